//! From candle_nn's layers. Weights are shared, not copied.

use super::{Embedding, LayerNorm, Linear, LinearWeight, Norm, RmsNorm};
use crate::Fusion;
use candle_core::Tensor;
use candle_core::quantized::QMatMul;

impl From<candle_nn::Linear> for Linear {
    fn from(layer: candle_nn::Linear) -> Self {
        Self::new(layer.weight().clone(), layer.bias().cloned())
    }
}

impl From<candle_nn::RmsNorm> for RmsNorm {
    fn from(layer: candle_nn::RmsNorm) -> Self {
        Self::new(layer.weight().clone(), layer.eps())
    }
}

impl From<candle_nn::LayerNorm> for LayerNorm {
    fn from(layer: candle_nn::LayerNorm) -> Self {
        Self::of(&layer)
    }
}

impl From<RmsNorm> for Norm {
    fn from(norm: RmsNorm) -> Self {
        Norm::Rms(norm)
    }
}

impl From<LayerNorm> for Norm {
    /// One that neither removes the mean nor has a bias becomes [`Norm::Rms`].
    fn from(norm: LayerNorm) -> Self {
        norm.into_norm()
    }
}

impl From<candle_nn::Embedding> for Embedding {
    fn from(layer: candle_nn::Embedding) -> Self {
        Self::new(layer.embeddings().clone(), layer.hidden_size())
    }
}

impl From<QMatMul> for LinearWeight {
    fn from(matrix: QMatMul) -> Self {
        match matrix {
            QMatMul::QTensor(blocks) => LinearWeight::Quantized(blocks),
            QMatMul::Tensor(dense) | QMatMul::TensorF16(dense) => LinearWeight::Dense(dense),
        }
    }
}

impl RmsNorm {
    /// From a weight `[size]`, with every fusion on.
    pub fn new(weight: Tensor, eps: f64) -> Self {
        Self::from_weight(weight, eps, Fusion::all())
    }
}

impl LayerNorm {
    /// From a weight and a bias `[size]`, with every fusion on.
    pub fn new(weight: Tensor, bias: Tensor, eps: f64) -> Self {
        Self::from_weights(weight, Some(bias), eps, Fusion::all())
    }

    /// From a weight `[size]`, with every fusion on.
    pub fn new_no_bias(weight: Tensor, eps: f64) -> Self {
        Self::from_weights(weight, None, eps, Fusion::all())
    }

    /// A norm that does not remove the mean, from a weight `[size]`, with every fusion on.
    ///
    /// ```
    /// use candle_core::{DType, Device, Module, Tensor};
    /// use candle_fused::nn::{LayerNorm, RmsNorm};
    /// let one = Tensor::ones(2, DType::F32, &Device::Cpu)?;
    /// let x = Tensor::new(&[3f32, 5.], &Device::Cpu)?;
    /// let y = LayerNorm::new(one.clone(), one.clone(), 0.).forward(&x)?;
    /// assert_eq!(y.to_vec1::<f32>()?, [0., 2.]);
    /// let y = LayerNorm::new_no_bias(one.clone(), 0.).forward(&x)?;
    /// assert_eq!(y.to_vec1::<f32>()?, [-1., 1.]);
    /// let same = [LayerNorm::rms_norm(one.clone(), 0.).forward(&x)?, RmsNorm::new(one, 0.).forward(&x)?];
    /// assert_eq!(same[0].to_vec1::<f32>()?, same[1].to_vec1::<f32>()?);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn rms_norm(weight: Tensor, eps: f64) -> Self {
        RmsNorm::new(weight, eps).into_inner()
    }
}
