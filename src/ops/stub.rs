//! stub
use candle_core::{Result, Tensor};
/// stub
pub fn rms_norm(x: &Tensor, w: &Tensor, eps: f64) -> Result<Tensor> { candle_nn::ops::rms_norm(&x.contiguous()?, w, eps as f32) }
/// stub
pub fn residual_add(x: &Tensor, r: &[&Tensor]) -> Result<Tensor> { x + r[0] }
