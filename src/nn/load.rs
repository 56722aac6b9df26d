//! candle_nn's constructors: the same names, signatures, tensor names and initial values. Within
//! [`quant::while_loading`](crate::quant::while_loading) linear layers are quantized.

use super::quantize::loaded;
use super::{Embedding, LayerNorm, Linear, RmsNorm};
use candle_core::Result;
use candle_nn::{LayerNormConfig, VarBuilder};

/// A layer of `weight` `[out_dim, in_dim]` and `bias` `[out_dim]`, as `candle_nn::linear`.
///
/// # Errors
/// If a tensor is missing or has another shape.
pub fn linear(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    let name = vb.prefix();
    loaded(candle_nn::linear(in_dim, out_dim, vb)?, &name)
}

/// A layer of `weight` `[out_dim, in_dim]`, as `candle_nn::linear_no_bias`.
///
/// # Errors
/// If the tensor is missing or has another shape.
pub fn linear_no_bias(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    let name = vb.prefix();
    loaded(candle_nn::linear_no_bias(in_dim, out_dim, vb)?, &name)
}

/// [`linear`] or [`linear_no_bias`], as `candle_nn::linear_b`.
///
/// # Errors
/// If a tensor is missing or has another shape.
pub fn linear_b(in_dim: usize, out_dim: usize, bias: bool, vb: VarBuilder) -> Result<Linear> {
    let name = vb.prefix();
    loaded(candle_nn::linear_b(in_dim, out_dim, bias, vb)?, &name)
}

/// A norm of `weight` `[size]`, as `candle_nn::rms_norm`.
///
/// # Errors
/// If the tensor is missing or has another shape.
pub fn rms_norm(size: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    Ok(candle_nn::rms_norm(size, eps, vb)?.into())
}

/// A norm of `weight` and, if `config.affine`, `bias`, `[size]` each, as `candle_nn::layer_norm`; an
/// f64 stands for a configuration with this eps.
///
/// # Errors
/// If a tensor is missing or has another shape.
pub fn layer_norm<C: Into<LayerNormConfig>>(
    size: usize,
    config: C,
    vb: VarBuilder,
) -> Result<LayerNorm> {
    Ok(candle_nn::layer_norm(size, config, vb)?.into())
}

/// A norm of `weight` `[size]`, as `candle_nn::layer_norm_no_bias`.
///
/// # Errors
/// If the tensor is missing or has another shape.
pub fn layer_norm_no_bias(size: usize, eps: f64, vb: VarBuilder) -> Result<LayerNorm> {
    Ok(candle_nn::layer_norm_no_bias(size, eps, vb)?.into())
}

/// A table `weight` `[in_size, out_size]`, as `candle_nn::embedding`.
///
/// # Errors
/// If the tensor is missing or has another shape.
pub fn embedding(in_size: usize, out_size: usize, vb: VarBuilder) -> Result<Embedding> {
    Ok(candle_nn::embedding(in_size, out_size, vb)?.into())
}
