//! GPTQ's layout, as AutoGPTQ and GPTQModel write it.
//!
//! With `B` bits, `P = 32 / B` codes in a word, K inputs and N outputs:
//!
//! | tensor | | |
//! |---|---|---|
//! | `qweight` | i32 `[K / P, N]` | field j of word (i, n), low bits first, is code (n, P i + j) |
//! | `qzeros` | i32 `[groups, N / P]` | field j of word (g, i) is the zero point of row P i + j, less one in the first version |
//! | `scales` | `[groups, N]` | |
//! | `g_idx` | i32 `[K]`, if there | the group of each column |
//!
//! Method: GPTQ (Frantar et al. 2022).

use super::tensors::{Tensors, fields, transposed};
use super::unpacked::Unpacked;
use super::words::InWords;
use crate::pool;
use crate::quant::words::{IN_ORDER, WordLayout, Words};
use candle_core::{Result, bail};

/// What a layer's matrix is called.
pub const PACKED: &str = "qweight";

/// How zero points are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zeros {
    /// As they are: version 2.
    AsTheyAre,
    /// Less one: version 1.
    LessOne,
    /// Nobody says.
    Unknown,
}

/// The matrix of a layer.
pub fn read(tensors: &Tensors<'_>, (rows, cols): (usize, usize), stored: Zeros) -> Result<InWords> {
    let (words, dims) = tensors.codes_in_words(PACKED)?;
    let Some(bits) = [4, 8]
        .into_iter()
        .find(|bits| is_packed(dims, (rows, cols), *bits))
    else {
        bail!(
            "{PACKED} has shape {dims:?}, expected [{cols} * bits / 32, {rows}] with 4 or 8 bits"
        );
    };
    let in_word = (32 / bits) as usize;
    let scales = tensors.scales_by_group("scales", (rows, cols))?;
    let groups = scales.len() / rows;
    if !rows.is_multiple_of(in_word) {
        bail!("{rows} rows, expected a multiple of {in_word}, as words of zero points have");
    }
    let words_of_zeros = tensors.words("qzeros", &[groups, rows / in_word])?;
    let zeros = match zero_points(&words_of_zeros, bits, stored)? {
        Some(zeros) => Some(transposed(&zeros, groups, rows)),
        None => None,
    };
    let groups = match tensors.has("g_idx") {
        true => Some(tensors.integers("g_idx", &[cols])?),
        false => None,
    };
    let layout = WordLayout {
        bits,
        of_rows: false,
        row_step: 1,
        col_step: rows,
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
        groups,
    };
    let words = Words { words, layout };
    Ok(InWords { rest, words })
}

/// Whether words of this shape hold `rows` rows of `cols` codes.
fn is_packed(dims: [usize; 2], (rows, cols): (usize, usize), bits: u32) -> bool {
    let in_word = (32 / bits) as usize;
    cols.is_multiple_of(in_word) && dims == [cols / in_word, rows]
}

/// Zero points `[groups, rows]`; none if all are half of the range.
fn zero_points(words: &[u32], bits: u32, stored: Zeros) -> Result<Option<Vec<u8>>> {
    let middle = 1u8 << (bits - 1);
    let plain = fields(words, bits);
    let all = |value: u8| pool::all(&plain, |z| *z == value);
    // Symmetric weights are known by their zero points, which some files of version 1 store as they are.
    if all(middle) || (all(middle - 1) && stored != Zeros::AsTheyAre) {
        return Ok(None);
    }
    match stored {
        Zeros::AsTheyAre => Ok(Some(plain)),
        Zeros::LessOne => {
            // A one in each field. GPTQModel takes it off whole words, so that a zero point of 0 borrows
            // from the next field; added to the word, it is paid back.
            let ones = u32::MAX / ((1 << bits) - 1);
            let words: Vec<_> = words.iter().map(|w| w.wrapping_add(ones)).collect();
            Ok(Some(fields(&words, bits)))
        }
        Zeros::Unknown => bail!(
            "qzeros: whether zero points are stored less one is said by `checkpoint_format` of \
             config.json: `models::Checkpoint` reads both"
        ),
    }
}
