//! FP8 (e4m3) weights.
//!
//! | tensor | | |
//! |---|---|---|
//! | `weight` | e4m3 `[N, K]` | |
//! | `weight_scale_inv` or `weight_scale` | of one value, `[N]`, `[N, 1]` or, for blocks of `[B, C]` values, `[N / B, K / C]` rounded up | multiplies |
//!
//! With scales of rows and of blocks of multiples of 128 x 128 values they are the crate's own; with others, numbers.
//!
//! Formats: FP8 Formats for Deep Learning (Micikevicius et al. 2022); blocks as in DeepSeek-V3 (2024).

use super::compressed::SCALE;
use super::tensors::Tensors;
use super::unpacked::{Target, gathered, put_apart};
use crate::models::weights::arranged;
use crate::nn::LinearWeight;
use crate::nn::pack::on_device;
use crate::quant::{Codes, FP8_BLOCK, Scheme, e4m3};
use candle_core::{Device, Result, Tensor, bail};

/// What the scale is called where it belongs to blocks.
const BLOCK_SCALE: &str = "weight_scale_inv";

/// Rows and columns of values that share a scale.
pub type Block = Option<[usize; 2]>;

/// Whether a layer has such a matrix.
pub fn is_there(tensors: &Tensors<'_>) -> bool {
    tensors.has("weight") && (tensors.has(SCALE) || tensors.has(BLOCK_SCALE))
}

/// Whether weights with scales of such blocks stay as they are.
pub fn is_kept(block: Block) -> bool {
    block.is_none_or(|block| block.iter().all(|side| side.is_multiple_of(FP8_BLOCK)))
}

/// A matrix as it is stored.
pub struct Floats {
    rows: usize,
    cols: usize,
    /// `[rows, cols]`, e4m3.
    codes: Vec<i8>,
    /// `[rows / height, cols / width]`, rounded up.
    scales: Vec<f32>,
    height: usize,
    width: usize,
}

/// The matrix `[rows, cols]` of a layer.
pub fn read(tensors: &Tensors<'_>, (rows, cols): (usize, usize), block: Block) -> Result<Floats> {
    let codes = tensors.floats8("weight", &[rows, cols])?;
    let name = match tensors.has(BLOCK_SCALE) {
        true => BLOCK_SCALE,
        false => SCALE,
    };
    let (scales, dims) = tensors.numbers(name)?;
    let [height, width] = match (dims.as_slice(), block) {
        _ if scales.len() == 1 => [rows, cols],
        ([n] | [n, 1], _) if *n == rows => [1, cols],
        ([n, k], Some([height, width]))
            if [*n, *k] == [rows.div_ceil(height), cols.div_ceil(width)] =>
        {
            [height, width]
        }
        _ => bail!(
            "{name} has shape {dims:?}, expected one value, {rows} rows, or the blocks of \
             {rows} x {cols} values that the configuration names"
        ),
    };
    Ok(Floats {
        rows,
        cols,
        codes,
        scales,
        height,
        width,
    })
}

impl Floats {
    /// The weight on its device, with the rows of `heads` put apart as [`Source::matrix`] has it.
    ///
    /// [`Source::matrix`]: crate::models::weights::Source::matrix
    ///
    /// # Errors
    /// If the rows are not those of `heads`, or the device's memory does not suffice.
    pub fn into_weight(self, heads: Option<usize>, to: Target<'_>) -> Result<LinearWeight> {
        if to.fused
            && let Some(scheme) = self.scheme(heads, to.device)
        {
            let codes = self.into_codes(scheme, heads)?;
            return Ok(LinearWeight::Packed(on_device(&codes, to.device)?));
        }
        let values = arranged(self.into_values()?.to_dtype(to.dtype)?, heads)?;
        Ok(LinearWeight::Dense(values.to_device(to.device)?))
    }

    /// The numbers, in f32 on the host.
    pub fn into_values(self) -> Result<Tensor> {
        let across = self.cols.div_ceil(self.width);
        let mut values: Vec<f32> = Vec::with_capacity(self.codes.len());
        for (row, codes) in self.codes.chunks_exact(self.cols).enumerate() {
            let scales = &self.scales[row / self.height * across..];
            for (codes, scale) in codes.chunks(self.width).zip(scales) {
                values.extend(codes.iter().map(|q| e4m3::to_f32(*q as u8) * scale));
            }
        }
        Tensor::from_vec(values, (self.rows, self.cols), &Device::Cpu)
    }

    /// The scheme that holds the matrix as it is, if one does.
    fn scheme(&self, heads: Option<usize>, device: &Device) -> Option<Scheme> {
        let known = |scale: &f32| scale.is_finite() && scale.is_sign_positive();
        if !self.scales.iter().all(known) || (device.is_cuda() && !self.cols.is_multiple_of(4)) {
            return None;
        }
        let blocks = [self.height, self.width];
        match heads {
            _ if self.width >= self.cols => Some(Scheme::Fp8),
            // Rows of several blocks would come together.
            None if is_kept(Some(blocks)) => Some(Scheme::Fp8Block128),
            _ => None,
        }
    }

    fn into_codes(self, scheme: Scheme, heads: Option<usize>) -> Result<Codes> {
        let (rows, cols) = (self.rows, self.cols);
        let across = cols.div_ceil(self.width);
        let scale =
            |row: usize, col: usize| self.scales[row / self.height * across + col / self.width];
        let scales = match scheme {
            Scheme::Fp8Block128 => (0..rows)
                .step_by(FP8_BLOCK)
                .flat_map(|row| (0..cols).step_by(FP8_BLOCK).map(move |col| (row, col)))
                .map(|(row, col)| scale(row, col))
                .collect(),
            _ => (0..rows).map(|row| scale(row, 0)).collect(),
        };
        let mut codes = Codes {
            scheme,
            rows,
            cols,
            codes: self.codes,
            scales,
            zeros: Vec::new(),
            group_scales: Vec::new(),
        };
        if let Some(heads) = heads {
            let source = put_apart(rows, heads)?;
            codes.codes = gathered(&codes.codes, cols, rows, &source);
            codes.scales = gathered(&codes.scales, 1, rows, &source);
        }
        Ok(codes)
    }
}
