//! The block formats of GGUF files.

use candle_core::quantized::GgmlDType;
use candle_core::{Result, bail};

/// How codes become values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scaling {
    /// d (q - zero), with a zero point that belongs to the format.
    Symmetric,
    /// d q + m.
    Affine,
    /// (d s) q - m n: a scale and a minimum for 256 values, and factors of both for 32.
    Super,
    /// (d s) q - m n: the same with factors of both for 16.
    Super16,
    /// (d s) (q - zero): a scale for 256 values and a factor for 16.
    SuperSymmetric,
}

/// A quantized format of GGUF.
///
/// The formats are those of ggml (`ggml-common.h`, `ggml-quants.c`). All numbers are little endian,
/// `q` is an unsigned code unless said otherwise:
///
/// | dtype | block | bytes, in order | value |
/// |---|---|---|---|
/// | Q4_0 | 32 | d f16, 16 nibble pairs | d (q - 8) |
/// | Q4_1 | 32 | d f16, m f16, 16 nibble pairs | d q + m |
/// | Q5_0 | 32 | d f16, 32 high bits, 16 nibble pairs | d (q - 16) |
/// | Q5_1 | 32 | d f16, m f16, 32 high bits, 16 nibble pairs | d q + m |
/// | Q8_0 | 32 | d f16, 32 i8 | d q, q signed |
/// | Q2_K | 256 | 16 nibble pairs (s, n), 64 bytes of bit pairs, d f16, m f16 | (d s) q - m n |
/// | Q3_K | 256 | 32 bytes of high bits, 64 bytes of bit pairs, 12 of 6-bit s, d f16 | (d (s - 32)) (q - 4) |
/// | Q4_K | 256 | d f16, m f16, 12 of 6-bit pairs (s, n), 128 nibble pairs | (d s) q - m n |
/// | Q5_K | 256 | as Q4_K with 32 bytes of high bits before the nibbles | (d s) q - m n |
/// | Q6_K | 256 | 128 nibble pairs, 64 bytes of bit pairs, 16 i8 s, d f16 | (d s) (q - 32) |
///
/// In the 32-wide formats byte `i` of the nibble pairs holds value `i` low and value `i + 16` high.
/// In Q4_K and Q5_K s and n belong to 32 values, in the other K formats to 16.
///
/// ```
/// use candle_core::quantized::GgmlDType;
/// use candle_fused::quant::BlockFormat;
/// let format = BlockFormat::of(GgmlDType::Q8_0)?;
/// // 32 bytes of codes and a scale in f16.
/// assert_eq!((format.values, format.bytes), (32, 34));
/// assert_eq!(format.row_bytes(64)?, 68);
/// assert!(format.row_bytes(65).is_err());
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockFormat {
    /// candle's name of the format.
    pub dtype: GgmlDType,
    /// Values in a block.
    pub values: usize,
    /// Bytes of a block.
    pub bytes: usize,
    /// Bits of a code.
    pub bits: u32,
    /// How codes become values.
    pub scaling: Scaling,
}

impl BlockFormat {
    /// All of them, by candle's names.
    pub const DTYPES: [GgmlDType; 10] = [
        GgmlDType::Q4_0,
        GgmlDType::Q4_1,
        GgmlDType::Q5_0,
        GgmlDType::Q5_1,
        GgmlDType::Q8_0,
        GgmlDType::Q2K,
        GgmlDType::Q3K,
        GgmlDType::Q4K,
        GgmlDType::Q5K,
        GgmlDType::Q6K,
    ];

    /// The description of `dtype`.
    ///
    /// # Errors
    /// If `dtype` is not one of [`Self::DTYPES`].
    pub fn of(dtype: GgmlDType) -> Result<Self> {
        use Scaling::{Affine, Super, Super16, SuperSymmetric, Symmetric};
        let (values, bytes, bits, scaling) = match dtype {
            GgmlDType::Q4_0 => (32, 18, 4, Symmetric),
            GgmlDType::Q4_1 => (32, 20, 4, Affine),
            GgmlDType::Q5_0 => (32, 22, 5, Symmetric),
            GgmlDType::Q5_1 => (32, 24, 5, Affine),
            GgmlDType::Q8_0 => (32, 34, 8, Symmetric),
            GgmlDType::Q2K => (256, 84, 2, Super16),
            GgmlDType::Q3K => (256, 110, 3, SuperSymmetric),
            GgmlDType::Q4K => (256, 144, 4, Super),
            GgmlDType::Q5K => (256, 176, 5, Super),
            GgmlDType::Q6K => (256, 210, 6, SuperSymmetric),
            other => bail!(
                "dtype: {other:?} is not supported, expected one of \
                 Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K"
            ),
        };
        Ok(Self {
            dtype,
            values,
            bytes,
            bits,
            scaling,
        })
    }

    /// Bytes of a row of `cols` values.
    ///
    /// # Errors
    /// If `cols` is zero or not a multiple of the block's values.
    pub fn row_bytes(&self, cols: usize) -> Result<usize> {
        if cols == 0 || !cols.is_multiple_of(self.values) {
            bail!(
                "cols: {cols} is not a positive multiple of {}, the block size of {:?}",
                self.values,
                self.dtype
            );
        }
        match (cols / self.values).checked_mul(self.bytes) {
            Some(bytes) => Ok(bytes),
            None => bail!("cols: {cols} is too large"),
        }
    }

    /// Bytes of `rows` rows of `cols` values, checked against `blocks`; gives the bytes of a row.
    pub(crate) fn check_matrix(&self, rows: usize, cols: usize, blocks: &[u8]) -> Result<usize> {
        let row_bytes = self.row_bytes(cols)?;
        if row_bytes.checked_mul(rows) != Some(blocks.len()) {
            bail!(
                "blocks: {} bytes given, but {rows} rows of {cols} values in {:?} take {row_bytes} \
                 bytes each",
                blocks.len(),
                self.dtype
            );
        }
        Ok(row_bytes)
    }
}

/// Whether `dtype` is one of the formats here.
///
/// ```
/// use candle_core::quantized::GgmlDType;
/// use candle_fused::quant::supports;
/// assert!(supports(GgmlDType::Q4K) && !supports(GgmlDType::Q8K));
/// ```
pub fn supports(dtype: GgmlDType) -> bool {
    BlockFormat::of(dtype).is_ok()
}
