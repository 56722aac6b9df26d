//! Rounding activations to 8 bits with AVX2 and AVX-512, bit for bit as the plain code.

use super::super::q8::{Grain, Q8Block};
use super::super::rounding::{Rounding, quantize};
use std::arch::x86_64::*;

/// Quantizes a token's values into its blocks, with AVX2.
///
/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2")]
pub(in super::super) unsafe fn avx2(x: &[f32], blocks: &mut [Q8Block], grain: Grain) {
    // SAFETY: the caller's.
    unsafe { quantize::<Avx2>(x, blocks, grain) }
}

/// Quantizes a token's values into its blocks, with AVX-512.
///
/// # Safety
/// The processor has AVX-512 F, BW, VL and DQ.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(in super::super) unsafe fn avx512(x: &[f32], blocks: &mut [Q8Block], grain: Grain) {
    // SAFETY: the caller's.
    unsafe { quantize::<Avx512>(x, blocks, grain) }
}

/// Halves of 16 values.
#[derive(Clone, Copy)]
struct Avx512;

impl Rounding for Avx512 {
    #[inline(always)]
    unsafe fn top(x: &[f32; 32]) -> u32 {
        // SAFETY: AVX-512, by the trait's contract.
        unsafe {
            let magnitude = |half: usize| {
                let x = _mm512_loadu_si512(x.as_ptr().add(16 * half).cast());
                _mm512_and_si512(x, _mm512_set1_epi32(i32::MAX))
            };
            _mm512_reduce_max_epu32(_mm512_max_epu32(magnitude(0), magnitude(1)))
        }
    }

    #[inline(always)]
    unsafe fn rounded(x: &[f32; 32], d: f32, inverse: f32) -> Q8Block {
        // SAFETY: AVX-512, by the trait's contract; a block has room for 32 codes.
        unsafe {
            let (mut q, mut sums) = ([0i8; 32], [0f32; 2]);
            for (half, sum) in sums.iter_mut().enumerate() {
                let x = _mm512_loadu_ps(x.as_ptr().add(16 * half));
                let codes = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(inverse)));
                let to = q.as_mut_ptr().add(16 * half).cast();
                _mm_storeu_si128(to, _mm512_cvtepi32_epi8(codes));
                *sum = _mm512_reduce_add_epi32(codes) as f32;
            }
            Q8Block::new(q, d, sums)
        }
    }

    #[inline(always)]
    unsafe fn rest(x: &[f32; 32], coarse: &Q8Block, most: f32) -> [f32; 32] {
        let mut rest = [0f32; 32];
        // SAFETY: AVX-512, by the trait's contract; both have 32 values.
        unsafe {
            for half in 0..2 {
                let q = (&raw const coarse.q).cast::<__m128i>().add(half);
                let q = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(q)));
                let x = _mm512_loadu_ps(x.as_ptr().add(16 * half));
                let left = _mm512_sub_ps(x, _mm512_mul_ps(q, _mm512_set1_ps(coarse.d)));
                let left = _mm512_max_ps(left, _mm512_set1_ps(-most));
                let left = _mm512_min_ps(left, _mm512_set1_ps(most));
                _mm512_storeu_ps(rest.as_mut_ptr().add(16 * half), left);
            }
        }
        rest
    }
}

/// Quarters of 8 values.
#[derive(Clone, Copy)]
struct Avx2;

impl Rounding for Avx2 {
    #[inline(always)]
    unsafe fn top(x: &[f32; 32]) -> u32 {
        // SAFETY: AVX2, by the trait's contract.
        unsafe {
            let magnitude = |quarter: usize| {
                let x = _mm256_loadu_si256(x.as_ptr().add(8 * quarter).cast());
                _mm256_and_si256(x, _mm256_set1_epi32(i32::MAX))
            };
            let low = _mm256_max_epu32(magnitude(0), magnitude(1));
            let top = _mm256_max_epu32(low, _mm256_max_epu32(magnitude(2), magnitude(3)));
            let top = _mm_max_epu32(
                _mm256_castsi256_si128(top),
                _mm256_extracti128_si256::<1>(top),
            );
            let top = _mm_max_epu32(top, _mm_shuffle_epi32::<0b01_00_11_10>(top));
            let top = _mm_max_epu32(top, _mm_shuffle_epi32::<0b10_11_00_01>(top));
            _mm_cvtsi128_si32(top) as u32
        }
    }

    #[inline(always)]
    unsafe fn rounded(x: &[f32; 32], d: f32, inverse: f32) -> Q8Block {
        // SAFETY: AVX2, by the trait's contract; a block has room for 32 codes.
        unsafe {
            let codes = |quarter: usize| {
                let x = _mm256_loadu_ps(x.as_ptr().add(8 * quarter));
                _mm256_cvtps_epi32(_mm256_mul_ps(x, _mm256_set1_ps(inverse)))
            };
            let codes = [codes(0), codes(1), codes(2), codes(3)];
            // Packing interleaves the halves of its operands.
            let bytes = _mm256_packs_epi16(
                _mm256_packs_epi32(codes[0], codes[1]),
                _mm256_packs_epi32(codes[2], codes[3]),
            );
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            let bytes = _mm256_permutevar8x32_epi32(bytes, order);
            let mut q = [0i8; 32];
            _mm256_storeu_si256(q.as_mut_ptr().cast(), bytes);
            let sum = |a: __m256i, b: __m256i| {
                let sum = _mm256_add_epi32(a, b);
                let sum = _mm_add_epi32(
                    _mm256_castsi256_si128(sum),
                    _mm256_extracti128_si256::<1>(sum),
                );
                let sum = _mm_add_epi32(sum, _mm_shuffle_epi32::<0b01_00_11_10>(sum));
                let sum = _mm_add_epi32(sum, _mm_shuffle_epi32::<0b10_11_00_01>(sum));
                _mm_cvtsi128_si32(sum) as f32
            };
            Q8Block::new(q, d, [sum(codes[0], codes[1]), sum(codes[2], codes[3])])
        }
    }

    #[inline(always)]
    unsafe fn rest(x: &[f32; 32], coarse: &Q8Block, most: f32) -> [f32; 32] {
        let mut rest = [0f32; 32];
        // SAFETY: AVX2, by the trait's contract; both have 32 values.
        unsafe {
            for quarter in 0..4 {
                let q = (&raw const coarse.q).cast::<u8>().add(8 * quarter);
                let q = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(q.cast())));
                let x = _mm256_loadu_ps(x.as_ptr().add(8 * quarter));
                let left = _mm256_sub_ps(x, _mm256_mul_ps(q, _mm256_set1_ps(coarse.d)));
                let left = _mm256_max_ps(left, _mm256_set1_ps(-most));
                let left = _mm256_min_ps(left, _mm256_set1_ps(most));
                _mm256_storeu_ps(rest.as_mut_ptr().add(8 * quarter), left);
            }
        }
        rest
    }
}
