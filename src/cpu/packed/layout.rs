//! Where the numbers of 16 rows lie, and how single rows get in and out.
//!
//! A row group is a run of chunks along k, read front to back. A chunk has a head with the scales
//! of its 32-wide blocks, and behind it the blocks' codes:
//!
//! | scaling | blocks | head |
//! |---|---|---|
//! | Symmetric | 2 | 16 f16 d of each block |
//! | Affine | 1 | 16 f16 d, 16 f16 m |
//! | Super | 8 | 16 f16 d, 16 f16 m, for each block 16 u8 s, for each block 16 u8 n |
//! | SuperSymmetric | 8 | 16 f16 d, 32 bytes unused, for each half block 16 i8 s |
//!
//! Codes lie in planes of 64 bytes: byte `4 * row + t` of plane `i` holds values of `row` only, so
//! that a 32-bit lane is a row and one multiply-add takes four consecutive k:
//!
//! - 8 bits: eight planes, plane `i` holds k = 4i + t.
//! - 4 bits: four planes, k = 4i + t in the low nibbles, k = 16 + 4i + t in the high ones.
//! - 5 bits: those and one plane of high bits: bit `3 - i` belongs to k = 4i + t, bit `7 - i` to
//!   k = 16 + 4i + t, so that adding the byte to itself brings up one after the other.
//! - 6 bits: those and a plane of bit pairs for each half of k; within it the pairs of i = 0, 1, 2, 3
//!   start at bits 4, 2, 0 and 6.
//!
//! Heads and planes are multiples of 64 bytes, so every plane is one aligned cache line. The size is
//! that of the GGUF blocks, but for the 6-bit factors of Q4_K and Q5_K, which take a byte here
//! (2.8 % and 2.3 % more), and the unused 32 bytes of Q6_K (1 %).

use crate::quant::{BlockFormat, Scaling, SubBlock};
use half::f16;

/// Rows that are packed together.
pub const ROW_GROUP: usize = 16;

/// Where the bits of plane pairs start, by `i`.
pub(super) const PAIR_SHIFT: [usize; 4] = [4, 2, 0, 6];

/// Sizes of the parts of a row group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    bits: u32,
    scaling: Scaling,
    /// 32-wide blocks in a full chunk.
    pub blocks: usize,
    /// Bytes before the first block's codes.
    pub head: usize,
    /// Bytes of a block's codes.
    pub codes: usize,
}

impl Layout {
    pub const fn new(bits: u32, scaling: Scaling) -> Self {
        let (blocks, head) = match scaling {
            Scaling::Symmetric => (2, 64),
            Scaling::Affine => (1, 64),
            Scaling::Super | Scaling::SuperSymmetric => (8, 64 + 256),
        };
        Self {
            bits,
            scaling,
            blocks,
            head,
            codes: 64 * bits as usize,
        }
    }

    /// The layout of blocks that are unpacked for many tokens: each with a scale and an offset in f32
    /// for each row and each of `parts`, and a byte for each code.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub const fn unpacked(parts: usize) -> Self {
        Self {
            bits: 8,
            scaling: Scaling::Affine,
            blocks: 1,
            head: 128 * parts,
            codes: 512,
        }
    }

    pub const fn of(format: &BlockFormat) -> Self {
        Self::new(format.bits, format.scaling)
    }

    /// Bytes of a full chunk.
    pub const fn chunk(&self) -> usize {
        self.head + self.blocks * self.codes
    }

    /// Bytes of a row group with `blocks` blocks of 32 along k. A last chunk that is not full has
    /// the whole head and the codes of the blocks that there are.
    pub const fn group(&self, blocks: usize) -> usize {
        blocks.div_ceil(self.blocks) * self.head + blocks * self.codes
    }

    /// Where row `lane`'s numbers of block `block` lie.
    #[inline(always)]
    fn place(&self, block: usize, lane: usize) -> Place {
        let (chunk, j) = (block / self.blocks, block % self.blocks);
        let head = chunk * self.chunk();
        let codes = head + self.head + j * self.codes + 4 * lane;
        let (d, m, scales, min) = match self.scaling {
            Scaling::Symmetric => (32 * j, None, None, None),
            Scaling::Affine => (0, Some(32), None, None),
            Scaling::Super => (0, Some(32), Some(64 + 16 * j), Some(192 + 16 * j)),
            Scaling::SuperSymmetric => (0, None, Some(64 + 32 * j), None),
        };
        Place {
            d: head + d + 2 * lane,
            m: m.map(|m| head + m + 2 * lane),
            scales: scales.map(|s| head + s + lane),
            min: min.map(|m| head + m + lane),
            codes,
        }
    }

    /// How many factors of d a block has.
    fn factors(&self) -> usize {
        match self.scaling {
            Scaling::SuperSymmetric => 2,
            _ => 1,
        }
    }

    /// Writes the scales of block `block` of row `lane` into `group`, and gives the place of its codes.
    #[inline(always)]
    pub fn write_scales(
        &self,
        group: &mut [u8],
        block: usize,
        lane: usize,
        sub: &SubBlock,
    ) -> usize {
        let place = self.place(block, lane);
        group[place.d..][..2].copy_from_slice(&sub.d.to_le_bytes());
        if let Some(m) = place.m {
            group[m..][..2].copy_from_slice(&sub.m.to_le_bytes());
        }
        if let Some(scales) = place.scales {
            for (s, factor) in sub.scales[..self.factors()].iter().enumerate() {
                group[scales + 16 * s] = *factor;
            }
        }
        if let Some(min) = place.min {
            group[min] = sub.min;
        }
        place.codes
    }

    /// Reads block `block` of row `lane` back.
    pub fn read(&self, group: &[u8], block: usize, lane: usize) -> SubBlock {
        let place = self.place(block, lane);
        let half = |at: usize| f16::from_le_bytes([group[at], group[at + 1]]);
        let mut sub = SubBlock::ZERO;
        sub.d = half(place.d);
        sub.m = place.m.map_or(f16::ZERO, half);
        if let Some(scales) = place.scales {
            for (s, factor) in sub.scales[..self.factors()].iter_mut().enumerate() {
                *factor = group[scales + 16 * s];
            }
        }
        sub.min = place.min.map_or(0, |min| group[min]);
        self.read_codes(&group[place.codes..], &mut sub.codes);
        sub
    }

    /// The codes of one row; `planes` starts at its byte of the block's first plane.
    pub fn read_codes(&self, planes: &[u8], codes: &mut [u8; 32]) {
        for (k, code) in codes.iter_mut().enumerate() {
            let (half, i, t) = (k / 16, k % 16 / 4, k % 4);
            if self.bits == 8 {
                *code = planes[64 * (k / 4) + t];
                continue;
            }
            let high = match self.bits {
                5 => planes[256 + t] >> (4 * half + 3 - i) & 1,
                6 => planes[256 + 64 * half + t] >> PAIR_SHIFT[i] & 3,
                _ => 0,
            };
            *code = planes[64 * i + t] >> (4 * half) & 15 | high << 4;
        }
    }
}

/// Byte offsets of one row's numbers of one block within its group.
struct Place {
    d: usize,
    m: Option<usize>,
    scales: Option<usize>,
    min: Option<usize>,
    codes: usize,
}
