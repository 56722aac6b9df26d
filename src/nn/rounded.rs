//! Quantized weights for candle's own layers.

use super::pack::{named, rounded};
use super::recipe::Recipe;
use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;

/// A backend of a `VarBuilder` that hands out what quantized weights are worth: each matrix is
/// quantized by a [`Recipe`] and turned back into numbers, as any candle model takes them.
///
/// So a foreign model shows the quality of a quantization without a change. Its size and speed are
/// those of dense weights: `candle_nn::Linear` holds a `Tensor`, and a `Tensor` holds none of these
/// formats. For those see [`while_loading`](crate::quant::while_loading) and
/// [`quantize_linear`](crate::quant::quantize_linear).
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::quant::{Quantization, Recipe, Rounded};
/// use candle_nn::VarBuilder;
/// use std::collections::HashMap;
/// let weight = Tensor::randn(0f32, 1., (8, 64), &Device::Cpu)?;
/// let tensors = HashMap::from([("layer.weight".to_owned(), weight)]);
/// let rounded = Rounded::new(Box::new(tensors), Recipe::new(Quantization::Int8));
/// let vb = VarBuilder::from_backend(Box::new(rounded), DType::F32, Device::Cpu);
/// let layer = candle_nn::linear_no_bias(64, 8, vb.pp("layer"))?;
/// # assert_eq!(layer.weight().dims(), [8, 64]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub struct Rounded<'a> {
    tensors: Box<dyn SimpleBackend + 'a>,
    recipe: Recipe,
}

impl<'a> Rounded<'a> {
    /// Over another backend, such as `candle_core::safetensors::MmapedSafetensors`. Matrices are
    /// tensors of two dimensions whose name ends in `.weight`. Names with `embed` or `wte` in them are
    /// taken for the embedding, those with `head` or `embed_out` for the head.
    pub fn new(tensors: Box<dyn SimpleBackend + 'a>, recipe: Recipe) -> Self {
        Self { tensors, recipe }
    }

    fn round(&self, name: &str, tensor: Tensor) -> Result<Tensor> {
        if tensor.rank() != 2 || !name.ends_with(".weight") {
            return Ok(tensor);
        }
        let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
        let asked = if has(&["head", "embed_out"]) {
            self.recipe.of_head(name)
        } else if has(&["embed", "wte"]) {
            self.recipe.of_embedding(name)
        } else {
            self.recipe.of(name)
        };
        match asked {
            Some(quantization) => named(name, rounded(&tensor, quantization)),
            None => Ok(tensor),
        }
    }
}

impl SimpleBackend for Rounded<'_> {
    fn get(&self, s: Shape, name: &str, h: Init, dtype: DType, dev: &Device) -> Result<Tensor> {
        self.round(name, self.tensors.get(s, name, h, dtype, dev)?)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, dev: &Device) -> Result<Tensor> {
        self.round(name, self.tensors.get_unchecked(name, dtype, dev)?)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.tensors.contains_tensor(name)
    }
}
