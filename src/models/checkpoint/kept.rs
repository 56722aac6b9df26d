//! A quantized matrix whose codes are those of one of the crate's own schemes.

use super::tensors::unpack;
use super::unpacked::{Target, gathered, put_apart};
use crate::nn::LinearWeight;
use crate::nn::pack::on_device;
#[cfg(feature = "cuda")]
use crate::nn::pack::words_on_device;
#[cfg(feature = "cuda")]
use crate::pool::all;
use crate::pool::map;
use crate::quant::Codes;
use crate::quant::words::Words;
use candle_core::{Device, Result, Tensor};

/// A matrix as it is stored. Its scales are some for each row.
pub struct Kept {
    /// Without the codes themselves.
    pub shell: Codes,
    /// Where they are.
    pub words: Words,
}

impl Kept {
    /// The weight on its device, with the rows of `heads` put apart as [`Source::matrix`] has it.
    ///
    /// [`Source::matrix`]: crate::models::weights::Source::matrix
    ///
    /// # Errors
    /// If the rows are not those of `heads`, or the device's memory does not suffice.
    pub fn into_weight(self, heads: Option<usize>, to: Target<'_>) -> Result<LinearWeight> {
        #[cfg(feature = "cuda")]
        if to.unpacks_words(heads) && all(&self.shell.group_scales, |scale| *scale != 0) {
            let weight = words_on_device(&self.shell, (&self.words, None), to.device)?;
            return Ok(LinearWeight::Packed(weight));
        }
        let mut codes = self.into_codes()?;
        if let Some(heads) = heads {
            let (rows, source) = (codes.rows, put_apart(codes.rows, heads)?);
            let per_row = |count: usize| count / rows.max(1);
            let [scales, group_scales] =
                [codes.scales.len(), codes.group_scales.len()].map(per_row);
            codes.codes = gathered(&codes.codes, codes.cols, rows, &source);
            codes.scales = gathered(&codes.scales, scales, rows, &source);
            codes.group_scales = gathered(&codes.group_scales, group_scales, rows, &source);
        }
        if to.fused {
            return Ok(LinearWeight::Packed(on_device(&codes, to.device)?));
        }
        let values = values(&codes)?.to_dtype(to.dtype)?;
        Ok(LinearWeight::Dense(values.to_device(to.device)?))
    }

    /// The numbers, in f32 on the host.
    pub fn into_values(self) -> Result<Tensor> {
        values(&self.into_codes()?)
    }

    /// With the codes, a byte each.
    ///
    /// # Errors
    /// If the words cannot be read.
    pub fn into_codes(self) -> Result<Codes> {
        let (rows, cols) = (self.shell.rows, self.shell.cols);
        let codes = unpack(&self.words.on_host()?, (rows, cols), self.words.layout);
        Ok(Codes {
            codes: map(&codes, |code| *code as i8),
            ..self.shell
        })
    }
}

fn values(codes: &Codes) -> Result<Tensor> {
    Tensor::from_vec(codes.dequantize(), (codes.rows, codes.cols), &Device::Cpu)
}
