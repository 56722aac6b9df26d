//! The packed matrix and how it is built.

use super::in_place::{InPlace, SharedBytes};
use super::layout::{Layout, ROW_GROUP};
use super::repack;
use crate::cpu::pool;
use crate::quant::{self, BlockFormat};
use candle_core::quantized::GgmlDType;
use candle_core::{Result, bail};
use std::ops::Range;

/// A cache line, the alignment of packed weights.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line([u8; 64]);

/// Where the weights are.
#[derive(Clone)]
enum Storage {
    /// In row groups.
    Groups(Vec<Line>),
    /// In rows of blocks, which are packed a group at a time whenever they are used.
    Rows(InPlace),
}

/// A quantized matrix, rows x cols, in GGUF's precision and about its size, in groups of 16 rows.
#[derive(Clone)]
pub struct PackedMatrix {
    pub(super) format: BlockFormat,
    rows: usize,
    cols: usize,
    storage: Storage,
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

    /// The same matrix without a copy: its blocks stay in `bytes`, from `start` on, and each group of
    /// rows is packed into the cache whenever it is used. That costs time in every product, most of it
    /// with one token, and saves the time and the memory of packing.
    ///
    /// # Errors
    /// If `dtype` is not one of the formats of [`crate::quant`], `cols` is not a positive multiple of
    /// its block size, or `bytes` ends before the matrix does.
    pub fn in_place(
        dtype: GgmlDType,
        rows: usize,
        cols: usize,
        bytes: SharedBytes,
        start: usize,
    ) -> Result<Self> {
        let format = BlockFormat::of(dtype)?;
        let storage = Storage::Rows(InPlace::new(&format, (rows, cols), bytes, start)?);
        Ok(Self {
            format,
            rows,
            cols,
            storage,
        })
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
        Ok(PackedBuilder {
            format,
            rows,
            cols,
            lines,
            filled: 0,
        })
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

    /// Bytes of the weights: what a product with one token reads.
    pub fn size_in_bytes(&self) -> usize {
        match &self.storage {
            Storage::Groups(lines) => std::mem::size_of_val(lines.as_slice()),
            Storage::Rows(rows) => self.rows * rows.row_bytes,
        }
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
        if let Storage::Rows(rows) = &self.storage {
            return match rows.rows(row).next() {
                Some(blocks) => quant::dequantize(self.format.dtype, blocks, out),
                None => bail!("row: there is no row {row} in the bytes of the matrix"),
            };
        }
        let layout = Layout::of(&self.format);
        let mut room = Vec::new();
        let group = self.group(row / ROW_GROUP, &mut room);
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

    /// The bytes of row group `index`, packed into `room` where the weights are in rows.
    pub(super) fn group<'a>(&'a self, index: usize, room: &'a mut Vec<Line>) -> &'a [u8] {
        let lines = Layout::of(&self.format).group(self.blocks()) / 64;
        let group = match &self.storage {
            Storage::Groups(all) => &all[index * lines..][..lines],
            Storage::Rows(rows) => {
                let first = index * ROW_GROUP;
                let count = ROW_GROUP.min(self.rows - first);
                if count < ROW_GROUP {
                    // What the rows that are missing leave of another group.
                    room.clear();
                }
                room.resize(lines, Line([0; 64]));
                repack::rows(
                    &self.format,
                    rows.rows(first).take(count),
                    0,
                    bytes_mut(room),
                );
                room
            }
        };
        // SAFETY: a line is 64 plain bytes without padding.
        unsafe { std::slice::from_raw_parts(group.as_ptr().cast(), 64 * lines) }
    }
}

/// The bytes of lines.
fn bytes_mut(lines: &mut [Line]) -> &mut [u8] {
    // SAFETY: a line is 64 plain bytes without padding.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), 64 * lines.len()) }
}

/// Puts a [`PackedMatrix`] together from the rows of several tensors, such as q, k and v, without
/// holding a joined copy.
pub struct PackedBuilder {
    format: BlockFormat,
    rows: usize,
    cols: usize,
    lines: Vec<Line>,
    filled: usize,
}

impl std::fmt::Debug for PackedBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (dtype, filled) = (self.format.dtype, self.filled);
        write!(
            f,
            "PackedBuilder({dtype:?}, {filled} of {} x {})",
            self.rows, self.cols
        )
    }
}

impl PackedBuilder {
    /// Appends `rows` rows from `blocks`, the bytes of a tensor of the matrix's dtype and width.
    ///
    /// # Errors
    /// If `blocks` has not exactly the bytes of those rows, or the matrix has fewer rows left.
    pub fn push(&mut self, rows: usize, blocks: &[u8]) -> Result<()> {
        let row_bytes = self.format.check_matrix(rows, self.cols, blocks)?;
        if rows > self.rows - self.filled {
            bail!(
                "rows: {rows} more rows given, but {} of {} are there already",
                self.filled,
                self.rows
            );
        }
        if rows == 0 {
            return Ok(());
        }
        let range = self.filled..self.filled + rows;
        self.filled = range.end;
        let source = Source {
            format: self.format,
            blocks,
            row_bytes,
            first: range.start,
        };
        let lines = Layout::of(&self.format).group(self.cols / 32) / 64;
        let (first, last) = (range.start / ROW_GROUP, range.end.div_ceil(ROW_GROUP));
        let groups = Groups(self.lines[first * lines..last * lines].as_mut_ptr());
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
        if self.filled != self.rows {
            bail!("rows: {} of {} rows were given", self.filled, self.rows);
        }
        Ok(PackedMatrix {
            format: self.format,
            rows: self.rows,
            cols: self.cols,
            storage: Storage::Groups(self.lines),
        })
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
    /// Writes the matrix's `rows`, all of one group, into that group.
    fn pack(&self, rows: Range<usize>, group: &mut [u8]) {
        let lane = rows.start % ROW_GROUP;
        let bytes = &self.blocks[(rows.start - self.first) * self.row_bytes..];
        let rows = bytes.chunks_exact(self.row_bytes).take(rows.len());
        repack::rows(&self.format, rows, lane, group);
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
        // SAFETY: the caller's.
        bytes_mut(unsafe { std::slice::from_raw_parts_mut(self.0.add(index * lines), lines) })
    }
}
