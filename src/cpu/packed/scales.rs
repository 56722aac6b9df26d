//! How the head of a chunk becomes scales; see `codes.rs`.

use super::kernel::{Codes, Isa, Scale, Scales};
use super::layout::Layout;
use crate::quant::{Scaling, ZERO_STEP};

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

/// [`Scaling::Super16`].
pub(super) struct Super16;

impl Scales for Super16 {
    const BY_ROWS: bool = true;

    #[inline(always)]
    fn layout<C: Codes>() -> Layout {
        const { Layout::new(C::BITS, Scaling::Super16) }
    }

    #[inline(always)]
    unsafe fn open<I: Isa>(head: *const u8, lane: usize) -> [I::Floats; 2] {
        // SAFETY: the head begins as that of `Super`.
        unsafe { Super::open::<I>(head, lane) }
    }

    #[inline(always)]
    unsafe fn at<I: Isa>(
        shared: [I::Floats; 2],
        head: *const u8,
        lane: usize,
        (j, part): (usize, usize),
        _: f32,
    ) -> Scale<I> {
        // SAFETY: the head has a byte with both factors for each row and each of 16 half blocks.
        unsafe {
            let [factor, min] = I::load_nibbles(head.add(64 + 32 * j + 16 * part + lane));
            Scale {
                scale: I::mul(shared[0], factor),
                offset: I::mul(shared[1], min),
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

/// An f32 scale for each two blocks.
pub(super) struct ByTwoBlocks;

impl Scales for ByTwoBlocks {
    #[inline(always)]
    fn layout<C: Codes>() -> Layout {
        const { Layout::nf4() }
    }

    #[inline(always)]
    unsafe fn open<I: Isa>(head: *const u8, lane: usize) -> [I::Floats; 2] {
        // SAFETY: the head begins as that of `ByRow`.
        unsafe { ByRow::open::<I>(head, lane) }
    }

    #[inline(always)]
    unsafe fn at<I: Isa>(
        shared: [I::Floats; 2],
        head: *const u8,
        lane: usize,
        place: (usize, usize),
        zero: f32,
    ) -> Scale<I> {
        // SAFETY: the caller's.
        unsafe { ByRow::at::<I>(shared, head, lane, place, zero) }
    }
}

/// Of e4m3 floats: a scale for each B blocks, or for the whole row if B is 0.
pub(super) struct OfFloats<const B: usize>;

impl<const B: usize> Scales for OfFloats<B> {
    #[inline(always)]
    fn layout<C: Codes>() -> Layout {
        const { Layout::fp8(B) }
    }

    #[inline(always)]
    unsafe fn open<I: Isa>(head: *const u8, lane: usize) -> [I::Floats; 2] {
        // SAFETY: the head has a scale for each row.
        [unsafe { I::nan_if_negative(I::load_f32(head.add(4 * lane))) }; 2]
    }

    #[inline(always)]
    unsafe fn at<I: Isa>(
        shared: [I::Floats; 2],
        _: *const u8,
        _: usize,
        _: (usize, usize),
        _: f32,
    ) -> Scale<I> {
        Scale {
            scale: shared[0],
            // SAFETY: the caller's.
            offset: unsafe { I::zero() },
        }
    }
}

/// A scale for each row, and an e4m3 one for each half block.
pub(super) struct RowAndGroup16;

impl Scales for RowAndGroup16 {
    const BY_ROWS: bool = true;

    #[inline(always)]
    fn layout<C: Codes>() -> Layout {
        const { Layout::nvfp4() }
    }

    #[inline(always)]
    unsafe fn open<I: Isa>(head: *const u8, lane: usize) -> [I::Floats; 2] {
        /// What scales are read less, by what codes are more.
        const MORE: f32 = 256. / 2.;
        // SAFETY: the head has a scale for each row.
        [unsafe { I::mul(I::load_f32(head.add(4 * lane)), I::set(MORE)) }; 2]
    }

    #[inline(always)]
    unsafe fn at<I: Isa>(
        shared: [I::Floats; 2],
        head: *const u8,
        lane: usize,
        (j, part): (usize, usize),
        zero: f32,
    ) -> Scale<I> {
        // SAFETY: the head has an e4m3 scale for each row and each of 32 half blocks.
        unsafe {
            let by = I::load_e4m3(head.add(64 + 32 * j + 16 * part + lane));
            let scale = I::mul(shared[0], by);
            Scale {
                scale,
                offset: I::mul(scale, I::set(-zero)),
            }
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
                I::mul(scale, I::mul(zero, I::set(-ZERO_STEP)))
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
