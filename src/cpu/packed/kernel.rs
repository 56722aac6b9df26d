//! The vector kernels: one row group times a few tokens, over all of k. They are written once, over an
//! instruction set ([`Isa`]), the codes of a format ([`Codes`]) and its scales ([`Scales`]).

use super::layout::{Layout, ROW_GROUP};
use super::q8::Q8Block;
use crate::cpu::simd::prefetch;
#[cfg(target_arch = "x86_64")]
use crate::cpu::tiles::Tile as AmxTile;
use std::marker::PhantomData;
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
/// `blocks` 32-wide blocks at `weights`; token `t` starts at `x[t * stride]`, and if it has two parts the fine one
/// half a stride behind that.
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

/// Tiles with the tokens that each takes, most first; the last takes one.
pub(super) type Tiles = &'static [(usize, Tile)];

/// Unpacks 32-wide blocks `blocks` of the row group at `weights` to bytes at `out`, which the tiles of
/// [`Kernels::unpacked`] take.
///
/// # Safety
/// The processor has the instruction set, `weights` points to a row group of the kernel's format that
/// has these blocks, and `out` has room for [`UNPACKED_BYTES`]; there are at most [`UNPACKED_BLOCKS`].
pub(super) type Unpack = unsafe fn(weights: *const u8, blocks: Range<usize>, out: *mut u8);

/// Dequantizes blocks of the row group at `weights` to one of the tiles of each part of each step of `out`.
///
/// # Safety
/// The processor has AVX-512 with bf16, `weights` points to a row group of the kernel's format that has these blocks,
/// and `out` has the parts of as many steps.
#[cfg(target_arch = "x86_64")]
pub(super) type Dequantize =
    unsafe fn(weights: *const u8, blocks: Range<usize>, out: &mut [[AmxTile; 2]], which: usize);

/// The kernels for codes with scales at a level.
pub(super) struct Kernels {
    /// The names of the packed and of the unpacked form.
    pub names: [&'static str; 2],
    /// For tokens of one part and of two.
    pub packed: [Tiles; 2],
    /// For many tokens: unpack once, then these, likewise.
    pub unpacked: Option<(Unpack, [Tiles; 2])>,
    /// For many tokens in AMX's tiles, of one part and of two.
    #[cfg(target_arch = "x86_64")]
    pub dequantize: Option<[Dequantize; 2]>,
}

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
    /// Each byte shifted left by 2; its low 2 bits are anything.
    unsafe fn shl2(a: Self::Bytes) -> Self::Bytes;
    /// Each byte shifted right by 1; its high bit is anything.
    unsafe fn shr1(a: Self::Bytes) -> Self::Bytes;
    /// Each byte shifted right by 2; its high 2 bits are anything.
    unsafe fn shr2(a: Self::Bytes) -> Self::Bytes;
    /// Each byte shifted right by 4; its high 4 bits are anything.
    unsafe fn shr4(a: Self::Bytes) -> Self::Bytes;
    /// Signed codes as `dot` takes them.
    unsafe fn eight_bits(a: Self::Bytes) -> Self::Bytes;
    /// The number of a table for the low nibble of byte `byte` of each lane.
    unsafe fn look_up_f32(table: &[f32; 16], a: Self::Bytes, byte: usize) -> Self::Floats;
    /// The byte of a table for each nibble.
    unsafe fn look_up(table: &[u8; 16], nibbles: Self::Bytes) -> Self::Bytes;
    /// Of four runs of 16 bytes from `p` on, the first ROWS of each: row by row the byte of each run.
    unsafe fn quads(p: *const u8) -> Self::Bytes;

    unsafe fn zero() -> Self::Floats;
    /// The same number everywhere.
    unsafe fn set(x: f32) -> Self::Floats;
    /// Reads ROWS f16.
    unsafe fn load_f16(p: *const u8) -> Self::Floats;
    /// Reads ROWS u8.
    unsafe fn load_u8(p: *const u8) -> Self::Floats;
    /// Reads the low and the high nibbles of ROWS bytes.
    unsafe fn load_nibbles(p: *const u8) -> [Self::Floats; 2];
    /// Reads ROWS i8.
    unsafe fn load_i8(p: *const u8) -> Self::Floats;
    /// Reads ROWS e4m3 floats of positive sign, less 2^8 times; NaN becomes 480.
    unsafe fn load_e4m3(p: *const u8) -> Self::Floats;
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// a b + c
    unsafe fn fma(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// Reads ROWS f32.
    unsafe fn load_f32(p: *const u8) -> Self::Floats;
    /// Writes 4 x ROWS bytes.
    unsafe fn store_bytes(p: *mut u8, a: Self::Bytes);
    /// NaN where the sign is set.
    unsafe fn nan_if_negative(a: Self::Floats) -> Self::Floats;
    /// The e4m3 float in byte `byte` of each lane, less 2^120 times; NaN becomes 480.
    unsafe fn e4m3(a: Self::Bytes, byte: usize) -> Self::Floats;
    /// Writes ROWS f32.
    unsafe fn store(p: *mut f32, a: Self::Floats);

    /// Adds the products of part `part` of a block (`planes`) with the blocks of T tokens, P parts each, to `sums`:
    /// the exact integer dot product (of floats the sum in f32), times the weights' scale and the token's. That of a coarse and a fine part is
    /// [`FINER`] times the coarse one plus the fine one, times the fine part's scale.
    unsafe fn accumulate<C: Codes, const T: usize, const P: usize>(
        sums: &mut [Self::Floats; T],
        scale: Self::Floats,
        planes: *const u8,
        part: usize,
        x: [[*const Q8Block; P]; T],
    );
}

/// How codes are stored.
pub(super) trait Codes {
    /// Bits of a code.
    const BITS: u32;
    /// Parts of a block that have their own scale.
    const PARTS: usize;
    /// Vectors of codes in a part.
    const VECTORS: usize = 8 / Self::PARTS;
    /// The code that stands for zero, where that is the format's and not stored.
    const ZERO: i32 = 1 << (Self::BITS - 1);
    /// Bytes from a row's first byte in a plane to the next row's.
    const ROW_BYTES: usize = 4;
    /// Whether products take codes as f32, by [`Self::float`], and not as whole numbers.
    const FLOATS: bool = false;
    /// What [`Self::float`] is less.
    const FLOATS_LESS: f32 = 1.;

    /// Starts reading part `part`.
    ///
    /// # Safety
    /// The processor has `I`, and `planes` points to a block's planes, at the first row wanted.
    unsafe fn open<I: Isa>(planes: *const u8, part: usize) -> Reader<I, Self>
    where
        Self: Sized;

    /// Vector `i`, to be asked for in order from 0 to VECTORS, and the k of its first code.
    ///
    /// # Safety
    /// As [`Self::open`].
    unsafe fn next<I: Isa>(reader: &mut Reader<I, Self>, i: usize) -> (I::Bytes, usize)
    where
        Self: Sized;

    /// What the code in byte `byte` of each lane stands for, less [`Self::FLOATS_LESS`] times; only of [`Self::FLOATS`].
    ///
    /// # Safety
    /// The processor has `I`.
    unsafe fn float<I: Isa>(codes: I::Bytes, byte: usize) -> I::Floats {
        let _ = (codes, byte);
        unreachable!("codes are whole numbers")
    }
}

/// A block's planes on their way to vectors.
pub(super) struct Reader<I: Isa, C: ?Sized> {
    pub planes: *const u8,
    pub part: usize,
    /// High bits of codes, or whole codes, that are still to come, if any.
    pub high: [I::Bytes; 2],
    codes: PhantomData<C>,
}

impl<I: Isa, C: Codes> Reader<I, C> {
    #[inline(always)]
    pub fn new(planes: *const u8, part: usize, high: [I::Bytes; 2]) -> Self {
        Self {
            planes,
            part,
            high,
            codes: PhantomData,
        }
    }

    /// [`Codes::next`].
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    pub unsafe fn next(&mut self, i: usize) -> (I::Bytes, usize) {
        // SAFETY: the caller's.
        unsafe { C::next(self, i) }
    }

    /// The low (`half` 0) or high nibbles of plane `i`.
    ///
    /// # Safety
    /// As [`Codes::next`], for codes that have nibble planes.
    #[inline(always)]
    pub unsafe fn nibbles(&self, i: usize, half: usize) -> I::Bytes {
        // SAFETY: plane i < 4 belongs to the block.
        unsafe {
            let plane = I::load(self.planes.add(64 * i));
            match half {
                0 => I::and(plane, I::splat(15)),
                _ => I::and(I::shr4(plane), I::splat(15)),
            }
        }
    }
}

/// What a code is multiplied by and what is added: weight = scale x code + offset.
#[derive(Clone, Copy)]
pub(super) struct Scale<I: Isa> {
    pub scale: I::Floats,
    pub offset: I::Floats,
}

/// How the head of a chunk becomes scales.
pub(super) trait Scales {
    /// Whether weights come from memory rather than from scratch in the cache.
    const STREAMED: bool = true;
    /// Whether the blocks of a chunk share so much that some rows should take them all in turn.
    const BY_ROWS: bool = false;

    /// The layout of chunks with codes C.
    fn layout<C: Codes>() -> Layout;

    /// What all blocks of a chunk share. `lane` is the first row wanted.
    ///
    /// # Safety
    /// The processor has `I`, and `head` points to a chunk's head.
    unsafe fn open<I: Isa>(head: *const u8, lane: usize) -> [I::Floats; 2];

    /// The scale of a block's part, `place` = (block of the chunk, part); `zero` is the code that stands for zero.
    ///
    /// # Safety
    /// As [`Self::open`].
    unsafe fn at<I: Isa>(
        shared: [I::Floats; 2],
        head: *const u8,
        lane: usize,
        place: (usize, usize),
        zero: f32,
    ) -> Scale<I>;
}

/// T tokens of P parts times H vectors of rows, from row `lane` on: for every block the exact integer dot
/// product, then sum += (dot w.scale) x.d + w.offset x.sum, with `out` as the sums.
///
/// # Safety
/// See [`Tile`].
#[inline(always)]
pub(super) unsafe fn tile<
    I: Isa,
    C: Codes,
    S: Scales,
    const T: usize,
    const P: usize,
    const H: usize,
>(
    mut weights: *const u8,
    blocks: usize,
    x: *const Q8Block,
    stride: usize,
    lane: usize,
    out: *mut [f32; ROW_GROUP],
) {
    let layout = S::layout::<C>();
    let lanes: [usize; H] = std::array::from_fn(|h| lane + h * I::ROWS);
    let mut x: [[*const Q8Block; P]; T] = std::array::from_fn(|t| {
        std::array::from_fn(|p| x.wrapping_add(t * stride + p * (stride / P)))
    });
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
                        let x = x.map(|x| x.map(|x| x.add(j)));
                        block::<I, C, S, T, P>(&mut sums[h], shared, weights, lanes[h], j, x);
                    }
                }
            } else {
                let shared: [_; H] = std::array::from_fn(|h| S::open::<I>(weights, lanes[h]));
                for j in 0..in_chunk {
                    let x = x.map(|x| x.map(|x| x.add(j)));
                    for h in 0..H {
                        block::<I, C, S, T, P>(&mut sums[h], shared[h], weights, lanes[h], j, x);
                    }
                }
            }
            x = x.map(|x| x.map(|x| x.add(in_chunk)));
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
unsafe fn block<I: Isa, C: Codes, S: Scales, const T: usize, const P: usize>(
    sums: &mut [I::Floats; T],
    shared: [I::Floats; 2],
    chunk: *const u8,
    lane: usize,
    j: usize,
    x: [[*const Q8Block; P]; T],
) {
    let layout = S::layout::<C>();
    let zero = if C::FLOATS {
        0
    } else if C::BITS == 8 {
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
            I::accumulate::<C, T, P>(sums, scale.scale, planes, part, x);
            if zero != 0 {
                for t in 0..T {
                    let sum = if C::PARTS == 1 {
                        (*x[t][0]).sum
                    } else {
                        (*x[t][0]).sums[part]
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
    let (from, to) = (S::layout::<C>(), Layout::unpacked(C::PARTS));
    let zero = C::ZERO as f32;
    // SAFETY: block by block this walks over both, which the caller vouches for.
    unsafe {
        for (index, block) in blocks.enumerate() {
            let (chunk, j) = (block / from.blocks, block % from.blocks);
            let head = weights.add(chunk * from.chunk());
            let planes = head.add(from.head + j * from.codes + C::ROW_BYTES * lane);
            if lane == 0 {
                fetch(planes, from.codes + from.head / from.blocks);
            }
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
