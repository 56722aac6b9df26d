//! The layouts of compressed-tensors for whole numbers, as llm-compressor writes them.
//!
//! `pack-quantized`, with `B` bits and `P = 32 / B` codes in a word:
//!
//! | tensor | | |
//! |---|---|---|
//! | `weight_packed` | i32 `[N, K / P]` | field j of word (n, i), low bits first, is code (n, P i + j) plus half of the range |
//! | `weight_scale` | `[N, groups]`, or of one value | |
//! | `weight_zero_point` | i32 `[N / P, groups]` or one word, if there | field j of word (i, g) is that of row P i + j, plus half of the range |
//! | | or i8, as the scale | as it is |
//! | `weight_g_idx` | i32 `[K]`, if there | the group of each column |
//!
//! `int-quantized`:
//!
//! | tensor | | |
//! |---|---|---|
//! | `weight` | i8 `[N, K]` | |
//! | `weight_scale` | `[N, groups]`, or of one value | |
//! | `weight_zero_point` | i8, as the scale, if there | |

use super::tensors::{StoredInts, Tensors, unpack};
use super::unpacked::Unpacked;
use super::words::InWords;
use crate::quant::words::{IN_ORDER, WordLayout, Words};
use candle_core::{Result, bail};

/// What a layer's matrix is called in `pack-quantized`.
pub const PACKED: &str = "weight_packed";

/// What its scale is called in either layout.
pub const SCALE: &str = "weight_scale";

/// What zero points are called.
pub const ZERO_POINT: &str = "weight_zero_point";
/// What the groups of columns that are not in order are called.
pub const GROUPS: &str = "weight_g_idx";

/// The matrix of a layer in `pack-quantized`.
pub fn read_packed(tensors: &Tensors<'_>, (rows, cols): (usize, usize)) -> Result<InWords> {
    let (words, dims) = tensors.codes_in_words(PACKED)?;
    let in_word = |bits: u32| (32 / bits) as usize;
    let fits = |bits: &u32| dims == [rows, cols.div_ceil(in_word(*bits))];
    let Some(bits) = [4, 8].into_iter().find(fits) else {
        bail!(
            "{PACKED} has shape {dims:?}, expected [{rows}, {cols} * bits / 32] with 4 or 8 bits"
        );
    };
    let scales = scales(tensors, (rows, cols))?;
    let groups = scales.len() / rows;
    let zeros = match tensors.has(ZERO_POINT) {
        true => Some(packed_zeros(tensors, bits, (rows, groups))?),
        false => None,
    };
    let layout = WordLayout {
        bits,
        of_rows: false,
        row_step: dims[1],
        col_step: 1,
        fields: IN_ORDER,
        signed: false,
    };
    let rest = Unpacked {
        rows,
        cols,
        bits,
        codes: Vec::new(),
        scales,
        zeros,
        groups: match tensors.has(GROUPS) {
            true => Some(tensors.integers(GROUPS, &[cols])?),
            false => None,
        },
    };
    let words = Words { words, layout };
    Ok(InWords { rest, words })
}

/// The matrix of a layer in `int-quantized`: its codes as words, if rows are whole ones.
pub fn read_bytes(
    tensors: &Tensors<'_>,
    (rows, cols): (usize, usize),
) -> Result<(Unpacked, Option<Words>)> {
    let scales = scales(tensors, (rows, cols))?;
    let groups = scales.len() / rows;
    let zeros = match tensors.has(ZERO_POINT) {
        true => {
            let (zeros, dims) = tensors.all_bytes(ZERO_POINT)?;
            let unsigned = zeros.into_iter().map(|q| q ^ 0x80).collect();
            Some(broadcast_zero_points(unsigned, &dims, (rows, groups))?)
        }
        false => None,
    };
    let rest = Unpacked {
        rows,
        cols,
        bits: 8,
        codes: Vec::new(),
        scales,
        zeros,
        groups: None,
    };
    let size = [rows, cols];
    let Some(layout) = WordLayout::of_signed_rows(cols) else {
        let codes = tensors.bytes("weight", &size)?;
        let rest = Unpacked {
            codes: codes.into_iter().map(|q| q ^ 0x80).collect(),
            ..rest
        };
        return Ok((rest, None));
    };
    let words = tensors.codes_in_bytes("weight", &size)?;
    Ok((rest, Some(Words { words, layout })))
}

/// Zero points `[rows, groups]` beside packed codes. Those of a tensor are not packed themselves.
fn packed_zeros(
    tensors: &Tensors<'_>,
    bits: u32,
    (rows, groups): (usize, usize),
) -> Result<Vec<u8>> {
    let (stored, dims) = tensors.words_or_bytes(ZERO_POINT)?;
    let words = match stored {
        StoredInts::Words(words) => words,
        StoredInts::Bytes(bytes) => {
            let half = 1i16 << (bits - 1);
            let unsigned = |byte: u8| match i16::from(byte as i8) + half {
                zero if (0..2 * half).contains(&zero) => Ok(zero as u8),
                zero => bail!(
                    "{ZERO_POINT}: {}, expected {} to {}",
                    zero - half,
                    -half,
                    half - 1
                ),
            };
            let zeros = bytes.into_iter().map(unsigned).collect::<Result<_>>()?;
            return broadcast_zero_points(zeros, &dims, (rows, groups));
        }
    };
    let high = rows.div_ceil((32 / bits) as usize);
    match *dims {
        [n, g] if [n, g] == [high, groups] => (),
        [n] if n == high && groups == 1 => (),
        _ => match words.as_slice() {
            [word] => return Ok(vec![lone_field(*word, bits)?; rows * groups]),
            _ => bail!(
                "{ZERO_POINT} has shape {dims:?}, expected one value, or words of the zero points of {rows} rows: \
                 [{high}, {groups}]"
            ),
        },
    }
    let layout = WordLayout {
        bits,
        of_rows: true,
        row_step: groups,
        col_step: 1,
        fields: IN_ORDER,
        signed: false,
    };
    Ok(unpack(&words, (rows, groups), layout))
}

/// The one value of a word, with the other fields padded or the same. A negative number that was not packed has neither.
fn lone_field(word: u32, bits: u32) -> Result<u8> {
    let mask = (1 << bits) - 1;
    let field = word & mask;
    match word == field || word == field * (u32::MAX / mask) {
        true => Ok(field as u8),
        false => bail!("{ZERO_POINT} is the word {word:#010x}, expected one field of {bits} bits"),
    }
}

/// Zero points `[rows, groups]`, of which one for all, or one for each row, may be stored.
fn broadcast_zero_points(
    zeros: Vec<u8>,
    dims: &[usize],
    (rows, groups): (usize, usize),
) -> Result<Vec<u8>> {
    match *dims {
        [n, g] if [n, g] == [rows, groups] => Ok(zeros),
        [n] if n == rows && groups == 1 => Ok(zeros),
        _ if zeros.len() == 1 => Ok(vec![zeros[0]; rows * groups]),
        _ => bail!(
            "{ZERO_POINT} has shape {dims:?}, expected one value, or those of the scales: [{rows}, {groups}]"
        ),
    }
}

/// `[rows, groups]`.
fn scales(tensors: &Tensors<'_>, (rows, cols): (usize, usize)) -> Result<Vec<f32>> {
    let (scales, dims) = tensors.numbers(SCALE)?;
    match *dims {
        [n, groups] if n == rows && groups > 0 && cols.is_multiple_of(groups) => Ok(scales),
        [n] if n == rows => Ok(scales),
        _ if scales.len() == 1 => Ok(vec![scales[0]; rows]),
        _ => bail!(
            "{SCALE} has shape {dims:?}, expected [{rows}, groups] with groups that divide the {cols} \
             columns"
        ),
    }
}
