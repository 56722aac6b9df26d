//! The packed matrix and how it is built.

use super::layout::{Layout, ROW_GROUP};
use crate::cpu::pool;
use crate::quant::{BlockFormat, SubBlock};
use candle_core::quantized::GgmlDType;
use candle_core::{Result, bail};
use std::ops::Range;

/// A cache line, the alignment of packed weights.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// A quantized matrix, rows x cols, in GGUF's precision and about its size, in groups of 16 rows.
#[derive(Clone)]
pub struct PackedMatrix {
    pub(super) format: BlockFormat,
    rows: usize,
    cols: usize,
    lines: Vec<Line>,
}

impl std::fmt::Debug for PackedMatrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "PackedMatrix({:?}, {} x {})",
            self.format.dtype, self.rows, self.cols
        )
    }
}

impl PackedMatrix {
    /// Packs `blocks`, the bytes of a GGUF tensor of `dtype` with `rows` rows of `cols` values.
    ///
    /// # Errors
    /// If `dtype` is not one of the formats of [`crate::quant`], `cols` is not a positive multiple of
    /// its block size, or `blocks` has not exactly the bytes of rows x cols values.
    pub fn pack(dtype: GgmlDType, rows: usize, cols: usize, blocks: &[u8]) -> Result<Self> {
        let mut builder = Self::builder(dtype, rows, cols)?;
        builder.push(rows, blocks)?;
        builder.finish()
    }

    /// Starts a matrix of `rows` rows that is put together from several tensors.
    ///
    /// # Errors
    /// As [`Self::pack`], or if the matrix is too large for memory.
    pub fn builder(dtype: GgmlDType, rows: usize, cols: usize) -> Result<PackedBuilder> {
        let format = BlockFormat::of(dtype)?;
        format.row_bytes(cols)?;
        let group = Layout::of(&format).group(cols / 32) / 64;
        let mut lines = Vec::new();
        let count = rows.div_ceil(ROW_GROUP).checked_mul(group);
        match count.map(|count| lines.try_reserve_exact(count).map(|()| count)) {
            Some(Ok(count)) => lines.resize(count, Line([0; 64])),
            _ => bail!("rows: {rows} rows of {cols} values in {dtype:?} do not fit into memory"),
        }
        let matrix = Self {
            format,
            rows,
            cols,
            lines,
        };
        Ok(PackedBuilder { matrix, filled: 0 })
    }

    /// Number of rows: outputs of a product.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns: inputs of a product.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The weights' format.
    pub fn dtype(&self) -> GgmlDType {
        self.format.dtype
    }

    /// Bytes of the packed weights: what a product with one token reads.
    pub fn size_in_bytes(&self) -> usize {
        std::mem::size_of_val(self.lines.as_slice())
    }

    /// The values of row `row`, bit for bit what [`crate::quant::dequantize`] gives for its blocks.
    ///
    /// # Errors
    /// If there is no row `row`, or `out` does not have cols values.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        if row >= self.rows {
            bail!("row: there is no row {row} among {}", self.rows);
        }
        if out.len() != self.cols {
            bail!(
                "out: {} values given, expected cols = {}",
                out.len(),
                self.cols
            );
        }
        let layout = Layout::of(&self.format);
        let group = self.group(row / ROW_GROUP);
        for (block, out) in out.chunks_exact_mut(32).enumerate() {
            let sub = layout.read(group, block, row % ROW_GROUP);
            out.copy_from_slice(&sub.values(&self.format));
        }
        Ok(())
    }

    /// 32-wide blocks along k.
    pub(super) fn blocks(&self) -> usize {
        self.cols / 32
    }

    /// The bytes of row group `index`.
    pub(super) fn group(&self, index: usize) -> &[u8] {
        let lines = Layout::of(&self.format).group(self.blocks()) / 64;
        let group = &self.lines[index * lines..][..lines];
        // SAFETY: a line is 64 plain bytes without padding.
        unsafe { std::slice::from_raw_parts(group.as_ptr().cast(), 64 * lines) }
    }
}

/// Puts a [`PackedMatrix`] together from the rows of several tensors, such as q, k and v, without
/// holding a joined copy.
#[derive(Debug)]
pub struct PackedBuilder {
    matrix: PackedMatrix,
    filled: usize,
}

impl PackedBuilder {
    /// Appends `rows` rows from `blocks`, the bytes of a tensor of the matrix's dtype and width.
    ///
    /// # Errors
    /// If `blocks` has not exactly the bytes of those rows, or the matrix has fewer rows left.
    pub fn push(&mut self, rows: usize, blocks: &[u8]) -> Result<()> {
        let matrix = &mut self.matrix;
        let row_bytes = matrix.format.check_matrix(rows, matrix.cols, blocks)?;
        if rows > matrix.rows - self.filled {
            bail!(
                "rows: {rows} more rows given, but {} of {} are there already",
                self.filled,
                matrix.rows
            );
        }
        if rows == 0 {
            return Ok(());
        }
        let range = self.filled..self.filled + rows;
        self.filled = range.end;
        let source = Source {
            format: matrix.format,
            blocks,
            row_bytes,
            first: range.start,
        };
        let lines = source.layout().group(matrix.cols / 32) / 64;
        let (first, last) = (range.start / ROW_GROUP, range.end.div_ceil(ROW_GROUP));
        let groups = Groups(matrix.lines[first * lines..last * lines].as_mut_ptr());
        pool::for_ranges(last - first, 1, |some| {
            for i in some {
                // SAFETY: group i lies within the slice, and the ranges are disjoint.
                let group = unsafe { groups.get(i, lines) };
                let start = (first + i) * ROW_GROUP;
                let rows = range.start.max(start)..range.end.min(start + ROW_GROUP);
                source.pack(rows, group);
            }
        });
        Ok(())
    }

    /// The matrix, once all its rows are there.
    ///
    /// # Errors
    /// If rows are missing.
    pub fn finish(self) -> Result<PackedMatrix> {
        if self.filled != self.matrix.rows {
            bail!(
                "rows: {} of {} rows were given",
                self.filled,
                self.matrix.rows
            );
        }
        Ok(self.matrix)
    }
}

/// The rows of a tensor on their way into groups.
struct Source<'a> {
    format: BlockFormat,
    blocks: &'a [u8],
    row_bytes: usize,
    /// The matrix's row that the tensor's first becomes.
    first: usize,
}

impl Source<'_> {
    fn layout(&self) -> Layout {
        Layout::of(&self.format)
    }

    /// Writes the matrix's `rows`, all of one group, into that group.
    fn pack(&self, rows: Range<usize>, group: &mut [u8]) {
        let layout = self.layout();
        for row in rows {
            let bytes = &self.blocks[(row - self.first) * self.row_bytes..][..self.row_bytes];
            let subs = self.format.values / 32;
            for (b, block) in bytes.chunks_exact(self.format.bytes).enumerate() {
                for index in 0..subs {
                    let sub = SubBlock::read(&self.format, block, index);
                    layout.write(group, b * subs + index, row % ROW_GROUP, &sub);
                }
            }
        }
    }
}

/// Row groups that several tasks write, each its own.
struct Groups(*mut Line);

// SAFETY: it stands for a `&mut [Line]`, whose parts the callers of `get` keep apart.
unsafe impl Sync for Groups {}

impl Groups {
    /// The bytes of group `index`, of `lines` lines.
    ///
    /// # Safety
    /// The group exists, and nobody else has it while the result lives.
    #[expect(clippy::mut_from_ref, reason = "callers keep the groups apart")]
    unsafe fn get(&self, index: usize, lines: usize) -> &mut [u8] {
        // SAFETY: the caller's; a line is 64 plain bytes without padding.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(index * lines).cast(), 64 * lines) }
    }
}
