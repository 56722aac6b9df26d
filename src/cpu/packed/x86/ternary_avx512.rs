//! Ternary products of a token by multiplying codes where they lie in their bytes.

use super::super::kernel::{Scales, fetch};
use super::super::layout::ROW_GROUP;
use super::super::q8::{Q8Block, TOGETHER};
use super::avx512::{Avx512, transposed};
use super::ternary::{Dots, PLANES, TableLine, group};
use std::arch::x86_64::*;

/// By multiplying; each [`TOGETHER`] blocks of the token have one scale, and the weights' too.
///
/// # Safety
/// See [`OneToken`](super::ternary::OneToken).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(in super::super) unsafe fn one_token<S: Scales>(
    weights: *const u8,
    blocks: usize,
    (x, _): (*const Q8Block, *const TableLine),
    sums: &mut [f32; ROW_GROUP],
) {
    // SAFETY: the caller's.
    unsafe { group::<Avx512, S, Multiply, 1, TOGETHER>(weights, blocks, x, Multiply(x), sums) }
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
