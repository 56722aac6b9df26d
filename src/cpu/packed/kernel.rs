//! The vector kernels: one row group times a few tokens, over all of k.

use super::activations::Q8Block;
use super::codes::{
    Affine, Codes, Eight, Five, Four, Scales, Six, Super, SuperSymmetric, Symmetric,
};
use super::isa::{Avx2, Avx512, Isa};
use super::layout::{Layout, ROW_GROUP};
use crate::cpu::simd::Level;
use candle_core::quantized::GgmlDType;

/// Most tokens that a kernel takes.
pub(super) const MAX_TOKENS: usize = 8;

/// The products of a row group: `out[t][r]`.
pub(super) type Products = [[f32; ROW_GROUP]; MAX_TOKENS];

/// Multiplies a row group of `blocks` 32-wide blocks at `weights` with a number of tokens that
/// belongs to the kernel; token `t` starts at `x[t * blocks]`.
///
/// # Safety
/// The processor has the instruction set, `weights` points to a group of the format, and `x` to all
/// of those tokens.
pub(super) type Tile =
    unsafe fn(weights: *const u8, blocks: usize, x: *const Q8Block, out: &mut Products);

/// The kernels of a format, by the tokens they take, most first; the last takes one.
pub(super) type Tiles = &'static [(usize, Tile)];

/// The kernels for `dtype` at `level`; none for the scalar level or an unsupported type.
pub(super) fn tiles(dtype: GgmlDType, level: Level) -> Option<Tiles> {
    match dtype {
        GgmlDType::Q4_0 => tiles_of::<Four, Symmetric>(level),
        GgmlDType::Q4_1 => tiles_of::<Four, Affine>(level),
        GgmlDType::Q5_0 => tiles_of::<Five, Symmetric>(level),
        GgmlDType::Q5_1 => tiles_of::<Five, Affine>(level),
        GgmlDType::Q8_0 => tiles_of::<Eight, Symmetric>(level),
        GgmlDType::Q4K => tiles_of::<Four, Super>(level),
        GgmlDType::Q5K => tiles_of::<Five, Super>(level),
        GgmlDType::Q6K => tiles_of::<Six, SuperSymmetric>(level),
        _ => None,
    }
}

fn tiles_of<C: Codes + 'static, S: Scales + 'static>(level: Level) -> Option<Tiles> {
    match level {
        Level::Scalar => None,
        Level::Avx2 => Some(
            const {
                &[
                 (4, avx2_by_halves::<C, S, 4> as Tile),
                    (2, avx2_by_halves::<C, S, 2>),
                    (1, avx2_at_once::<C, S>),
                ]
            },
        ),
        Level::Avx512 => Some(
            const {
                &[
                    (8, avx512::<C, S, 8> as Tile),
                    (4, avx512::<C, S, 4>),
                    (2, avx512::<C, S, 2>),
                    (1, avx512::<C, S, 1>),
                ]
            },
        ),
    }
}

/// One token: both halves of the group in one pass, so that memory is read front to back.
///
/// # Safety
/// See [`Tile`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2_at_once<C: Codes, S: Scales>(
    weights: *const u8,
    blocks: usize,
    x: *const Q8Block,
    out: &mut Products,
) {
    // SAFETY: the caller's.
    unsafe { tile::<Avx2, C, S, 1, 2>(weights, blocks, x, 0, out) }
}

/// Several tokens: each half of the group on its own, so that sums and codes fit the registers.
///
/// # Safety
/// See [`Tile`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2_by_halves<C: Codes, S: Scales, const T: usize>(
    weights: *const u8,
    blocks: usize,
    x: *const Q8Block,
    out: &mut Products,
) {
    for lane in [0, Avx2::ROWS] {
        // SAFETY: the caller's.
        unsafe { tile::<Avx2, C, S, T, 1>(weights, blocks, x, lane, out) }
    }
}

/// # Safety
/// See [`Tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn avx512<C: Codes, S: Scales, const T: usize>(
    weights: *const u8,
    blocks: usize,
    x: *const Q8Block,
    out: &mut Products,
) {
    // SAFETY: the caller's.
    unsafe { tile::<Avx512, C, S, T, 1>(weights, blocks, x, 0, out) }
}

/// T tokens times H vectors of rows, from row `lane` on: for every block the exact integer dot
/// product, then sum += (dot w.scale) x.d + w.offset x.sum.
///
/// # Safety
/// See [`Tile`].
#[inline(always)]
unsafe fn tile<I: Isa, C: Codes, S: Scales, const T: usize, const H: usize>(
    mut weights: *const u8,
    blocks: usize,
    x: *const Q8Block,
    lane: usize,
    out: &mut Products,
) {
    let layout = const { Layout::new(C::BITS, S::SCALING) };
    let lanes: [usize; H] = std::array::from_fn(|h| lane + h * I::ROWS);
    let mut x: [*const Q8Block; T] = std::array::from_fn(|t| x.wrapping_add(t * blocks));
    // SAFETY: chunk by chunk this walks over the group and the tokens, which the caller vouches for.
    unsafe {
        let mut sums = [[I::zero(); T]; H];
        let mut left = blocks;
        while left > 0 {
            let in_chunk = left.min(layout.blocks);
            if layout.blocks > 2 {
                for h in 0..H {
                    let shared = S::open::<I>(weights, lanes[h]);
                    for j in 0..in_chunk {
                        let x = x.map(|x| x.add(j));
                        block::<I, C, S, T>(&mut sums[h], shared, weights, lanes[h], j, x);
                    }
                }
            } else {
                for j in 0..in_chunk {
                    let x = x.map(|x| x.add(j));
                    for h in 0..H {
                        let shared = S::open::<I>(weights, lanes[h]);
                        block::<I, C, S, T>(&mut sums[h], shared, weights, lanes[h], j, x);
                    }
                }
            }
            x = x.map(|x| x.add(in_chunk));
            weights = weights.add(layout.head + in_chunk * layout.codes);
            left -= in_chunk;
        }
        for h in 0..H {
            for t in 0..T {
                I::store(out[t].as_mut_ptr().add(lanes[h]), sums[h][t]);
            }
        }
    }
}

/// Adds the products of block `j` of the chunk at `chunk`.
///
/// # Safety
/// See [`Tile`].
#[inline(always)]
unsafe fn block<I: Isa, C: Codes, S: Scales, const T: usize>(
    sums: &mut [I::Floats; T],
    shared: [I::Floats; 2],
    chunk: *const u8,
    lane: usize,
    j: usize,
    x: [*const Q8Block; T],
) {
    let layout = const { Layout::new(C::BITS, S::SCALING) };
    let zero = if C::BITS == 8 { I::EIGHT_BIT_ZERO } else { 1 << (C::BITS - 1) };
    // SAFETY: the block lies within the chunk, by the caller's contract.
    unsafe {
        let planes = chunk.add(layout.head + j * layout.codes + 4 * lane);
        for part in 0..C::PARTS {
            let scale = S::at::<I>(shared, chunk, lane, (j, part), zero as f32);
            I::accumulate::<C, T>(sums, scale.scale, planes, part, x);
            if zero != 0 {
                for t in 0..T {
                    let sum = if C::PARTS == 1 { (*x[t]).sum } else { (*x[t]).sums[part] };
                    sums[t] = I::fma(scale.offset, I::set(sum), sums[t]);
                }
            }
        }
    }
}
