//! AVX2, FMA and F16C.

use super::super::codes::Unpacked;
use super::super::floats::{self, E4M3_PLACES};
use super::super::kernel::{Codes, Isa, Kernels, Scales, Tile, Tiles, Unpack, tile, unpack};
use super::super::layout::ROW_GROUP;
use super::super::q8::Q8Block;
use super::super::scales::Ready;
use super::dot_avx2;
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
                match C::FLOATS {
                    true => const { up_to_8_tokens::<C, S, 1>() },
                    false => &[
                        (4, by_halves::<C, S, 4, 1> as Tile),
                        (3, by_halves::<C, S, 3, 1>),
                        (2, by_halves::<C, S, 2, 1>),
                        (1, at_once::<C, S, 1>),
                    ],
                },
                match C::FLOATS || C::BITS == 8 {
                    true => const { up_to_8_tokens::<C, S, 2>() },
                    // A sum for each part takes twice the registers: 4-bit codes took longer with a tile of three than
                    // with two tiles.
                    false => &[
                        (2, by_halves::<C, S, 2, 2> as Tile),
                        (1, at_once::<C, S, 2>),
                    ],
                },
            ],
            unpacked: match C::BITS {
                8 => None,
                _ if C::FLOATS => None,
                _ => Some((
                    unpack_group::<C, S> as Unpack,
                    [
                        &[
                            (4, by_halves::<Unpacked<C>, Ready, 4, 1> as Tile),
                            (3, by_halves::<Unpacked<C>, Ready, 3, 1>),
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
            dequantize: None,
        }
    }
}

/// Tiles of up to eight tokens, for codes that are costly to widen or to convert: all tokens of a tile share that.
const fn up_to_8_tokens<C: Codes + 'static, S: Scales + 'static, const P: usize>() -> Tiles {
    &[
        (8, by_halves::<C, S, 8, P> as Tile),
        (4, by_halves::<C, S, 4, P>),
        (3, by_halves::<C, S, 3, P>),
        (2, by_halves::<C, S, 2, P>),
        (1, at_once::<C, S, P>),
    ]
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
    /// A permutation takes the low 3 bits of a lane, and a blend its sign.
    #[inline(always)]
    unsafe fn look_up_f32(table: &[f32; 16], a: __m256i, byte: usize) -> __m256 {
        // SAFETY: AVX2, by the trait's contract; the table is readable.
        unsafe {
            let (index, sign) = match byte {
                0 => (a, _mm256_slli_epi32::<28>(a)),
                1 => (_mm256_srli_epi32::<8>(a), _mm256_slli_epi32::<20>(a)),
                2 => (_mm256_srli_epi32::<16>(a), _mm256_slli_epi32::<12>(a)),
                _ => (_mm256_srli_epi32::<24>(a), _mm256_slli_epi32::<4>(a)),
            };
            let half = |from: usize| {
                let half = _mm256_loadu_ps(table.as_ptr().add(from));
                _mm256_permutevar8x32_ps(half, index)
            };
            _mm256_blendv_ps(half(0), half(8), _mm256_castsi256_ps(sign))
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
                _ if C::FLOATS => floats::accumulate::<Self, C, T, P>(sums, scale, planes, x),
                8 if P == 2 && T > 2 => {
                    let x = x.map(|x| [x[0], x[P - 1]]);
                    dot_avx2::eight_bits_by_16::<Self, C, T>(sums, scale, planes, x)
                }
                8 => dot_avx2::eight_bits::<Self, C, T, P>(sums, scale, planes, x),
                _ => dot_avx2::few_bits::<Self, C, T, P>(sums, scale, planes, part, x),
            }
        }
    }
}
