//! candle_nn's constructors: the same names, signatures, tensor names and initial values. Within
//! [`quant::while_loading`](crate::quant::while_loading) linear layers are quantized.

use super::quantize::loaded;
use super::{Embedding, LayerNorm, Linear, RmsNorm};
use candle_core::Result;
use candle_nn::VarBuilder;

pub use candle_nn::LayerNormConfig;

/// A layer of `weight` `[out_dim, in_dim]` and `bias` `[out_dim]`, as `candle_nn::linear`.
///
/// # Errors
/// If a tensor is missing or has another shape.
///
/// ```
/// use candle_core::{DType, Device};
/// let vb = candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let layer = candle_fused::nn::linear(4, 3, vb)?;
/// assert_eq!((layer.weight().dims(), layer.bias().map(|b| b.dims())), (&[3, 4][..], Some(&[3][..])));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn linear(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    let name = vb.prefix();
    loaded(candle_nn::linear(in_dim, out_dim, vb)?, &name)
}

/// A layer of `weight` `[out_dim, in_dim]`, as `candle_nn::linear_no_bias`.
///
/// # Errors
/// If the tensor is missing or has another shape.
///
/// ```
/// use candle_core::{DType, Device};
/// let vb = candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let layer = candle_fused::nn::linear_no_bias(4, 3, vb)?;
/// assert!(layer.weight().dims() == [3, 4] && layer.bias().is_none());
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn linear_no_bias(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    let name = vb.prefix();
    loaded(candle_nn::linear_no_bias(in_dim, out_dim, vb)?, &name)
}

/// [`linear`] or [`linear_no_bias`], as `candle_nn::linear_b`.
///
/// # Errors
/// If a tensor is missing or has another shape.
///
/// ```
/// use candle_core::{DType, Device};
/// let vb = candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu);
/// assert!(candle_fused::nn::linear_b(4, 3, false, vb.clone())?.bias().is_none());
/// assert!(candle_fused::nn::linear_b(4, 3, true, vb)?.bias().is_some());
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn linear_b(in_dim: usize, out_dim: usize, bias: bool, vb: VarBuilder) -> Result<Linear> {
    let name = vb.prefix();
    loaded(candle_nn::linear_b(in_dim, out_dim, bias, vb)?, &name)
}

/// A norm of `weight` `[size]`, as `candle_nn::rms_norm`.
///
/// # Errors
/// If the tensor is missing or has another shape.
///
/// ```
/// use candle_core::{DType, Device};
/// let vb = candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu);
/// assert_eq!(candle_fused::nn::rms_norm(4, 1e-5, vb)?.weight().dims(), [4]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn rms_norm(size: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    Ok(candle_nn::rms_norm(size, eps, vb)?.into())
}

/// A norm of `weight` and, if `config.affine`, `bias`, `[size]` each, as `candle_nn::layer_norm`; an
/// f64 stands for a configuration with this eps.
///
/// # Errors
/// If a tensor is missing or has another shape.
///
/// ```
/// use candle_core::{DType, Device};
/// let vb = candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let norm = candle_fused::nn::layer_norm(4, 1e-5, vb)?;
/// assert!(norm.weight().dims() == [4] && norm.bias().is_some());
/// # Ok::<(), candle_core::Error>(())
/// ```
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
///
/// ```
/// use candle_core::{DType, Device};
/// let vb = candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu);
/// assert!(candle_fused::nn::layer_norm_no_bias(4, 1e-5, vb)?.bias().is_none());
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn layer_norm_no_bias(size: usize, eps: f64, vb: VarBuilder) -> Result<LayerNorm> {
    Ok(candle_nn::layer_norm_no_bias(size, eps, vb)?.into())
}

/// A table `weight` `[in_size, out_size]`, as `candle_nn::embedding`.
///
/// # Errors
/// If the tensor is missing or has another shape.
///
/// ```
/// use candle_core::{DType, Device};
/// let vb = candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let embedding = candle_fused::nn::embedding(32, 4, vb)?;
/// assert_eq!((embedding.vocab_size(), embedding.hidden_size()), (32, 4));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn embedding(in_size: usize, out_size: usize, vb: VarBuilder) -> Result<Embedding> {
    Ok(candle_nn::embedding(in_size, out_size, vb)?.into())
}
