//! Single layers and matrices, for models that this crate does not have.

#[cfg(feature = "cuda")]
use super::quantize;
use super::{BlockFormat, Codes, Quantization, Recipe, Scheme};
use crate::cpu::packed::PackedMatrix;
#[cfg(feature = "cuda")]
use crate::cuda::BlockMatrix;
use crate::nn::Linear;
use crate::ops::Weight;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Result, Tensor, bail};
use std::cell::RefCell;
use std::sync::Arc;

/// A candle layer `x Wᵀ + bias` with its weight quantized by `scheme`, on the device where it is. The
/// bias stays as it is.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_fused::quant::{self, Scheme};
/// let weight = Tensor::ones((3, 64), DType::F32, &Device::Cpu)?;
/// let layer = quant::quantize_linear(candle_nn::Linear::new(weight, None), Scheme::Int8)?;
/// let x = Tensor::ones((1, 64), DType::F32, &Device::Cpu)?;
/// assert!((layer.forward(&x)?.to_vec2::<f32>()?[0][0] - 64.).abs() < 1e-3);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If the weight's width does not divide by the scheme's group (or by 32), a weight is NaN or infinite,
/// or the device is neither a CPU nor a CUDA device.
pub fn quantize_linear(layer: candle_nn::Linear, scheme: Scheme) -> Result<Linear> {
    let weight = pack(layer.weight(), scheme.into())?;
    Linear::from_quantized(weight, layer.bias().cloned(), layer.weight().device())
}

thread_local! {
    static RECIPE: RefCell<Option<Recipe>> = const { RefCell::new(None) };
}

/// Runs `load`, in which the layers that [`nn::linear`](fn@crate::nn::linear),
/// [`nn::linear_no_bias`](crate::nn::linear_no_bias) and [`nn::linear_b`](crate::nn::linear_b) make on
/// this thread are quantized by `recipe`, under the names that their `VarBuilder` gives them: a candle
/// model that takes its layers from [`nn`](crate::nn) is quantized without another change. `recipe`'s
/// head and embedding do not count here, since a layer does not know what it is; patterns do.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_fused::quant::{self, Quantization, Recipe};
/// use candle_fused::nn;
/// use candle_nn::{VarBuilder, VarMap};
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// let recipe = Recipe::new(Quantization::Int8).with("head.*", None);
/// let (layer, head) = quant::while_loading(&recipe, || {
///     let layer = nn::linear(64, 32, vb.pp("layer"))?;
///     candle_core::Result::Ok((layer, nn::linear(32, 8, vb.pp("head"))?))
/// })?;
/// assert!(layer.is_quantized() && !head.is_quantized());
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn while_loading<T>(recipe: &Recipe, load: impl FnOnce() -> T) -> T {
    /// Puts back what was there, even if `load` panics.
    struct Outer(Option<Recipe>);
    impl Drop for Outer {
        fn drop(&mut self) {
            RECIPE.set(self.0.take());
        }
    }
    let _outer = Outer(RECIPE.replace(Some(recipe.clone())));
    load()
}

/// A layer that was just read, quantized if [`while_loading`] asks for it.
pub(crate) fn loaded(layer: candle_nn::Linear, name: &str) -> Result<Linear> {
    let name = format!("{name}.weight");
    let asked = RECIPE.with_borrow(|recipe| recipe.as_ref().and_then(|r| r.of(&name)));
    match asked {
        None => Ok(layer.into()),
        Some(quantization) => {
            let weight = named(&name, pack(layer.weight(), quantization))?;
            Linear::from_quantized(weight, layer.bias().cloned(), layer.weight().device())
        }
    }
}

/// An error with the tensor's name in front.
pub(crate) fn named<T>(name: &str, result: Result<T>) -> Result<T> {
    match result {
        Ok(value) => Ok(value),
        Err(e) => bail!("tensor `{name}`: {e}"),
    }
}

/// A dense matrix `[N, K]` quantized where it is.
pub(crate) fn pack(weight: &Tensor, quantization: Quantization) -> Result<Weight> {
    let (rows, cols) = weight.dims2()?;
    quantization.check(cols)?;
    match (weight.device(), quantization.scheme(), quantization) {
        (Device::Cpu, Some(scheme), _) => {
            let packed = PackedMatrix::quantize(weight, scheme)?;
            Ok(Weight::Packed(Arc::new(packed)))
        }
        (Device::Cpu, None, Quantization::Gguf(dtype)) => {
            let blocks = blocks(weight, dtype)?;
            let packed = PackedMatrix::pack(dtype, rows, cols, &blocks)?;
            Ok(Weight::Packed(Arc::new(packed)))
        }
        #[cfg(feature = "cuda")]
        (Device::Cuda(_), Some(scheme), _) => {
            let values = weight.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
            on_device(&quantize(&values, rows, cols, scheme)?, weight.device())
        }
        #[cfg(feature = "cuda")]
        (Device::Cuda(_), None, Quantization::Gguf(dtype)) => {
            let blocks = blocks(weight, dtype)?;
            let matrix = BlockMatrix::new(dtype, rows, cols, &blocks, weight.device())?;
            Ok(Weight::Blocks(Arc::new(matrix)))
        }
        (device, ..) => bail!(
            "{quantization} on {:?}: expected the CPU or a CUDA device, with the feature `cuda`",
            device.location()
        ),
    }
}

/// Codes in the layout of a device.
pub(crate) fn on_device(codes: &Codes, device: &Device) -> Result<Weight> {
    match device {
        Device::Cpu => Ok(Weight::Packed(Arc::new(PackedMatrix::from_codes(codes)?))),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => {
            let matrix = BlockMatrix::from_codes(codes, device)?;
            Ok(Weight::Blocks(Arc::new(matrix)))
        }
        other => bail!(
            "{} on {:?}: expected the CPU or a CUDA device, with the feature `cuda`",
            codes.scheme,
            other.location()
        ),
    }
}

/// GGUF blocks as candle quantizes them, on the host.
fn blocks(weight: &Tensor, dtype: GgmlDType) -> Result<Vec<u8>> {
    BlockFormat::of(dtype)?;
    let weight = weight.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
    let cols = weight.dim(1)?;
    let finite = |values: &[f32]| values.iter().position(|w| !w.is_finite());
    if let Some(at) = finite(&weight.flatten_all()?.to_vec1::<f32>()?) {
        bail!(
            "weights: a value that is not finite at row {}, column {}",
            at / cols,
            at % cols
        );
    }
    Ok(QTensor::quantize(&weight, dtype)?.data()?.into_owned())
}

/// The values of a weight, `[N, K]` in f32 (a dense one as it is).
pub(crate) fn dense(weight: &Weight) -> Result<Tensor> {
    match weight {
        Weight::Dense(w) => Ok(w.clone()),
        Weight::Packed(w) => {
            let mut values = vec![0f32; w.rows() * w.cols()];
            for (row, out) in values.chunks_exact_mut(w.cols()).enumerate() {
                w.dequantize_row(row, out)?;
            }
            Tensor::from_vec(values, (w.rows(), w.cols()), &Device::Cpu)
        }
        #[cfg(feature = "cuda")]
        Weight::Blocks(w) => w.dequantize(DType::F32),
    }
}

/// The same in another form: quantized by `quantization` and back, for models whose layers are
/// candle's own tensors.
pub(crate) fn rounded(weight: &Tensor, quantization: Quantization) -> Result<Tensor> {
    let on_host = weight.to_device(&Device::Cpu)?;
    dense(&pack(&on_host, quantization)?)?
        .to_dtype(weight.dtype())?
        .to_device(weight.device())
}
