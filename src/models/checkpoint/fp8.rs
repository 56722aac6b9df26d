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
use super::tensors::{Tensors, bits};
use super::unpacked::{Target, gathered, put_apart};
#[cfg(feature = "cuda")]
use crate::cuda::holds_nan;
use crate::models::weights::arranged;
use crate::nn::LinearWeight;
use crate::nn::pack::on_device;
#[cfg(feature = "cuda")]
use crate::nn::pack::words_on_device;
#[cfg(feature = "cuda")]
use crate::quant::words::{WordLayout, Words};
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
    /// Of all rows, e4m3, on the host or on the GPU that takes them.
    codes: Tensor,
    /// `[rows / height, cols / width]`, rounded up.
    scales: Vec<f32>,
    height: usize,
    width: usize,
}

/// The matrix `[rows, cols]` of a layer.
pub fn read(tensors: &Tensors<'_>, (rows, cols): (usize, usize), block: Block) -> Result<Floats> {
    let codes = tensors.codes_in_floats8("weight", &[rows, cols])?;
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
            #[cfg(feature = "cuda")]
            if to.unpacks_words(heads)
                && let Some(weight) = self.on_gpu(scheme, to)?
            {
                return Ok(weight);
            }
            let codes = self.into_codes(scheme, heads)?;
            return Ok(LinearWeight::Packed(on_device(&codes, to.device)?));
        }
        let values = arranged(self.into_values()?.to_dtype(to.dtype)?, heads)?;
        Ok(LinearWeight::Dense(values.to_device(to.device)?))
    }

    /// The weight, if its codes are on a GPU, and no NaN is among them: these are marked by the host.
    #[cfg(feature = "cuda")]
    fn on_gpu(&self, scheme: Scheme, to: Target<'_>) -> Result<Option<LinearWeight>> {
        let Some(layout) = WordLayout::of_signed_rows(self.cols) else {
            return Ok(None);
        };
        if !self.codes.device().is_cuda() || holds_nan(&self.codes)? {
            return Ok(None);
        }
        let words = Words {
            words: self.codes.clone(),
            layout,
        };
        let weight = words_on_device(&self.shell(scheme), (&words, None), to.device)?;
        Ok(Some(LinearWeight::Packed(weight)))
    }

    /// The numbers, in f32 on the host.
    pub fn into_values(self) -> Result<Tensor> {
        let across = self.cols.div_ceil(self.width);
        let mut values = bits(&self.codes, e4m3::to_f32)?;
        for (row, values) in values.chunks_exact_mut(self.cols).enumerate() {
            let scales = &self.scales[row / self.height * across..];
            for (values, scale) in values.chunks_mut(self.width).zip(scales) {
                values.iter_mut().for_each(|value| *value *= scale);
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

    /// The scheme's scales, without codes.
    fn shell(&self, scheme: Scheme) -> Codes {
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
        Codes {
            scheme,
            rows,
            cols,
            codes: Vec::new(),
            scales,
            zeros: Vec::new(),
            group_scales: Vec::new(),
        }
    }

    fn into_codes(self, scheme: Scheme, heads: Option<usize>) -> Result<Codes> {
        let (rows, cols) = (self.rows, self.cols);
        let mut codes = Codes {
            codes: bits(&self.codes, |bits| bits as i8)?,
            ..self.shell(scheme)
        };
        if let Some(heads) = heads {
            let source = put_apart(rows, heads)?;
            codes.codes = gathered(&codes.codes, cols, rows, &source);
            codes.scales = gathered(&codes.scales, 1, rows, &source);
        }
        Ok(codes)
    }
}
