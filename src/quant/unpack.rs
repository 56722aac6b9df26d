//! From a block's bytes to its codes and scales, and from those to values.

use super::{BlockFormat, Scaling};
use candle_core::quantized::GgmlDType;
use candle_core::{Result, bail};
use half::f16;

/// 32 consecutive values of a row, taken out of their block. What a format does not have is zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SubBlock {
    /// Unsigned codes; for 8 bits the two's complement byte.
    pub codes: [u8; 32],
    /// The block's scale.
    pub d: f16,
    /// The block's offset or scale of the minima.
    pub m: f16,
    /// Factors of `d`: one for all 32 values, or one for each 16, which is an i8 for `SuperSymmetric`.
    pub scales: [u8; 2],
    /// Factors of `m`, likewise.
    pub mins: [u8; 2],
}

impl SubBlock {
    /// All codes and scales zero, which is the value zero in every format.
    pub const ZERO: Self = Self {
        codes: [0; 32],
        d: f16::ZERO,
        m: f16::ZERO,
        scales: [0; 2],
        mins: [0; 2],
    };

    /// Reads values `32 * index..32 * (index + 1)` of a block.
    pub fn read(format: &BlockFormat, block: &[u8], index: usize) -> Self {
        let mut sub = Self::scales(format, block, index);
        for (i, code) in sub.codes.iter_mut().enumerate() {
            *code = read_code(format, block, index, i);
        }
        sub
    }

    /// As [`SubBlock::read`], without the codes.
    #[inline(always)]
    pub fn scales(format: &BlockFormat, block: &[u8], index: usize) -> Self {
        let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]);
        let mut sub = Self::ZERO;
        match format.scaling {
            Scaling::Symmetric => sub.d = half(0),
            Scaling::Affine => (sub.d, sub.m) = (half(0), half(2)),
            Scaling::Super => {
                (sub.d, sub.m) = (half(0), half(2));
                (sub.scales[0], sub.mins[0]) = six_bit_pair(&block[4..16], index);
            }
            Scaling::Super16 => {
                (sub.d, sub.m) = (half(80), half(82));
                let pairs = [block[2 * index], block[2 * index + 1]];
                (sub.scales, sub.mins) = (pairs.map(|p| p & 15), pairs.map(|p| p >> 4));
            }
            Scaling::SuperSymmetric if format.bits == 3 => {
                sub.d = half(108);
                sub.scales = [0, 1].map(|h| six_bits(&block[96..108], 2 * index + h) as u8);
            }
            Scaling::SuperSymmetric => {
                sub.d = half(208);
                sub.scales = [block[192 + 2 * index], block[193 + 2 * index]];
            }
        }
        sub
    }

    /// The 32 values, rounded as ggml's and candle's dequantizers round them.
    pub fn values(&self, format: &BlockFormat) -> [f32; 32] {
        let (d, m) = (self.d.to_f32(), self.m.to_f32());
        let codes = self.codes;
        match format.scaling {
            Scaling::Symmetric if format.bits == 8 => codes.map(|q| f32::from(q as i8) * d),
            Scaling::Symmetric => {
                let zero = 1i16 << (format.bits - 1);
                codes.map(|q| f32::from(i16::from(q) - zero) * d)
            }
            Scaling::Affine => codes.map(|q| f32::from(q) * d + m),
            Scaling::Super => {
                let scale = d * f32::from(self.scales[0]);
                let min = m * f32::from(self.mins[0]);
                codes.map(|q| scale * f32::from(q) - min)
            }
            Scaling::Super16 => {
                let scales = self.scales.map(|s| d * f32::from(s));
                let mins = self.mins.map(|n| m * f32::from(n));
                std::array::from_fn(|i| scales[i / 16] * f32::from(codes[i]) - mins[i / 16])
            }
            Scaling::SuperSymmetric => {
                let scales = self.scales.map(|s| d * f32::from(s as i8));
                let zero = 1i16 << (format.bits - 1);
                std::array::from_fn(|i| scales[i / 16] * f32::from(i16::from(codes[i]) - zero))
            }
        }
    }
}

/// The 6-bit scale and minimum of sub-block `j`: the first four of each fill the low bits of bytes
/// 0..4 and 4..8; the others lie in bytes 8..12, with their high bits on top of the first eight.
fn six_bit_pair(packed: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        let low = packed[j + 4];
        let scale = low & 15 | packed[j - 4] >> 6 << 4;
        let min = low >> 4 | packed[j] >> 6 << 4;
        (scale, min)
    }
}

/// The factor of Q3_K's 16 values `j`, less its 32: the low 4 bits are nibbles of bytes 0..8, low ones first; the high
/// 2 bits are pairs of bytes 8..12, the lowest of each byte first.
#[inline(always)]
fn six_bits(packed: &[u8], j: usize) -> i8 {
    let low = packed[j % 8] >> (4 * (j / 8)) & 15;
    let high = packed[8 + j % 4] >> (2 * (j / 4)) & 3;
    (low | high << 4) as i8 - 32
}

/// Code `i` of the 32 at `index`.
fn read_code(format: &BlockFormat, block: &[u8], index: usize, i: usize) -> u8 {
    let nibble = |byte: u8, high: bool| if high { byte >> 4 } else { byte & 15 };
    match (format.scaling, format.bits) {
        (Scaling::Symmetric | Scaling::Affine, 8) => block[2 + i],
        (Scaling::Symmetric | Scaling::Affine, bits) => {
            let scales = if format.scaling == Scaling::Affine {
                4
            } else {
                2
            };
            let nibbles = &block[format.bytes - 16..];
            let high = match bits {
                5 => block[scales + i / 8] >> (i % 8) & 1,
                _ => 0,
            };
            nibble(nibbles[i % 16], i >= 16) | high << 4
        }
        (Scaling::Super, bits) => {
            let nibbles = &block[format.bytes - 128..];
            let high = match bits {
                5 => block[16 + i] >> index & 1,
                _ => 0,
            };
            nibble(nibbles[index / 2 * 32 + i], index % 2 == 1) | high << 4
        }
        (Scaling::Super16, _) => bit_pair(&block[16..80], index, i),
        (Scaling::SuperSymmetric, 3) => {
            bit_pair(&block[32..96], index, i) | (block[i] >> index & 1) << 2
        }
        (Scaling::SuperSymmetric, _) => {
            let (half, quarter) = (index / 4, index % 4);
            let low = nibble(block[64 * half + quarter % 2 * 32 + i], quarter >= 2);
            let high = block[128 + 32 * half + i] >> (2 * quarter) & 3;
            low | high << 4
        }
    }
}

/// Code `i` of the 32 at `index` of bit pairs: a byte has those of four times 32 values.
fn bit_pair(pairs: &[u8], index: usize, i: usize) -> u8 {
    pairs[index / 4 * 32 + i] >> (2 * (index % 4)) & 3
}

/// Values of consecutive blocks: `out[i]` is value `i` of `blocks`, bit for bit what candle's
/// `QTensor::dequantize` gives.
///
/// # Errors
/// If `dtype` is not supported (see [`BlockFormat::of`]), or `blocks` is not exactly the blocks of
/// `out.len()` values.
///
/// ```
/// use candle_core::quantized::{GgmlDType, QTensor};
/// use candle_core::{Device, Tensor};
/// let values = Tensor::arange(0f32, 32., &Device::Cpu)?;
/// let blocks = QTensor::quantize(&values, GgmlDType::Q8_0)?;
/// let mut out = [0.; 32];
/// candle_fused::quant::dequantize(GgmlDType::Q8_0, &blocks.data()?, &mut out)?;
/// assert!((out[9] - 9.).abs() < 0.13);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn dequantize(dtype: GgmlDType, blocks: &[u8], out: &mut [f32]) -> Result<()> {
    let format = BlockFormat::of(dtype)?;
    if !out.len().is_multiple_of(format.values)
        || blocks.len() != out.len() / format.values * format.bytes
    {
        bail!(
            "blocks: {} bytes given for {} values, but {dtype:?} stores {} values in {} bytes",
            blocks.len(),
            out.len(),
            format.values,
            format.bytes
        );
    }
    let pairs = blocks.chunks_exact(format.bytes);
    for (block, values) in pairs.zip(out.chunks_exact_mut(format.values)) {
        for (index, values) in values.chunks_exact_mut(32).enumerate() {
            values.copy_from_slice(&SubBlock::read(&format, block, index).values(&format));
        }
    }
    Ok(())
}
