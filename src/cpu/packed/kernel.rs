//! The vector kernels: one row group times a few tokens, over all of k.

use super::activations::Q8Block;
use super::codes::{
    Affine, ByGroup, ByRow, Codes, Eight, Five, Four, Ready, Scales, Six, Super, SuperSymmetric,
    Symmetric, Two, Unpacked,
};
use super::isa::{Avx2, Avx512, Isa};
use super::layout::ROW_GROUP;
use crate::cpu::simd::Level;
use crate::quant::{Format, Scheme};
use candle_core::quantized::GgmlDType;
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use std::ops::Range;

/// How far ahead of the products packed weights are fetched. The hardware's own prefetching stops at
/// every page and starts anew, which costs a fifth of the memory's bandwidth.
const AHEAD: usize = 3072;

/// 32-wide blocks that are unpacked at a time: with their
/// scales they take up to 12 KB, so that they stay in the first-level cache.
pub(super) const UNPACKED_BLOCKS: usize = 16;

/// Bytes of [`UNPACKED_BLOCKS`] unpacked blocks.
pub(super) const UNPACKED_BYTES: usize = UNPACKED_BLOCKS * (512 + 256);

/// Adds the products of a row group with a number of tokens that belongs to the kernel to `sums`:
/// `blocks` 32-wide blocks at `weights`; token `t` starts at `x[t * stride]`.
///
/// # Safety
/// The processor has the instruction set, `weights` points to chunks of the kernel's format, `x` to
/// all of those tokens, and `sums` to a row for each.
pub(super) type Tile = unsafe fn(
    weights: *const u8,
    blocks: usize,
    x: *const Q8Block,
    stride: usize,
    sums: *mut [f32; ROW_GROUP],
);

/// Unpacks 32-wide blocks `blocks` of the row group at `weights` to bytes at `out`, which the tiles of
/// [`Kernels::unpacked`] take.
///
/// # Safety
/// The processor has the instruction set, `weights` points to a row group of the kernel's format that
/// has these blocks, and `out` has room for [`UNPACKED_BYTES`]; there are at most [`UNPACKED_BLOCKS`].
pub(super) type Unpack = unsafe fn(weights: *const u8, blocks: Range<usize>, out: *mut u8);

/// The kernels of a format at a level.
pub(super) struct Kernels {
    /// By the tokens they take, most first; the last takes one.
    pub packed: &'static [(usize, Tile)],
    /// For many tokens: unpack once, then these.
    pub unpacked: Option<(Unpack, &'static [(usize, Tile)])>,
}

/// The kernels for `format` at `level`; none for the scalar level or an unsupported type.
pub(super) fn kernels(format: &Format, level: Level) -> Option<&'static Kernels> {
    let dtype = match format {
        Format::Block(format) => format.dtype,
        Format::Scheme(scheme) => return kernels_of_scheme(scheme, level),
    };
    match dtype {
        GgmlDType::Q4_0 => kernels_of::<Four, Symmetric>(level),
        GgmlDType::Q4_1 => kernels_of::<Four, Affine>(level),
        GgmlDType::Q5_0 => kernels_of::<Five, Symmetric>(level),
        GgmlDType::Q5_1 => kernels_of::<Five, Affine>(level),
        GgmlDType::Q8_0 => kernels_of::<Eight, Symmetric>(level),
        GgmlDType::Q4K => kernels_of::<Four, Super>(level),
        GgmlDType::Q5K => kernels_of::<Five, Super>(level),
        GgmlDType::Q6K => kernels_of::<Six, SuperSymmetric>(level),
        _ => None,
    }
}

fn kernels_of_scheme(scheme: &Scheme, level: Level) -> Option<&'static Kernels> {
    match (scheme.group(), scheme) {
        (_, Scheme::Int8) => kernels_of::<Eight, ByRow>(level),
        (None, _) => kernels_of::<Two, ByRow>(level),
        (Some(group), Scheme::Ternary { .. }) => match group {
            32 => kernels_of::<Two, ByGroup<1, false>>(level),
            64 => kernels_of::<Two, ByGroup<2, false>>(level),
            128 => kernels_of::<Two, ByGroup<4, false>>(level),
            _ => None,
        },
        (Some(group), Scheme::Int4 { zero_point, .. }) => match (group, zero_point) {
            (32, false) => kernels_of::<Four, ByGroup<1, false>>(level),
            (64, false) => kernels_of::<Four, ByGroup<2, false>>(level),
            (128, false) => kernels_of::<Four, ByGroup<4, false>>(level),
            (32, true) => kernels_of::<Four, ByGroup<1, true>>(level),
            (64, true) => kernels_of::<Four, ByGroup<2, true>>(level),
            (128, true) => kernels_of::<Four, ByGroup<4, true>>(level),
            _ => None,
        },
    }
}

fn kernels_of<C: Codes + 'static, S: Scales + 'static>(level: Level) -> Option<&'static Kernels> {
    match level {
        Level::Scalar => None,
        Level::Avx2 => Some(
            const {
                &Kernels {
                    packed: &[
                        (4, avx2_by_halves::<C, S, 4> as Tile),
                        (2, avx2_by_halves::<C, S, 2>),
                        (1, avx2_at_once::<C, S>),
                    ],
                    unpacked: match C::BITS {
                        8 => None,
                        _ => Some((
                            avx2_unpack::<C, S> as Unpack,
                            &[
                                (4, avx2_by_halves::<Unpacked<C>, Ready, 4> as Tile),
                                (2, avx2_by_halves::<Unpacked<C>, Ready, 2>),
                                (1, avx2_by_halves::<Unpacked<C>, Ready, 1>),
                            ],
                        )),
                    },
                }
            },
        ),
        Level::Avx512 => Some(
            const {
                &Kernels {
                    packed: &[
                        (8, avx512::<C, S, 8> as Tile),
                        (4, avx512::<C, S, 4>),
                        (2, avx512::<C, S, 2>),
                        (1, avx512::<C, S, 1>),
                    ],
                    unpacked: match C::BITS {
                        8 => None,
                        _ => Some((
                            avx512_unpack::<C, S> as Unpack,
                            &[
                                (8, avx512::<Unpacked<C>, Ready, 8> as Tile),
                                (4, avx512::<Unpacked<C>, Ready, 4>),
                                (1, avx512::<Unpacked<C>, Ready, 1>),
                            ],
                        )),
                    },
                }
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
    stride: usize,
    sums: *mut [f32; ROW_GROUP],
) {
    // SAFETY: the caller's.
    unsafe { tile::<Avx2, C, S, 1, 2>(weights, blocks, x, stride, 0, sums) }
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
    stride: usize,
    sums: *mut [f32; ROW_GROUP],
) {
    for lane in [0, Avx2::ROWS] {
        // SAFETY: the caller's.
        unsafe { tile::<Avx2, C, S, T, 1>(weights, blocks, x, stride, lane, sums) }
    }
}

/// # Safety
/// See [`Unpack`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2_unpack<C: Codes, S: Scales>(weights: *const u8, blocks: Range<usize>, out: *mut u8) {
    for lane in [0, Avx2::ROWS] {
        // SAFETY: the caller's.
        unsafe { unpack::<Avx2, C, S>(weights, blocks.clone(), lane, out) }
    }
}

/// # Safety
/// See [`Unpack`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn avx512_unpack<C: Codes, S: Scales>(
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
unsafe fn avx512<C: Codes, S: Scales, const T: usize>(
    weights: *const u8,
    blocks: usize,
    x: *const Q8Block,
    stride: usize,
    sums: *mut [f32; ROW_GROUP],
) {
    // SAFETY: the caller's.
    unsafe { tile::<Avx512, C, S, T, 1>(weights, blocks, x, stride, 0, sums) }
}

/// T tokens times H vectors of rows, from row `lane` on: for every block the exact integer dot
/// product, then sum += (dot w.scale) x.d + w.offset x.sum, with `out` as the sums.
///
/// # Safety
/// See [`Tile`].
#[inline(always)]
pub(super) unsafe fn tile<I: Isa, C: Codes, S: Scales, const T: usize, const H: usize>(
    mut weights: *const u8,
    blocks: usize,
    x: *const Q8Block,
    stride: usize,
    lane: usize,
    out: *mut [f32; ROW_GROUP],
) {
    let layout = S::layout::<C>();
    let lanes: [usize; H] = std::array::from_fn(|h| lane + h * I::ROWS);
    let mut x: [*const Q8Block; T] = std::array::from_fn(|t| x.wrapping_add(t * stride));
    // SAFETY: chunk by chunk this walks over the group and the tokens, which the caller vouches for.
    unsafe {
        let at = |t: usize, h: usize| out.add(t).cast::<f32>().add(lanes[h]);
        let mut sums = [[I::zero(); T]; H];
        for (h, sums) in sums.iter_mut().enumerate() {
            for (t, sum) in sums.iter_mut().enumerate() {
                *sum = I::load_f32(at(t, h).cast());
            }
        }
        let mut left = blocks;
        while left > 0 {
            let in_chunk = left.min(layout.blocks);
            // All rows of a block together, as they share cache lines, unless all blocks of some rows
            // share their scales.
            if S::BY_ROWS {
                for h in 0..H {
                    let shared = S::open::<I>(weights, lanes[h]);
                    for j in 0..in_chunk {
                        let x = x.map(|x| x.add(j));
                        block::<I, C, S, T>(&mut sums[h], shared, weights, lanes[h], j, x);
                    }
                }
            } else {
                let shared: [_; H] = std::array::from_fn(|h| S::open::<I>(weights, lanes[h]));
                for j in 0..in_chunk {
                    let x = x.map(|x| x.add(j));
                    for h in 0..H {
                        block::<I, C, S, T>(&mut sums[h], shared[h], weights, lanes[h], j, x);
                    }
                }
            }
            x = x.map(|x| x.add(in_chunk));
            weights = weights.add(layout.head + in_chunk * layout.codes);
            left -= in_chunk;
        }
        for (h, sums) in sums.iter().enumerate() {
            for (t, sum) in sums.iter().enumerate() {
                I::store(at(t, h), *sum);
            }
        }
    }
}

/// Starts fetching `bytes` bytes that lie [`AHEAD`] of `p`, existing or not.
#[inline(always)]
pub(super) fn fetch(p: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(64) {
        // SAFETY: a prefetch has no effect but on caches, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(AHEAD + line).cast()) };
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
    let layout = S::layout::<C>();
    let zero = if C::BITS == 8 {
        I::EIGHT_BIT_ZERO
    } else {
        C::ZERO
    };
    // SAFETY: the block lies within the chunk, by the caller's contract.
    unsafe {
        let planes = chunk.add(layout.head + j * layout.codes + C::ROW_BYTES * lane);
        if S::STREAMED && lane == 0 {
            fetch(planes, layout.codes + layout.head / layout.blocks);
        }
        for part in 0..C::PARTS {
            let scale = S::at::<I>(shared, chunk, lane, (j, part), zero as f32);
            I::accumulate::<C, T>(sums, scale.scale, planes, part, x);
            if zero != 0 {
                for t in 0..T {
                    let sum = if C::PARTS == 1 {
                        (*x[t]).sum
                    } else {
                        (*x[t]).sums[part]
                    };
                    sums[t] = I::fma(scale.offset, I::set(sum), sums[t]);
                }
            }
        }
    }
}

/// Unpacks rows from `lane` on: for every block the scales and offsets of its parts in f32, then its
/// codes in bytes, by k.
///
/// # Safety
/// See [`Unpack`].
#[inline(always)]
pub(super) unsafe fn unpack<I: Isa, C: Codes, S: Scales>(
    weights: *const u8,
    blocks: Range<usize>,
    lane: usize,
    out: *mut u8,
) {
    let (from, to) = (S::layout::<C>(), Ready::layout::<Unpacked<C>>());
    let zero = C::ZERO as f32;
    // SAFETY: block by block this walks over both, which the caller vouches for.
    unsafe {
        for (index, block) in blocks.enumerate() {
            let (chunk, j) = (block / from.blocks, block % from.blocks);
            let head = weights.add(chunk * from.chunk());
            let planes = head.add(from.head + j * from.codes + C::ROW_BYTES * lane);
            let out = out.add(index * to.chunk());
            let shared = S::open::<I>(head, lane);
            for part in 0..C::PARTS {
                let scale = S::at::<I>(shared, head, lane, (j, part), zero);
                let scales = out.add(128 * part + 4 * lane).cast::<f32>();
                I::store(scales, scale.scale);
                I::store(scales.add(ROW_GROUP), scale.offset);
                let mut codes = C::open::<I>(planes, part);
                for i in 0..C::VECTORS {
                    let (codes, k) = codes.next(i);
                    I::store_bytes(out.add(to.head + 16 * k + 4 * lane), codes);
                }
            }
        }
    }
}
