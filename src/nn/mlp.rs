//! The two matrices after attention, with a gate or without.

use super::{Norm, Projection};
use crate::ops::Activation;
use candle_core::{Result, Tensor};

/// `down(act(gate(x)) * up(x))` (SwiGLU in Llama and its relatives) or `down(act(up(x)))` (GPT-NeoX), with a norm in
/// front of `down` in BitNet.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::nn::{self, Mlp, Norm, Projection};
/// use candle_fused::ops::Activation;
/// let vb = candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let [gate, up] = ["gate_proj", "up_proj"].map(|name| nn::linear_no_bias(64, 96, vb.pp(name)));
/// let down = nn::linear_no_bias(96, 64, vb.pp("down_proj"))?;
/// let mlp = Mlp::new(Projection::from_linears(vec![gate?, up?])?, down.into(), Activation::SwiGlu);
/// let norm = Norm::from(nn::rms_norm(64, 1e-6, vb.pp("norm"))?);
/// let x = Tensor::ones((2, 64), DType::F32, &Device::Cpu)?;
/// // Weights of zeros: only the residual is left.
/// let y = mlp.forward(&x, Some(&norm), &x)?;
/// assert_eq!(y.to_vec2::<f32>()?, x.to_vec2::<f32>()?);
/// // As BitNet has it.
/// let mlp = mlp.with_sub_norm(nn::rms_norm(96, 1e-6, vb.pp("ffn_sub_norm"))?.into());
/// assert!(mlp.sub_norm().is_some());
/// assert_eq!(mlp.forward(&x, Some(&norm), &x)?.to_vec2::<f32>()?, x.to_vec2::<f32>()?);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Mlp {
    up: Projection,
    down: Projection,
    activation: Activation,
    sub_norm: Option<Norm>,
}

impl Mlp {
    /// From the matrices before the activation as one [`Projection`] (gate and up, in this
    /// order, for [`Activation::SwiGlu`] and other activations with a gate), and the matrix after it. What is fused is what is in them.
    pub fn new(up: Projection, down: Projection, activation: Activation) -> Self {
        Self {
            up,
            down,
            activation,
            sub_norm: None,
        }
    }

    /// The same with a norm after the activation, before the last matrix (SubLN, Wang et al. 2022).
    pub fn with_sub_norm(self, norm: Norm) -> Self {
        Self {
            sub_norm: Some(norm),
            ..self
        }
    }

    /// The norm before the last matrix.
    pub fn sub_norm(&self) -> Option<&Norm> {
        self.sub_norm.as_ref()
    }

    /// The matrices before the activation, and the one after it.
    pub(crate) fn projections(&self) -> (&Projection, &Projection) {
        (&self.up, &self.down)
    }

    /// What is between the matrices.
    pub(crate) fn activation(&self) -> Activation {
        self.activation
    }

    /// `residual + mlp(norm(x))`.
    ///
    /// # Errors
    /// If shapes do not fit.
    pub fn forward(&self, x: &Tensor, norm: Option<&Norm>, residual: &Tensor) -> Result<Tensor> {
        let _span = tracing::trace_span!("mlp").entered();
        let hidden = self.up.forward_activated(x, norm, self.activation)?;
        let norm = self.sub_norm.as_ref();
        self.down.forward_norm_residual(&hidden, norm, residual)
    }
}
