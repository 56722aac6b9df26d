//! The gated MLP of Llama and its relatives.

use super::{Projection, RmsNorm};
use candle_core::{Result, Tensor};

/// `down(silu(gate(x)) * up(x))`.
#[derive(Clone, Debug)]
pub struct GatedMlp {
    gate_up: Projection,
    down: Projection,
}

impl GatedMlp {
    /// From the gate and up matrices (in this order) as one [`Projection`], and the down matrix.
    pub fn new(gate_up: Projection, down: Projection) -> Self {
        Self { gate_up, down }
    }

    /// Gate and up, and down.
    #[cfg(feature = "cuda")]
    pub(crate) fn projections(&self) -> (&Projection, &Projection) {
        (&self.gate_up, &self.down)
    }

    /// `residual + mlp(norm(x))`.
    pub fn forward(&self, x: &Tensor, norm: &RmsNorm, residual: &Tensor) -> Result<Tensor> {
        let _span = tracing::trace_span!("mlp").entered();
        let hidden = self.gate_up.forward_swiglu(x, Some(norm))?;
        self.down.forward_residual(&hidden, residual)
    }
}
