//! Tiles multiplied by AVX-512's products of bf16 (`vdpbf16ps`), for processors that have these and no AMX, as Zen 4
//! and 5: twice the multiplications of f32 a cycle there, and weights are not widened.

use super::product::{Multiply, Sums, Weights};
use super::{ROWS, Row, Tile};
use std::arch::x86_64::*;
use std::mem::transmute;

/// Rows of tokens that are multiplied at a time, so that their sums with two tiles of weights stay in registers.
const TOKENS: usize = 8;

/// AVX-512 with products of bf16.
pub(in crate::cpu) struct Vectors;

impl Multiply for Vectors {
    type Before = ();

    #[inline(always)]
    unsafe fn begin() {}

    #[inline(always)]
    unsafe fn end((): ()) {}

    #[inline(always)]
    unsafe fn block<W: Weights>(
        tokens: [&[Tile]; 2],
        count: usize,
        parts: usize,
        weights: &[[Tile; 2]],
        sums: &mut [[Sums; 2]; 2],
    ) {
        for (i, (tokens, sums)) in tokens.into_iter().zip(sums).enumerate() {
            let count = count.saturating_sub(i * ROWS).min(ROWS);
            for first in (0..count).step_by(TOKENS) {
                // SAFETY: the processor has these, by the caller.
                unsafe { rows::<W>((tokens, first), parts, weights, sums) };
            }
        }
    }
}

/// Rows of a tile of tokens, from `first` on, times two tiles of weights.
#[target_feature(enable = "avx512f,avx512bf16")]
fn rows<W: Weights>(
    (tokens, first): (&[Tile], usize),
    parts: usize,
    weights: &[[Tile; 2]],
    sums: &mut [Sums; 2],
) {
    let mut acc = [[_mm512_setzero_ps(); 2]; TOKENS];
    for (i, w) in weights.iter().enumerate() {
        let (step, part_of_w) = (i / W::PARTS, i % W::PARTS);
        for tile in &tokens[step * parts..(step + 1) * parts - part_of_w] {
            let Some(rows) = tile[first..].first_chunk::<TOKENS>() else {
                unreachable!("a tile has whole runs of rows")
            };
            for pair in 0..ROWS {
                let w = w.each_ref().map(|tile| vector(&tile[pair]));
                for (row, acc) in rows.iter().zip(&mut acc) {
                    let token = broadcast(row, pair);
                    for (acc, w) in acc.iter_mut().zip(w) {
                        *acc = _mm512_dpbf16_ps(*acc, token, w);
                    }
                }
            }
        }
    }
    for (i, acc) in acc.into_iter().enumerate() {
        for (acc, sums) in acc.into_iter().zip(sums.iter_mut()) {
            // SAFETY: a row of sums has 64 bytes.
            unsafe { _mm512_store_ps(sums.0[first + i].as_mut_ptr(), acc) };
        }
    }
}

/// A row.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn vector(row: &Row) -> __m512bh {
    // SAFETY: a row has 64 bytes, as has a vector.
    unsafe { transmute(_mm512_load_si512((&raw const *row).cast())) }
}

/// Two neighbours of a row in every pair of a vector.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn broadcast(row: &Row, pair: usize) -> __m512bh {
    let [a, b] = row.0.as_chunks::<2>().0[pair];
    let pair = u32::from(a) | u32::from(b) << 16;
    // SAFETY: vectors of as many bits.
    unsafe { transmute(_mm512_set1_epi32(pair as i32)) }
}
