//! The bytes of weights: memory of their own, a part of a file that is mapped, or the rows of a GGUF
//! tensor where they are.

use super::memory::Memory;
use crate::quant::BlockFormat;
use candle_core::{Result, bail};
use memmap2::Mmap;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// A cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Line([u8; 64]);

impl Line {
    pub const ZERO: Self = Self([0; 64]);
}

/// The bytes of lines.
pub(super) fn bytes_mut(lines: &mut [Line]) -> &mut [u8] {
    // SAFETY: a line is 64 plain bytes without padding.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), 64 * lines.len()) }
}

/// A file of packed matrices, which begin on cache lines.
pub(crate) enum FileBytes {
    Mapped(Mmap),
    Copied(Memory),
}

impl FileBytes {
    /// A copy that begins on a cache line.
    pub fn copy(bytes: &[u8]) -> Result<Self> {
        let mut memory = Memory::zeroed(bytes.len())?;
        memory.bytes_mut().copy_from_slice(bytes);
        Ok(Self::Copied(memory))
    }
}

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            FileBytes::Mapped(map) => map,
            FileBytes::Copied(memory) => memory.bytes(),
        }
    }
}

/// Where weights lie.
#[derive(Clone)]
pub(super) enum Store {
    /// Packed.
    Own(Arc<Memory>),
    /// Packed, in a file.
    Mapped(Arc<FileBytes>, Range<usize>),
    /// In rows of GGUF blocks, which are packed a group at a time whenever they are used.
    InPlace(InPlace),
}

impl Store {
    pub fn bytes(&self) -> &[u8] {
        match self {
            Store::Own(memory) => memory.bytes(),
            Store::Mapped(map, range) => &map[range.clone()],
            Store::InPlace(blocks) => blocks.bytes(),
        }
    }
}

/// Bytes that a matrix can stay in: a memory map, or anything else that keeps them.
pub type SharedBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// The rows of a GGUF tensor in memory that is shared.
#[derive(Clone)]
pub(super) struct InPlace {
    memory: SharedBytes,
    /// Where in there the rows lie.
    range: Range<usize>,
    row_bytes: usize,
}

impl InPlace {
    /// # Errors
    /// If `cols` does not fit the format, or the memory ends before the last row does.
    pub fn new(
        format: &BlockFormat,
        (rows, cols): (usize, usize),
        memory: SharedBytes,
        start: usize,
    ) -> Result<Self> {
        let row_bytes = format.row_bytes(cols)?;
        let len = (*memory).as_ref().len();
        let end = row_bytes
            .checked_mul(rows)
            .and_then(|size| size.checked_add(start));
        match end.filter(|end| *end <= len) {
            Some(end) => Ok(Self {
                memory,
                range: start..end,
                row_bytes,
            }),
            None => bail!(
                "bytes: {len} given, but {rows} rows of {row_bytes} bytes start at {start}; the \
                 file may be cut short"
            ),
        }
    }

    fn bytes(&self) -> &[u8] {
        &(*self.memory).as_ref()[self.range.clone()]
    }

    /// The blocks of row `row`, which exists.
    pub fn row(&self, row: usize) -> &[u8] {
        &self.bytes()[row * self.row_bytes..][..self.row_bytes]
    }
}

#[cfg(test)]
mod tests {
    use crate::cpu::packed::tests::{normals, quantized};
    use crate::cpu::packed::{PackedMatrix, Q8Activations};
    use crate::cpu::simd::Level;
    use crate::quant::BlockFormat;
    use candle_core::quantized::GgmlDType;
    use rand::{SeedableRng, rngs::StdRng};
    use std::sync::Arc;

    #[test]
    fn a_matrix_in_place_computes_what_the_packed_one_does() {
        let mut rng = StdRng::seed_from_u64(11);
        for dtype in BlockFormat::DTYPES {
            for (rows, cols, m) in [(16, 256, 1), (50, 768, 3), (7, 2048, 20)] {
                let blocks = quantized(&mut rng, dtype, rows, cols);
                let packed = PackedMatrix::pack(dtype, rows, cols, &blocks).unwrap();
                // In the middle of a file, at an odd place.
                let file = [&[1; 5], blocks.as_slice(), &[2; 9]].concat();
                let place = PackedMatrix::in_place(dtype, rows, cols, Arc::new(file), 5).unwrap();
                assert_eq!(place.size_in_bytes(), blocks.len());
                let x = normals(&mut rng, m * cols);
                for level in Level::available() {
                    let x = Q8Activations::quantize(level, &x, m, cols).unwrap();
                    let (mut a, mut b) = (vec![0.; m * rows], vec![1.; m * rows]);
                    packed.forward(level, &x, &mut a).unwrap();
                    place.forward(level, &x, &mut b).unwrap();
                    assert_eq!(a, b, "{dtype:?} {level:?}");
                }
                let (mut a, mut b) = (vec![0.; cols], vec![1.; cols]);
                for row in 0..rows {
                    packed.dequantize_row(row, &mut a).unwrap();
                    place.dequantize_row(row, &mut b).unwrap();
                    assert_eq!(a, b, "{dtype:?} row {row}");
                }
                assert!(place.dequantize_row(rows, &mut b).is_err());
            }
        }
    }

    #[test]
    fn bytes_that_end_too_early_are_refused() {
        let size = 3 * BlockFormat::of(GgmlDType::Q4_0).unwrap().bytes;
        let open = |rows, start| {
            let bytes = Arc::new(vec![0u8; size]);
            PackedMatrix::in_place(GgmlDType::Q4_0, rows, 32, bytes, start)
        };
        assert!(open(3, 0).is_ok() && open(2, size / 3).is_ok());
        for (rows, start) in [(3, 1), (4, 0), (1, usize::MAX), (usize::MAX, 0)] {
            let error = open(rows, start).unwrap_err().to_string();
            assert!(error.contains("cut short"), "{error}");
        }
    }
}
