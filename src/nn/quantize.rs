//! Single layers quantized, for models that this crate does not have.

use super::Linear;
use super::pack::{named, pack};
use super::recipe::Recipe;
use crate::quant::Scheme;
use candle_core::Result;
use std::cell::RefCell;

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

/// What [`while_loading`] has been asked for, and the matrices that were read since.
struct Loading {
    recipe: Recipe,
    matrices: Vec<String>,
}

thread_local! {
    static LOADING: RefCell<Option<Loading>> = const { RefCell::new(None) };
}

/// Runs `load`, in which the layers that [`nn::linear`](fn@crate::nn::linear),
/// [`nn::linear_no_bias`](crate::nn::linear_no_bias) and [`nn::linear_b`](crate::nn::linear_b) make on
/// this thread are quantized by `recipe`, under the names that their `VarBuilder` gives them: a candle
/// model that takes its layers from [`nn`](crate::nn) is quantized without another change. `recipe`'s
/// head and embedding do not count here, since a layer does not know what it is; patterns do.
///
/// # Errors
/// Those of `load`, or if one of `recipe`'s patterns matches none of these layers.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_fused::quant::{self, Quantization, Recipe};
/// use candle_fused::nn;
/// use candle_nn::VarBuilder;
/// let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let recipe = Recipe::new(Quantization::Int8).with("head.*", None);
/// let (layer, head) = quant::while_loading(&recipe, || {
///     let layer = nn::linear(64, 32, vb.pp("layer"))?;
///     candle_core::Result::Ok((layer, nn::linear(32, 8, vb.pp("head"))?))
/// })?;
/// assert!(layer.is_quantized() && !head.is_quantized());
/// // No layer has such a name.
/// let recipe = recipe.with("heads.*", None);
/// let refused = quant::while_loading(&recipe, || nn::linear(32, 8, vb.pp("head")));
/// assert!(refused.unwrap_err().to_string().contains("`heads.*` matches no matrix"));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn while_loading<T, E: From<candle_core::Error>>(
    recipe: &Recipe,
    load: impl FnOnce() -> std::result::Result<T, E>,
) -> std::result::Result<T, E> {
    /// Puts back what was there, even if `load` panics.
    struct Outer(Option<Loading>);
    impl Drop for Outer {
        fn drop(&mut self) {
            LOADING.set(self.0.take());
        }
    }
    let loading = Loading {
        recipe: recipe.clone(),
        matrices: Vec::new(),
    };
    let _outer = Outer(LOADING.replace(Some(loading)));
    let loaded = load()?;
    let matrices = || {
        LOADING
            .take()
            .map_or(Vec::new(), |loading| loading.matrices)
    };
    recipe.check_patterns(matrices)?;
    Ok(loaded)
}

/// A layer that was just read, quantized if [`while_loading`] asks for it.
pub(crate) fn loaded(layer: candle_nn::Linear, name: &str) -> Result<Linear> {
    let name = format!("{name}.weight");
    let asked = LOADING.with_borrow_mut(|loading| {
        let loading = loading.as_mut()?;
        loading.matrices.push(name.clone());
        loading.recipe.of(&name)
    });
    match asked {
        None => Ok(layer.into()),
        Some(quantization) => {
            let weight = named(&name, pack(layer.weight(), quantization))?;
            Linear::from_quantized(weight, layer.bias().cloned(), layer.weight().device())
        }
    }
}
