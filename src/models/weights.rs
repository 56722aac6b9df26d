//! A decoder put together from named tensors, whatever file they are in.

use super::decoder::{Block, Decoder, Stack};
use super::names::{Names, Qkv};
use super::shape::{Head, NormKind, Shape};
use crate::Fusion;
use crate::nn::{Attention, Embedding, LayerNorm, LinearWeight, Mlp, Norm, Projection, RmsNorm};
use crate::ops::Activation;
use crate::ops::flash_attention::check_head_dim;
use candle_core::{DType, Device, Result, Tensor, bail};

/// Where tensors come from.
pub trait Source {
    /// Where the model's tensors are to be.
    fn device(&self) -> &Device;

    /// What numbers are read as, if one is asked for.
    fn dtype(&self) -> Option<DType> {
        None
    }

    fn has(&self, tensor: &str) -> bool;

    /// Whether a matrix belongs to a layer that was trained with its input rounded to 8 bits of each token.
    fn rounds_input(&self, tensor: &str) -> bool {
        let _ = tensor;
        false
    }

    /// `[rows, cols]`, on the model's device. With `heads`, the queries, keys and values that the rows
    /// hold for each head in turn are put apart: all queries, all keys, all values.
    fn matrix(
        &mut self,
        tensor: &str,
        rows: usize,
        cols: usize,
        heads: Option<usize>,
    ) -> Result<LinearWeight>;

    /// `[len]`, likewise.
    fn vector(&mut self, tensor: &str, len: usize) -> Result<Tensor>;

    /// The table `[rows, cols]`, and the head of the name `tied` that shares it.
    fn table(
        &mut self,
        tensor: &str,
        size: (usize, usize),
        tied: Option<&str>,
        fusion: Fusion,
    ) -> Result<(Embedding, Option<Projection>)>;
}

/// Puts a model together.
pub struct Loader<'a, S> {
    pub source: S,
    pub names: &'a Names,
    pub shape: &'a Shape,
    pub fusion: Fusion,
}

impl<S: Source> Loader<'_, S> {
    /// The whole model.
    ///
    /// # Errors
    /// If the shape is impossible, or a tensor is missing or has another shape, by its name.
    pub fn decoder(mut self) -> Result<Decoder> {
        self.check()?;
        let tied = match self.shape.head {
            Head::Own => false,
            Head::Embedding => true,
            Head::Either => !self.source.has(&format!("{}.weight", self.names.head)),
        };
        let (embedding, tied) = self.table(tied)?;
        let head = match tied {
            Some(head) => head,
            None => {
                let (name, rows) = (self.names.head.to_owned(), self.shape.vocab);
                self.projection(&[(name, rows)], self.shape.hidden, false)?
            }
        };
        let stack = self.layers(embedding)?;
        Ok(Decoder { stack, head })
    }

    /// The model without its head.
    ///
    /// # Errors
    /// As [`Loader::decoder`].
    pub fn stack(mut self) -> Result<Stack> {
        self.check()?;
        let (embedding, _) = self.table(false)?;
        self.layers(embedding)
    }

    /// That the shape is possible, and the last layer there, before anything is read.
    pub fn check(&self) -> Result<()> {
        self.shape.check()?;
        if !self.fusion.is_none()
            && let Some(dtype) = self.source.dtype()
            && !matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
        {
            bail!("dtype: {dtype:?}, expected f32, f16 or bf16");
        }
        if self.fusion.flash_attention {
            check_head_dim(self.source.device(), self.shape.attention.head_dim)?;
        }
        let norm = |layer: usize| {
            let Names {
                layer: stem,
                attention_norm,
                ..
            } = self.names;
            format!("{stem}.{layer}.{attention_norm}.weight")
        };
        let (layers, last) = (self.shape.layers, norm(self.shape.layers - 1));
        // A source that makes tensors as they are asked for has none of them.
        if self.source.has(&norm(0)) && !self.source.has(&last) {
            bail!("config: num_hidden_layers is {layers}, tensor `{last}` is missing");
        }
        let [q_norm, _] = self.names.head_norms;
        let q_norm = format!("{}.0.{q_norm}.weight", self.names.layer);
        // `VarBuilder::zeros` has every tensor that one can think of.
        let has_all = self.source.has("no tensor");
        if !self.shape.kind.head_norms && self.source.has(&q_norm) && !has_all {
            bail!("config: tensor `{q_norm}` is a norm of heads, which this model does not have");
        }
        let [sub_norm, _] = self.names.sub_norms;
        let sub_norm = format!("{}.0.{sub_norm}.weight", self.names.layer);
        if !self.shape.kind.sub_norms && self.source.has(&sub_norm) && !has_all {
            bail!(
                "config: tensor `{sub_norm}` is a norm in front of a matrix, which this model does not have"
            );
        }
        Ok(())
    }

    /// The embedding, and a head that shares it.
    pub fn table(&mut self, tied: bool) -> Result<(Embedding, Option<Projection>)> {
        let name = format!("{}.weight", self.names.embedding);
        let size = (self.shape.vocab, self.shape.hidden);
        let head = format!("{}.weight", self.names.head);
        let tied = tied.then_some(head.as_str());
        self.source.table(&name, size, tied, self.fusion)
    }

    fn layers(&mut self, embedding: Embedding) -> Result<Stack> {
        let blocks = (0..self.shape.layers)
            .map(|layer| self.block(layer))
            .collect::<Result<_>>()?;
        let norm = self.norm(self.names.norm)?;
        // On a GPU copies and packing are under way on the stream of this thread, which another thread's
        // stream does not wait for.
        self.source.device().synchronize()?;
        Ok(Stack {
            embedding,
            blocks,
            norm,
            max_positions: self.shape.max_positions,
        })
    }

    /// One layer.
    pub fn block(&mut self, layer: usize) -> Result<Block> {
        let (names, shape, fusion) = (self.names, self.shape, self.fusion);
        let within = |part: &str| format!("{}.{layer}.{part}", names.layer);
        let [hidden, inner] = [shape.hidden, shape.intermediate];
        let config = shape.attention_of(layer);
        let [q, ..] = config.widths();
        let qkv = self.qkv(layer)?;
        let output = [(within(names.output), hidden)];
        let output = self.projection(&output, q, shape.biases.output)?;
        let mut attention = Attention::new(qkv, output, config).with_fusion(fusion);
        if shape.kind.head_norms {
            let [q, k] = names.head_norms.map(&within);
            let mut norm = |name| self.rms_norm(name, config.head_dim);
            attention = attention.with_head_norms(norm(&q)?, norm(&k)?);
        }
        // Gate and up, each alone or both in one.
        let rows = shape.activation.inputs(inner) / names.up.len();
        let up: Vec<_> = names.up.iter().map(|name| (within(name), rows)).collect();
        let mut mlp = Mlp::new(
            self.projection(&up, hidden, shape.biases.mlp)?,
            self.projection(&[(within(names.down), hidden)], inner, shape.biases.mlp)?,
            shape.activation,
        );
        if shape.kind.sub_norms {
            let [output, down] = names.sub_norms.map(&within);
            attention = attention.with_sub_norm(self.rms_norm(&output, q)?.into());
            mlp = mlp.with_sub_norm(self.rms_norm(&down, inner)?.into());
        }
        Ok(Block {
            attention_norm: self.norm(&within(names.attention_norm))?,
            attention,
            mlp_norm: self.norm(&within(names.mlp_norm))?,
            mlp,
            parallel: shape.parallel,
            rotated: shape.rotates(layer),
        })
    }

    fn qkv(&mut self, layer: usize) -> Result<Projection> {
        let (names, shape) = (self.names, self.shape);
        let within = |part: &str| format!("{}.{layer}.{part}", names.layer);
        let (hidden, widths, bias) = (shape.hidden, shape.attention.widths(), shape.biases.qkv);
        let joint = |name: &str| (within(name), widths.iter().sum());
        match &names.qkv {
            Qkv::Three(parts) => {
                let parts: Vec<_> = parts.iter().map(|p| within(p)).zip(widths).collect();
                self.projection(&parts, hidden, bias)
            }
            Qkv::Joint(name) => self.projection(&[joint(name)], hidden, bias),
            Qkv::PerHead(name) => {
                let heads = shape.attention.heads;
                let (weights, bias) = self.tensors(&[joint(name)], hidden, bias, Some(heads))?;
                let bias = bias.map(|b| together(&b, heads)).transpose()?;
                Projection::new(weights, bias, self.fusion)
            }
        }
    }

    /// Matrices `[rows, cols]` that share their input, and their biases.
    fn projection(
        &mut self,
        parts: &[(String, usize)],
        cols: usize,
        bias: bool,
    ) -> Result<Projection> {
        let (weights, bias) = self.tensors(parts, cols, bias, None)?;
        let projection = Projection::new(weights, bias, self.fusion)?;
        let rounds =
            |(name, _): &(String, usize)| self.source.rounds_input(&format!("{name}.weight"));
        Ok(match parts.iter().all(rounds) {
            true => projection.with_rounded_input(),
            false => projection,
        })
    }

    fn tensors(
        &mut self,
        parts: &[(String, usize)],
        cols: usize,
        bias: bool,
        heads: Option<usize>,
    ) -> Result<(Vec<LinearWeight>, Option<Tensor>)> {
        let source = &mut self.source;
        let weights = parts
            .iter()
            .map(|(name, rows)| source.matrix(&format!("{name}.weight"), *rows, cols, heads))
            .collect::<Result<_>>()?;
        let mut names = parts.iter().map(|(name, _)| format!("{name}.bias"));
        if !bias && !names.any(|name| source.has(&name)) {
            return Ok((weights, None));
        }
        let biases = parts
            .iter()
            .map(|(name, rows)| source.vector(&format!("{name}.bias"), *rows))
            .collect::<Result<Vec<_>>>()?;
        let bias = match biases.as_slice() {
            [only] => only.clone(),
            _ => Tensor::cat(&biases, 0)?,
        };
        Ok((weights, Some(bias)))
    }

    fn norm(&mut self, name: &str) -> Result<Norm> {
        let (hidden, eps) = (self.shape.hidden, self.shape.eps);
        match self.shape.kind.norm {
            NormKind::Rms => Ok(Norm::Rms(self.rms_norm(name, hidden)?)),
            NormKind::Layer => {
                let weight = self.source.vector(&format!("{name}.weight"), hidden)?;
                let bias = self.source.vector(&format!("{name}.bias"), hidden)?;
                let norm = LayerNorm::from_weights(weight, Some(bias), eps, self.fusion);
                Ok(Norm::Layer(norm))
            }
        }
    }

    fn rms_norm(&mut self, name: &str, len: usize) -> Result<RmsNorm> {
        let weight = self.source.vector(&format!("{name}.weight"), len)?;
        Ok(RmsNorm::from_weight(weight, self.shape.eps, self.fusion))
    }
}

/// A matrix with its rows [`together`] if they belong to `heads`.
pub fn arranged(rows: Tensor, heads: Option<usize>) -> Result<Tensor> {
    match heads {
        Some(heads) => together(&rows, heads),
        None => Ok(rows),
    }
}

/// Rows `[heads, 3, head_dim]` as `[3, heads, head_dim]`: all queries, all keys, all values.
fn together(rows: &Tensor, heads: usize) -> Result<Tensor> {
    let count = rows.dim(0)?;
    let rest = rows.elem_count() / count.max(1);
    rows.reshape((heads, 3, count / 3 / heads, rest))?
        .transpose(0, 1)?
        .contiguous()?
        .reshape(rows.dims())
}

/// The activation of an MLP, by candle's name.
pub fn activation(act: candle_nn::Activation) -> Option<Activation> {
    use candle_nn::Activation as Act;
    match act {
        Act::Gelu => Some(Activation::Gelu),
        Act::NewGelu | Act::GeluPytorchTanh => Some(Activation::GeluTanh),
        Act::Silu | Act::Swish => Some(Activation::Silu),
        _ => None,
    }
}

/// The shape behind the check of what must be there for all of them: an MLP gated by SiLU.
pub fn gated(shape: Shape, act: candle_nn::Activation) -> Result<Shape> {
    if activation(act) != Some(Activation::Silu) {
        bail!("config: hidden_act is {act:?}, expected silu");
    }
    Ok(shape)
}
