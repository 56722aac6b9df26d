//! The few vector operations that the kernels are written in, for AVX2 and AVX-512 VNNI.

use super::activations::Q8Block;
use super::codes::Codes;
use std::arch::x86_64::*;

/// An instruction set: vectors whose 32-bit lanes are `ROWS` rows.
///
/// # Safety
/// Every function requires a processor with the instruction set, and pointers that are good for the
/// reads that its description names. They must be inlined into a function compiled for the set.
pub(super) trait Isa: Copy {
    /// Four codes of each row.
    type Bytes: Copy;
    /// An f32 of each row.
    type Floats: Copy;

    /// Rows of a vector.
    const ROWS: usize;
    /// What [`Self::eight_bits`] adds to a signed code.
    const EIGHT_BIT_ZERO: i32;

    /// Reads 4 x ROWS bytes.
    unsafe fn load(p: *const u8) -> Self::Bytes;
    /// The same byte everywhere.
    unsafe fn splat(byte: u8) -> Self::Bytes;
    unsafe fn and(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    unsafe fn or(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// Each byte shifted left by one.
    unsafe fn double(a: Self::Bytes) -> Self::Bytes;
    /// Each 16-bit lane shifted left by 2: the low 2 bits of a byte are the neighbour's.
    unsafe fn shl2(a: Self::Bytes) -> Self::Bytes;
    /// Each 16-bit lane shifted right by 2: the high 2 bits of a byte are the neighbour's.
    unsafe fn shr2(a: Self::Bytes) -> Self::Bytes;
    /// Each 16-bit lane shifted right by 4: the high 4 bits of a byte are the neighbour's.
    unsafe fn shr4(a: Self::Bytes) -> Self::Bytes;
    /// Signed codes as `dot` takes them.
    unsafe fn eight_bits(a: Self::Bytes) -> Self::Bytes;
    /// Of four runs of 16 bytes from `p` on, the first ROWS of each: row by row the byte of each run.
    unsafe fn quads(p: *const u8) -> Self::Bytes {
        let mut bytes = [0u8; 64];
        for row in 0..Self::ROWS {
            for t in 0..4 {
                // SAFETY: within the four runs.
                bytes[4 * row + t] = unsafe { p.add(16 * t + row).read() };
            }
        }
        // SAFETY: ROWS is 16 at most.
        unsafe { Self::load(bytes.as_ptr()) }
    }

    unsafe fn zero() -> Self::Floats;
    /// The same number everywhere.
    unsafe fn set(x: f32) -> Self::Floats;
    /// Reads ROWS f16.
    unsafe fn load_f16(p: *const u8) -> Self::Floats;
    /// Reads ROWS u8.
    unsafe fn load_u8(p: *const u8) -> Self::Floats;
    /// Reads ROWS i8.
    unsafe fn load_i8(p: *const u8) -> Self::Floats;
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// a b + c
    unsafe fn fma(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// Reads ROWS f32.
    unsafe fn load_f32(p: *const u8) -> Self::Floats;
    /// Writes 4 x ROWS bytes.
    unsafe fn store_bytes(p: *mut u8, a: Self::Bytes);
    /// Writes ROWS f32.
    unsafe fn store(p: *mut f32, a: Self::Floats);

    /// Adds the products of part `part` of a block (`planes`) with T tokens' blocks to `sums`: the
    /// exact integer dot product, times the weights' scale and the token's.
    unsafe fn accumulate<C: Codes, const T: usize>(
        sums: &mut [Self::Floats; T],
        scale: Self::Floats,
        planes: *const u8,
        part: usize,
        x: [*const Q8Block; T],
    );
}

/// AVX2, FMA and F16C: 8 rows.
#[derive(Clone, Copy)]
pub(super) struct Avx2;

/// Four bytes, repeated.
///
/// # Safety
/// AVX2, and 4 readable bytes at `p`.
#[inline(always)]
unsafe fn broadcast256(p: *const u8) -> __m256i {
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
unsafe fn in_order<const T: usize>(mut sums: [__m256i; T]) -> [__m256i; T] {
    for sum in &mut sums {
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
    unsafe fn load_i8(p: *const u8) -> __m256 {
        // SAFETY: AVX2 and 8 readable bytes, by the trait's contract.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))) }
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
    unsafe fn accumulate<C: Codes, const T: usize>(
        sums: &mut [__m256; T],
        scale: __m256,
        planes: *const u8,
        part: usize,
        x: [*const Q8Block; T],
    ) {
        // SAFETY: the caller's.
        unsafe {
            match C::BITS {
                8 => avx2_eight_bits::<C, T>(sums, scale, planes, x),
                _ => avx2_few_bits::<C, T>(sums, scale, planes, part, x),
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
unsafe fn avx2_few_bits<C: Codes, const T: usize>(
    sums: &mut [__m256; T],
    scale: __m256,
    planes: *const u8,
    part: usize,
    x: [*const Q8Block; T],
) {
    // SAFETY: AVX2 and the planes and tokens readable, by the trait's contract; k < 32 - 3.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let mut codes = C::open::<Avx2>(planes, part);
        let run = match C::BITS {
            2 | 4 => 8,
            5 => 4,
            _ => 2,
        };
        let mut dots = [_mm256_setzero_si256(); T];
        for start in (0..C::VECTORS).step_by(run) {
            let mut pairs = [_mm256_setzero_si256(); T];
            for i in start..start + run {
                let (w, k) = codes.next(i);
                for t in 0..T {
                    let q = (&raw const (*x[t]).q).cast::<u8>();
                    let product = _mm256_maddubs_epi16(w, broadcast256(q.add(k)));
                    pairs[t] = _mm256_add_epi16(pairs[t], product);
                }
                if T > 1 {
                    pairs = in_order(pairs);
                }
            }
            for t in 0..T {
                dots[t] = _mm256_add_epi32(dots[t], _mm256_madd_epi16(pairs[t], ones));
            }
        }
        avx2_finish(sums, scale, dots, x);
    }
}

/// |w| times x with w's sign: at most 2 x 128 x 127 for a pair, and x is never -128.
///
/// # Safety
/// See [`Isa::accumulate`].
#[inline(always)]
unsafe fn avx2_eight_bits<C: Codes, const T: usize>(
    sums: &mut [__m256; T],
    scale: __m256,
    planes: *const u8,
    x: [*const Q8Block; T],
) {
    // SAFETY: AVX2 and the planes and tokens readable, by the trait's contract; k < 32 - 3.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let mut codes = C::open::<Avx2>(planes, 0);
        let mut dots = [_mm256_setzero_si256(); T];
        for i in 0..C::VECTORS {
            let (w, k) = codes.next(i);
            let magnitude = _mm256_abs_epi8(w);
            for t in 0..T {
                let q = (&raw const (*x[t]).q).cast::<u8>();
                let signed = _mm256_sign_epi8(broadcast256(q.add(k)), w);
                let pairs = _mm256_maddubs_epi16(magnitude, signed);
                dots[t] = _mm256_add_epi32(dots[t], _mm256_madd_epi16(pairs, ones));
            }
            if T > 1 {
                dots = in_order(dots);
            }
        }
        avx2_finish(sums, scale, dots, x);
    }
}

/// Adds the scaled dot products to the sums.
///
/// # Safety
/// See [`Isa::accumulate`].
#[inline(always)]
unsafe fn avx2_finish<const T: usize>(
    sums: &mut [__m256; T],
    scale: __m256,
    dots: [__m256i; T],
    x: [*const Q8Block; T],
) {
    for t in 0..T {
        // SAFETY: the caller's.
        unsafe {
            let product = _mm256_mul_ps(_mm256_cvtepi32_ps(dots[t]), scale);
            sums[t] = _mm256_fmadd_ps(product, _mm256_set1_ps((*x[t]).d), sums[t]);
        }
    }
}

/// AVX-512 with VNNI: 16 rows.
#[derive(Clone, Copy)]
pub(super) struct Avx512;

impl Isa for Avx512 {
    type Bytes = __m512i;
    type Floats = __m512;

    const ROWS: usize = 16;
    const EIGHT_BIT_ZERO: i32 = 128;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m512i {
        // SAFETY: 64 readable bytes, by the trait's contract.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn splat(byte: u8) -> __m512i {
        // SAFETY: AVX-512, by the trait's contract.
        unsafe { _mm512_set1_epi8(byte as i8) }
    }
    #[inline(always)]
    unsafe fn and(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: AVX-512, by the trait's contract.
        unsafe { _mm512_and_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: AVX-512, by the trait's contract.
        unsafe { _mm512_or_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn double(a: __m512i) -> __m512i {
        // SAFETY: AVX-512, by the trait's contract.
        unsafe { _mm512_add_epi8(a, a) }
    }
    #[inline(always)]
    unsafe fn shl2(a: __m512i) -> __m512i {
        // SAFETY: AVX-512, by the trait's contract.
        unsafe { _mm512_slli_epi16::<2>(a) }
    }
    #[inline(always)]
    unsafe fn shr2(a: __m512i) -> __m512i {
        // SAFETY: AVX-512, by the trait's contract.
        unsafe { _mm512_srli_epi16::<2>(a) }
    }
    #[inline(always)]
    unsafe fn shr4(a: __m512i) -> __m512i {
        // SAFETY: AVX-512, by the trait's contract.
        unsafe { _mm512_srli_epi16::<4>(a) }
    }
    /// `dpbusd` takes the weights unsigned.
    #[inline(always)]
    unsafe fn eight_bits(a: __m512i) -> __m512i {
        // SAFETY: AVX-512, by the trait's contract.
        unsafe { _mm512_xor_si512(a, _mm512_set1_epi8(-128)) }
    }
    /// Runs of four rows go to the lane of these rows, and within it each row's bytes together.
    #[inline(always)]
    unsafe fn quads(p: *const u8) -> __m512i {
        // SAFETY: AVX-512 and 64 readable bytes, by the trait's contract.
        unsafe {
            let lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let bytes = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let gathered = _mm512_permutexvar_epi32(lanes, Self::load(p));
            _mm512_shuffle_epi8(gathered, _mm512_broadcast_i32x4(bytes))
        }
    }
    #[inline(always)]
    unsafe fn zero() -> __m512 {
        // SAFETY: AVX-512, by the trait's contract.
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn set(x: f32) -> __m512 {
        // SAFETY: AVX-512, by the trait's contract.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> __m512 {
        // SAFETY: AVX-512 and 32 readable bytes, by the trait's contract.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> __m512 {
        // SAFETY: AVX-512 and 16 readable bytes, by the trait's contract.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> __m512 {
        // SAFETY: AVX-512 and 16 readable bytes, by the trait's contract.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: AVX-512, by the trait's contract.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: AVX-512, by the trait's contract.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn load_f32(p: *const u8) -> __m512 {
        // SAFETY: 64 readable bytes, by the trait's contract.
        unsafe { _mm512_loadu_ps(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_bytes(p: *mut u8, a: __m512i) {
        // SAFETY: 64 writable bytes, by the trait's contract.
        unsafe { _mm512_storeu_si512(p.cast(), a) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, a: __m512) {
        // SAFETY: 64 writable bytes, by the trait's contract.
        unsafe { _mm512_storeu_ps(p, a) }
    }

    #[inline(always)]
    unsafe fn accumulate<C: Codes, const T: usize>(
        sums: &mut [__m512; T],
        scale: __m512,
        planes: *const u8,
        part: usize,
        x: [*const Q8Block; T],
    ) {
        // SAFETY: VNNI and the planes and tokens readable, by the trait's contract; k < 32 - 3.
        unsafe {
            let mut codes = C::open::<Self>(planes, part);
            let mut dots = [_mm512_setzero_si512(); T];
            for i in 0..C::VECTORS {
                let (w, k) = codes.next(i);
                for t in 0..T {
                    let q = (&raw const (*x[t]).q).cast::<u8>().add(k);
                    let x = _mm512_set1_epi32(q.cast::<i32>().read_unaligned());
                    dots[t] = _mm512_dpbusd_epi32(dots[t], w, x);
                }
            }
            for t in 0..T {
                let product = _mm512_mul_ps(_mm512_cvtepi32_ps(dots[t]), scale);
                sums[t] = _mm512_fmadd_ps(product, _mm512_set1_ps((*x[t]).d), sums[t]);
            }
        }
    }
}
