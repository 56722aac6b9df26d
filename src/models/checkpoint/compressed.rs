//! The layouts of compressed-tensors for whole numbers, as llm-compressor writes them.
//!
//! `pack-quantized`, with `B` bits and `P = 32 / B` codes in a word:
//!
//! | tensor | | |
//! |---|---|---|
//! | `weight_packed` | i32 `[N, K / P]` | field j of word (n, i), low bits first, is code (n, P i + j) plus half of the range |
//! | `weight_scale` | `[N, groups]`, or of one value | |
//! | `weight_zero_point` | i32 `[N / P, groups]`, if there | field j of word (i, g) is that of row P i + j, plus half of the range |
//! | `weight_g_idx` | i32 `[K]`, if there | the group of each column |
//!
//! `int-quantized`:
//!
//! | tensor | | |
//! |---|---|---|
//! | `weight` | i8 `[N, K]` | |
//! | `weight_scale` | `[N, groups]`, or of one value | |
//! | `weight_zero_point` | i8, as the scale, if there | |

use super::tensors::{Tensors, unpack};
use super::unpacked::Unpacked;
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
pub fn read_packed(tensors: &Tensors<'_>, (rows, cols): (usize, usize)) -> Result<Unpacked> {
    let (words, dims) = tensors.matrix_of_words(PACKED)?;
    let in_word = |bits: u32| (32 / bits) as usize;
    let fits = |bits: &u32| dims == [rows, cols.div_ceil(in_word(*bits))];
    let Some(bits) = [4, 8].into_iter().find(fits) else {
        bail!(
            "{PACKED} has shape {dims:?}, expected [{rows}, {cols} * bits / 32] with 4 or 8 bits"
        );
    };
    let in_word = in_word(bits);
    let scales = scales(tensors, (rows, cols))?;
    let groups = scales.len() / rows;
    let zeros = match tensors.has(ZERO_POINT) {
        true => {
            let words = tensors.words(ZERO_POINT, &[rows.div_ceil(in_word), groups])?;
            let place = |n: usize, g: usize| (n / in_word * groups + g, field(n, in_word, bits));
            Some(unpack(&words, (rows, groups), bits, place))
        }
        false => None,
    };
    // A shift, since a division would take longer than the rest.
    let log = in_word.trailing_zeros();
    let place = |n: usize, k: usize| (n * dims[1] + (k >> log), field(k, in_word, bits));
    Ok(Unpacked {
        rows,
        cols,
        bits,
        codes: unpack(&words, (rows, cols), bits, place),
        scales,
        zeros,
        groups: match tensors.has(GROUPS) {
            true => Some(tensors.integers(GROUPS, &[cols])?),
            false => None,
        },
    })
}

/// Bits below code `at` in its word of a power of two of codes.
fn field(at: usize, in_word: usize, bits: u32) -> u32 {
    (at & (in_word - 1)) as u32 * bits
}

/// The matrix of a layer in `int-quantized`.
pub fn read_bytes(tensors: &Tensors<'_>, (rows, cols): (usize, usize)) -> Result<Unpacked> {
    let unsigned = |bytes: Vec<u8>| bytes.into_iter().map(|q| q ^ 0x80).collect();
    let scales = scales(tensors, (rows, cols))?;
    let groups = scales.len() / rows;
    Ok(Unpacked {
        rows,
        cols,
        bits: 8,
        codes: unsigned(tensors.bytes("weight", &[rows, cols])?),
        scales,
        zeros: match tensors.has(ZERO_POINT) {
            true => Some(unsigned(tensors.bytes(ZERO_POINT, &[rows, groups])?)),
            false => None,
        },
        groups: None,
    })
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
