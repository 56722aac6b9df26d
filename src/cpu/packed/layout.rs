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
//! | Super16 | 8 | 16 f16 d, 16 f16 m, for each half block 16 bytes with s low and n high |
//! | SuperSymmetric | 8 | 16 f16 d, 32 bytes unused, for each half block 16 i8 s |
//! | a scale for each row | all | 16 f32 s |
//! | FP8 in blocks of 128 | 4 | 16 f32 s |
//! | NVFP4 | 16 | 16 f32 s, for each half block 16 e4m3 b |
//! | NF4 | 2 | 16 f32 s |
//! | groups of g | 2g / 32 | for each of two groups 16 f16 s |
//! | groups of g with zero points | 4g / 32 | for each of four groups 16 f16 s, for each 16 u8 z, in sixteenths |
//!
//! Codes lie in planes of 64 bytes: byte `4 * row + t` of plane `i` (of ternary ones: byte `16 * t + row`)
//! holds values of `row` only, so that a 32-bit lane is a row and one multiply-add takes four
//! consecutive k:
//!
//! - 8 bits: eight planes, plane `i` holds k = 4i + t. Where these are e4m3 floats with a NaN among a row's codes of a
//!   chunk, the sign of its scale is set: so products need not look for it.
//! - 4 bits: four planes, k = 4i + t in the low nibbles, k = 16 + 4i + t in the high ones.
//! - 5 bits: those and one plane of high bits: bit `3 - i` belongs to k = 4i + t, bit `7 - i` to
//!   k = 16 + 4i + t, so that adding the byte to itself brings up one after the other.
//! - 6 bits: those and a plane of bit pairs for each half of k; within it the pairs of i = 0, 1, 2, 3
//!   start at bits 4, 2, 0 and 6.
//! - 3 bits: three planes. The low 3 bits of plane `i`'s nibbles hold k = 8i + t (low nibbles) and k = 8i + 4 + t;
//!   their fourth bits are bit `i` of k = 24 + t and k = 28 + t, so that an operation takes 2 bits of these codes.
//! - 2 bits: two planes, bits 2i and 2i + 1 of plane `p` hold k = 16p + 4i + t.
//! - ternary: the same bits hold one more than the code. Here the 16 rows lie side by side, as a table look-up takes
//!   them: a nibble is two codes, and the rows of one t share their table.
//!
//! Heads and planes are multiples of 64 bytes, so every plane is one aligned cache line. The size is
//! that of the GGUF blocks, but for the 6-bit factors of Q4_K, Q5_K and Q3_K, which take a byte here
//! (2.8 %, 2.3 % and 3.6 % more), and the unused 32 bytes of Q6_K and Q3_K (1 % and 1.8 %). Of rows whose number is
//! not a multiple of 16 the last group is padded with zeros.

use crate::quant::{BlockFormat, Codes, Format, MIDDLE, Scaling, Scheme, SubBlock, e4m3};
use half::f16;

/// Rows that are packed together.
pub const ROW_GROUP: usize = 16;

/// Where the bits of plane pairs start, by `i`.
pub(super) const PAIR_SHIFT: [usize; 4] = [4, 2, 0, 6];

/// What stands in the heads of chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Heads {
    /// The scales of GGUF blocks.
    Block(Scaling),
    /// An f32 scale for each row, of all or of some blocks.
    Row,
    /// The same, whose sign says that there is a NaN among the codes, which are e4m3.
    Fp8,
    /// An f32 scale for each row, and an e4m3 one for each half block.
    RowAndGroup16,
    /// Scales, and perhaps zero points, of groups of so many blocks.
    Groups { blocks: usize, zeros: bool },
}

/// More bytes than any row group has.
const WHOLE_ROW: usize = 1 << (usize::BITS - 1);

/// Sizes of the parts of a row group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    bits: u32,
    heads: Heads,
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
            Scaling::Super | Scaling::Super16 | Scaling::SuperSymmetric => (8, 64 + 256),
        };
        Self {
            bits,
            heads: Heads::Block(scaling),
            blocks,
            head,
            codes: 64 * bits as usize,
        }
    }

    /// Codes with a scale for each row, whose one chunk is as long as it is.
    pub const fn by_row(bits: u32) -> Self {
        let codes = 64 * bits as usize;
        Self {
            bits,
            heads: Heads::Row,
            blocks: WHOLE_ROW / codes,
            head: 64,
            codes,
        }
    }

    /// e4m3 floats with a scale of each row for `blocks` blocks; 0 for the whole row.
    pub const fn fp8(blocks: usize) -> Self {
        let row = Self::by_row(8);
        Self {
            heads: Heads::Fp8,
            blocks: if blocks == 0 { row.blocks } else { blocks },
            ..row
        }
    }

    /// 4 bits with a scale for each row and one for each half block.
    pub const fn nvfp4() -> Self {
        /// Half a KB of scales to 4 KB of codes.
        const BLOCKS: usize = 16;
        Self {
            bits: 4,
            heads: Heads::RowAndGroup16,
            blocks: BLOCKS,
            head: 64 + 32 * BLOCKS,
            codes: 256,
        }
    }

    /// 4 bits with an f32 scale of each row for two blocks.
    pub const fn nf4() -> Self {
        Self {
            blocks: 2,
            ..Self::by_row(4)
        }
    }

    /// Codes with a scale, and perhaps a zero point, for each `group` blocks.
    pub const fn by_group(bits: u32, group: usize, zeros: bool) -> Self {
        let (groups, head) = if zeros { (4, 192) } else { (2, 64) };
        Self {
            bits,
            heads: Heads::Groups {
                blocks: group,
                zeros,
            },
            blocks: groups * group,
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
            heads: Heads::Block(Scaling::Affine),
            blocks: 1,
            head: 128 * parts,
            codes: 512,
        }
    }

    pub fn of(format: &Format) -> Self {
        match format {
            Format::Block(format) => Self::of_blocks(format),
            Format::Scheme(scheme) => Self::of_scheme(scheme),
        }
    }

    pub const fn of_blocks(format: &BlockFormat) -> Self {
        Self::new(format.bits, format.scaling)
    }

    pub fn of_scheme(scheme: &Scheme) -> Self {
        match scheme.group() {
            _ if *scheme == Scheme::Nvfp4 => Self::nvfp4(),
            _ if *scheme == Scheme::Nf4 => Self::nf4(),
            group if scheme.is_fp8() => Self::fp8(group.map_or(0, |group| group / 32)),
            Some(group) => Self::by_group(scheme.bits(), group / 32, scheme.has_zeros()),
            None => Self::by_row(scheme.bits()),
        }
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

    /// Bytes of the row groups of a matrix; none if they, or its values, are more than can be counted.
    pub fn matrix(&self, rows: usize, cols: usize) -> Option<usize> {
        rows.checked_mul(cols)?;
        let blocks = cols.div_ceil(32);
        let heads = blocks.div_ceil(self.blocks).checked_mul(self.head)?;
        let group = blocks.checked_mul(self.codes)?.checked_add(heads)?;
        rows.div_ceil(ROW_GROUP).checked_mul(group)
    }

    /// Where the codes of block `block` lie, behind the head of its chunk.
    #[inline(always)]
    fn planes(&self, block: usize) -> (usize, usize) {
        let (chunk, j) = (block / self.blocks, block % self.blocks);
        let head = chunk * self.chunk();
        (head, head + self.head + j * self.codes)
    }

    /// Where row `lane`'s scale of block `block` lies, and what else each half of its values has, for schemes.
    fn scheme_place(&self, block: usize, lane: usize) -> (usize, Option<[usize; 2]>) {
        let (head, _) = self.planes(block);
        match self.heads {
            Heads::Groups { blocks, zeros } => {
                let group = block % self.blocks / blocks;
                let zero = head + 128 + 16 * group + lane;
                (head + 32 * group + 2 * lane, zeros.then_some([zero; 2]))
            }
            Heads::RowAndGroup16 => {
                let first = head + 64 + 32 * (block % self.blocks) + lane;
                (head + 4 * lane, Some([first, first + ROW_GROUP]))
            }
            Heads::Row | Heads::Fp8 | Heads::Block(_) => (head + 4 * lane, None),
        }
    }

    /// Writes block `block` of row `lane` of a scheme's matrix into `group`.
    pub fn write_scheme(&self, group: &mut [u8], block: usize, lane: usize, from: &SchemeBlock) {
        let (scale, others) = self.scheme_place(block, lane);
        match self.heads {
            Heads::Groups { .. } => {
                let stored = f16::from_f32(from.scale);
                group[scale..][..2].copy_from_slice(&stored.to_le_bytes());
            }
            Heads::Fp8 => {
                let has_nan = from.codes.iter().any(|q| e4m3::is_nan(*q as u8));
                // As a block before this one may have said.
                let sign = group[scale + 3] & 0x80 | if has_nan { 0x80 } else { 0 };
                group[scale..][..4].copy_from_slice(&from.scale.abs().to_le_bytes());
                group[scale + 3] |= sign;
            }
            _ => group[scale..][..4].copy_from_slice(&from.scale.to_le_bytes()),
        }
        for (at, other) in others.iter().flatten().zip(from.others) {
            group[*at] = other;
        }
        let (_, planes) = self.planes(block);
        let offset = if self.is_ternary() { 1 } else { 0 };
        let codes = from.codes.map(|q| (q + offset) as u8);
        self.write_codes(&mut group[planes + self.row_bytes() * lane..], &codes);
    }

    /// Reads block `block` of row `lane` of a scheme's matrix back.
    pub fn read_scheme(&self, group: &[u8], block: usize, lane: usize) -> SchemeBlock {
        let (scale, others) = self.scheme_place(block, lane);
        let bytes = &group[scale..];
        let scale = match self.heads {
            Heads::Groups { .. } => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            _ => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        };
        let scale = match self.heads {
            Heads::Fp8 => scale.abs(),
            _ => scale,
        };
        let (_, planes) = self.planes(block);
        let mut codes = [0; 32];
        self.read_codes(&group[planes + self.row_bytes() * lane..], &mut codes);
        let (offset, usual) = match self.bits {
            2 => (1, 0),
            4 => (0, MIDDLE),
            _ => (0, 0),
        };
        SchemeBlock {
            codes: codes.map(|q| q as i8 - offset),
            scale,
            others: others.map_or([usual; 2], |others| others.map(|at| group[at])),
        }
    }

    /// Whether the codes are those of ternary weights.
    const fn is_ternary(&self) -> bool {
        self.bits == 2 && !matches!(self.heads, Heads::Block(_))
    }

    /// Bytes from a row's first byte in a plane to the next row's.
    const fn row_bytes(&self) -> usize {
        if self.is_ternary() { 1 } else { 4 }
    }

    /// Where row `lane`'s numbers of block `block` lie, for GGUF blocks.
    #[inline(always)]
    fn place(&self, block: usize, lane: usize) -> Place {
        let j = block % self.blocks;
        let (head, planes) = self.planes(block);
        let (d, m, scales, min) = match self.heads {
            Heads::Block(Scaling::Affine) => (0, Some(32), None, None),
            Heads::Block(Scaling::Super) => (0, Some(32), Some(64 + 16 * j), Some(192 + 16 * j)),
            Heads::Block(Scaling::Super16) => (0, Some(32), Some(64 + 32 * j), None),
            Heads::Block(Scaling::SuperSymmetric) => (0, None, Some(64 + 32 * j), None),
            _ => (32 * j, None, None, None),
        };
        Place {
            d: head + d + 2 * lane,
            m: m.map(|m| head + m + 2 * lane),
            scales: scales.map(|s| head + s + lane),
            min: min.map(|m| head + m + lane),
            codes: planes + self.row_bytes() * lane,
        }
    }

    /// Whether a factor of m stands above that of d.
    fn has_factor_pairs(&self) -> bool {
        self.heads == Heads::Block(Scaling::Super16)
    }

    /// How many factors of d a block has.
    fn factors(&self) -> usize {
        match self.heads {
            Heads::Block(Scaling::Super16 | Scaling::SuperSymmetric) => 2,
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
            for s in 0..self.factors() {
                let above = match self.has_factor_pairs() {
                    true => sub.mins[s] << 4,
                    false => 0,
                };
                group[scales + 16 * s] = sub.scales[s] | above;
            }
        }
        if let Some(min) = place.min {
            group[min] = sub.mins[0];
        }
        place.codes
    }

    /// Writes the codes of one row of a scheme's matrix; `planes` starts at its byte of the block's first
    /// plane.
    fn write_codes(&self, planes: &mut [u8], codes: &[u8; 32]) {
        if self.bits == 8 {
            for (i, codes) in codes.chunks_exact(4).enumerate() {
                planes[64 * i..][..4].copy_from_slice(codes);
            }
            return;
        }
        if self.is_ternary() {
            for (at, codes) in (0..).step_by(64).zip(codes.chunks_exact(16)) {
                for t in 0..4 {
                    let code = |i: usize| codes[4 * i + t] << (2 * i);
                    planes[at + 16 * t] = (0..4).map(code).fold(0, |a, b| a | b);
                }
            }
            return;
        }
        for i in 0..4 {
            for t in 0..4 {
                let (low, high) = (codes[4 * i + t], codes[16 + 4 * i + t]);
                planes[64 * i + t] = low & 15 | high << 4;
            }
        }
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
        if self.has_factor_pairs() {
            sub.mins = sub.scales.map(|pair| pair >> 4);
            sub.scales = sub.scales.map(|pair| pair & 15);
        }
        if let Some(min) = place.min {
            sub.mins[0] = group[min];
        }
        self.read_codes(&group[place.codes..], &mut sub.codes);
        sub
    }

    /// The codes of one row; `planes` starts at its byte of the block's first plane.
    pub fn read_codes(&self, planes: &[u8], codes: &mut [u8; 32]) {
        for (k, code) in codes.iter_mut().enumerate() {
            let (half, i, t) = (k / 16, k % 16 / 4, k % 4);
            let nibble = |plane: usize, half: usize| planes[64 * plane + t] >> (4 * half) & 15;
            *code = match self.bits {
                8 => planes[64 * (k / 4) + t],
                2 if self.is_ternary() => planes[64 * half + 16 * t] >> (2 * i) & 3,
                2 => planes[64 * half + t] >> (2 * i) & 3,
                3 if k < 24 => nibble(k / 8, i % 2) & 7,
                3 => (0..3).fold(0, |code, bit| code | nibble(bit, i % 2) >> 3 << bit),
                5 => nibble(i, half) | (planes[256 + t] >> (4 * half + 3 - i) & 1) << 4,
                6 => {
                    let high = planes[256 + 64 * half + t] >> PAIR_SHIFT[i] & 3;
                    nibble(i, half) | high << 4
                }
                _ => nibble(i, half),
            };
        }
    }
}

/// 32 consecutive values of a row of a scheme's matrix, as [`Codes::value`] has them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct SchemeBlock {
    pub codes: [i8; 32],
    pub scale: f32,
    /// The zero point, or the e4m3 scale, of each half.
    pub others: [u8; 2],
}

impl SchemeBlock {
    pub fn values(&self, scheme: Scheme) -> [f32; 32] {
        std::array::from_fn(|i| {
            Codes::value(scheme, self.codes[i], (self.scale, self.others[i / 16]))
        })
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
