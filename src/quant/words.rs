//! Codes in words of 32 bits, as the checkpoints of other programs have them.

use crate::pool;
use candle_core::{DType, Device, Result, Tensor};

/// Fields of a word in order, the first in the lowest bits.
pub(crate) const IN_ORDER: u32 = 0x7654_3210;

/// Fields of four bits of which the upper one of each byte is the first.
pub(crate) const UPPER_FIRST: u32 = 0x6745_2301;

/// Where the codes of a matrix are among its words. The codes of a word are those of neighbouring columns, or of
/// neighbouring rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WordLayout {
    /// Bits of a code: 4 or 8.
    pub bits: u32,
    /// Whether the codes of a word are of neighbouring rows.
    pub of_rows: bool,
    /// Words from a row to the next, or from the rows of a word to the next ones.
    pub row_step: usize,
    /// The same of columns.
    pub col_step: usize,
    /// The field of the i-th code of a word, i of 4 bits each.
    pub fields: u32,
    /// Whether codes of 8 bits are signed.
    pub signed: bool,
}

impl WordLayout {
    /// Of a matrix whose rows are one behind the other, and each is whole words; none if it is not.
    pub fn of_rows(bits: u32, cols: usize, fields: u32) -> Option<Self> {
        let in_word = (32 / bits) as usize;
        cols.is_multiple_of(in_word).then_some(Self {
            bits,
            of_rows: false,
            row_step: cols / in_word,
            col_step: 1,
            fields,
            signed: false,
        })
    }

    /// The same of signed bytes.
    pub fn of_signed_rows(cols: usize) -> Option<Self> {
        let layout = Self::of_rows(8, cols, IN_ORDER)?;
        Some(Self {
            signed: true,
            ..layout
        })
    }

    /// Binary logarithms of the rows and of the columns that share a word.
    pub fn logs(&self) -> [u32; 2] {
        let log = (32 / self.bits).ilog2();
        match self.of_rows {
            true => [log, 0],
            false => [0, log],
        }
    }

    /// The word of a code, and the bits below it there.
    #[inline]
    pub fn place(&self, row: usize, col: usize) -> (usize, u32) {
        let [rows, cols] = self.logs();
        let word = (row >> rows) * self.row_step + (col >> cols) * self.col_step;
        let within = (row & ((1 << rows) - 1)) + (col & ((1 << cols) - 1));
        let field = self.fields >> (4 * within as u32) & 15;
        (word, field * self.bits)
    }
}

/// The words of a matrix.
#[derive(Clone, Debug)]
pub(crate) struct Words {
    /// In i32, in bytes or, for a GPU, in e4m3 floats, one behind the other, on the host or on the GPU that unpacks them.
    pub words: Tensor,
    pub layout: WordLayout,
}

impl Words {
    pub fn on_host(&self) -> Result<Vec<u32>> {
        let words = self.words.to_device(&Device::Cpu)?;
        if words.dtype() == DType::U8 {
            let bytes = words.to_vec1::<u8>()?;
            let (words, _) = bytes.as_chunks();
            return Ok(pool::map(words, |word| u32::from_le_bytes(*word)));
        }
        let words = words.to_vec1::<i32>()?;
        Ok(words.into_iter().map(|word| word as u32).collect())
    }

    /// Whether every code of so many rows and columns has its word.
    #[cfg(feature = "cuda")]
    pub fn hold(&self, rows: usize, cols: usize) -> bool {
        // Places grow with rows and with columns.
        let bytes = self.words.elem_count() * self.words.dtype().size_in_bytes();
        rows > 0 && cols > 0 && self.layout.place(rows - 1, cols - 1).0 < bytes / 4
    }
}
