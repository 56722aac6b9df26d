//! AVX2, FMA and F16C.

use super::super::codes::Unpacked;
use super::super::floats::{self, E4M3_PLACES};
use super::super::kernel::{Codes, Isa, Kernels, Scales, Tile, Unpack, tile, unpack};
use super::super::layout::ROW_GROUP;
use super::super::q8::{FINER, Q8Block};
use super::super::scales::Ready;
use std::arch::x86_64::*;
use std::ops::Range;

/// 8 rows.
#[derive(Clone, Copy)]
pub struct Avx2;

/// The kernels for codes C with scales S.
pub(in super::super) fn kernels<C: Codes + 'static, S: Scales + 'static>() -> &'static Kernels {
    const {
        &Kernels {
            names: ["avx2_tiles", "avx2_unpacked_tiles"],
            packed: [
                &[
                    (4, by_halves::<C, S, 4, 1> as Tile),
                    (2, by_halves::<C, S, 2, 1>),
                    (1, at_once::<C, S, 1>),
                ],
                &[
                    (2, by_halves::<C, S, 2, 2> as Tile),
                    (1, at_once::<C, S, 2>),
                ],
            ],
            unpacked: match C::BITS {
                8 => None,
                _ => Some((
                    unpack_group::<C, S> as Unpack,
                    [
                        &[
                            (4, by_halves::<Unpacked<C>, Ready, 4, 1> as Tile),
                            (2, by_halves::<Unpacked<C>, Ready, 2, 1>),
                            (1, by_halves::<Unpacked<C>, Ready, 1, 1>),
                        ],
                        &[
                            (2, by_halves::<Unpacked<C>, Ready, 2, 2> as Tile),
                            (1, by_halves::<Unpacked<C>, Ready, 1, 2>),
                        ],
                    ],
                )),
            },
        }
    }
}

/// One token: both halves of the group in one pass, so that memory is read front to back.
///
/// # Safety
/// See [`Tile`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn at_once<C: Codes, S: Scales, const P: usize>(
    weights: *const u8,
    blocks: usize,
    x: *const Q8Block,
    stride: usize,
    sums: *mut [f32; ROW_GROUP],
) {
    // SAFETY: the caller's.
    unsafe { tile::<Avx2, C, S, 1, P, 2>(weights, blocks, x, stride, 0, sums) }
}

/// Several tokens: each half of the group on its own, so that sums and codes fit the registers.
///
/// # Safety
/// See [`Tile`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn by_halves<C: Codes, S: Scales, const T: usize, const P: usize>(
    weights: *const u8,
    blocks: usize,
    x: *const Q8Block,
    stride: usize,
    sums: *mut [f32; ROW_GROUP],
) {
    for lane in [0, Avx2::ROWS] {
        // SAFETY: the caller's.
        unsafe { tile::<Avx2, C, S, T, P, 1>(weights, blocks, x, stride, lane, sums) }
    }
}

/// # Safety
/// See [`Unpack`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_group<C: Codes, S: Scales>(
    weights: *const u8,
    blocks: Range<usize>,
    out: *mut u8,
) {
    for lane in [0, Avx2::ROWS] {
        // SAFETY: the caller's.
        unsafe { unpack::<Avx2, C, S>(weights, blocks.clone(), lane, out) }
    }
}

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

impl Isa for Avx2 {
    type Bytes = __m256i;
    type Floats = __m256;

    const ROWS: usize = 8;
    const EIGHT_BIT_ZERO: i32 = 0;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m256i {
        // SAFETY: 32 readable bytes, by the trait's contract.
        unsafe { _mm256_loadu_si256(p.cast()) }
    }
    #[inline(always)]
    unsafe fn splat(byte: u8) -> __m256i {
        // SAFETY: AVX2, by the trait's contract.
        unsafe { _mm256_set1_epi8(byte as i8) }
    }
    #[inline(always)]
    unsafe fn and(a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: AVX2, by the trait's contract.
        unsafe { _mm256_and_si256(a, b) }
    }
    #[inline(always)]
    unsafe fn or(a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: AVX2, by the trait's contract.
        unsafe { _mm256_or_si256(a, b) }
    }
    #[inline(always)]
    unsafe fn double(a: __m256i) -> __m256i {
        // SAFETY: AVX2, by the trait's contract.
        unsafe { _mm256_add_epi8(a, a) }
    }
    #[inline(always)]
    unsafe fn shl2(a: __m256i) -> __m256i {
        // SAFETY: AVX2, by the trait's contract.
        unsafe { _mm256_slli_epi16::<2>(a) }
    }
    #[inline(always)]
    unsafe fn shr1(a: __m256i) -> __m256i {
        // SAFETY: AVX2, by the trait's contract.
        unsafe { _mm256_srli_epi16::<1>(a) }
    }
    #[inline(always)]
    unsafe fn shr2(a: __m256i) -> __m256i {
        // SAFETY: AVX2, by the trait's contract.
        unsafe { _mm256_srli_epi16::<2>(a) }
    }
    #[inline(always)]
    unsafe fn shr4(a: __m256i) -> __m256i {
        // SAFETY: AVX2, by the trait's contract.
        unsafe { _mm256_srli_epi16::<4>(a) }
    }
    #[inline(always)]
    unsafe fn eight_bits(a: __m256i) -> __m256i {
        a
    }
    #[inline(always)]
    unsafe fn look_up(table: &[u8; 16], nibbles: __m256i) -> __m256i {
        // SAFETY: AVX2, by the trait's contract; the table is readable.
        unsafe {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles)
        }
    }
    #[inline(always)]
    unsafe fn quads(p: *const u8) -> __m256i {
        // SAFETY: AVX2 and 8 readable bytes in each of four runs, by the trait's contract.
        unsafe {
            let run = |t: usize| _mm_loadl_epi64(p.add(16 * t).cast());
            let first = _mm_unpacklo_epi8(run(0), run(1));
            let second = _mm_unpacklo_epi8(run(2), run(3));
            _mm256_set_m128i(
                _mm_unpackhi_epi16(first, second),
                _mm_unpacklo_epi16(first, second),
            )
        }
    }
    #[inline(always)]
    unsafe fn zero() -> __m256 {
        // SAFETY: AVX2, by the trait's contract.
        unsafe { _mm256_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn set(x: f32) -> __m256 {
        // SAFETY: AVX2, by the trait's contract.
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> __m256 {
        // SAFETY: F16C and 16 readable bytes, by the trait's contract.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> __m256 {
        // SAFETY: AVX2 and 8 readable bytes, by the trait's contract.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> [__m256; 2] {
        // SAFETY: AVX2 and 8 readable bytes, by the trait's contract.
        unsafe {
            let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
            let low = _mm256_and_si256(bytes, _mm256_set1_epi32(15));
            [low, _mm256_srli_epi32::<4>(bytes)].map(|v| _mm256_cvtepi32_ps(v))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> __m256 {
        // SAFETY: AVX2 and 8 readable bytes, by the trait's contract.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))) }
    }
    /// As f16, whose bias is 8 more, with the bits in their places.
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> __m256 {
        // SAFETY: F16C and 8 readable bytes, by the trait's contract.
        unsafe {
            let bytes = _mm_cvtepu8_epi16(_mm_loadl_epi64(p.cast()));
            _mm256_cvtph_ps(_mm_slli_epi16::<7>(bytes))
        }
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        // SAFETY: AVX2, by the trait's contract.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: FMA, by the trait's contract.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn load_f32(p: *const u8) -> __m256 {
        // SAFETY: 32 readable bytes, by the trait's contract.
        unsafe { _mm256_loadu_ps(p.cast()) }
    }
    #[inline(always)]
    unsafe fn nan_if_negative(a: __m256) -> __m256 {
        // SAFETY: the instructions, by the trait's contract.
        unsafe {
            let bits = _mm256_castps_si256(a);
            let signs = _mm256_srai_epi32::<31>(bits);
            _mm256_castsi256_ps(_mm256_or_si256(bits, signs))
        }
    }
    #[inline(always)]
    unsafe fn e4m3(a: __m256i, byte: usize) -> __m256 {
        // SAFETY: the instructions, by the trait's contract.
        unsafe {
            let top = match byte {
                0 => _mm256_slli_epi32::<24>(a),
                1 => _mm256_slli_epi32::<16>(a),
                2 => _mm256_slli_epi32::<8>(a),
                _ => a,
            };
            let moved = _mm256_srai_epi32::<4>(top);
            let places = _mm256_set1_epi32(E4M3_PLACES);
            _mm256_castsi256_ps(_mm256_and_si256(moved, places))
        }
    }
    #[inline(always)]
    unsafe fn store_bytes(p: *mut u8, a: __m256i) {
        // SAFETY: 32 writable bytes, by the trait's contract.
        unsafe { _mm256_storeu_si256(p.cast(), a) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, a: __m256) {
        // SAFETY: 32 writable bytes, by the trait's contract.
        unsafe { _mm256_storeu_ps(p, a) }
    }

    #[inline(always)]
    unsafe fn accumulate<C: Codes, const T: usize, const P: usize>(
        sums: &mut [__m256; T],
        scale: __m256,
        planes: *const u8,
        part: usize,
        x: [[*const Q8Block; P]; T],
    ) {
        // SAFETY: the caller's.
        unsafe {
            match C::BITS {
                8 if C::FLOATS => floats::accumulate::<Self, T, P>(sums, scale, planes, x),
                8 => eight_bits::<C, T, P>(sums, scale, planes, x),
                _ => few_bits::<C, T, P>(sums, scale, planes, part, x),
            }
        }
    }
}

/// Pairs of products are summed in i16, and as many of those as cannot overflow: 8 x 2 x 15 x 127,
/// 4 x 2 x 31 x 127 and 2 x 2 x 63 x 127 are below 2^15.
///
/// # Safety
/// See [`Isa::accumulate`].
#[inline(always)]
unsafe fn few_bits<C: Codes, const T: usize, const P: usize>(
    sums: &mut [__m256; T],
    scale: __m256,
    planes: *const u8,
    part: usize,
    x: [[*const Q8Block; P]; T],
) {
    // SAFETY: AVX2 and the planes and tokens readable, by the trait's contract; k < 32 - 3.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let mut codes = C::open::<Avx2>(planes, part);
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

/// |w| times x with w's sign: at most 2 x 128 x 127 for a pair, and x is never -128.
///
/// # Safety
/// See [`Isa::accumulate`].
#[inline(always)]
unsafe fn eight_bits<C: Codes, const T: usize, const P: usize>(
    sums: &mut [__m256; T],
    scale: __m256,
    planes: *const u8,
    x: [[*const Q8Block; P]; T],
) {
    // SAFETY: AVX2 and the planes and tokens readable, by the trait's contract; k < 32 - 3.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let mut codes = C::open::<Avx2>(planes, 0);
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
/// See [`Isa::accumulate`].
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
