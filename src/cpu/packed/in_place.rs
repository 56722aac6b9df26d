//! Weights that stay where they are, such as in a memory-mapped file.

use crate::quant::BlockFormat;
use candle_core::{Result, bail};
use std::sync::Arc;

/// Bytes that a matrix can stay in: a memory map, or anything else that keeps them.
pub type SharedBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// The rows of a GGUF tensor in memory that is shared.
#[derive(Clone)]
pub(super) struct InPlace {
    bytes: SharedBytes,
    /// Where the first row starts.
    start: usize,
    pub row_bytes: usize,
}

impl InPlace {
    /// # Errors
    /// If `cols` does not fit the format, or the bytes do not reach to the end of the last row.
    pub fn new(
        format: &BlockFormat,
        (rows, cols): (usize, usize),
        bytes: SharedBytes,
        start: usize,
    ) -> Result<Self> {
        let row_bytes = format.row_bytes(cols)?;
        let end = row_bytes
            .checked_mul(rows)
            .and_then(|size| size.checked_add(start));
        let len = (*bytes).as_ref().len();
        if end.is_none_or(|end| end > len) {
            bail!(
                "bytes: {len} given, but {rows} rows of {row_bytes} bytes start at {start}; the \
                 file may be cut short"
            );
        }
        Ok(Self {
            bytes,
            start,
            row_bytes,
        })
    }

    /// The blocks from row `first` on, row by row.
    pub fn rows(&self, first: usize) -> std::slice::ChunksExact<'_, u8> {
        let start = self.start + first * self.row_bytes;
        (*self.bytes).as_ref()[start..].chunks_exact(self.row_bytes)
    }
}

#[cfg(test)]
mod tests {
    use crate::cpu::packed::tests::{DTYPES, normals, quantized};
    use crate::cpu::packed::{PackedMatrix, Q8Activations};
    use crate::cpu::simd::Level;
    use crate::quant::BlockFormat;
    use candle_core::quantized::GgmlDType;
    use rand::{SeedableRng, rngs::StdRng};
    use std::sync::Arc;

    #[test]
    fn a_matrix_in_place_computes_what_the_packed_one_does() {
        let mut rng = StdRng::seed_from_u64(11);
        for dtype in DTYPES {
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
