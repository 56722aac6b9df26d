//! Ternary products by table look-up.
//!
//! Two neighbouring codes of a row are a nibble, and what they add to the product is one of nine sums of
//! two activations: `pshufb` looks up 32 of them at once where multiplying takes a multiply-add for
//! each 32 codes and the unpacking before it. The idea is T-MAC's (Wei et al. 2025, with tables of bits)
//! and that of bitnet.cpp's TL1 (Wang et al. 2024). Other than there the sums stay exact: an
//! activation x in -127..=127 is split into x = 16 h + l with l in 0..=15 and h in -8..=7, each part has
//! a table of bytes, and four look-ups fit into a byte before they are widened:
//!
//! - low table: `u0 l0 + u1 l1`, at most 60, with codes u in 0..=2
//! - high table: `u0 h0 + u1 h1 + 32`, 0 to 60
//!
//! Tables are made once for each activation row; 512 bytes for 32 activations. Where four blocks of activations
//! have one scale, and weights too, their products are one exact sum.

use super::super::kernel::{Scales, fetch};
use super::super::layout::ROW_GROUP;
use super::super::q8::Q8Block;
use super::avx2::Avx2;
use super::ternary::{Dots, PLANES, TableLine, group};
use std::arch::x86_64::*;

/// Bytes of the tables of 32 activations.
pub const TABLE_BYTES: usize = 512;

/// What the high tables have too much in the sum of a block: 16 look-ups of 32, 16-fold.
const EXCESS: usize = 16 * 32 * 16;

/// By table look-up; each RUN blocks of the token have one scale, and the weights' too.
///
/// # Safety
/// See [`OneToken`](super::ternary::OneToken).
#[target_feature(enable = "avx2,fma,f16c")]
pub(in super::super) unsafe fn one_token<S: Scales, const RUN: usize>(
    weights: *const u8,
    blocks: usize,
    (x, tables): (*const Q8Block, *const TableLine),
    sums: &mut [f32; ROW_GROUP],
) {
    // SAFETY: the caller's.
    unsafe { group::<Avx2, S, LookUp, 2, RUN>(weights, blocks, x, LookUp(tables), sums) }
}

/// The tables of a row of activations, in place of what was in `tables`.
///
/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2")]
pub unsafe fn tables(x: &[Q8Block], tables: &mut Vec<TableLine>) {
    let lines = TABLE_BYTES / 64;
    tables.resize(x.len() * lines, TableLine([0; 64]));
    // The codes that an entry stands for, first and second side by side.
    let codes: [u8; 32] = std::array::from_fn(|i| {
        let entry = (i / 2) as u8;
        let code = if i % 2 == 0 { entry & 3 } else { entry >> 2 };
        code.min(2)
    });
    // Activations k and k + 4 side by side.
    let pairs = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    let (nibble, eight) = (_mm_set1_epi8(15), _mm_set1_epi8(8));
    for (x, tables) in x.iter().zip(tables.chunks_exact_mut(lines)) {
        for (plane, tables) in tables.chunks_exact_mut(4).enumerate() {
            // SAFETY: a block has two runs of 16 activations; the rest are registers and arrays of
            // their size.
            unsafe {
                let q = _mm_loadu_si128(x.q.as_ptr().add(16 * plane).cast());
                let q = _mm_shuffle_epi8(q, pairs);
                let low = _mm_and_si128(q, nibble);
                let high = _mm_and_si128(_mm_srli_epi16::<4>(q), nibble);
                let high = _mm_sub_epi8(_mm_xor_si128(high, eight), eight);
                let (mut lows, mut highs) = ([0i16; 8], [0i16; 8]);
                _mm_storeu_si128(lows.as_mut_ptr().cast(), low);
                _mm_storeu_si128(highs.as_mut_ptr().cast(), high);
                let codes = _mm256_loadu_si256(codes.as_ptr().cast());
                // Tables of two runs, one in each lane.
                let table = |first: i16, second: i16, more: i16| {
                    let sums = |pair| {
                        let sums = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(pair));
                        _mm256_add_epi16(sums, _mm256_set1_epi16(more))
                    };
                    let packed = _mm256_packus_epi16(sums(first), sums(second));
                    _mm256_permute4x64_epi64::<0b11_01_10_00>(packed)
                };
                for (at, line) in tables.iter_mut().enumerate() {
                    let (half, nibble) = (at / 2, at % 2);
                    let t = 4 * nibble + 2 * half;
                    let out = line.0.as_mut_ptr().cast::<__m256i>();
                    _mm256_store_si256(out, table(lows[t], lows[t + 1], 0));
                    _mm256_store_si256(out.add(1), table(highs[t], highs[t + 1], 32));
                }
            }
        }
    }
}

/// Sums that are looked up in the tables of a token.
#[derive(Clone, Copy)]
struct LookUp(*const TableLine);

impl Dots<Avx2, 2> for LookUp {
    #[inline(always)]
    unsafe fn dots<const BLOCKS: usize>(self, planes: *const u8, first: usize) -> [__m256; 2] {
        // SAFETY: the caller's.
        unsafe { run::<BLOCKS>(planes, self.0.add(first * (TABLE_BYTES / 64))) }
    }
}

/// The sums of u q over up to four blocks, rows 0 to 7 and 8 to 15.
///
/// # Safety
/// As [`group`]: the blocks' planes and tables are readable.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn run<const BLOCKS: usize>(planes: *const u8, tables: *const TableLine) -> [__m256; 2] {
    // Bytes of two neighbouring rows are summed as one number of 16 bits, what is in its upper half once more by
    // itself: modulo 2^16, which holds a sum over 128 activations.
    let (mut pairs, mut odd) = ([_mm256_setzero_si256(); 2], [_mm256_setzero_si256(); 2]);
    // SAFETY: the caller's.
    unsafe {
        for b in 0..BLOCKS {
            let planes = planes.add(b * PLANES);
            fetch(planes, PLANES);
            for (part, bytes) in block(planes, tables.add(b * (TABLE_BYTES / 64)))
                .into_iter()
                .enumerate()
            {
                for bytes in bytes {
                    pairs[part] = _mm256_add_epi16(pairs[part], bytes);
                    odd[part] = _mm256_add_epi16(odd[part], _mm256_srli_epi16::<8>(bytes));
                }
            }
        }
    }
    // Both lanes: low + 16 high.
    let whole = |[low, high]: [__m256i; 2]| {
        let sum = _mm256_add_epi16(low, _mm256_slli_epi16::<4>(high));
        _mm_add_epi16(
            _mm256_castsi256_si128(sum),
            _mm256_extracti128_si256::<1>(sum),
        )
    };
    let (pairs, odd) = (whole(pairs), whole(odd));
    let even = _mm_sub_epi16(pairs, _mm_slli_epi16::<8>(odd));
    let excess = _mm_set1_epi16((BLOCKS * EXCESS) as i16);
    let (even, odd) = (_mm_sub_epi16(even, excess), _mm_sub_epi16(odd, excess));
    let floats = |rows| _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(rows));
    [
        floats(_mm_unpacklo_epi16(even, odd)),
        floats(_mm_unpackhi_epi16(even, odd)),
    ]
}

/// What is looked up for a block in the low and in the high tables, row by row in bytes; the sum of two each.
///
/// # Safety
/// As [`run`].
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn block(planes: *const u8, tables: *const TableLine) -> [[__m256i; 2]; 2] {
    let nibble = _mm256_set1_epi8(15);
    let mut low = [_mm256_setzero_si256(); 2];
    let mut high = [_mm256_setzero_si256(); 2];
    // SAFETY: the caller's.
    unsafe {
        for v in 0..4 {
            let codes = _mm256_loadu_si256(planes.add(32 * v).cast());
            let indices = [
                _mm256_and_si256(codes, nibble),
                _mm256_and_si256(_mm256_srli_epi16::<4>(codes), nibble),
            ];
            for (n, index) in indices.into_iter().enumerate() {
                let table = tables.add(2 * v + n).cast::<__m256i>();
                let look_up = |table| _mm256_shuffle_epi8(_mm256_load_si256(table), index);
                low[v / 2] = _mm256_add_epi8(low[v / 2], look_up(table));
                high[v / 2] = _mm256_add_epi8(high[v / 2], look_up(table.add(1)));
            }
        }
    }
    [low, high]
}
