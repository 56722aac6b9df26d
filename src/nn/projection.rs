//! Matrix products, alone or several that share their input.

use super::{InputOrder, Norm, pack, per_token};
use crate::cpu::packed::PackedMatrix;
#[cfg(feature = "cuda")]
use crate::cuda::BlockMatrix;
use crate::fusion::fallback;
use crate::ops::{self, Activation, Epilogue, Prologue, Weight};
use crate::{ActivationBits, Fusion, quant, trace};
use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor};
use candle_core::{D, DType, Device, Module, Result, Tensor};
use std::borrow::Cow;
use std::sync::Arc;

/// A weight as a checkpoint holds it.
#[derive(Clone, Debug)]
pub enum LinearWeight {
    /// `[N, K]`, f32, f16 or bf16.
    Dense(Tensor),
    /// GGUF blocks `[N, K]`.
    Quantized(Arc<QTensor>),
    /// `[N, K]` in the form that the fused product takes.
    Packed(Weight),
    /// The same with its columns in another order than the input's.
    Reordered(Weight, InputOrder),
}

impl LinearWeight {
    pub(super) fn dims2(&self) -> Result<(usize, usize)> {
        match self {
            LinearWeight::Dense(w) => w.dims2(),
            LinearWeight::Quantized(w) => w.shape().dims2(),
            LinearWeight::Packed(w) | LinearWeight::Reordered(w, _) => Ok((w.rows(), w.cols())),
        }
    }

    fn order(&self) -> Option<&InputOrder> {
        match self {
            LinearWeight::Reordered(_, order) => Some(order),
            _ => None,
        }
    }

    /// Why its device has no fused product, if it has none.
    fn fallback(&self) -> Option<&'static str> {
        match self {
            LinearWeight::Dense(w) => fallback(w.device()),
            LinearWeight::Quantized(w) => fallback(&w.device()),
            LinearWeight::Packed(_) | LinearWeight::Reordered(..) => fallback(&Device::Cpu),
        }
    }
}

/// One or several matrices `[N_i, K]` with the same input, as q, k and v have.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::Fusion;
/// use candle_fused::cpu::packed::PackedMatrix;
/// use candle_fused::nn::{LinearWeight, Projection};
/// use candle_fused::ops::{Activation, Weight};
/// use candle_fused::quant::{Scheme, quantize};
/// use std::sync::Arc;
/// let ones = |rows: usize| Tensor::ones((rows, 32), DType::F32, &Device::Cpu);
/// let x = ones(1)?;
/// // A matrix of two rows and one of three.
/// let both = vec![LinearWeight::Dense(ones(2)?), LinearWeight::Dense(ones(3)?)];
/// let projection = Projection::new(both, None, Fusion::all())?;
/// assert_eq!(projection.forward_joint(&x, None)?.to_vec2::<f32>()?, [[32.; 5]]);
/// let parts = projection.forward_parts(&x, None)?;
/// assert_eq!((parts[0].dims(), parts[1].dims()), (&[1, 2][..], &[1, 3][..]));
/// assert!(projection.fusion().linear);
///
/// let one = Projection::from_weights(vec![Weight::Dense(ones(2)?)], Fusion::all());
/// let y = one.forward_residual(&x, &Tensor::ones((1, 2), DType::F32, &Device::Cpu)?)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[33., 33.]]);
/// let y = one.forward_activated(&x.neg()?, None, Activation::Silu)?;
/// assert!(y.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
///
/// let codes = quantize(&[1.; 16 * 32], 16, 32, Scheme::Int8)?;
/// let packed = Projection::from_packed(vec![Arc::new(PackedMatrix::from_codes(&codes)?)], Fusion::all());
/// assert!((packed.forward_joint(&x, None)? - 32.)?.abs()?.max_all()?.to_scalar::<f32>()? < 0.01);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Projection {
    form: Form,
    /// Rows of each matrix.
    rows: Vec<usize>,
    bias: Option<Tensor>,
    /// The order of the fused matrices' columns, if it is not the input's.
    order: Option<InputOrder>,
    /// Whether the input is rounded to 8 bits of each token, whatever the form.
    rounds_input: bool,
    fusion: Fusion,
}

#[derive(Clone, Debug)]
enum Form {
    /// On a GPU dense matrices lie in one, so that one product serves them all.
    Fused(Vec<Weight>),
    Plain(Vec<QMatMul>),
    /// Matrices that want their input in different orders, each alone.
    Apart(Vec<Projection>),
}

impl Projection {
    /// From weights as loaded and a bias `[sum of N_i]`.
    ///
    /// `fusion.linear` (dense) or `fusion.quant_linear` (quantized) chooses the form; weights that have
    /// to be repacked for it are, and the originals dropped. Weights that are packed already are turned
    /// into f32 where `fusion.quant_linear` is off.
    pub fn new(weights: Vec<LinearWeight>, bias: Option<Tensor>, fusion: Fusion) -> Result<Self> {
        let quantized = weights.iter().any(|w| !matches!(w, LinearWeight::Dense(_)));
        let here = weights.iter().all(|w| w.fallback().is_none());
        let fused = if !here {
            false
        } else if quantized {
            fusion.quant_linear
        } else {
            fusion.linear
        };
        let rows = weights
            .iter()
            .map(|w| Ok(w.dims2()?.0))
            .collect::<Result<_>>()?;
        let order = weights.first().and_then(|w| w.order().cloned());
        let order = order.filter(|_| fused);
        let form = if fused && weights.iter().any(|w| w.order() != order.as_ref()) {
            let alone = |w| Self::new(vec![w], None, fusion);
            Form::Apart(weights.into_iter().map(alone).collect::<Result<_>>()?)
        } else if fused {
            let weights = weights.into_iter().map(pack).collect::<Result<_>>()?;
            Form::Fused(joined(weights)?)
        } else {
            Form::Plain(weights.into_iter().map(plain).collect::<Result<_>>()?)
        };
        Ok(Self {
            order: order.filter(|_| matches!(form, Form::Fused(_))),
            form,
            rows,
            bias,
            rounds_input: false,
            fusion,
        })
    }

    /// From matrices that are repacked already; shared ones are not copied.
    pub fn from_packed(weights: Vec<Arc<PackedMatrix>>, fusion: Fusion) -> Self {
        Self::from_weights(weights.into_iter().map(Weight::Packed).collect(), fusion)
    }

    /// From weights in the form that the fused product takes.
    pub fn from_weights(weights: Vec<Weight>, fusion: Fusion) -> Self {
        Self {
            rows: weights.iter().map(Weight::rows).collect(),
            form: Form::Fused(weights),
            bias: None,
            order: None,
            rounds_input: false,
            fusion,
        }
    }

    /// The fusions that are on.
    pub fn fusion(&self) -> Fusion {
        self.fusion
    }

    /// The same for layers that were trained with their input rounded to 8 bits of each token, unless other bits are
    /// asked for.
    pub(crate) fn with_rounded_input(mut self) -> Self {
        if matches!(
            self.fusion.activations,
            ActivationBits::Auto | ActivationBits::PerToken8
        ) {
            self.fusion.activations = ActivationBits::PerToken8;
            self.rounds_input = true;
        }
        self
    }

    /// Whether the input has to be rounded before these weights meet it: products of quantized ones do it themselves.
    fn rounds_before(&self, weights: &[Weight]) -> bool {
        self.rounds_input && !weights.iter().all(Weight::is_quantized)
    }

    /// With this bias, `[sum of N_i]`.
    pub(crate) fn with_bias(self, bias: Option<Tensor>) -> Self {
        Self { bias, ..self }
    }

    /// The matrices and the bias, if the product is fused with whatever is around it.
    #[cfg(feature = "cuda")]
    pub(crate) fn fused_parts(&self) -> Option<(&[Weight], Option<&Tensor>)> {
        let fusion = self.fusion;
        let norms = fusion.rms_norm_linear && fusion.layer_norm_linear;
        let around = norms && fusion.swiglu && fusion.gelu && fusion.residual_add;
        match &self.form {
            // The launches of a plan take no gather in front of a product.
            Form::Fused(weights)
                if around && self.order.is_none() && !self.rounds_before(weights) =>
            {
                Some((weights, self.bias.as_ref()))
            }
            _ => None,
        }
    }

    /// Rows of each matrix.
    #[cfg(feature = "cuda")]
    pub(crate) fn rows(&self) -> &[usize] {
        &self.rows
    }

    /// The fused form, unless candle's own operations have to serve: then the trace hears why.
    fn fused_form(&self, x: &Tensor) -> Option<&[Weight]> {
        let Form::Fused(weights) = &self.form else {
            return None;
        };
        match fallback(x.device()) {
            Some(why) => {
                trace::record("linear", || format!("candle: {why}"));
                None
            }
            None => Some(weights),
        }
    }

    /// The outputs of all matrices without the bias, by candle's products or each matrix's own.
    fn outputs(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        match &self.form {
            Form::Plain(weights) => weights.iter().map(|w| w.forward(x)).collect(),
            Form::Fused(weights) => {
                let x = self.ordered(x)?;
                let dense = |w: &Weight| pack::dense(w)?.to_dtype(x.dtype());
                let product = |w: &Weight| QMatMul::Tensor(dense(w)?).forward(&x);
                weights.iter().map(product).collect()
            }
            Form::Apart(parts) => parts.iter().map(|p| p.forward_joint(x, None)).collect(),
        }
    }

    /// The input in the order of the matrices' columns.
    fn ordered<'a>(&self, x: &'a Tensor) -> Result<Cow<'a, Tensor>> {
        match &self.order {
            Some(order) => Ok(Cow::Owned(order.gather(x)?)),
            None => Ok(Cow::Borrowed(x)),
        }
    }

    /// All outputs side by side, `[.., sum of N_i]`, of `norm(x)` if a norm is given.
    pub fn forward_joint(&self, x: &Tensor, norm: Option<&Norm>) -> Result<Tensor> {
        if let Some(weights) = self.fused_form(x) {
            return self.fused(weights, x, norm, Activation::None, &[]);
        }
        let parts = self.plain(x, norm)?;
        match parts.as_slice() {
            [only] => Ok(only.clone()),
            _ => Tensor::cat(&parts, D::Minus1),
        }
    }

    /// The output of each matrix, `[.., N_i]`.
    pub fn forward_parts(&self, x: &Tensor, norm: Option<&Norm>) -> Result<Vec<Tensor>> {
        let joint = self.forward_joint(x, norm)?;
        let mut start = 0;
        self.rows
            .iter()
            .map(|rows| {
                let part = joint.narrow(D::Minus1, start, *rows);
                start += rows;
                part
            })
            .collect()
    }

    /// The activation of the output: of two matrices, gate and up, or of one that holds both in this order,
    /// for [`Activation::SwiGlu`].
    ///
    /// # Errors
    /// If shapes do not fit, or there are no such matrices.
    pub fn forward_activated(
        &self,
        x: &Tensor,
        norm: Option<&Norm>,
        activation: Activation,
    ) -> Result<Tensor> {
        let gate = activation.gate();
        if gate.is_some() {
            ops::linear::check_gated("projection", activation, &self.rows)?;
        }
        let inside = if gate.is_some() {
            self.fusion.swiglu
        } else {
            self.fusion.gelu
        };
        if inside && let Some(weights) = self.fused_form(x) {
            return self.fused(weights, x, norm, activation, &[]);
        }
        let y = self.forward_joint(x, norm)?;
        let Some(gate) = gate else {
            return activated(&y, activation);
        };
        let half = y.dim(D::Minus1)? / 2;
        let part = |start| y.narrow(D::Minus1, start, half);
        activated(&part(0)?, gate)? * part(half)?
    }

    /// The output of one matrix plus `residual`.
    pub fn forward_residual(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        self.forward_norm_residual(x, None, residual)
    }

    /// The output of one matrix, of `norm(x)` if a norm is given, plus `residual`.
    pub(super) fn forward_norm_residual(
        &self,
        x: &Tensor,
        norm: Option<&Norm>,
        residual: &Tensor,
    ) -> Result<Tensor> {
        let fusion = self.fusion.on(x.device());
        if fusion.residual_add
            && let Some(weights) = self.fused_form(x)
        {
            return self.fused(weights, x, norm, Activation::None, &[residual]);
        }
        let y = self.forward_joint(x, norm)?;
        if fusion.residual_add {
            ops::residual_add(&y, &[residual])
        } else {
            y + residual
        }
    }

    fn fused(
        &self,
        weights: &[Weight],
        x: &Tensor,
        norm: Option<&Norm>,
        activation: Activation,
        residuals: &[&Tensor],
    ) -> Result<Tensor> {
        // A norm's weight is in the order of its input, so that it cannot follow a gather.
        let rounds = self.rounds_before(weights);
        let plain = self.order.is_none() && !rounds;
        let inside = |n: &&Norm| plain && n.prologue(self.fusion).is_some();
        let (x, prologue) = match (norm, norm.filter(inside)) {
            (_, Some(norm)) => (Cow::Borrowed(x), norm.prologue(self.fusion)),
            (Some(norm), None) => (Cow::Owned(norm.forward(x)?), None),
            (None, None) => (Cow::Borrowed(x), None),
        };
        let prologue = prologue.unwrap_or(Prologue::None);
        let x = match rounds {
            true => Cow::Owned(per_token::rounded(&x)?),
            false => self.ordered(&x)?,
        };
        let name = match (weights.iter().any(Weight::is_quantized), prologue) {
            (true, _) => "quant_linear",
            (false, Prologue::RmsNorm { .. }) => "rms_norm_linear",
            (false, Prologue::LayerNorm { .. }) => "layer_norm_linear",
            (false, Prologue::None) => "linear",
        };
        let epilogue = Epilogue {
            bias: self.bias.as_ref(),
            activation,
            residuals,
        };
        let bits = self.fusion.activations;
        ops::linear::launch(name, &x, prologue, weights, epilogue, bits)
    }

    fn plain(&self, x: &Tensor, norm: Option<&Norm>) -> Result<Vec<Tensor>> {
        let x = match norm {
            Some(norm) => norm.forward(x)?,
            None => x.contiguous()?,
        };
        let x = match self.rounds_input {
            true => per_token::rounded(&x)?,
            false => x,
        };
        let mut start = 0;
        self.outputs(&x)?
            .into_iter()
            .map(|y| {
                let Some(bias) = &self.bias else {
                    return Ok(y);
                };
                let rows = y.dim(D::Minus1)?;
                let part = bias.narrow(0, start, rows)?;
                start += rows;
                y.broadcast_add(&part)
            })
            .collect()
    }
}

/// A weight in the form that the fused product takes.
pub(super) fn pack(weight: LinearWeight) -> Result<Weight> {
    let (rows, cols) = weight.dims2()?;
    match weight {
        LinearWeight::Dense(w) => Ok(Weight::Dense(w.contiguous()?)),
        LinearWeight::Packed(w) | LinearWeight::Reordered(w, _) => Ok(w),
        #[cfg(feature = "cuda")]
        LinearWeight::Quantized(w) if quant::supports(w.dtype()) && w.device().is_cuda() => {
            Ok(Weight::Blocks(Arc::new(BlockMatrix::from_qtensor(&w)?)))
        }
        LinearWeight::Quantized(w) if quant::supports(w.dtype()) => {
            let packed = PackedMatrix::pack(w.dtype(), rows, cols, &w.data()?)?;
            Ok(Weight::Packed(Arc::new(packed)))
        }
        // Types without a core of their own (f32, f16 and the rare block types).
        LinearWeight::Quantized(w) => Ok(Weight::Dense(dense(&w)?)),
    }
}

/// The values of a tensor of a GGUF file, on its device. On a GPU f16 and bf16 stay what they are,
/// and none of candle's kernels runs, which the driver would have to compile first.
pub(crate) fn dense(w: &QTensor) -> Result<Tensor> {
    let device = w.device();
    if device.is_cpu() {
        return w.dequantize(&device);
    }
    let bytes = w.data()?;
    match w.dtype() {
        GgmlDType::F32 => Tensor::from_raw_buffer(&bytes, DType::F32, w.shape().dims(), &device),
        GgmlDType::F16 => Tensor::from_raw_buffer(&bytes, DType::F16, w.shape().dims(), &device),
        GgmlDType::BF16 => Tensor::from_raw_buffer(&bytes, DType::BF16, w.shape().dims(), &device),
        _ => numbers(w, DType::F32),
    }
}

/// The values of a tensor of a GGUF file in `dtype`, on its device; on a GPU none of candle's kernels
/// runs here either.
pub(crate) fn numbers(w: &QTensor, dtype: DType) -> Result<Tensor> {
    let device = w.device();
    if device.is_cpu() {
        return w.dequantize(&device)?.to_dtype(dtype);
    }
    let storage = QStorage::from_data(w.data()?, &Device::Cpu, w.dtype())?;
    let values = QTensor::new(storage, w.shape().clone())?.dequantize(&Device::Cpu)?;
    values.to_dtype(dtype)?.to_device(&device)
}

/// Dense matrices of one dtype on one GPU as one matrix; others as they are.
fn joined(weights: Vec<Weight>) -> Result<Vec<Weight>> {
    #[cfg(feature = "cuda")]
    if weights.len() > 1 {
        let dense: Vec<_> = weights
            .iter()
            .filter_map(|weight| match weight {
                Weight::Dense(w) if w.device().is_cuda() => Some(w),
                _ => None,
            })
            .collect();
        if dense.len() == weights.len() && dense.iter().all(|w| w.dtype() == dense[0].dtype()) {
            let tracked = dense.iter().map(|w| ("weights", *w));
            crate::ops::view::inference_only("projection", tracked)?;
            return Ok(vec![Weight::Dense(crate::cuda::stack_rows(&dense)?)]);
        }
    }
    Ok(weights)
}

/// Whether rows have an odd number of blocks of a type that candle multiplies in pairs: built with debug
/// assertions it panics at them.
fn odd_pairs(w: &QTensor) -> bool {
    let pairs = matches!(
        w.dtype(),
        GgmlDType::Q4_1 | GgmlDType::Q5_0 | GgmlDType::Q5_1
    );
    let width = w.shape().dims().last().copied().unwrap_or(0);
    pairs && !(width / w.dtype().block_size()).is_multiple_of(2)
}

fn plain(weight: LinearWeight) -> Result<QMatMul> {
    match weight {
        LinearWeight::Dense(w) => Ok(QMatMul::Tensor(w)),
        LinearWeight::Quantized(w) if odd_pairs(&w) => {
            Ok(QMatMul::Tensor(w.dequantize(&w.device())?))
        }
        LinearWeight::Quantized(w) => QMatMul::from_arc(w),
        LinearWeight::Packed(w) => Ok(QMatMul::Tensor(pack::dense(&w)?)),
        LinearWeight::Reordered(w, order) => Ok(QMatMul::Tensor(order.restore(&pack::dense(&w)?)?)),
    }
}

/// An activation without a gate, in candle's own operations.
fn activated(y: &Tensor, activation: Activation) -> Result<Tensor> {
    match activation {
        Activation::Gelu => y.gelu_erf(),
        Activation::GeluTanh => y.gelu(),
        Activation::Silu => y.silu(),
        Activation::Relu => y.relu(),
        Activation::Relu2 => y.relu()?.sqr(),
        _ => Ok(y.clone()),
    }
}
