//! RMSNorm.

use crate::{Fusion, ops};
use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;

/// `x / sqrt(mean(x^2) + eps) * weight` over the last dimension.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Tensor,
    eps: f64,
    fused: bool,
}

impl RmsNorm {
    /// From a weight `[size]`; `fusion.rms_norm` chooses the form.
    pub fn from_weight(weight: Tensor, eps: f64, fusion: Fusion) -> Self {
        Self {
            weight,
            eps,
            fused: fusion.rms_norm,
        }
    }

    /// Loads `weight` `[size]`.
    pub fn load(size: usize, eps: f64, vb: VarBuilder, fusion: Fusion) -> Result<Self> {
        Ok(Self::from_weight(vb.get(size, "weight")?, eps, fusion))
    }

    /// The weight, `[size]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// What is added to the mean of squares.
    pub fn eps(&self) -> f64 {
        self.eps
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if self.fused {
            ops::rms_norm(x, &self.weight, self.eps)
        } else {
            candle_nn::ops::rms_norm(&x.contiguous()?, &self.weight, self.eps as f32)
        }
    }
}
