//! How the planes of a block become vectors of codes, and its head scales: the two halves of a
//! format, combined freely by the kernels. The layout is described in [`super::layout`].

use super::isa::Isa;
use super::layout::Layout;
use crate::quant::Scaling;
use std::marker::PhantomData;

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
}

/// A block's planes on their way to vectors.
pub(super) struct Reader<I: Isa, C: ?Sized> {
    planes: *const u8,
    part: usize,
    /// High bits of codes still to come, if any.
    high: [I::Bytes; 2],
    codes: PhantomData<C>,
}

impl<I: Isa, C: Codes> Reader<I, C> {
    #[inline(always)]
    fn new(planes: *const u8, part: usize, high: [I::Bytes; 2]) -> Self {
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
    unsafe fn nibbles(&self, i: usize, half: usize) -> I::Bytes {
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

/// 2 bits: ternary.
pub(super) struct Two;

impl Codes for Two {
    const BITS: u32 = 2;
    const PARTS: usize = 1;
    const ZERO: i32 = 1;
    const ROW_BYTES: usize = 1;

    #[inline(always)]
    unsafe fn open<I: Isa>(planes: *const u8, part: usize) -> Reader<I, Self> {
        // SAFETY: two planes belong to the block.
        unsafe { Reader::new(planes, part, [I::quads(planes), I::quads(planes.add(64))]) }
    }

    #[inline(always)]
    unsafe fn next<I: Isa>(reader: &mut Reader<I, Self>, i: usize) -> (I::Bytes, usize) {
        // SAFETY: the caller's.
        unsafe {
            let left = reader.high[i / 4];
            reader.high[i / 4] = I::shr2(left);
            (I::and(left, I::splat(3)), 4 * i)
        }
    }
}

/// 4 bits.
pub(super) struct Four;

impl Codes for Four {
    const BITS: u32 = 4;
    const PARTS: usize = 1;

    #[inline(always)]
    unsafe fn open<I: Isa>(planes: *const u8, part: usize) -> Reader<I, Self> {
        // SAFETY: the caller's.
        Reader::new(planes, part, [unsafe { I::splat(0) }; 2])
    }

    #[inline(always)]
    unsafe fn next<I: Isa>(reader: &mut Reader<I, Self>, i: usize) -> (I::Bytes, usize) {
        let (plane, half) = (i / 2, i % 2);
        // SAFETY: the caller's.
        (
            unsafe { reader.nibbles(plane, half) },
            16 * half + 4 * plane,
        )
    }
}

/// 5 bits.
pub(super) struct Five;

impl Codes for Five {
    const BITS: u32 = 5;
    const PARTS: usize = 1;

    #[inline(always)]
    unsafe fn open<I: Isa>(planes: *const u8, part: usize) -> Reader<I, Self> {
        // SAFETY: the fifth plane belongs to the block.
        unsafe {
            let high = I::load(planes.add(256));
            Reader::new(planes, part, [high, I::shr4(high)])
        }
    }

    #[inline(always)]
    unsafe fn next<I: Isa>(reader: &mut Reader<I, Self>, i: usize) -> (I::Bytes, usize) {
        let (plane, half) = (i / 2, i % 2);
        // SAFETY: the caller's.
        unsafe {
            let high = I::double(reader.high[half]);
            reader.high[half] = high;
            let low = reader.nibbles(plane, half);
            (
                I::or(low, I::and(high, I::splat(16))),
                16 * half + 4 * plane,
            )
        }
    }
}

/// 6 bits, with a scale for each half of the block.
pub(super) struct Six;

impl Codes for Six {
    const BITS: u32 = 6;
    const PARTS: usize = 2;

    #[inline(always)]
    unsafe fn open<I: Isa>(planes: *const u8, part: usize) -> Reader<I, Self> {
        // SAFETY: planes 4 and 5 belong to the block.
        let high = unsafe { I::load(planes.add(256 + 64 * part)) };
        Reader::new(planes, part, [high; 2])
    }

    #[inline(always)]
    unsafe fn next<I: Isa>(reader: &mut Reader<I, Self>, i: usize) -> (I::Bytes, usize) {
        let half = reader.part;
        // SAFETY: the caller's.
        unsafe {
            let high = match i {
                0 => reader.high[0],
                3 => I::shr2(reader.high[0]),
                _ => {
                    reader.high[1] = I::shl2(reader.high[1]);
                    reader.high[1]
                }
            };
            let low = reader.nibbles(i, half);
            (I::or(low, I::and(high, I::splat(48))), 16 * half + 4 * i)
        }
    }
}

/// 8 bits, signed.
pub(super) struct Eight;

impl Codes for Eight {
    const BITS: u32 = 8;
    const PARTS: usize = 1;

    #[inline(always)]
    unsafe fn open<I: Isa>(planes: *const u8, part: usize) -> Reader<I, Self> {
        // SAFETY: the caller's.
        Reader::new(planes, part, [unsafe { I::splat(0) }; 2])
    }

    #[inline(always)]
    unsafe fn next<I: Isa>(reader: &mut Reader<I, Self>, i: usize) -> (I::Bytes, usize) {
        // SAFETY: plane i < 8 belongs to the block.
        (
            unsafe { I::eight_bits(I::load(reader.planes.add(64 * i))) },
            4 * i,
        )
    }
}

/// Codes of C that are bytes already, unsigned, a plane of four k after another.
pub(super) struct Unpacked<C>(PhantomData<C>);

impl<C: Codes> Codes for Unpacked<C> {
    const BITS: u32 = C::BITS;
    const PARTS: usize = C::PARTS;

    #[inline(always)]
    unsafe fn open<I: Isa>(planes: *const u8, part: usize) -> Reader<I, Self> {
        // SAFETY: the caller's.
        Reader::new(planes, part, [unsafe { I::splat(0) }; 2])
    }

    #[inline(always)]
    unsafe fn next<I: Isa>(reader: &mut Reader<I, Self>, i: usize) -> (I::Bytes, usize) {
        let plane = reader.part * Self::VECTORS + i;
        // SAFETY: plane < 8 belongs to the block.
        (unsafe { I::load(reader.planes.add(64 * plane)) }, 4 * plane)
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

/// [`Scaling::Symmetric`].
pub(super) struct Symmetric;

impl Scales for Symmetric {
    #[inline(always)]
    fn layout<C: Codes>() -> Layout {
        const { Layout::new(C::BITS, Scaling::Symmetric) }
    }

    #[inline(always)]
    unsafe fn open<I: Isa>(_: *const u8, _: usize) -> [I::Floats; 2] {
        // SAFETY: the caller's.
        [unsafe { I::zero() }; 2]
    }

    #[inline(always)]
    unsafe fn at<I: Isa>(
        _: [I::Floats; 2],
        head: *const u8,
        lane: usize,
        (j, _): (usize, usize),
        zero: f32,
    ) -> Scale<I> {
        // SAFETY: the head has the scales of two blocks.
        unsafe {
            let scale = I::load_f16(head.add(32 * j + 2 * lane));
            Scale {
                scale,
                offset: I::mul(scale, I::set(-zero)),
            }
        }
    }
}

/// [`Scaling::Affine`].
pub(super) struct Affine;

impl Scales for Affine {
    #[inline(always)]
    fn layout<C: Codes>() -> Layout {
        const { Layout::new(C::BITS, Scaling::Affine) }
    }

    #[inline(always)]
    unsafe fn open<I: Isa>(_: *const u8, _: usize) -> [I::Floats; 2] {
        // SAFETY: the caller's.
        [unsafe { I::zero() }; 2]
    }

    #[inline(always)]
    unsafe fn at<I: Isa>(
        _: [I::Floats; 2],
        head: *const u8,
        lane: usize,
        _: (usize, usize),
        _: f32,
    ) -> Scale<I> {
        // SAFETY: the head has a scale and an offset for each row.
        unsafe {
            Scale {
                scale: I::load_f16(head.add(2 * lane)),
                offset: I::load_f16(head.add(32 + 2 * lane)),
            }
        }
    }
}

/// [`Scaling::Super`].
pub(super) struct Super;

impl Scales for Super {
    const BY_ROWS: bool = true;

    #[inline(always)]
    fn layout<C: Codes>() -> Layout {
        const { Layout::new(C::BITS, Scaling::Super) }
    }

    #[inline(always)]
    unsafe fn open<I: Isa>(head: *const u8, lane: usize) -> [I::Floats; 2] {
        // SAFETY: the head has both for each row.
        unsafe {
            let min = I::load_f16(head.add(32 + 2 * lane));
            [I::load_f16(head.add(2 * lane)), I::mul(min, I::set(-1.0))]
        }
    }

    #[inline(always)]
    unsafe fn at<I: Isa>(
        shared: [I::Floats; 2],
        head: *const u8,
        lane: usize,
        (j, _): (usize, usize),
        _: f32,
    ) -> Scale<I> {
        // SAFETY: the head has both factors for each row and each of 8 blocks.
        unsafe {
            Scale {
                scale: I::mul(shared[0], I::load_u8(head.add(64 + 16 * j + lane))),
                offset: I::mul(shared[1], I::load_u8(head.add(192 + 16 * j + lane))),
            }
        }
    }
}

/// [`Scaling::SuperSymmetric`].
pub(super) struct SuperSymmetric;

impl Scales for SuperSymmetric {
    const BY_ROWS: bool = true;

    #[inline(always)]
    fn layout<C: Codes>() -> Layout {
        const { Layout::new(C::BITS, Scaling::SuperSymmetric) }
    }

    #[inline(always)]
    unsafe fn open<I: Isa>(head: *const u8, lane: usize) -> [I::Floats; 2] {
        // SAFETY: the head has a scale for each row.
        [unsafe { I::load_f16(head.add(2 * lane)) }; 2]
    }

    #[inline(always)]
    unsafe fn at<I: Isa>(
        shared: [I::Floats; 2],
        head: *const u8,
        lane: usize,
        (j, part): (usize, usize),
        zero: f32,
    ) -> Scale<I> {
        // SAFETY: the head has a factor for each row and each of 16 half blocks.
        unsafe {
            let factor = I::load_i8(head.add(64 + 32 * j + 16 * part + lane));
            let scale = I::mul(shared[0], factor);
            Scale {
                scale,
                offset: I::mul(scale, I::set(-zero)),
            }
        }
    }
}

/// A scale for each row.
pub(super) struct ByRow;

impl Scales for ByRow {
    #[inline(always)]
    fn layout<C: Codes>() -> Layout {
        const { Layout::by_row(C::BITS) }
    }

    #[inline(always)]
    unsafe fn open<I: Isa>(head: *const u8, lane: usize) -> [I::Floats; 2] {
        // SAFETY: the head has a scale for each row.
        [unsafe { I::load_f32(head.add(4 * lane)) }; 2]
    }

    #[inline(always)]
    unsafe fn at<I: Isa>(
        shared: [I::Floats; 2],
        _: *const u8,
        _: usize,
        _: (usize, usize),
        zero: f32,
    ) -> Scale<I> {
        Scale {
            scale: shared[0],
            // SAFETY: the caller's.
            offset: unsafe { I::mul(shared[0], I::set(-zero)) },
        }
    }
}

/// A scale for each B blocks, with a zero point if Z.
pub(super) struct ByGroup<const B: usize, const Z: bool>;

impl<const B: usize, const Z: bool> Scales for ByGroup<B, Z> {
    #[inline(always)]
    fn layout<C: Codes>() -> Layout {
        const { Layout::by_group(C::BITS, B, Z) }
    }

    #[inline(always)]
    unsafe fn open<I: Isa>(_: *const u8, _: usize) -> [I::Floats; 2] {
        // SAFETY: the caller's.
        [unsafe { I::zero() }; 2]
    }

    #[inline(always)]
    unsafe fn at<I: Isa>(
        _: [I::Floats; 2],
        head: *const u8,
        lane: usize,
        (j, _): (usize, usize),
        zero: f32,
    ) -> Scale<I> {
        let group = j / B;
        // SAFETY: the head has a scale for each group of the chunk and each row, and with Z a zero
        // point behind four of them.
        unsafe {
            let scale = I::load_f16(head.add(32 * group + 2 * lane));
            let offset = if Z {
                let zero = I::load_u8(head.add(128 + 16 * group + lane));
                I::mul(scale, I::mul(zero, I::set(-1.0)))
            } else {
                I::mul(scale, I::set(-zero))
            };
            Scale { scale, offset }
        }
    }
}

/// Scales and offsets that are f32 already, 16 of each for each part.
pub(super) struct Ready;

impl Scales for Ready {
    const STREAMED: bool = false;

    #[inline(always)]
    fn layout<C: Codes>() -> Layout {
        const { Layout::unpacked(C::PARTS) }
    }

    #[inline(always)]
    unsafe fn open<I: Isa>(_: *const u8, _: usize) -> [I::Floats; 2] {
        // SAFETY: the caller's.
        [unsafe { I::zero() }; 2]
    }

    #[inline(always)]
    unsafe fn at<I: Isa>(
        _: [I::Floats; 2],
        head: *const u8,
        lane: usize,
        (_, part): (usize, usize),
        _: f32,
    ) -> Scale<I> {
        // SAFETY: the head has a scale and an offset for each row and part.
        unsafe {
            let scales = head.add(128 * part + 4 * lane);
            Scale {
                scale: I::load_f32(scales),
                offset: I::load_f32(scales.add(64)),
            }
        }
    }
}
