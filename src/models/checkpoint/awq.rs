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
use candle_core::{Result, bail};

/// What a layer's matrix is called.
pub const PACKED: &str = "qweight";

const BITS: u32 = 4;

/// Codes of a word.
const IN_WORD: usize = 8;

/// The field of each row of eight: the inverse of 0, 2, 4, 6, 1, 3, 5, 7.
const FIELD: [u32; IN_WORD] = [0, 4, 1, 5, 2, 6, 3, 7];

/// The matrix of a layer.
pub fn read(tensors: &Tensors<'_>, (rows, cols): (usize, usize)) -> Result<Unpacked> {
    if !rows.is_multiple_of(IN_WORD) {
        bail!("{rows} rows, expected a multiple of {IN_WORD}");
    }
    let words = tensors.words(PACKED, &[cols, rows / IN_WORD])?;
    let scales = tensors.scales_by_group("scales", (rows, cols))?;
    let groups = scales.len() / rows;
    let zeros = tensors.words("qzeros", &[groups, rows / IN_WORD])?;
    let place = |n: usize, k: usize| {
        let word = k * (rows / IN_WORD) + n / IN_WORD;
        (word, FIELD[n % IN_WORD] * BITS)
    };
    Ok(Unpacked {
        rows,
        cols,
        bits: BITS,
        codes: unpack(&words, (rows, cols), BITS, place),
        scales,
        zeros: Some(unpack(&zeros, (rows, groups), BITS, place)),
        groups: None,
    })
}

/// Whether words of this shape hold `rows` rows of `cols` codes.
pub fn is_packed(dims: [usize; 2], (rows, cols): (usize, usize)) -> bool {
    rows.is_multiple_of(IN_WORD) && dims == [cols, rows / IN_WORD]
}
