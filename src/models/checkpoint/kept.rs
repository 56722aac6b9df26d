//! A quantized matrix whose codes are those of one of the crate's own schemes.

use super::unpacked::{Target, gathered, put_apart};
use crate::nn::LinearWeight;
use crate::nn::pack::on_device;
use crate::quant::Codes;
use candle_core::{Device, Result, Tensor};

/// A matrix as it is stored. Its scales are some for each row.
pub struct Kept(pub Codes);

impl Kept {
    /// The weight on its device, with the rows of `heads` put apart as [`Source::matrix`] has it.
    ///
    /// [`Source::matrix`]: crate::models::weights::Source::matrix
    ///
    /// # Errors
    /// If the rows are not those of `heads`, or the device's memory does not suffice.
    pub fn into_weight(mut self, heads: Option<usize>, to: Target<'_>) -> Result<LinearWeight> {
        if let Some(heads) = heads {
            let codes = &mut self.0;
            let (rows, source) = (codes.rows, put_apart(codes.rows, heads)?);
            let per_row = |count: usize| count / rows.max(1);
            let [scales, group_scales] =
                [codes.scales.len(), codes.group_scales.len()].map(per_row);
            codes.codes = gathered(&codes.codes, codes.cols, rows, &source);
            codes.scales = gathered(&codes.scales, scales, rows, &source);
            codes.group_scales = gathered(&codes.group_scales, group_scales, rows, &source);
        }
        if to.fused {
            return Ok(LinearWeight::Packed(on_device(&self.0, to.device)?));
        }
        let values = self.into_values()?.to_dtype(to.dtype)?;
        Ok(LinearWeight::Dense(values.to_device(to.device)?))
    }

    /// The numbers, in f32 on the host.
    pub fn into_values(self) -> Result<Tensor> {
        Tensor::from_vec(
            self.0.dequantize(),
            (self.0.rows, self.0.cols),
            &Device::Cpu,
        )
    }
}
