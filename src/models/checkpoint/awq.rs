//! AWQ's layout for `gemm`, as AutoAWQ writes it.
//!
//! | tensor | | |
//! |---|---|---|
//! | `qweight` | i32 `[K, N / 8]` | field i of word (k, c), low bits first, is code (8 c + ORDER[i], k) |
//! | `qzeros` | i32 `[groups, N / 8]` | zero points, likewise |
//! | `scales` | f16 `[groups, N]` | |
//!
//! Method: AWQ (Lin et al. 2023).

use super::tensors::{Tensors, unpack};
use super::unpacked::Unpacked;
use super::words::InWords;
use crate::quant::words::{WordLayout, Words};
use candle_core::{Result, bail};

/// What a layer's matrix is called.
pub const PACKED: &str = "qweight";

/// Codes of a word.
const IN_WORD: usize = 8;

/// The fields of eight rows, the first row's in the lowest 4 bits: the inverse of 0, 2, 4, 6, 1, 3, 5, 7.
const FIELDS: u32 = 0x7362_5140;

/// The matrix of a layer.
pub fn read(tensors: &Tensors<'_>, (rows, cols): (usize, usize)) -> Result<InWords> {
    if !rows.is_multiple_of(IN_WORD) {
        bail!("{rows} rows, expected a multiple of {IN_WORD}");
    }
    let (words, dims) = tensors.codes_in_words(PACKED)?;
    tensors.check(PACKED, &dims, &[cols, rows / IN_WORD])?;
    let scales = tensors.scales_by_group("scales", (rows, cols))?;
    let groups = scales.len() / rows;
    let zeros = tensors.words("qzeros", &[groups, rows / IN_WORD])?;
    let layout = WordLayout {
        bits: 4,
        of_rows: true,
        row_step: 1,
        col_step: rows / IN_WORD,
        fields: FIELDS,
        signed: false,
    };
    let rest = Unpacked {
        rows,
        cols,
        bits: layout.bits,
        codes: Vec::new(),
        scales,
        zeros: Some(unpack(&zeros, (rows, groups), layout)),
        groups: None,
    };
    let words = Words { words, layout };
    Ok(InWords { rest, words })
}

/// Whether words of this shape hold `rows` rows of `cols` codes.
pub fn is_packed(dims: [usize; 2], (rows, cols): (usize, usize)) -> bool {
    rows.is_multiple_of(IN_WORD) && dims == [cols, rows / IN_WORD]
}
