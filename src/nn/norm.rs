//! RMSNorm and LayerNorm.

use crate::Fusion;
use crate::ops::{self, Prologue};
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

/// `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Option<Tensor>,
    eps: f64,
    fused: bool,
}

impl LayerNorm {
    /// From a weight and a bias `[size]`; `fusion.layer_norm` chooses the form.
    pub fn from_weights(weight: Tensor, bias: Option<Tensor>, eps: f64, fusion: Fusion) -> Self {
        Self {
            weight,
            bias,
            eps,
            fused: fusion.layer_norm,
        }
    }

    /// Loads `weight` and `bias` `[size]`.
    pub fn load(size: usize, eps: f64, vb: VarBuilder, fusion: Fusion) -> Result<Self> {
        let (weight, bias) = (vb.get(size, "weight")?, vb.get(size, "bias")?);
        Ok(Self::from_weights(weight, Some(bias), eps, fusion))
    }

    /// The weight, `[size]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias, `[size]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// What is added to the variance.
    pub fn eps(&self) -> f64 {
        self.eps
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if self.fused {
            return ops::layer_norm(x, &self.weight, self.bias.as_ref(), self.eps);
        }
        let (weight, eps) = (self.weight.clone(), self.eps);
        match &self.bias {
            Some(bias) => candle_nn::LayerNorm::new(weight, bias.clone(), eps).forward(x),
            None => candle_nn::LayerNorm::new_no_bias(weight, eps).forward(x),
        }
    }
}

/// The norm in front of a part of a layer.
#[derive(Clone, Debug)]
pub enum Norm {
    /// [`RmsNorm`]
    Rms(RmsNorm),
    /// [`LayerNorm`]
    Layer(LayerNorm),
}

impl Norm {
    /// The norm as the prologue of a product, unless `fusion` says otherwise.
    pub(crate) fn prologue(&self, fusion: Fusion) -> Option<Prologue<'_>> {
        match self {
            Norm::Rms(n) if fusion.rms_norm_linear => Some(Prologue::RmsNorm {
                weight: &n.weight,
                eps: n.eps,
            }),
            Norm::Layer(n) if fusion.layer_norm_linear => Some(Prologue::LayerNorm {
                weight: &n.weight,
                bias: n.bias.as_ref(),
                eps: n.eps,
            }),
            _ => None,
        }
    }
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Norm::Rms(norm) => norm.forward(x),
            Norm::Layer(norm) => norm.forward(x),
        }
    }
}
