//! AVX-512 with VNNI.

use super::super::codes::Unpacked;
use super::super::floats::{self, E4M3_PLACES};
use super::super::kernel::{Codes, Isa, Kernels, Scales, Tile, Tiles, Unpack, tile, unpack};
use super::super::layout::ROW_GROUP;
use super::super::q8::{FINER, Q8Block};
use super::super::scales::Ready;
use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

/// 16 rows.
#[derive(Clone, Copy)]
pub struct Avx512;

/// The kernels for codes C with scales S.
pub(in super::super) const fn kernels<C: Codes + 'static, S: Scales + 'static>() -> &'static Kernels
{
    const {
        &Kernels {
            names: ["avx512_tiles", "avx512_unpacked_tiles"],
            packed: [const { tiles::<C, S, 1>() }, const { tiles::<C, S, 2>() }],
            // Codes of 4 bits are two instructions away: unpacking them first takes longer for any number of tokens
            // (Zen 4 by 17 % for 16 and 5 % for 256).
            unpacked: match C::BITS {
                4 | 8 => None,
                _ => Some((
                    unpack_group::<C, S> as Unpack,
                    [
                        const { tiles::<Unpacked<C>, Ready, 1>() },
                        const { tiles::<Unpacked<C>, Ready, 2>() },
                    ],
                )),
            },
            dequantize: None,
        }
    }
}

/// The tiles for tokens of P parts.
const fn tiles<C: Codes + 'static, S: Scales + 'static, const P: usize>() -> Tiles {
    let all: Tiles = &[
        (8, group::<C, S, 8, P> as Tile),
        (4, group::<C, S, 4, P>),
        (3, group::<C, S, 3, P>),
        (2, group::<C, S, 2, P>),
        (1, group::<C, S, 1, P>),
    ];
    // Scales of half blocks and two parts of eight tokens are more than the registers hold.
    if P * C::PARTS > 2 {
        all.split_at(1).1
    } else {
        all
    }
}

/// # Safety
/// See [`Unpack`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn unpack_group<C: Codes, S: Scales>(
    weights: *const u8,
    blocks: Range<usize>,
    out: *mut u8,
) {
    // SAFETY: the caller's.
    unsafe { unpack::<Avx512, C, S>(weights, blocks, 0, out) }
}

/// # Safety
/// See [`Tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn group<C: Codes, S: Scales, const T: usize, const P: usize>(
    weights: *const u8,
    blocks: usize,
    x: *const Q8Block,
    stride: usize,
    sums: *mut [f32; ROW_GROUP],
) {
    // SAFETY: the caller's.
    unsafe { tile::<Avx512, C, S, T, P, 1>(weights, blocks, x, stride, 0, sums) }
}

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
    unsafe fn shr1(a: __m512i) -> __m512i {
        // SAFETY: AVX-512, by the trait's contract.
        unsafe { _mm512_srli_epi16::<1>(a) }
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
    #[inline(always)]
    unsafe fn look_up(table: &[u8; 16], nibbles: __m512i) -> __m512i {
        // SAFETY: AVX-512, by the trait's contract; the table is readable.
        unsafe {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles)
        }
    }
    /// A permutation takes the low 4 bits of a lane.
    #[inline(always)]
    unsafe fn look_up_f32(table: &[f32; 16], a: __m512i, byte: usize) -> __m512 {
        // SAFETY: AVX-512, by the trait's contract; the table is readable.
        unsafe {
            let index = match byte {
                0 => a,
                1 => _mm512_srli_epi32::<8>(a),
                2 => _mm512_srli_epi32::<16>(a),
                _ => _mm512_srli_epi32::<24>(a),
            };
            _mm512_permutexvar_ps(index, _mm512_loadu_ps(table.as_ptr()))
        }
    }
    #[inline(always)]
    unsafe fn quads(p: *const u8) -> __m512i {
        // SAFETY: AVX-512 and 64 readable bytes, by the trait's contract.
        unsafe { transposed(Self::load(p)) }
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
    unsafe fn load_nibbles(p: *const u8) -> [__m512; 2] {
        // SAFETY: AVX-512 and 16 readable bytes, by the trait's contract.
        unsafe {
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
            let low = _mm512_and_si512(bytes, _mm512_set1_epi32(15));
            [low, _mm512_srli_epi32::<4>(bytes)].map(|v| _mm512_cvtepi32_ps(v))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> __m512 {
        // SAFETY: AVX-512 and 16 readable bytes, by the trait's contract.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    /// As f16, whose bias is 8 more, with the bits in their places.
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> __m512 {
        // SAFETY: AVX-512 and 16 readable bytes, by the trait's contract.
        unsafe {
            let bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
            _mm512_cvtph_ps(_mm256_slli_epi16::<7>(bytes))
        }
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
    unsafe fn nan_if_negative(a: __m512) -> __m512 {
        // SAFETY: the instructions, by the trait's contract.
        unsafe {
            let bits = _mm512_castps_si512(a);
            let signs = _mm512_srai_epi32::<31>(bits);
            _mm512_castsi512_ps(_mm512_or_si512(bits, signs))
        }
    }
    #[inline(always)]
    unsafe fn e4m3(a: __m512i, byte: usize) -> __m512 {
        // SAFETY: the instructions, by the trait's contract.
        unsafe {
            let top = match byte {
                0 => _mm512_slli_epi32::<24>(a),
                1 => _mm512_slli_epi32::<16>(a),
                2 => _mm512_slli_epi32::<8>(a),
                _ => a,
            };
            let moved = _mm512_srai_epi32::<4>(top);
            let places = _mm512_set1_epi32(E4M3_PLACES);
            _mm512_castsi512_ps(_mm512_and_si512(moved, places))
        }
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
    unsafe fn accumulate<C: Codes, const T: usize, const P: usize>(
        sums: &mut [__m512; T],
        scale: __m512,
        planes: *const u8,
        part: usize,
        x: [[*const Q8Block; P]; T],
    ) {
        // SAFETY: VNNI and the planes and tokens readable, by the trait's contract; k < 32 - 3.
        unsafe {
            if C::FLOATS {
                return floats::accumulate::<Self, C, T, P>(sums, scale, planes, x);
            }
            let mut codes = C::open::<Self>(planes, part);
            // A single token's products would wait for one another: two sums of every other one.
            let chains = if T * P == 1 { 2 } else { 1 };
            let mut dots = [[[_mm512_setzero_si512(); P]; 2]; T];
            for i in 0..C::VECTORS {
                let (w, k) = codes.next(i);
                for t in 0..T {
                    for p in 0..P {
                        let q = (&raw const (*x[t][p]).q).cast::<u8>().add(k);
                        let x = _mm512_set1_epi32(q.cast::<i32>().read_unaligned());
                        let dot = &mut dots[t][i % chains][p];
                        *dot = _mm512_dpbusd_epi32(*dot, w, x);
                    }
                }
            }
            for t in 0..T {
                let mut dot = dots[t][0][0];
                if chains == 2 {
                    dot = _mm512_add_epi32(dot, dots[t][1][0]);
                }
                if P == 2 {
                    dot = _mm512_slli_epi32::<{ FINER.ilog2() }>(dot);
                    dot = _mm512_add_epi32(dot, dots[t][0][1]);
                }
                let product = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), scale);
                let d = _mm512_set1_ps((*x[t][P - 1]).d);
                sums[t] = _mm512_fmadd_ps(product, d, sums[t]);
            }
        }
    }
}

/// Four runs of 16 bytes as 16 runs of four: runs of four rows go to the lane of these rows, and within
/// it each row's bytes together.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn transposed(runs: __m512i) -> __m512i {
    let mut lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    // The compiler would take both shuffles for one of bytes across lanes, which without VBMI is nine
    // instructions instead of two. SAFETY: no instruction at all.
    unsafe {
        asm!("/* {0} */", inout(zmm_reg) lanes, options(pure, nomem, nostack, preserves_flags));
    }
    let bytes = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let gathered = _mm512_permutexvar_epi32(lanes, runs);
    _mm512_shuffle_epi8(gathered, _mm512_broadcast_i32x4(bytes))
}
