//! Matrix products with everything that touches one row inside: the norm before, the bias,
//! activation, gating and residual after.
//!
//! `linear = prologue x weights x epilogue`: [`Prologue`], [`Weight`] and [`Epilogue`] combine
//! freely, and one launch (`launch`) serves [`linear`](fn@linear), [`rms_norm_linear`] and [`quant_linear`].
//!
//! [`rms_norm_linear`]: fn@crate::ops::rms_norm_linear
//! [`quant_linear`]: fn@crate::ops::quant_linear

mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod input;
mod launch;
mod op;
mod reference;
mod tile;

use crate::cpu::packed::PackedMatrix;
#[cfg(feature = "cuda")]
use crate::cuda::BlockMatrix;
use candle_core::{Result, Tensor};
use std::sync::Arc;

#[cfg(feature = "cuda")]
pub use crate::cuda::KernelInfo;
pub use crate::quant::ActivationBits;
#[cfg(feature = "cuda")]
pub use cuda::kernel_table;
pub(crate) use launch::{check_gated, launch};
pub use reference::reference;

/// A weight matrix `[N, K]`: N outputs of K inputs.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::ops::Weight;
/// let weight = Weight::Dense(Tensor::zeros((3, 2), DType::F32, &Device::Cpu)?);
/// assert_eq!((weight.rows(), weight.cols()), (3, 2));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub enum Weight {
    /// f32, f16 or bf16, row-major.
    Dense(Tensor),
    /// GGUF blocks or codes of a [`Scheme`](crate::quant::Scheme), packed for the CPU.
    Packed(Arc<PackedMatrix>),
    /// GGUF blocks or codes of a [`Scheme`](crate::quant::Scheme), packed for a GPU.
    #[cfg(feature = "cuda")]
    Blocks(Arc<BlockMatrix>),
}

impl Weight {
    /// N, the number of outputs.
    pub fn rows(&self) -> usize {
        match self {
            Weight::Dense(w) => w.dims().first().copied().unwrap_or(0),
            Weight::Packed(w) => w.rows(),
            #[cfg(feature = "cuda")]
            Weight::Blocks(w) => w.rows(),
        }
    }

    /// K, the number of inputs.
    pub fn cols(&self) -> usize {
        match self {
            Weight::Dense(w) => w.dims().get(1).copied().unwrap_or(0),
            Weight::Packed(w) => w.cols(),
            #[cfg(feature = "cuda")]
            Weight::Blocks(w) => w.cols(),
        }
    }

    /// Whether the weight is in GGUF blocks or codes.
    pub(crate) fn is_quantized(&self) -> bool {
        !matches!(self, Weight::Dense(_))
    }
}

/// What happens to each input row before the product.
#[derive(Clone, Copy, Debug, Default)]
pub enum Prologue<'a> {
    /// Nothing: the row enters as it is.
    #[default]
    None,
    /// `x / sqrt(mean(x^2) + eps) * weight`, rounded as [`rms_norm`](fn@crate::ops::rms_norm) rounds. On Hopper, where x and
    /// weights are in bf16 and few (K up to 1,024), from 65 rows on, and with few quantized weights, what is rounded is
    /// `x * weight`, or the norm's weights times the product's; the factor of the row multiplies the sums.
    RmsNorm {
        /// `[K]`, in x's dtype.
        weight: &'a Tensor,
        /// Added to the mean of squares.
        eps: f64,
    },
    /// `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, rounded as
    /// [`layer_norm`](fn@crate::ops::layer_norm) rounds.
    LayerNorm {
        /// `[K]`, in x's dtype.
        weight: &'a Tensor,
        /// Likewise.
        bias: Option<&'a Tensor>,
        /// Added to the variance.
        eps: f64,
    },
}

/// The pointwise function after the product and bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `y`
    #[default]
    None,
    /// `y * sigmoid(y)`
    Silu,
    /// `y / 2 * (1 + erf(y / sqrt(2)))`, what Hugging Face calls `gelu`.
    Gelu,
    /// `y / 2 * (1 + tanh(sqrt(2 / pi) * (y + 0.044715 * y^3)))`, `gelu_new` or `gelu_pytorch_tanh`.
    GeluTanh,
    /// `max(y, 0)`
    Relu,
    /// `max(y, 0)^2` (Primer, So et al. 2021).
    Relu2,
    /// `silu(y[i]) * y[i + N / 2]`: the first half of the outputs is the gate, the second half what
    /// it gates, and N / 2 values come out (GLU Variants Improve Transformer, Shazeer 2020).
    SwiGlu,
    /// `gelu(y[i]) * y[i + N / 2]`, with the GELU of [`Activation::Gelu`]; otherwise as [`Activation::SwiGlu`].
    GeGlu,
    /// The same with the GELU of [`Activation::GeluTanh`].
    GeGluTanh,
    /// `max(y[i], 0)^2 * y[i + N / 2]`; otherwise as [`Activation::SwiGlu`] (BitNet b1.58 2B4T, Ma et al. 2025).
    Relu2Glu,
}

impl Activation {
    /// What the first half of the outputs goes through before it multiplies the second; none where there are
    /// no such halves.
    ///
    /// ```
    /// use candle_fused::ops::Activation;
    /// assert_eq!(Activation::SwiGlu.gate(), Some(Activation::Silu));
    /// assert_eq!(Activation::Silu.gate(), None);
    /// ```
    pub fn gate(self) -> Option<Self> {
        match self {
            Activation::SwiGlu => Some(Activation::Silu),
            Activation::GeGlu => Some(Activation::Gelu),
            Activation::GeGluTanh => Some(Activation::GeluTanh),
            Activation::Relu2Glu => Some(Activation::Relu2),
            _ => None,
        }
    }

    /// The output channels of the weights for a result of `outputs` columns: twice as many with a gate.
    pub(crate) fn inputs(self, outputs: usize) -> usize {
        match self.gate() {
            Some(_) => 2 * outputs,
            None => outputs,
        }
    }

    /// Outputs of `rows` rows of weights: half of them if one half gates the other.
    pub(crate) fn outputs(self, rows: usize) -> usize {
        match self.gate() {
            Some(_) => rows / 2,
            None => rows,
        }
    }
}

/// What happens to each output before it is written: `act(y + bias) + residuals`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Epilogue<'a> {
    /// `[N]`, in x's dtype.
    pub bias: Option<&'a Tensor>,
    /// Applied after the bias.
    pub activation: Activation,
    /// At most two tensors of the output's shape and dtype, added last.
    pub residuals: &'a [&'a Tensor],
}

/// `y = act(x Wᵀ + bias) + residuals` in one step.
///
/// * `x`: `[.., K]`, f32, f16 or bf16, any layout
/// * `weight`: `[N, K]`, f32, f16 or bf16 (its dtype may differ from x's)
/// * result: `[.., N]`, or `[.., N / 2]` where one half gates the other ([`Activation::SwiGlu`]), in x's dtype
///
/// Products are accumulated in f32 and everything in the epilogue is computed in f32; the result is
/// rounded once.
///
/// # Errors
/// If shapes or dtypes do not fit, by the name of the argument.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::ops::{self, Activation, Epilogue};
/// let x = Tensor::ones((1, 4), DType::F32, &Device::Cpu)?;
/// let w = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
/// let y = ops::linear(&x, &w, &Epilogue { residuals: &[&x.narrow(1, 0, 2)?], ..Default::default() })?;
/// assert_eq!(y.to_vec2::<f32>()?, [[5., 5.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn linear(x: &Tensor, weight: &Tensor, epilogue: &Epilogue<'_>) -> Result<Tensor> {
    launch(
        "linear",
        x,
        Prologue::None,
        &[Weight::Dense(weight.clone())],
        *epilogue,
        ActivationBits::Auto,
    )
}
