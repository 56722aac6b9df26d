//! What happens to a layer, step by step.

use crate::models::decoder::Block;
use crate::models::names::{Names, Qkv};
use crate::models::shape::Shape;
use crate::nn::gptq::Hessian;
use crate::nn::{KvCache, Norm, RotaryEmbedding, Tokens};
use candle_core::{DType, Device, Module, Result, Tensor};

/// Matrices of a layer that share their input, in the order in which the input meets them; and the way out of the layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Qkv,
    Output,
    Up,
    Down,
    Leave,
}

impl Step {
    pub const ALL: [Step; 5] = [Self::Qkv, Self::Output, Self::Up, Self::Down, Self::Leave];

    /// The matrices of all layers with their inputs.
    pub fn widths(names: &Names, shape: &Shape) -> Vec<(String, usize)> {
        let [gathered, ..] = shape.attention.widths();
        let of = |(layer, step): (usize, Self)| {
            let cols = match step {
                Self::Output => gathered,
                Self::Down => shape.intermediate,
                Self::Qkv | Self::Up | Self::Leave => shape.hidden,
            };
            let matrices = step.matrices(names, layer).into_iter();
            matrices.map(move |name| (name, cols))
        };
        let layers = 0..shape.layers;
        let steps = layers.flat_map(|layer| Self::ALL.map(|step| (layer, step)));
        steps.flat_map(of).collect()
    }

    /// The names of its matrices.
    pub fn matrices(self, names: &Names, layer: usize) -> Vec<String> {
        let qkv = match &names.qkv {
            Qkv::Three(parts) => &parts[..],
            Qkv::Joint(name) | Qkv::PerHead(name) => std::slice::from_ref(name),
        };
        let parts = match self {
            Self::Qkv => qkv,
            Self::Output => std::slice::from_ref(&names.output),
            Self::Up => names.up,
            Self::Down => std::slice::from_ref(&names.down),
            Self::Leave => &[],
        };
        let within = |part: &&str| format!("{}.{layer}.{part}.weight", names.layer);
        parts.iter().map(within).collect()
    }
}

/// Some windows of the text as they go through a layer.
pub struct Part {
    /// What enters the layer, `[B, T, hidden]`.
    pub x: Tensor,
    /// What attention gathers, then the residual stream behind it.
    pub between: Option<Tensor>,
}

impl Part {
    /// Takes a step, with the matrices of those before it quantized; `hessian` collects what the step's matrices meet,
    /// if they are to be quantized.
    pub fn step(
        &mut self,
        step: Step,
        block: &Block,
        rotary: &RotaryEmbedding,
        hessian: Option<&mut Hessian>,
    ) -> Result<()> {
        match step {
            Step::Qkv => collect(hessian, &self.x, Some(&block.attention_norm)),
            Step::Output => {
                let gathered = self.gathered(block, rotary)?;
                collect(hessian, &gathered, block.attention.sub_norm())?;
                self.between = Some(gathered);
                Ok(())
            }
            Step::Up => {
                let gathered = self.between.take();
                let gathered = gathered.map_or_else(|| self.gathered(block, rotary), Ok)?;
                let h = block.attention.project_back(&gathered, &self.x)?;
                let input = block.mlp_input(&self.x, &h);
                collect(hessian, input, Some(&block.mlp_norm))?;
                self.between = Some(h);
                Ok(())
            }
            Step::Down => {
                let Some(hessian) = hessian else {
                    return Ok(());
                };
                let h = self.between.as_ref().unwrap_or(&self.x);
                let input = block.mlp_input(&self.x, h);
                let (up, _) = block.mlp.projections();
                let norm = Some(&block.mlp_norm);
                let inner = up.forward_activated(input, norm, block.mlp.activation())?;
                collect(Some(hessian), &inner, block.mlp.sub_norm())
            }
            Step::Leave => {
                let h = self.between.take().unwrap_or_else(|| self.x.clone());
                self.x = block.behind_attention(&self.x, &h)?;
                Ok(())
            }
        }
    }

    /// What the heads gather.
    fn gathered(&self, block: &Block, rotary: &RotaryEmbedding) -> Result<Tensor> {
        let (batch, tokens, _) = self.x.dims3()?;
        let attention = &block.attention;
        let mut cache: KvCache = attention.new_cache(batch, tokens, DType::F32, &Device::Cpu)?;
        let at = Tokens {
            position: 0,
            rotary,
            mask: None,
        };
        attention.attend(&self.x, Some(&block.attention_norm), &at, &mut cache)
    }
}

/// Adds `norm(x)` to the inputs that are collected, if they are.
fn collect(hessian: Option<&mut Hessian>, x: &Tensor, norm: Option<&Norm>) -> Result<()> {
    match (hessian, norm) {
        (Some(hessian), Some(norm)) => hessian.add(&norm.forward(x)?),
        (Some(hessian), None) => hessian.add(x),
        (None, _) => Ok(()),
    }
}
