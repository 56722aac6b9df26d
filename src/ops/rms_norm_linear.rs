//! RMSNorm as the prologue of a matrix product.

pub use super::linear::reference;
use super::linear::{ActivationBits, Epilogue, Prologue, Weight, launch};
use candle_core::{D, Result, Tensor};

/// `y_i = act(rms_norm(x, norm_weight, eps) W_iᵀ + bias) + residuals`: one norm feeding one or
/// several weight matrices, as q, k and v, or gate and up, in one step.
///
/// * `x`: `[.., K]`, f32, f16 or bf16, any layout
/// * `norm_weight`: `[K]`, in x's dtype
/// * `weights`: one or more `[N_i, K]`, f32, f16 or bf16
/// * `epilogue`: over all outputs side by side, N = sum of N_i
/// * result: a view `[.., N_i]` for each weight; with [`Activation::SwiGlu`] one tensor
///   `[.., N / 2]`
///
/// The norm is computed in f32 and rounded as [`Prologue::RmsNorm`] says; see
/// [`crate::ops::linear`](fn@crate::ops::linear) for the rest.
///
/// # Errors
/// If shapes or dtypes do not fit, by the name of the argument.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::ops::{Epilogue, rms_norm_linear};
/// let ones = |dims: &[usize]| Tensor::ones(dims, DType::F32, &Device::Cpu);
/// let (x, norm) = (ones(&[1, 4])?.affine(3., 0.)?, ones(&[4])?);
/// let (q, k) = (ones(&[2, 4])?, ones(&[1, 4])?);
/// let parts = rms_norm_linear(&x, &norm, 0., &[&q, &k], &Epilogue::default())?;
/// assert_eq!(parts[0].to_vec2::<f32>()?, [[4., 4.]]);
/// assert_eq!(parts[1].to_vec2::<f32>()?, [[4.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// [`Activation::SwiGlu`]: super::Activation::SwiGlu
pub fn rms_norm_linear(
    x: &Tensor,
    norm_weight: &Tensor,
    eps: f64,
    weights: &[&Tensor],
    epilogue: &Epilogue<'_>,
) -> Result<Vec<Tensor>> {
    let prologue = Prologue::RmsNorm {
        weight: norm_weight,
        eps,
    };
    parts("rms_norm_linear", x, prologue, weights, epilogue)
}

/// The product of several dense weights after a norm, a view for each.
pub(super) fn parts(
    name: &'static str,
    x: &Tensor,
    prologue: Prologue<'_>,
    weights: &[&Tensor],
    epilogue: &Epilogue<'_>,
) -> Result<Vec<Tensor>> {
    let matrices: Vec<_> = weights
        .iter()
        .map(|w| Weight::Dense((*w).clone()))
        .collect();
    let y = launch(
        name,
        x,
        prologue,
        &matrices,
        *epilogue,
        ActivationBits::Auto,
    )?;
    if epilogue.activation.gate().is_some() || weights.len() == 1 {
        return Ok(vec![y]);
    }
    let mut start = 0;
    matrices
        .iter()
        .map(|w| {
            let part = y.narrow(D::Minus1, start, w.rows());
            start += w.rows();
            part
        })
        .collect()
}
