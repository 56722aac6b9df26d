//! compressed-tensors' `nvfp4-pack-quantized`.
//!
//! | tensor | | |
//! |---|---|---|
//! | `weight_packed` | u8 `[N, K / 2]` | e2m1, the value of the lower column in the lower half of a byte |
//! | `weight_scale` | e4m3 `[N, K / 16]` | multiplies each 16 values |
//! | `weight_global_scale` | f32, of one value | divides all of them |
//!
//! Format: NVFP4 (NVIDIA, 2025). Activations are not quantized here, whatever the configuration says of them.

use super::compressed::{GROUPS, PACKED, SCALE, ZERO_POINT};
use super::tensors::Tensors;
use super::unpacked::{Target, gathered, put_apart};
use crate::nn::LinearWeight;
use crate::nn::pack::on_device;
use crate::quant::{Codes, NVFP4_GROUP, Scheme};
use candle_core::{Device, Result, Tensor, bail};

const GLOBAL: &str = "weight_global_scale";

/// Whether a layer has such a matrix, by its tensors alone.
pub fn is_there(tensors: &Tensors<'_>) -> bool {
    tensors.has(PACKED) && tensors.has(GLOBAL)
}

/// A matrix as it is stored.
pub struct Floats4(Codes);

/// The matrix `[rows, cols]` of a layer.
pub fn read(tensors: &Tensors<'_>, (rows, cols): (usize, usize)) -> Result<Floats4> {
    for part in [ZERO_POINT, GROUPS] {
        if tensors.has(part) {
            bail!("{part} is there, expected none beside NVFP4");
        }
    }
    if !tensors.has(GLOBAL) {
        bail!("{GLOBAL} is missing, expected it beside {PACKED} of NVFP4");
    }
    if !cols.is_multiple_of(NVFP4_GROUP) {
        bail!("{PACKED}: {cols} columns, expected a multiple of {NVFP4_GROUP}");
    }
    let bytes = tensors.bytes(PACKED, &[rows, cols / 2])?;
    let group_scales = tensors.floats8(SCALE, &[rows, cols / NVFP4_GROUP])?;
    let global = match tensors.numbers(GLOBAL)?.0.as_slice() {
        [global] if *global > 0. && global.is_normal() && (1. / global).is_normal() => *global,
        other => bail!(
            "{GLOBAL} is {other:?}, expected one positive normal number with such a reciprocal"
        ),
    };
    let both = |byte: u8| [(byte & 15) as i8, (byte >> 4) as i8];
    let codes = Codes {
        scheme: Scheme::Nvfp4,
        rows,
        cols,
        codes: bytes.into_iter().flat_map(both).collect(),
        scales: vec![1. / global; rows],
        zeros: Vec::new(),
        group_scales: group_scales.into_iter().map(|b| b as u8).collect(),
    };
    codes.check()?;
    Ok(Floats4(codes))
}

impl Floats4 {
    /// The weight on its device, with the rows of `heads` put apart as [`Source::matrix`] has it.
    ///
    /// [`Source::matrix`]: crate::models::weights::Source::matrix
    ///
    /// # Errors
    /// If the rows are not those of `heads`, or the device's memory does not suffice.
    pub fn into_weight(mut self, heads: Option<usize>, to: Target<'_>) -> Result<LinearWeight> {
        let Codes { rows, cols, .. } = self.0;
        if let Some(heads) = heads {
            // All rows have one scale.
            let (codes, source) = (&mut self.0, put_apart(rows, heads)?);
            codes.codes = gathered(&codes.codes, cols, rows, &source);
            let groups = cols / NVFP4_GROUP;
            codes.group_scales = gathered(&codes.group_scales, groups, rows, &source);
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

#[cfg(test)]
mod tests;
