//! Integer dot products with AVX2, which has no instruction that adds four products of bytes to a sum of 32 bits.

use super::super::kernel::{Codes, Isa};
use super::super::q8::{FINER, Q8Block};
use std::arch::x86_64::*;

/// Four bytes, repeated.
///
/// # Safety
/// AVX2, and 4 readable bytes at `p`.
#[inline(always)]
unsafe fn broadcast(p: *const u8) -> __m256i {
    // SAFETY: the caller's.
    unsafe { _mm256_set1_epi32(p.cast::<i32>().read_unaligned()) }
}

/// Keeps the compiler from moving sums across this point: it would unpack all codes of a block
/// first, which is more than the registers hold.
///
/// # Safety
/// AVX2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn in_order<const T: usize, const P: usize>(
    mut sums: [[__m256i; P]; T],
) -> [[__m256i; P]; T] {
    for sum in sums.as_flattened_mut() {
        // SAFETY: the statement is empty.
        unsafe {
            std::arch::asm!(
                "/* {0} */",
                inout(ymm_reg) * sum,
                options(nomem, nostack, preserves_flags)
            );
        }
    }
    sums
}

/// Pairs of products are summed in i16, and as many of those as cannot overflow: 8 x 2 x 15 x 127,
/// 4 x 2 x 31 x 127 and 2 x 2 x 63 x 127 are below 2^15.
///
/// # Safety
/// See [`Isa::accumulate`](super::super::kernel::Isa::accumulate).
#[inline(always)]
pub(super) unsafe fn few_bits<I: Isa<Bytes = __m256i>, C: Codes, const T: usize, const P: usize>(
    sums: &mut [__m256; T],
    scale: __m256,
    planes: *const u8,
    part: usize,
    x: [[*const Q8Block; P]; T],
) {
    // SAFETY: AVX2 and the planes and tokens readable, by the trait's contract; k < 32 - 3.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let mut codes = C::open::<I>(planes, part);
        let run = match C::BITS {
            ..=4 => C::VECTORS,
            5 => 4,
            _ => 2,
        };
        let mut dots = [[_mm256_setzero_si256(); P]; T];
        for start in (0..C::VECTORS).step_by(run) {
            let mut pairs = [[_mm256_setzero_si256(); P]; T];
            for i in start..start + run {
                let (w, k) = codes.next(i);
                for t in 0..T {
                    for p in 0..P {
                        let q = (&raw const (*x[t][p]).q).cast::<u8>();
                        let product = _mm256_maddubs_epi16(w, broadcast(q.add(k)));
                        pairs[t][p] = _mm256_add_epi16(pairs[t][p], product);
                    }
                }
                if T * P > 1 {
                    pairs = in_order(pairs);
                }
            }
            for t in 0..T {
                for p in 0..P {
                    let sum = _mm256_madd_epi16(pairs[t][p], ones);
                    dots[t][p] = _mm256_add_epi32(dots[t][p], sum);
                }
            }
        }
        finish(sums, scale, dots, x);
    }
}

/// Both parts of 32 activations as one number each, coarse x [`FINER`] + fine: at most 127 x 256 + 128, which is less
/// than 2^15. First those of even k, then those of odd k, so that a 32-bit lane has k and k + 2, as
/// [`eight_bits_by_16`] wants them.
///
/// # Safety
/// AVX2, and the blocks readable.
#[inline(always)]
unsafe fn sixteen_bits([coarse, fine]: [*const Q8Block; 2]) -> [__m256i; 2] {
    const { assert!(FINER == 256) };
    // SAFETY: the caller's.
    unsafe {
        let coarse = _mm256_loadu_si256((&raw const (*coarse).q).cast());
        let fine = _mm256_loadu_si256((&raw const (*fine).q).cast());
        let odd = _mm256_and_si256(coarse, _mm256_set1_epi16(-FINER as i16));
        [
            _mm256_add_epi16(_mm256_slli_epi16::<8>(coarse), low_bytes(fine)),
            _mm256_add_epi16(odd, _mm256_srai_epi16::<8>(fine)),
        ]
    }
}

/// The lower byte of each 16-bit lane, sign-extended.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn low_bytes(a: __m256i) -> __m256i {
    // SAFETY: the caller's.
    unsafe { _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(a)) }
}

/// Codes and activations as 16-bit numbers, even and odd k apart: half the multiplications of two parts, and no signs
/// to be moved. 32 x 128 x 2^15 is below 2^31.
///
/// # Safety
/// See [`Isa::accumulate`](super::super::kernel::Isa::accumulate).
#[inline(always)]
pub(super) unsafe fn eight_bits_by_16<I: Isa<Bytes = __m256i>, C: Codes, const T: usize>(
    sums: &mut [__m256; T],
    scale: __m256,
    planes: *const u8,
    x: [[*const Q8Block; 2]; T],
) {
    // SAFETY: AVX2 and the planes and tokens readable, by the trait's contract; k < 32 - 3.
    unsafe {
        let mut tokens = [[_mm256_setzero_si256(); 2]; T];
        for t in 0..T {
            tokens[t] = sixteen_bits(x[t]);
        }
        let mut codes = C::open::<I>(planes, 0);
        let mut dots = [[_mm256_setzero_si256(); 1]; T];
        for i in 0..C::VECTORS {
            let (w, k) = codes.next(i);
            let halves = [low_bytes(w), _mm256_srai_epi16::<8>(w)];
            for t in 0..T {
                for half in 0..2 {
                    let pair = broadcast((&raw const tokens[t][half]).cast::<u8>().add(k));
                    let products = _mm256_madd_epi16(halves[half], pair);
                    dots[t][0] = _mm256_add_epi32(dots[t][0], products);
                }
            }
            dots = in_order(dots);
        }
        // The numbers are in steps of the fine part's scale.
        finish(sums, scale, dots, x.map(|[_, fine]| [fine]));
    }
}

/// |w| times x with w's sign: at most 2 x 128 x 127 for a pair, and x is never -128.
///
/// # Safety
/// See [`Isa::accumulate`](super::super::kernel::Isa::accumulate).
#[inline(always)]
pub(super) unsafe fn eight_bits<
    I: Isa<Bytes = __m256i>,
    C: Codes,
    const T: usize,
    const P: usize,
>(
    sums: &mut [__m256; T],
    scale: __m256,
    planes: *const u8,
    x: [[*const Q8Block; P]; T],
) {
    // SAFETY: AVX2 and the planes and tokens readable, by the trait's contract; k < 32 - 3.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let mut codes = C::open::<I>(planes, 0);
        let mut dots = [[_mm256_setzero_si256(); P]; T];
        for i in 0..C::VECTORS {
            let (w, k) = codes.next(i);
            let magnitude = _mm256_abs_epi8(w);
            for t in 0..T {
                for p in 0..P {
                    let q = (&raw const (*x[t][p]).q).cast::<u8>();
                    let signed = _mm256_sign_epi8(broadcast(q.add(k)), w);
                    let pairs = _mm256_maddubs_epi16(magnitude, signed);
                    dots[t][p] = _mm256_add_epi32(dots[t][p], _mm256_madd_epi16(pairs, ones));
                }
            }
            if T * P > 1 {
                dots = in_order(dots);
            }
        }
        finish(sums, scale, dots, x);
    }
}

/// Adds the scaled dot products to the sums.
///
/// # Safety
/// See [`Isa::accumulate`](super::super::kernel::Isa::accumulate).
#[inline(always)]
unsafe fn finish<const T: usize, const P: usize>(
    sums: &mut [__m256; T],
    scale: __m256,
    dots: [[__m256i; P]; T],
    x: [[*const Q8Block; P]; T],
) {
    for t in 0..T {
        // SAFETY: the caller's.
        unsafe {
            let mut dot = dots[t][0];
            if P == 2 {
                dot = _mm256_slli_epi32::<{ FINER.ilog2() as i32 }>(dot);
                dot = _mm256_add_epi32(dot, dots[t][1]);
            }
            let product = _mm256_mul_ps(_mm256_cvtepi32_ps(dot), scale);
            let d = _mm256_set1_ps((*x[t][P - 1]).d);
            sums[t] = _mm256_fmadd_ps(product, d, sums[t]);
        }
    }
}
