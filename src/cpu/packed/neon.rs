//! The kernels for aarch64: NEON, with and without the dot products (`sdot`) of ARMv8.2.

use super::codes::Unpacked;
use super::floats::{self, E4M3_PLACES};
use super::kernel::{Codes, Isa, Kernels, Reader, Scales, Tile, Unpack, tile, unpack};
use super::layout::ROW_GROUP;
use super::q8::{FINER, Q8Block};
use super::scales::Ready;
use crate::cpu::vector::widen_f16;
use std::arch::aarch64::*;
use std::arch::asm;
use std::ops::Range;

/// 4 rows; a row group takes four vectors.
#[derive(Clone, Copy)]
struct Neon<const DOTPROD: bool>;

/// Vectors of a row group.
const VECTORS: usize = ROW_GROUP / 4;

/// The tiles of a function, for tokens of one part and of two.
macro_rules! tiles {
    ($tile:ident, $codes:ty, $scales:ty) => {
        [
            &[
                (4, $tile::<$codes, $scales, 4, 1> as Tile),
                (3, $tile::<$codes, $scales, 3, 1>),
                (2, $tile::<$codes, $scales, 2, 1>),
                (1, $tile::<$codes, $scales, 1, 1>),
            ],
            &[
                (2, $tile::<$codes, $scales, 2, 2> as Tile),
                (1, $tile::<$codes, $scales, 1, 2>),
            ],
        ]
    };
}

/// The kernels for codes C with scales S around a function for tiles.
macro_rules! kernels {
    ($kernels:ident, $tile:ident, $names:expr) => {
        /// The kernels for codes C with scales S.
        pub(super) fn $kernels<C: Codes + 'static, S: Scales + 'static>() -> &'static Kernels {
            const {
                &Kernels {
                    names: $names,
                    packed: tiles!($tile, C, S),
                    unpacked: match C::BITS {
                        8 => None,
                        _ if C::FLOATS => None,
                        _ => Some((
                            neon_unpack::<C, S> as Unpack,
                            tiles!($tile, Unpacked<C>, Ready),
                        )),
                    },
                }
            }
        }
    };
}

kernels!(neon_kernels, neon, ["neon_tiles", "neon_unpacked_tiles"]);
kernels!(
    dotprod_kernels,
    dotprod,
    ["dotprod_tiles", "dotprod_unpacked_tiles"]
);

/// # Safety
/// See [`Tile`].
#[target_feature(enable = "neon")]
unsafe fn neon<C: Codes, S: Scales, const T: usize, const P: usize>(
    weights: *const u8,
    blocks: usize,
    x: *const Q8Block,
    stride: usize,
    sums: *mut [f32; ROW_GROUP],
) {
    // SAFETY: the caller's.
    unsafe { tile::<Neon<false>, C, S, T, P, VECTORS>(weights, blocks, x, stride, 0, sums) }
}

/// # Safety
/// See [`Tile`].
#[target_feature(enable = "neon,dotprod")]
unsafe fn dotprod<C: Codes, S: Scales, const T: usize, const P: usize>(
    weights: *const u8,
    blocks: usize,
    x: *const Q8Block,
    stride: usize,
    sums: *mut [f32; ROW_GROUP],
) {
    // SAFETY: the caller's.
    unsafe { tile::<Neon<true>, C, S, T, P, VECTORS>(weights, blocks, x, stride, 0, sums) }
}

/// # Safety
/// See [`Unpack`].
#[target_feature(enable = "neon")]
unsafe fn neon_unpack<C: Codes, S: Scales>(weights: *const u8, blocks: Range<usize>, out: *mut u8) {
    for lane in (0..ROW_GROUP).step_by(4) {
        // SAFETY: the caller's.
        unsafe { unpack::<Neon<false>, C, S>(weights, blocks.clone(), lane, out) }
    }
}

impl<const DOTPROD: bool> Isa for Neon<DOTPROD> {
    type Bytes = uint8x16_t;
    type Floats = float32x4_t;

    const ROWS: usize = 4;
    const EIGHT_BIT_ZERO: i32 = 0;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> uint8x16_t {
        // SAFETY: 16 readable bytes, by the trait's contract.
        unsafe { vld1q_u8(p) }
    }
    #[inline(always)]
    unsafe fn splat(byte: u8) -> uint8x16_t {
        // SAFETY: NEON, by the trait's contract.
        unsafe { vdupq_n_u8(byte) }
    }
    #[inline(always)]
    unsafe fn and(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
        // SAFETY: NEON, by the trait's contract.
        unsafe { vandq_u8(a, b) }
    }
    #[inline(always)]
    unsafe fn or(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
        // SAFETY: NEON, by the trait's contract.
        unsafe { vorrq_u8(a, b) }
    }
    #[inline(always)]
    unsafe fn double(a: uint8x16_t) -> uint8x16_t {
        // SAFETY: NEON, by the trait's contract.
        unsafe { vaddq_u8(a, a) }
    }
    #[inline(always)]
    unsafe fn shl2(a: uint8x16_t) -> uint8x16_t {
        // SAFETY: NEON, by the trait's contract.
        unsafe { vshlq_n_u8::<2>(a) }
    }
    #[inline(always)]
    unsafe fn shr1(a: uint8x16_t) -> uint8x16_t {
        // SAFETY: NEON, by the trait's contract.
        unsafe { vshrq_n_u8::<1>(a) }
    }
    #[inline(always)]
    unsafe fn shr2(a: uint8x16_t) -> uint8x16_t {
        // SAFETY: NEON, by the trait's contract.
        unsafe { vshrq_n_u8::<2>(a) }
    }
    #[inline(always)]
    unsafe fn shr4(a: uint8x16_t) -> uint8x16_t {
        // SAFETY: NEON, by the trait's contract.
        unsafe { vshrq_n_u8::<4>(a) }
    }
    #[inline(always)]
    unsafe fn eight_bits(a: uint8x16_t) -> uint8x16_t {
        a
    }
    #[inline(always)]
    unsafe fn look_up(table: &[u8; 16], nibbles: uint8x16_t) -> uint8x16_t {
        // SAFETY: NEON, by the trait's contract; the table is readable.
        unsafe { vqtbl1q_u8(vld1q_u8(table.as_ptr()), nibbles) }
    }
    /// The places of a number's four bytes are four times its own, and 0 to 3 more.
    #[inline(always)]
    unsafe fn look_up_f32(table: &[f32; 16], a: uint8x16_t, byte: usize) -> float32x4_t {
        // SAFETY: NEON, by the trait's contract; the table is readable.
        unsafe {
            let a = vreinterpretq_u32_u8(a);
            let moved = match byte {
                0 => a,
                1 => vshrq_n_u32::<8>(a),
                2 => vshrq_n_u32::<16>(a),
                _ => vshrq_n_u32::<24>(a),
            };
            let codes = vandq_u32(moved, vdupq_n_u32(15));
            let places = vmlaq_n_u32(vdupq_n_u32(0x0302_0100), codes, 0x0404_0404);
            let table = vld1q_u8_x4(table.as_ptr().cast());
            vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(places)))
        }
    }
    #[inline(always)]
    unsafe fn quads(p: *const u8) -> uint8x16_t {
        // SAFETY: NEON and 4 readable bytes in each of four runs, by the trait's contract.
        unsafe {
            let run = |t: usize| {
                let bytes = p.add(16 * t).cast::<u32>().read_unaligned();
                vcreate_u8(u64::from(bytes))
            };
            let first = vreinterpret_u16_u8(vzip1_u8(run(0), run(1)));
            let second = vreinterpret_u16_u8(vzip1_u8(run(2), run(3)));
            let (low, high) = (vzip1_u16(first, second), vzip2_u16(first, second));
            vreinterpretq_u8_u16(vcombine_u16(low, high))
        }
    }
    #[inline(always)]
    unsafe fn zero() -> float32x4_t {
        // SAFETY: NEON, by the trait's contract.
        unsafe { vdupq_n_f32(0.0) }
    }
    #[inline(always)]
    unsafe fn set(x: f32) -> float32x4_t {
        // SAFETY: NEON, by the trait's contract.
        unsafe { vdupq_n_f32(x) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> float32x4_t {
        // SAFETY: NEON and 8 readable bytes, by the trait's contract.
        unsafe { widen_f16(vreinterpret_u16_u8(vld1_u8(p))) }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> float32x4_t {
        // SAFETY: NEON and 4 readable bytes, by the trait's contract.
        unsafe { widen_u8(vcreate_u8(u64::from(p.cast::<u32>().read_unaligned()))) }
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> [float32x4_t; 2] {
        // SAFETY: NEON and 4 readable bytes, by the trait's contract.
        unsafe {
            let bytes = vcreate_u8(u64::from(p.cast::<u32>().read_unaligned()));
            [
                widen_u8(vand_u8(bytes, vdup_n_u8(15))),
                widen_u8(vshr_n_u8::<4>(bytes)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> float32x4_t {
        // SAFETY: NEON and 4 readable bytes, by the trait's contract.
        unsafe {
            let bytes = vcreate_s8(u64::from(p.cast::<u32>().read_unaligned()));
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))))
        }
    }
    /// As f16, whose bias is 8 more, with the bits in their places.
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> float32x4_t {
        // SAFETY: NEON and 4 readable bytes, by the trait's contract.
        unsafe {
            let bytes = vcreate_u8(u64::from(p.cast::<u32>().read_unaligned()));
            widen_f16(vshl_n_u16::<7>(vget_low_u16(vmovl_u8(bytes))))
        }
    }
    #[inline(always)]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: NEON, by the trait's contract.
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        // SAFETY: NEON, by the trait's contract.
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    unsafe fn load_f32(p: *const u8) -> float32x4_t {
        // SAFETY: NEON and 16 readable bytes, by the trait's contract.
        unsafe { vreinterpretq_f32_u8(vld1q_u8(p)) }
    }
    #[inline(always)]
    unsafe fn nan_if_negative(a: float32x4_t) -> float32x4_t {
        // SAFETY: NEON, by the trait's contract.
        unsafe {
            let bits = vreinterpretq_s32_f32(a);
            vreinterpretq_f32_s32(vorrq_s32(bits, vshrq_n_s32::<31>(bits)))
        }
    }
    #[inline(always)]
    unsafe fn e4m3(a: uint8x16_t, byte: usize) -> float32x4_t {
        // SAFETY: NEON, by the trait's contract.
        unsafe {
            let a = vreinterpretq_s32_u8(a);
            let top = match byte {
                0 => vshlq_n_s32::<24>(a),
                1 => vshlq_n_s32::<16>(a),
                2 => vshlq_n_s32::<8>(a),
                _ => a,
            };
            let moved = vandq_s32(vshrq_n_s32::<4>(top), vdupq_n_s32(E4M3_PLACES));
            vreinterpretq_f32_s32(moved)
        }
    }
    #[inline(always)]
    unsafe fn store_bytes(p: *mut u8, a: uint8x16_t) {
        // SAFETY: 16 writable bytes, by the trait's contract.
        unsafe { vst1q_u8(p, a) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, a: float32x4_t) {
        // SAFETY: 16 writable bytes, by the trait's contract.
        unsafe { vst1q_f32(p, a) }
    }

    #[inline(always)]
    unsafe fn accumulate<C: Codes, const T: usize, const P: usize>(
        sums: &mut [float32x4_t; T],
        scale: float32x4_t,
        planes: *const u8,
        part: usize,
        x: [[*const Q8Block; P]; T],
    ) {
        // SAFETY: the instructions and the planes and tokens readable, by the trait's contract.
        unsafe {
            if C::FLOATS {
                return floats::accumulate::<Self, C, T, P>(sums, scale, planes, x);
            }
            let dots = match DOTPROD {
                true => by_dot_products::<C, T, P>(planes, part, x),
                false => by_long_products::<C, T, P>(planes, part, x),
            };
            for t in 0..T {
                let mut dot = dots[t][0];
                if P == 2 {
                    dot = vaddq_s32(vshlq_n_s32::<{ FINER.ilog2() as i32 }>(dot), dots[t][1]);
                }
                let product = vmulq_f32(vcvtq_f32_s32(dot), scale);
                sums[t] = vfmaq_n_f32(sums[t], product, (*x[t][P - 1]).d);
            }
        }
    }
}

/// The first four bytes as f32.
#[inline]
#[target_feature(enable = "neon")]
fn widen_u8(bytes: uint8x8_t) -> float32x4_t {
    vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))))
}

/// The dot products of four rows with T tokens. Codes of fewer than 8 bits are the same numbers as
/// signed bytes.
///
/// # Safety
/// See [`Isa::accumulate`]; with `sdot`.
#[inline(always)]
unsafe fn by_dot_products<C: Codes, const T: usize, const P: usize>(
    planes: *const u8,
    part: usize,
    x: [[*const Q8Block; P]; T],
) -> [[int32x4_t; P]; T] {
    // SAFETY: the caller's; a token's block has 32 codes.
    unsafe {
        let q = x.map(|parts| {
            parts.map(|x| {
                let q = (&raw const (*x).q).cast::<i8>();
                [vld1q_s8(q), vld1q_s8(q.add(16))]
            })
        });
        let mut codes = C::open::<Neon<true>>(planes, part);
        let mut dots = [[vdupq_n_s32(0); P]; T];
        // Written out, since the lane of `sdot` is part of the instruction.
        add_vector(0, &mut codes, &q, &mut dots);
        add_vector(1, &mut codes, &q, &mut dots);
        add_vector(2, &mut codes, &q, &mut dots);
        add_vector(3, &mut codes, &q, &mut dots);
        if C::VECTORS == 8 {
            add_vector(4, &mut codes, &q, &mut dots);
            add_vector(5, &mut codes, &q, &mut dots);
            add_vector(6, &mut codes, &q, &mut dots);
            add_vector(7, &mut codes, &q, &mut dots);
        }
        dots
    }
}

/// Adds the products of vector `i` of the codes to `dots`.
///
/// # Safety
/// As [`by_dot_products`].
#[inline(always)]
unsafe fn add_vector<C: Codes, const T: usize, const P: usize>(
    i: usize,
    codes: &mut Reader<Neon<true>, C>,
    q: &[[[int8x16_t; 2]; P]; T],
    dots: &mut [[int32x4_t; P]; T],
) {
    // SAFETY: the caller's.
    unsafe {
        let (w, k) = codes.next(i);
        let w = vreinterpretq_s8_u8(w);
        for (q, dot) in q.as_flattened().iter().zip(dots.as_flattened_mut()) {
            let q = q[k / 16];
            *dot = match k / 4 % 4 {
                0 => sdot::<0>(*dot, w, q),
                1 => sdot::<1>(*dot, w, q),
                2 => sdot::<2>(*dot, w, q),
                _ => sdot::<3>(*dot, w, q),
            };
        }
    }
}

/// `sum` plus, for each 32-bit lane, its four products of `w` with 32-bit lane `LANE` of `q`.
///
/// Assembly, since the intrinsic is not stable at the crate's oldest compiler.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot<const LANE: u32>(mut sum: int32x4_t, w: int8x16_t, q: int8x16_t) -> int32x4_t {
    // SAFETY: the instruction only touches these registers.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {w:v}.16b, {q:v}.4b[{lane}]",
            sum = inout(vreg) sum,
            w = in(vreg) w,
            q = in(vreg) q,
            lane = const LANE,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// The dot products of four rows with T tokens, without `sdot`.
///
/// Products are summed in i16, one of each vector in a lane, and as many as cannot overflow: all
/// 8 x 31 x 127 (5 bits) and 4 x 63 x 127 (6 bits) are below 2^15, and so are 2 x 128 x 127, as x
/// is never -128.
///
/// # Safety
/// See [`Isa::accumulate`].
#[inline(always)]
unsafe fn by_long_products<C: Codes, const T: usize, const P: usize>(
    planes: *const u8,
    part: usize,
    x: [[*const Q8Block; P]; T],
) -> [[int32x4_t; P]; T] {
    let run = if C::BITS == 8 { 2 } else { C::VECTORS };
    // SAFETY: the caller's; k < 32 - 3.
    unsafe {
        let mut codes = C::open::<Neon<false>>(planes, part);
        let mut dots = [[[vdupq_n_s32(0); 2]; P]; T];
        for start in (0..C::VECTORS).step_by(run) {
            let mut pairs = [[[vdupq_n_s16(0); 2]; P]; T];
            for i in start..start + run {
                let (w, k) = codes.next(i);
                let w = vreinterpretq_s8_u8(w);
                for (x, [low, high]) in x.as_flattened().iter().zip(pairs.as_flattened_mut()) {
                    let q = (&raw const (**x).q).cast::<u8>().add(k);
                    let q = vdupq_n_s32(q.cast::<i32>().read_unaligned());
                    let q = vreinterpretq_s8_s32(q);
                    *low = vmlal_s8(*low, vget_low_s8(w), vget_low_s8(q));
                    *high = vmlal_high_s8(*high, w, q);
                }
            }
            let pairs = pairs.as_flattened().as_flattened();
            for (dot, pairs) in dots
                .as_flattened_mut()
                .as_flattened_mut()
                .iter_mut()
                .zip(pairs)
            {
                *dot = vpadalq_s16(*dot, *pairs);
            }
        }
        dots.map(|parts| parts.map(|[low, high]| vpaddq_s32(low, high)))
    }
}
