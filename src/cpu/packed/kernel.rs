//! The vector kernels: one row group times a few tokens, over all of k.

use super::activations::Q8Block;
use super::codes::{Codes, Eight, Five, Four, Six, Two, Unpacked};
use super::isa::Isa;
use super::layout::ROW_GROUP;
#[cfg(target_arch = "aarch64")]
use super::neon as arch;
use super::scales::{Affine, ByGroup, ByRow, Ready, Scales, Super, SuperSymmetric, Symmetric};
#[cfg(target_arch = "x86_64")]
use super::x86 as arch;
use crate::cpu::simd::{Level, prefetch};
use crate::quant::{Format, Scheme};
use candle_core::quantized::GgmlDType;
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
        GgmlDType::Q4_0 => arch::kernels::<Four, Symmetric>(level),
        GgmlDType::Q4_1 => arch::kernels::<Four, Affine>(level),
        GgmlDType::Q5_0 => arch::kernels::<Five, Symmetric>(level),
        GgmlDType::Q5_1 => arch::kernels::<Five, Affine>(level),
        GgmlDType::Q8_0 => arch::kernels::<Eight, Symmetric>(level),
        GgmlDType::Q4K => arch::kernels::<Four, Super>(level),
        GgmlDType::Q5K => arch::kernels::<Five, Super>(level),
        GgmlDType::Q6K => arch::kernels::<Six, SuperSymmetric>(level),
        _ => None,
    }
}

fn kernels_of_scheme(scheme: &Scheme, level: Level) -> Option<&'static Kernels> {
    match (scheme.group(), scheme) {
        (_, Scheme::Int8) => arch::kernels::<Eight, ByRow>(level),
        (None, _) => arch::kernels::<Two, ByRow>(level),
        (Some(group), Scheme::Ternary { .. }) => match group {
            32 => arch::kernels::<Two, ByGroup<1, false>>(level),
            64 => arch::kernels::<Two, ByGroup<2, false>>(level),
            128 => arch::kernels::<Two, ByGroup<4, false>>(level),
            _ => None,
        },
        (Some(group), Scheme::Int4 { zero_point, .. }) => match (group, zero_point) {
            (32, false) => arch::kernels::<Four, ByGroup<1, false>>(level),
            (64, false) => arch::kernels::<Four, ByGroup<2, false>>(level),
            (128, false) => arch::kernels::<Four, ByGroup<4, false>>(level),
            (32, true) => arch::kernels::<Four, ByGroup<1, true>>(level),
            (64, true) => arch::kernels::<Four, ByGroup<2, true>>(level),
            (128, true) => arch::kernels::<Four, ByGroup<4, true>>(level),
            _ => None,
        },
    }
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
        prefetch::<1, _>(p.wrapping_add(AHEAD + line));
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
