//! RMSNorm and LayerNorm.

use crate::Fusion;
use crate::fusion::fallback;
use crate::ops::{self, Prologue};
use crate::trace;
use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;

/// `x / sqrt(mean(x^2) + eps) * weight` over the last dimension.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_fused::Fusion;
/// use candle_fused::nn::RmsNorm;
/// let vb = candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let loaded = RmsNorm::load(2, 1e-5, vb, Fusion::all())?;
/// assert_eq!((loaded.weight().dims(), loaded.eps()), (&[2][..], 1e-5));
/// let norm = RmsNorm::from_weight(Tensor::new(&[1f32, 2.], &Device::Cpu)?, 0., Fusion::all());
/// let x = Tensor::new(&[[5f32, -5.]], &Device::Cpu)?;
/// assert_eq!(norm.forward(&x)?.to_vec2::<f32>()?, [[1., -2.]]);
/// assert_eq!(norm.forward_diff(&x)?.to_vec2::<f32>()?, [[1., -2.]]);
/// assert!(!norm.into_inner().remove_mean());
/// # Ok::<(), candle_core::Error>(())
/// ```
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

    /// The same as a [`LayerNorm`] that does not remove the mean.
    pub fn into_inner(self) -> LayerNorm {
        LayerNorm {
            weight: self.weight,
            bias: None,
            remove_mean: false,
            eps: self.eps,
            fused: self.fused,
        }
    }

    /// The norm in candle's own operations, which have gradients.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit.
    pub fn forward_diff(&self, xs: &Tensor) -> Result<Tensor> {
        candle_nn::RmsNorm::new(self.weight.clone(), self.eps).forward_diff(xs)
    }
}

/// Whether a norm of tensors like `x` is fused, if it is to be; the trace hears why it is not.
fn fused(asked: bool, op: &'static str, x: &Tensor) -> bool {
    let why = fallback(x.device()).filter(|_| asked);
    if let Some(why) = why {
        trace::record(op, || format!("candle: {why}"));
    }
    asked && why.is_none()
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if fused(self.fused, "rms_norm", x) {
            ops::rms_norm(x, &self.weight, self.eps)
        } else {
            candle_nn::ops::rms_norm(&x.contiguous()?, &self.weight, self.eps as f32)
        }
    }
}

/// `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension; without the removal of
/// the mean, `x / sqrt(mean(x^2) + eps) * weight + bias`.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_fused::Fusion;
/// use candle_fused::nn::LayerNorm;
/// let vb = candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let loaded = LayerNorm::load(2, 1e-5, vb, Fusion::all())?;
/// assert!(loaded.weight().dims() == [2] && loaded.bias().is_some() && loaded.eps() == 1e-5);
/// let weight = Tensor::new(&[1f32, 2.], &Device::Cpu)?;
/// let norm = LayerNorm::from_weights(weight, None, 0., Fusion::all());
/// assert!(norm.remove_mean());
/// let x = Tensor::new(&[[7f32, 3.]], &Device::Cpu)?;
/// assert_eq!(norm.forward(&x)?.to_vec2::<f32>()?, [[1., -2.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Option<Tensor>,
    remove_mean: bool,
    eps: f64,
    fused: bool,
}

impl LayerNorm {
    /// From a weight and a bias `[size]`; `fusion.layer_norm` chooses the form.
    pub fn from_weights(weight: Tensor, bias: Option<Tensor>, eps: f64, fusion: Fusion) -> Self {
        Self {
            weight,
            bias,
            remove_mean: true,
            eps,
            fused: fusion.layer_norm,
        }
    }

    /// As candle_nn's layer, with every fusion on.
    pub(super) fn of(layer: &candle_nn::LayerNorm) -> Self {
        Self {
            weight: layer.weight().clone(),
            bias: layer.bias().cloned(),
            remove_mean: layer.remove_mean(),
            eps: layer.eps(),
            fused: true,
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

    /// What is added to the variance, or to the mean of squares.
    pub fn eps(&self) -> f64 {
        self.eps
    }

    /// As the norm before a part of a layer.
    pub(super) fn into_norm(self) -> Norm {
        match self {
            Self {
                remove_mean: false,
                bias: None,
                weight,
                eps,
                fused,
            } => Norm::Rms(RmsNorm { weight, eps, fused }),
            other => Norm::Layer(other),
        }
    }

    /// Whether the mean is removed; without, and without a bias, it is an RMSNorm.
    pub fn remove_mean(&self) -> bool {
        self.remove_mean
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let fused = fused(self.fused, "layer_norm", x);
        if fused && self.remove_mean {
            return ops::layer_norm(x, &self.weight, self.bias.as_ref(), self.eps);
        }
        let (weight, eps) = (self.weight.clone(), self.eps);
        let normed = match (&self.bias, self.remove_mean) {
            (Some(bias), true) => {
                return candle_nn::LayerNorm::new(weight, bias.clone(), eps).forward(x);
            }
            (None, true) => return candle_nn::LayerNorm::new_no_bias(weight, eps).forward(x),
            (_, false) if fused => ops::rms_norm(x, &weight, eps)?,
            (_, false) => candle_nn::LayerNorm::rms_norm(weight, eps).forward(x)?,
        };
        match &self.bias {
            Some(bias) => normed.broadcast_add(bias),
            None => Ok(normed),
        }
    }
}

/// The norm before a part of a layer.
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
            Norm::Layer(n) if fusion.layer_norm_linear && n.remove_mean => {
                Some(Prologue::LayerNorm {
                    weight: &n.weight,
                    bias: n.bias.as_ref(),
                    eps: n.eps,
                })
            }
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
