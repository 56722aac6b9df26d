//! LayerNorm as the prologue of a matrix product.

pub use super::linear::reference;
use super::linear::{Epilogue, Prologue};
use super::rms_norm_linear::parts;
use candle_core::{Result, Tensor};

/// `y_i = act(layer_norm(x, norm_weight, norm_bias, eps) W_iᵀ + bias) + residuals`: one norm feeding
/// one or several weight matrices in one step, as GPT-NeoX has it before attention and MLP.
///
/// * `x`: `[.., K]`, f32, f16 or bf16, any layout
/// * `norm_weight`, `norm_bias`: `[K]`, in x's dtype
/// * `weights`: one or more `[N_i, K]`, f32, f16 or bf16
/// * `epilogue`: over all outputs side by side, N = sum of N_i
/// * result: a view `[.., N_i]` for each weight; with [`Activation::SwiGlu`] one tensor
///   `[.., N / 2]`
///
/// The norm is computed in f32 and rounded as [`layer_norm`](fn@crate::ops::layer_norm) does; see
/// [`crate::ops::linear`](fn@crate::ops::linear) for the rest.
///
/// # Errors
/// If shapes or dtypes do not fit, by the name of the argument.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::ops::{Epilogue, layer_norm_linear};
/// let x = Tensor::new(&[[1f32, 3.]], &Device::Cpu)?;
/// let norm = Tensor::ones(2, DType::F32, &Device::Cpu)?;
/// let up = Tensor::new(&[[1f32, 2.]], &Device::Cpu)?;
/// let parts = layer_norm_linear(&x, &norm, None, 0., &[&up], &Epilogue::default())?;
/// assert_eq!(parts[0].to_vec2::<f32>()?, [[1.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// [`Activation::SwiGlu`]: super::Activation::SwiGlu
pub fn layer_norm_linear(
    x: &Tensor,
    norm_weight: &Tensor,
    norm_bias: Option<&Tensor>,
    eps: f64,
    weights: &[&Tensor],
    epilogue: &Epilogue<'_>,
) -> Result<Vec<Tensor>> {
    let prologue = Prologue::LayerNorm {
        weight: norm_weight,
        bias: norm_bias,
        eps,
    };
    parts("layer_norm_linear", x, prologue, weights, epilogue)
}
