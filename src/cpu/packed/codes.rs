//! How the planes of a block become vectors of codes. With the scales of `scales.rs` these are the
//! two halves of a format, combined freely by the kernels. The layout is described in
//! `layout.rs`.

use super::kernel::{Codes, Isa, Reader};
use crate::quant::{e2m1, e4m3, nf4};
use std::marker::PhantomData;

/// 2 bits: ternary.
pub(super) struct Ternary;

impl Codes for Ternary {
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

/// 2 bits, with a scale for each half of the block.
pub(super) struct Two;

impl Codes for Two {
    const BITS: u32 = 2;
    const PARTS: usize = 2;

    #[inline(always)]
    unsafe fn open<I: Isa>(planes: *const u8, part: usize) -> Reader<I, Self> {
        // SAFETY: two planes belong to the block.
        let pairs = unsafe { I::load(planes.add(64 * part)) };
        Reader::new(planes, part, [pairs; 2])
    }

    #[inline(always)]
    unsafe fn next<I: Isa>(reader: &mut Reader<I, Self>, i: usize) -> (I::Bytes, usize) {
        // SAFETY: the caller's.
        unsafe {
            let left = reader.high[0];
            reader.high[0] = I::shr2(left);
            (I::and(left, I::splat(3)), 16 * reader.part + 4 * i)
        }
    }
}

/// 3 bits, with a scale for each half of the block.
pub(super) struct Three;

impl Codes for Three {
    const BITS: u32 = 3;
    const PARTS: usize = 2;

    #[inline(always)]
    unsafe fn open<I: Isa>(planes: *const u8, part: usize) -> Reader<I, Self> {
        // SAFETY: three planes belong to the block.
        unsafe {
            let [a, b, c] = [0, 1, 2].map(|plane| I::load(planes.add(64 * plane)));
            let pairs = match part {
                0 => [a, b],
                _ => {
                    // The fourth bits of all nibbles, one below the other.
                    let fourth = I::splat(0x88);
                    let low = I::shr1(I::and(a, fourth));
                    let two = I::shr1(I::or(low, I::and(b, fourth)));
                    [c, I::shr1(I::or(two, I::and(c, fourth)))]
                }
            };
            Reader::new(planes, part, pairs)
        }
    }

    #[inline(always)]
    unsafe fn next<I: Isa>(reader: &mut Reader<I, Self>, i: usize) -> (I::Bytes, usize) {
        let pair = reader.high[i / 2];
        // SAFETY: the caller's.
        unsafe {
            let codes = match i % 2 {
                0 => pair,
                _ => I::shr4(pair),
            };
            (I::and(codes, I::splat(7)), 16 * reader.part + 4 * i)
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

/// e4m3 floats.
pub(super) struct Float8;

impl Codes for Float8 {
    const BITS: u32 = 8;
    const PARTS: usize = 1;
    const FLOATS: bool = true;
    const FLOATS_LESS: f32 = e4m3::UNBIAS;

    #[inline(always)]
    unsafe fn open<I: Isa>(planes: *const u8, part: usize) -> Reader<I, Self> {
        // SAFETY: the caller's.
        unsafe { Reader::new(planes, part, [I::splat(0); 2]) }
    }

    #[inline(always)]
    unsafe fn next<I: Isa>(reader: &mut Reader<I, Self>, i: usize) -> (I::Bytes, usize) {
        // SAFETY: plane i < 8 belongs to the block.
        (unsafe { I::load(reader.planes.add(64 * i)) }, 4 * i)
    }

    #[inline(always)]
    unsafe fn float<I: Isa>(codes: I::Bytes, byte: usize) -> I::Floats {
        // SAFETY: the caller's.
        unsafe { I::e4m3(codes, byte) }
    }
}

/// Places in the table of NF4.
pub(super) struct NormalFloat4;

impl Codes for NormalFloat4 {
    const BITS: u32 = 4;
    const PARTS: usize = 1;
    const FLOATS: bool = true;

    #[inline(always)]
    unsafe fn open<I: Isa>(planes: *const u8, part: usize) -> Reader<I, Self> {
        // SAFETY: the caller's.
        unsafe { Reader::new(planes, part, [I::splat(0); 2]) }
    }

    /// The high nibbles of bytes are anything.
    #[inline(always)]
    unsafe fn next<I: Isa>(reader: &mut Reader<I, Self>, i: usize) -> (I::Bytes, usize) {
        let (half, plane) = (i / 4, i % 4);
        // SAFETY: plane < 4 belongs to the block.
        unsafe {
            let codes = I::load(reader.planes.add(64 * plane));
            let codes = match half {
                0 => codes,
                _ => I::shr4(codes),
            };
            (codes, 16 * half + 4 * plane)
        }
    }

    #[inline(always)]
    unsafe fn float<I: Isa>(codes: I::Bytes, byte: usize) -> I::Floats {
        // SAFETY: the caller's.
        unsafe { I::look_up_f32(&nf4::TABLE, codes, byte) }
    }
}

/// e2m1 floats, as twice their value and [`Codes::ZERO`] more, with a scale for each half of the block.
pub(super) struct Float4;

/// What e2m1 codes become.
const FLOATS4: [u8; 16] = {
    let mut all = [0; 16];
    let mut code = 0;
    while code < 16 {
        all[code] = (e2m1::doubled(code as u8) as i32 + Float4::ZERO) as u8;
        code += 1;
    }
    all
};

impl Codes for Float4 {
    const BITS: u32 = 4;
    const PARTS: usize = 2;
    /// Bytes are unsigned to products.
    const ZERO: i32 = 12;

    #[inline(always)]
    unsafe fn open<I: Isa>(planes: *const u8, part: usize) -> Reader<I, Self> {
        // SAFETY: the caller's.
        Reader::new(planes, part, [unsafe { I::splat(0) }; 2])
    }

    #[inline(always)]
    unsafe fn next<I: Isa>(reader: &mut Reader<I, Self>, i: usize) -> (I::Bytes, usize) {
        let half = reader.part;
        // SAFETY: the caller's.
        let codes = unsafe { I::look_up(&FLOATS4, reader.nibbles(i, half)) };
        (codes, 16 * half + 4 * i)
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
