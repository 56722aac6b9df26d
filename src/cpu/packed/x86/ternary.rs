//! Ternary products of a single token. Where 128 activations have one scale, and as many weights, the sum over them is
//! one exact integer: scales are applied once for four blocks, and with AVX-512 codes are multiplied where they lie in
//! their bytes.

use super::super::activations::{Q8Activations, Q8Block, TOGETHER};
use super::super::codes::Two;
use super::super::isa::Isa;
use super::super::kernel::fetch;
use super::super::layout::ROW_GROUP;
use super::super::scales::{ByGroup, ByRow, Scales};
use super::avx2::Avx2;
use super::avx512::{Avx512, transposed};
use super::lookup::{LookUp, TableLine};
use crate::cpu::simd::Level;
use crate::quant::Scheme;
use std::arch::x86_64::*;

/// Bytes of the codes of a block.
pub(super) const PLANES: usize = 128;

/// The sums of codes times activations of a token, for H vectors of rows.
pub(super) trait Dots<I: Isa, const H: usize>: Copy {
    /// The sums of u q over up to [`TOGETHER`] blocks from block `first` on, exactly, with codes u in 0..=2.
    ///
    /// # Safety
    /// The processor has `I`, `planes` are the codes of these blocks, and the token has them.
    unsafe fn dots<const BLOCKS: usize>(self, planes: *const u8, first: usize) -> [I::Floats; H];
}

/// The products of a token with a row group of ternary codes of so many blocks, added to the last argument. The token
/// is given by its blocks and their tables.
///
/// # Safety
/// The processor has the level for which [`kernel`] gave this, weights are a group of its scheme, the token has as
/// many blocks, and tables if this is for AVX2.
pub(in super::super) type OneToken =
    unsafe fn(*const u8, usize, (*const Q8Block, *const TableLine), &mut [f32; ROW_GROUP]);

/// The kernel for the only token of `x` at a level, if there is one for what is known of it.
pub(in super::super) fn kernel(
    scheme: &Scheme,
    level: Level,
    x: &Q8Activations,
) -> Option<OneToken> {
    if !matches!(scheme, Scheme::Ternary { .. }) || x.m() != 1 {
        return None;
    }
    match (level, x.tables().is_some(), scheme.group(), x.is_wide()) {
        (Level::Avx2, true, None, true) => Some(avx2::<ByRow, TOGETHER>),
        (Level::Avx2, true, None, false) => Some(avx2::<ByRow, 1>),
        (Level::Avx2, true, Some(32), _) => Some(avx2::<ByGroup<1, false>, 1>),
        (Level::Avx2, true, Some(64), _) => Some(avx2::<ByGroup<2, false>, 1>),
        (Level::Avx2, true, Some(128), true) => Some(avx2::<ByGroup<4, false>, TOGETHER>),
        (Level::Avx2, true, Some(128), false) => Some(avx2::<ByGroup<4, false>, 1>),
        (Level::Avx512, _, None, true) => Some(avx512::<ByRow>),
        (Level::Avx512, _, Some(128), true) => Some(avx512::<ByGroup<4, false>>),
        _ => None,
    }
}

/// By table look-up; each RUN blocks of the token have one scale, and the weights' too.
///
/// # Safety
/// See [`OneToken`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<S: Scales, const RUN: usize>(
    weights: *const u8,
    blocks: usize,
    (x, tables): (*const Q8Block, *const TableLine),
    sums: &mut [f32; ROW_GROUP],
) {
    // SAFETY: the caller's.
    unsafe { group::<Avx2, S, LookUp, 2, RUN>(weights, blocks, x, LookUp(tables), sums) }
}

/// By multiplying; each [`TOGETHER`] blocks of the token have one scale, and the weights' too.
///
/// # Safety
/// See [`OneToken`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn avx512<S: Scales>(
    weights: *const u8,
    blocks: usize,
    (x, _): (*const Q8Block, *const TableLine),
    sums: &mut [f32; ROW_GROUP],
) {
    // SAFETY: the caller's.
    unsafe { group::<Avx512, S, Multiply, 1, TOGETHER>(weights, blocks, x, Multiply(x), sums) }
}

/// Adds the products of a row group of ternary codes with one token to `sums`, of whose blocks each RUN have one
/// scale, as the weights' have.
///
/// # Safety
/// The processor has `I`, `weights` points to a row group of `Two` with S of `blocks` blocks, `x` to as many, which
/// are those of `dots`.
#[inline(always)]
unsafe fn group<I: Isa, S: Scales, D: Dots<I, H>, const H: usize, const RUN: usize>(
    mut weights: *const u8,
    blocks: usize,
    x: *const Q8Block,
    dots: D,
    sums: &mut [f32; ROW_GROUP],
) {
    let layout = S::layout::<Two>();
    let lanes: [usize; H] = std::array::from_fn(|h| h * I::ROWS);
    // SAFETY: chunk by chunk this walks over the group and the token, which the caller vouches for.
    unsafe {
        let mut totals = lanes.map(|lane| I::load_f32(sums.as_ptr().add(lane).cast()));
        let mut chunk = 0;
        while chunk < blocks {
            let in_chunk = (blocks - chunk).min(layout.blocks);
            let shared = lanes.map(|lane| S::open::<I>(weights, lane));
            let mut j = 0;
            while j < in_chunk {
                let planes = weights.add(layout.head + j * layout.codes);
                let first = x.add(chunk + j);
                // What is left of a run goes block by block.
                let (some, dots, sum) = if in_chunk - j >= RUN {
                    let sum: f32 = (0..RUN).map(|i| (*first.add(i)).sum).sum();
                    (RUN, dots.dots::<RUN>(planes, chunk + j), sum)
                } else {
                    (1, dots.dots::<1>(planes, chunk + j), (*first).sum)
                };
                for (h, total) in totals.iter_mut().enumerate() {
                    let scale = S::at::<I>(shared[h], weights, lanes[h], (j, 0), 1.0);
                    let product = I::mul(dots[h], scale.scale);
                    *total = I::fma(product, I::set((*first).d), *total);
                    *total = I::fma(scale.offset, I::set(sum), *total);
                }
                j += some;
            }
            weights = weights.add(layout.head + in_chunk * layout.codes);
            chunk += in_chunk;
        }
        for (lane, total) in lanes.into_iter().zip(totals) {
            I::store(sums.as_mut_ptr().add(lane), total);
        }
    }
}

/// Sums of products with the activations of a token.
#[derive(Clone, Copy)]
struct Multiply(*const Q8Block);

impl Dots<Avx512, 1> for Multiply {
    #[inline(always)]
    unsafe fn dots<const BLOCKS: usize>(self, planes: *const u8, first: usize) -> [__m512; 1] {
        // SAFETY: the caller's.
        [unsafe { products::<BLOCKS>(planes, self.0.add(first)) }]
    }
}

/// The sums of u q over up to [`TOGETHER`] blocks, 16 rows. A byte's four codes are multiplied in their places: the
/// second comes out 4-fold, the third 16-fold and the fourth 64-fold, and each has a sum of its own, at most
/// 64 x 2 x 127 x 32 in magnitude.
///
/// # Safety
/// The blocks' planes and activations are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn products<const BLOCKS: usize>(planes: *const u8, x: *const Q8Block) -> __m512 {
    let places = [3, 3 << 2, 3 << 4, 3u8 << 6].map(|mask| _mm512_set1_epi8(mask as i8));
    let mut sums = [_mm512_setzero_si512(); 4];
    // SAFETY: the caller's; a block has two planes of 64 bytes, for 16 activations each.
    unsafe {
        for b in 0..BLOCKS {
            let planes = planes.add(b * PLANES);
            fetch(planes, PLANES);
            for plane in 0..2 {
                let codes = transposed(_mm512_loadu_si512(planes.add(64 * plane).cast()));
                let q = (&raw const (*x.add(b)).q).cast::<i32>().add(4 * plane);
                for (i, (sum, place)) in sums.iter_mut().zip(places).enumerate() {
                    let q = _mm512_set1_epi32(q.add(i).read_unaligned());
                    *sum = _mm512_dpbusd_epi32(*sum, _mm512_and_si512(codes, place), q);
                }
            }
        }
    }
    let [one, four, sixteen, sixty_four] = sums;
    let low = _mm512_add_epi32(one, _mm512_srai_epi32::<2>(four));
    let high = _mm512_add_epi32(
        _mm512_srai_epi32::<4>(sixteen),
        _mm512_srai_epi32::<6>(sixty_four),
    );
    _mm512_cvtepi32_ps(_mm512_add_epi32(low, high))
}
