//! The two matrices behind attention, with a gate or without.

use super::{Norm, Projection};
use crate::ops::Activation;
use candle_core::{Result, Tensor};

/// `down(act(gate(x)) * up(x))` (SwiGLU in Llama and its relatives) or `down(act(up(x)))` (GPT-NeoX).
#[derive(Clone, Debug)]
pub struct Mlp {
    up: Projection,
    down: Projection,
    activation: Activation,
}

impl Mlp {
    /// From the matrices in front of the activation as one [`Projection`] (gate and up, in this
    /// order, for [`Activation::SwiGlu`] and other activations with a gate), and the matrix behind it. What is fused is what is in them.
    pub fn new(up: Projection, down: Projection, activation: Activation) -> Self {
        Self {
            up,
            down,
            activation,
        }
    }

    /// What stands in front of the activation, and behind it.
    #[cfg(feature = "cuda")]
    pub(crate) fn projections(&self) -> (&Projection, &Projection) {
        (&self.up, &self.down)
    }

    /// What is between the matrices.
    #[cfg(feature = "cuda")]
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
        self.down.forward_residual(&hidden, residual)
    }
}
