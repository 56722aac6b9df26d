//! One matrix under candle_nn's names, and its way into the joint forms.

use super::{LinearWeight, Norm, Projection};
use crate::Fusion;
use crate::ops::Weight;
use candle_core::quantized::QTensor;
use candle_core::{DType, Device, Module, Result, Tensor, bail};
use std::sync::Arc;

/// `x Wᵀ + bias` for x `[.., K]` of any layout, W `[N, K]` and bias `[N]`.
///
/// Stands where a `candle_nn::Linear` stood. What comes before or after it in a model fits into the
/// same step: [`Linear::forward_norm`], [`Linear::forward_residual`], and for several matrices with
/// one input [`Projection::from_linears`].
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_fused::nn::Linear;
/// let layer = Linear::new(Tensor::ones((3, 2), DType::F32, &Device::Cpu)?, None);
/// let x = Tensor::new(&[[10f32, 100.]], &Device::Cpu)?;
/// assert_eq!(layer.forward(&x)?.to_vec2::<f32>()?, [[110., 110., 110.]]);
/// let residual = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
/// let y = layer.forward_residual(&x, &residual)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[111., 111., 111.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Linear {
    weight: LinearWeight,
    /// The weight's values, or `[0, K]` in their place.
    values: Tensor,
    bias: Option<Tensor>,
    projection: Projection,
    fusion: Fusion,
}

impl Linear {
    /// From a weight `[N, K]` (f32, f16 or bf16) and a bias `[N]`. What does not fit together is
    /// refused by the first call of `forward`, as candle_nn does.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        // A view is laid out once; if that fails, the op lays it out and says why it cannot.
        let weight = weight.contiguous().unwrap_or(weight);
        let fusion = Fusion::all();
        let projection = Projection::from_weights(vec![Weight::Dense(weight.clone())], fusion);
        Self {
            projection: projection.with_bias(bias.clone()),
            values: weight.clone(),
            weight: LinearWeight::Dense(weight),
            bias,
            fusion,
        }
    }

    /// From a weight quantized on `device`.
    pub(crate) fn from_quantized(
        weight: Weight,
        bias: Option<Tensor>,
        device: &Device,
    ) -> Result<Self> {
        let fusion = Fusion::all();
        let projection = Projection::from_weights(vec![weight.clone()], fusion);
        Ok(Self {
            values: Tensor::zeros((0, weight.cols()), DType::F32, device)?,
            projection: projection.with_bias(bias.clone()),
            weight: LinearWeight::Packed(weight),
            bias,
            fusion,
        })
    }

    /// From a matrix `[N, K]` of a GGUF file, as `candle_core::quantized::QMatMul::from_qtensor`.
    ///
    /// ```
    /// use candle_core::quantized::{GgmlDType, QTensor};
    /// use candle_core::{DType, Device, Module, Tensor};
    /// use candle_fused::nn::Linear;
    /// let weight = Tensor::ones((3, 32), DType::F32, &Device::Cpu)?;
    /// let layer = Linear::from_qtensor(QTensor::quantize(&weight, GgmlDType::Q8_0)?)?;
    /// let y = layer.forward(&Tensor::ones((1, 32), DType::F32, &Device::Cpu)?)?;
    /// assert!((y.to_vec2::<f32>()?[0][0] - 32.).abs() < 0.1 && layer.is_quantized());
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the tensor is not a matrix.
    pub fn from_qtensor(weight: QTensor) -> Result<Self> {
        let device = weight.device();
        match super::projection::pack(LinearWeight::Quantized(Arc::new(weight)))? {
            Weight::Dense(weight) => Ok(Self::new(weight, None)),
            weight => Self::from_quantized(weight, None, &device),
        }
    }

    /// The same with the fusions that are on in `fusion`: without `linear` the product is candle's.
    ///
    /// # Errors
    /// If the weight is not a matrix.
    pub fn from_weight(weight: Tensor, bias: Option<Tensor>, fusion: Fusion) -> Result<Self> {
        let values = weight.clone();
        let weight = LinearWeight::Dense(weight);
        Ok(Self {
            values,
            projection: Projection::new(vec![weight.clone()], bias.clone(), fusion)?,
            weight,
            bias,
            fusion,
        })
    }

    /// The weight, `[N, K]`. A quantized one is no tensor; `[0, K]` stands for it.
    pub fn weight(&self) -> &Tensor {
        &self.values
    }

    /// Whether the weight is quantized.
    pub fn is_quantized(&self) -> bool {
        !matches!(self.weight, LinearWeight::Dense(_))
    }

    /// The bias, `[N]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// `norm(x) Wᵀ + bias`, in one step.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit, by the name of the argument.
    ///
    /// ```
    /// use candle_core::{DType, Device, Module, Tensor};
    /// use candle_fused::Fusion;
    /// use candle_fused::nn::{Linear, Norm, RmsNorm};
    /// let ones = |n: usize| Tensor::ones(n, DType::F32, &Device::Cpu);
    /// let weight = Tensor::new(&[[1f32, 2.]], &Device::Cpu)?;
    /// let layer = Linear::from_weight(weight, Some(ones(1)?), Fusion::all())?;
    /// assert_eq!((layer.weight().dims(), layer.bias().map(|b| b.dims())), (&[1, 2][..], Some(&[1][..])));
    /// let norm = Norm::from(RmsNorm::new(ones(2)?, 0.));
    /// let x = Tensor::new(&[[5f32, -5.]], &Device::Cpu)?;
    /// let (one, two) = (layer.forward_norm(&x, &norm)?, layer.forward(&norm.forward(&x)?)?);
    /// assert_eq!((one.to_vec2::<f32>()?, two.to_vec2::<f32>()?), (vec![vec![0.]], vec![vec![0.]]));
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn forward_norm(&self, x: &Tensor, norm: &Norm) -> Result<Tensor> {
        self.projection.forward_joint(x, Some(norm))
    }

    /// `x Wᵀ + bias + residual`, in one step.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit, by the name of the argument.
    pub fn forward_residual(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        self.projection.forward_residual(x, residual)
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.projection.forward_joint(x, None)
    }
}

impl From<Linear> for Projection {
    fn from(linear: Linear) -> Self {
        linear.projection
    }
}

impl Projection {
    /// Layers that share their input as one, as q, k and v do, or gate and up: one step makes all
    /// their outputs. On a GPU their weights are copied into one matrix.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_fused::nn::{self, Projection};
    /// use candle_fused::ops::Activation;
    /// use candle_nn::VarBuilder;
    /// let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
    /// let gate = nn::linear_no_bias(64, 128, vb.pp("gate_proj"))?;
    /// let up = nn::linear_no_bias(64, 128, vb.pp("up_proj"))?;
    /// let norm = nn::rms_norm(64, 1e-6, vb.pp("norm"))?.into();
    /// let gate_up = Projection::from_linears(vec![gate, up])?;
    /// let x = Tensor::ones((1, 64), DType::F32, &Device::Cpu)?;
    /// // silu(gate(norm(x))) * up(norm(x))
    /// let y = gate_up.forward_activated(&x, Some(&norm), Activation::SwiGlu)?;
    /// assert_eq!(y.dims(), [1, 128]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// If there are no layers, a weight is not a matrix, some have a bias and some do not, or their
    /// fusions differ.
    pub fn from_linears(linears: Vec<Linear>) -> Result<Self> {
        let Some(first) = linears.first() else {
            bail!("projection: linears is empty, expected one or more layers");
        };
        let fusion = first.fusion;
        if linears.iter().any(|l| l.fusion != fusion) {
            bail!("projection: linears have different fusions, expected one for all");
        }
        let biases: Vec<_> = linears.iter().filter_map(Linear::bias).collect();
        let bias = match biases.len() {
            0 => None,
            n if n == linears.len() => Some(Tensor::cat(&biases, 0)?),
            n => bail!(
                "projection: {n} of {} linears have a bias, expected all or none",
                linears.len()
            ),
        };
        for linear in &linears {
            let (rows, _) = linear.weight.dims2()?;
            if let Some(bias) = linear.bias().filter(|b| b.dims() != [rows]) {
                bail!(
                    "projection: a bias of shape {:?}, expected [{rows}]",
                    bias.shape()
                );
            }
        }
        let weights = linears.into_iter().map(|l| l.weight);
        Self::new(weights.collect(), bias, fusion)
    }
}

impl Module for Projection {
    /// All outputs side by side.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_joint(x, None)
    }
}
