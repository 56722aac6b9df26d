//! The packed matrix and how it is built.

use super::layout::{Layout, ROW_GROUP};
use super::memory::Memory;
use super::repack;
use super::store::{InPlace, Line, SharedBytes, Store, bytes_mut};
use crate::pool;
use crate::quant::{self, BlockFormat, Format};
use candle_core::quantized::GgmlDType;
use candle_core::{Result, bail};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

/// A quantized matrix, rows x cols, in its format's precision and about its size, in groups of 16
/// rows.
///
/// ```
/// use candle_core::quantized::{GgmlDType, QTensor};
/// use candle_core::{Device, Tensor};
/// use candle_fused::cpu::packed::PackedMatrix;
/// use std::sync::Arc;
/// let weight = Tensor::randn(0f32, 1., (16, 64), &Device::Cpu)?;
/// let blocks = QTensor::quantize(&weight, GgmlDType::Q4_0)?.data()?.to_vec();
/// let matrix = PackedMatrix::pack(GgmlDType::Q4_0, 16, 64, &blocks)?;
/// assert_eq!((matrix.rows(), matrix.cols(), matrix.format().to_string()), (16, 64, "q4_0".into()));
/// // About the size of the blocks.
/// assert!(matrix.size_in_bytes() <= 2 * blocks.len());
/// let row = |matrix: &PackedMatrix| -> candle_core::Result<[f32; 64]> {
///     let mut row = [0.; 64];
///     matrix.dequantize_row(3, &mut row)?;
///     Ok(row)
/// };
/// // The same from two tensors, and without a copy.
/// let mut builder = PackedMatrix::builder(GgmlDType::Q4_0, 16, 64)?;
/// let (first, second) = blocks.split_at(blocks.len() / 2);
/// builder.push(8, first)?;
/// builder.push(8, second)?;
/// assert_eq!(row(&builder.finish()?)?, row(&matrix)?);
/// let in_place = PackedMatrix::in_place(GgmlDType::Q4_0, 16, 64, Arc::new(blocks), 0)?;
/// assert_eq!(row(&in_place)?, row(&matrix)?);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone)]
pub struct PackedMatrix {
    pub(super) format: Format,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) store: Store,
}

impl std::fmt::Debug for PackedMatrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "PackedMatrix({}, {} x {})",
            self.format, self.rows, self.cols
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
        // Before there is room for as many: the numbers may be a file's.
        BlockFormat::of(dtype)?.check_matrix(rows, cols, blocks)?;
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
        let blocks = InPlace::new(&format, (rows, cols), bytes, start)?;
        Ok(Self {
            format: format.into(),
            rows,
            cols,
            store: Store::InPlace(blocks),
        })
    }

    /// Starts a matrix of `rows` rows that is put together from several tensors.
    ///
    /// # Errors
    /// As [`Self::pack`], or if the matrix is too large for memory.
    pub fn builder(dtype: GgmlDType, rows: usize, cols: usize) -> Result<PackedBuilder> {
        let format = BlockFormat::of(dtype)?;
        format.row_bytes(cols)?;
        PackedBuilder::new(format.into(), rows, cols)
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
    pub fn format(&self) -> Format {
        self.format
    }

    /// Bytes of the weights: what a product with one token reads.
    pub fn size_in_bytes(&self) -> usize {
        self.store.bytes().len()
    }

    /// The values of row `row`, bit for bit what [`crate::quant::dequantize`] gives for its blocks, or
    /// [`Codes::dequantize`](crate::quant::Codes::dequantize) for its codes.
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
        if let (Store::InPlace(blocks), Format::Block(format)) = (&self.store, &self.format) {
            return quant::dequantize(format.dtype, blocks.row(row), out);
        }
        let layout = Layout::of(&self.format);
        let mut room = Vec::new();
        let group = self.group(row / ROW_GROUP, &mut room);
        for (block, out) in out.chunks_mut(32).enumerate() {
            let lane = row % ROW_GROUP;
            let values = match &self.format {
                Format::Block(format) => layout.read(group, block, lane).values(format),
                Format::Scheme(scheme) => layout.read_scheme(group, block, lane).values(*scheme),
            };
            out.copy_from_slice(&values[..out.len()]);
        }
        Ok(())
    }

    /// 32-wide blocks along k, the last perhaps padded with zeros.
    pub(super) fn blocks(&self) -> usize {
        self.cols.div_ceil(32)
    }

    /// The row groups, to be asked for one by one.
    pub(super) fn groups(&self) -> RowGroups<'_> {
        RowGroups {
            rows: self.rows,
            blocks: self.blocks(),
            size: Layout::of(&self.format).group(self.blocks()),
            held: match (&self.store, &self.format) {
                (Store::InPlace(blocks), Format::Block(format)) => Held::Rows(blocks, format),
                _ => Held::Packed(self.store.bytes()),
            },
        }
    }

    /// The bytes of row group `index`, packed into `room` where the blocks lie in rows.
    pub(super) fn group<'a>(&'a self, index: usize, room: &'a mut Vec<Line>) -> &'a [u8] {
        self.groups().get(index, room)
    }
}

thread_local! {
    /// The row group in hand, or some of its blocks, of a matrix that is not packed.
    pub(super) static ROOM: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// The row groups of a matrix.
pub(super) struct RowGroups<'a> {
    rows: usize,
    /// 32-wide blocks of a row.
    blocks: usize,
    /// Bytes of a group.
    size: usize,
    held: Held<'a>,
}

/// How row groups are held.
enum Held<'a> {
    /// One behind the other.
    Packed(&'a [u8]),
    /// In rows of blocks.
    Rows(&'a InPlace, &'a BlockFormat),
}

impl<'a> RowGroups<'a> {
    /// Some blocks of group `index`, which begin and end with a chunk or the row, and where these are in the bytes: all
    /// of it, or these blocks packed into `room` where they lie in rows.
    #[cfg(target_arch = "x86_64")]
    pub fn part<'b>(
        &self,
        index: usize,
        blocks: &Range<usize>,
        room: &'b mut Vec<Line>,
    ) -> (&'b [u8], Range<usize>)
    where
        'a: 'b,
    {
        match self.held {
            Held::Packed(_) => (self.get(index, room), blocks.clone()),
            Held::Rows(rows, format) => {
                let of_row = of_row(format, blocks);
                let size = Layout::of_blocks(format).group(blocks.len());
                (
                    self.pack(index, rows, format, of_row, size, room),
                    0..blocks.len(),
                )
            }
        }
    }

    /// About the bytes that some blocks of group `index` have, or those of its first row where blocks lie in rows.
    #[cfg(target_arch = "x86_64")]
    pub fn bytes(&self, index: usize, blocks: &Range<usize>) -> &'a [u8] {
        match self.held {
            Held::Packed(groups) => {
                let block = self.size / self.blocks;
                let first = index * self.size;
                &groups[first + blocks.start * block..first + blocks.end * block]
            }
            Held::Rows(rows, format) => &rows.row(index * ROW_GROUP)[of_row(format, blocks)],
        }
    }

    /// The bytes of group `index`, packed into `room` where the blocks lie in rows.
    #[inline]
    pub fn get<'b>(&self, index: usize, room: &'b mut Vec<Line>) -> &'b [u8]
    where
        'a: 'b,
    {
        match self.held {
            Held::Packed(groups) => &groups[index * self.size..][..self.size],
            Held::Rows(rows, format) => {
                let of_row = of_row(format, &(0..self.blocks));
                self.pack(index, rows, format, of_row, self.size, room)
            }
        }
    }

    /// Packs the bytes `of_row` of each row of group `index`, `size` bytes when packed.
    fn pack<'b>(
        &self,
        index: usize,
        blocks: &InPlace,
        format: &BlockFormat,
        of_row: Range<usize>,
        size: usize,
        room: &'b mut Vec<Line>,
    ) -> &'b [u8] {
        let first = index * ROW_GROUP;
        let count = ROW_GROUP.min(self.rows - first);
        if count < ROW_GROUP {
            // The rows that are missing would leave what another group had there.
            room.clear();
        }
        room.resize(size / 64, Line::ZERO);
        let rows = (first..first + count).map(|row| &blocks.row(row)[of_row.clone()]);
        let group = bytes_mut(room);
        repack::rows(format, rows, 0, group);
        group
    }
}

/// The bytes that some 32-wide blocks have in a row of GGUF blocks.
fn of_row(format: &BlockFormat, blocks: &Range<usize>) -> Range<usize> {
    let each = format.values / 32;
    blocks.start / each * format.bytes..blocks.end.div_ceil(each) * format.bytes
}

/// Puts a [`PackedMatrix`] together from the rows of several tensors, such as q, k and v, without
/// holding a joined copy.
#[derive(Debug)]
pub struct PackedBuilder {
    format: Format,
    rows: usize,
    cols: usize,
    memory: Memory,
    filled: usize,
}

impl PackedBuilder {
    /// Room for a matrix whose width its format has been asked about.
    pub(super) fn new(format: Format, rows: usize, cols: usize) -> Result<Self> {
        let bytes = Layout::of(&format).matrix(rows, cols);
        let Some(Ok(memory)) = bytes.map(Memory::zeroed) else {
            bail!("rows: {rows} rows of {cols} values in {format} do not fit into memory");
        };
        Ok(Self {
            format,
            rows,
            cols,
            memory,
            filled: 0,
        })
    }

    /// What is to be packed.
    pub(super) fn format(&self) -> (Format, usize) {
        (self.format, self.cols)
    }

    /// Appends `rows` rows from `blocks`, the bytes of a tensor of the matrix's dtype and width.
    ///
    /// # Errors
    /// If `blocks` has not exactly the bytes of those rows, or the matrix has fewer rows left or holds
    /// no GGUF blocks.
    pub fn push(&mut self, rows: usize, blocks: &[u8]) -> Result<()> {
        let Format::Block(format) = self.format else {
            bail!("blocks: the matrix is {}, expected codes", self.format);
        };
        let row_bytes = format.check_matrix(rows, self.cols, blocks)?;
        self.push_with(rows, |_, group, row, lane| {
            let bytes = &blocks[row * row_bytes..][..row_bytes];
            repack::rows(&format, std::iter::once(bytes), lane, group);
        })
    }

    /// Appends `rows` rows: `write` is called with each row, counted from 0, its row group and its place
    /// in there.
    pub(super) fn push_with(
        &mut self,
        rows: usize,
        write: impl Fn(&Layout, &mut [u8], usize, usize) + Sync,
    ) -> Result<()> {
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
        let layout = Layout::of(&self.format);
        let bytes = layout.group(self.cols.div_ceil(32));
        let (first, last) = (range.start / ROW_GROUP, range.end.div_ceil(ROW_GROUP));
        let groups = Groups(self.memory.bytes_mut()[first * bytes..last * bytes].as_mut_ptr());
        pool::for_ranges(last - first, 1, |some| {
            for i in some {
                // SAFETY: group i lies within the slice, and the ranges are disjoint.
                let group = unsafe { groups.get(i, bytes) };
                let start = (first + i) * ROW_GROUP;
                let rows: Range<_> = range.start.max(start)..range.end.min(start + ROW_GROUP);
                for row in rows {
                    write(&layout, group, row - range.start, row % ROW_GROUP);
                }
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
            store: Store::Own(Arc::new(self.memory)),
        })
    }
}

/// Row groups that several tasks write, each its own.
struct Groups(*mut u8);

// SAFETY: it stands for a `&mut [u8]`, whose parts the callers of `get` keep apart.
unsafe impl Sync for Groups {}

impl Groups {
    /// Group `index`, of `bytes` bytes.
    ///
    /// # Safety
    /// The group exists, and nobody else has it while the result lives.
    #[expect(clippy::mut_from_ref, reason = "callers keep the groups apart")]
    unsafe fn get(&self, index: usize, bytes: usize) -> &mut [u8] {
        // SAFETY: the caller's.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(index * bytes), bytes) }
    }
}
