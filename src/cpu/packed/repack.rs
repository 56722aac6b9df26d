//! From the rows of a GGUF tensor to the layout of a row group.
//!
//! Both keep four consecutive codes in a 32-bit word, so that a row's word of a plane takes a few
//! shifts and masks; in the 32-wide formats the nibbles need none at all.

use super::layout::{Layout, PAIR_SHIFT};
use crate::quant::{BlockFormat, Scaling, SubBlock};

/// GGUF bytes of a row that are taken at a time, so that the lines they go to stay in the first-level
/// cache while the rows of the group fill them one after the other.
const STRIP: usize = 1024;

/// Writes rows into a group: the blocks of `rows`' row `i` become row `lane + i`.
///
/// # Panics
/// If there are more rows, or more blocks of a row, than the group has room for.
pub(super) fn rows<'a>(
    format: &BlockFormat,
    rows: impl Iterator<Item = &'a [u8]> + Clone,
    lane: usize,
    group: &mut [u8],
) {
    use Scaling::{Affine, Super, Super16, SuperSymmetric, Symmetric};
    // Each arm is a copy of the code with these two known.
    match (format.bits, format.scaling) {
        (4, Symmetric) => strips(4, Symmetric, format, rows, lane, group),
        (5, Symmetric) => strips(5, Symmetric, format, rows, lane, group),
        (8, Symmetric) => strips(8, Symmetric, format, rows, lane, group),
        (4, Affine) => strips(4, Affine, format, rows, lane, group),
        (5, Affine) => strips(5, Affine, format, rows, lane, group),
        (2, Super16) => strips(2, Super16, format, rows, lane, group),
        (3, SuperSymmetric) => strips(3, SuperSymmetric, format, rows, lane, group),
        (4, Super) => strips(4, Super, format, rows, lane, group),
        (5, Super) => strips(5, Super, format, rows, lane, group),
        (6, SuperSymmetric) => strips(6, SuperSymmetric, format, rows, lane, group),
        (bits, scaling) => strips(bits, scaling, format, rows, lane, group),
    }
}

#[inline(always)]
fn strips<'a>(
    bits: u32,
    scaling: Scaling,
    format: &BlockFormat,
    rows: impl Iterator<Item = &'a [u8]> + Clone,
    lane: usize,
    group: &mut [u8],
) {
    let format = BlockFormat {
        bits,
        scaling,
        ..*format
    };
    let layout = Layout::of_blocks(&format);
    let subs = format.values / 32;
    let step = STRIP / format.bytes;
    let blocks = rows.clone().next().map_or(0, <[u8]>::len) / format.bytes;
    for first in (0..blocks).step_by(step) {
        for (i, row) in rows.clone().enumerate() {
            let strip = row.chunks_exact(format.bytes).skip(first).take(step);
            for (b, block) in strip.enumerate() {
                for index in 0..subs {
                    let sub = SubBlock::scales(&format, block, index);
                    let at = (first + b) * subs + index;
                    let codes = layout.write_scales(group, at, lane + i, &sub);
                    planes(&format, block, index, &mut group[codes..]);
                }
            }
        }
    }
}

/// Word `i` of `bytes`.
#[inline(always)]
fn word(bytes: &[u8], i: usize) -> u32 {
    let (words, _) = bytes.as_chunks();
    u32::from_le_bytes(words[i])
}

/// Writes the codes of values `32 * index..32 * (index + 1)` of a block; `out` starts at the row's
/// word of the first plane.
#[inline(always)]
fn planes(format: &BlockFormat, block: &[u8], index: usize, out: &mut [u8]) {
    // One check for all of them.
    let out = &mut out[..64 * (format.bits as usize - 1) + 4];
    let mut write = |plane: usize, word: u32| {
        out[64 * plane..][..4].copy_from_slice(&word.to_le_bytes());
    };
    match (format.scaling, format.bits) {
        (Scaling::Symmetric | Scaling::Affine, 8) => {
            let codes = &block[2..34];
            for i in 0..8 {
                write(i, word(codes, i));
            }
        }
        (Scaling::Symmetric | Scaling::Affine, bits) => {
            let nibbles = &block[format.bytes - 16..format.bytes];
            for i in 0..4 {
                write(i, word(nibbles, i));
            }
            if bits == 5 {
                write(4, high_bits(word(&block[format.bytes - 20..], 0)));
            }
        }
        (Scaling::Super, bits) => {
            let nibbles = &block[format.bytes - 128 + index / 2 * 32..][..32];
            for i in 0..4 {
                write(i, pair(nibbles, i, index % 2));
            }
            if bits == 5 {
                let high = &block[16..48];
                let mut all = 0;
                for i in 0..8 {
                    all |= (word(high, i) >> index & 0x0101_0101) << high_bit(i);
                }
                write(4, all);
            }
        }
        (Scaling::Super16, _) => {
            let pairs = &block[16 + index / 4 * 32..][..32];
            for part in 0..2 {
                let code = |i: usize| bit_pairs(pairs, 4 * part + i, index) << (2 * i);
                write(part, code(0) | code(1) | code(2) | code(3));
            }
        }
        (Scaling::SuperSymmetric, 3) => {
            let (high, pairs) = (&block[..32], &block[32 + index / 4 * 32..][..32]);
            let code =
                |i: usize| bit_pairs(pairs, i, index) | (word(high, i) >> index & 0x0101_0101) << 2;
            let last = code(6) | code(7) << 4;
            for i in 0..3 {
                let bits = last >> i & 0x1111_1111;
                write(i, code(2 * i) | code(2 * i + 1) << 4 | bits << 3);
            }
        }
        (Scaling::SuperSymmetric, _) => {
            let (half, quarter) = (index / 4, index % 4);
            let low = &block[64 * half + quarter % 2 * 32..][..32];
            for i in 0..4 {
                write(i, pair(low, i, quarter / 2));
            }
            let high = &block[128 + 32 * half..][..32];
            for part in 0..2 {
                let mut all = 0;
                for i in 0..4 {
                    let bits = word(high, 4 * part + i) >> (2 * quarter) & 0x0303_0303;
                    all |= bits << PAIR_SHIFT[i];
                }
                write(4 + part, all);
            }
        }
    }
}

/// Word `i` of the codes of 32 values `index` of a block, of whose bit pairs a byte has four.
#[inline(always)]
fn bit_pairs(pairs: &[u8], i: usize, index: usize) -> u32 {
    word(pairs, i) >> (2 * (index % 4)) & 0x0303_0303
}

/// Words `i` and `i + 4` of codes in the low (`half` 0) or high nibbles of their bytes, as one.
#[inline(always)]
fn pair(codes: &[u8], i: usize, half: usize) -> u32 {
    let low = word(codes, i) >> (4 * half) & 0x0f0f_0f0f;
    let high = word(codes, i + 4) >> (4 * half) & 0x0f0f_0f0f;
    low | high << 4
}

/// The bit of a plane of high bits that belongs to word `i` of the codes.
#[inline(always)]
fn high_bit(i: usize) -> usize {
    if i < 4 { 3 - i } else { 11 - i }
}

/// The word of a plane of high bits from a bit for each code in their order.
#[inline(always)]
fn high_bits(bits: u32) -> u32 {
    // Copies 7 bits apart: bit `t` of the nibble comes to lie at the bottom of byte `t`.
    let mut all = 0;
    for i in 0..8 {
        let spread = ((bits >> (4 * i) & 15) * 0x0020_4081) & 0x0101_0101;
        all |= spread << high_bit(i);
    }
    all
}
