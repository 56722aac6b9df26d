//! Before: candle's layers, a cache that grows by concatenation, a mask, repeated keys.

use super::Config;
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::ops::softmax_last_dim;
use candle_nn::rotary_emb::rope;
use candle_nn::{Embedding, Linear, RmsNorm, VarBuilder, embedding, linear_no_bias, rms_norm};

struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    cos: Tensor,
    sin: Tensor,
    heads: usize,
    kv_heads: usize,
    cache: Option<(Tensor, Tensor)>,
}

impl Attention {
    fn new(cfg: &Config, (cos, sin): &(Tensor, Tensor), vb: VarBuilder) -> Result<Self> {
        let kv = cfg.kv_heads * cfg.head_dim();
        Ok(Self {
            q_proj: linear_no_bias(cfg.hidden, cfg.hidden, vb.pp("q_proj"))?,
            k_proj: linear_no_bias(cfg.hidden, kv, vb.pp("k_proj"))?,
            v_proj: linear_no_bias(cfg.hidden, kv, vb.pp("v_proj"))?,
            o_proj: linear_no_bias(cfg.hidden, cfg.hidden, vb.pp("o_proj"))?,
            cos: cos.clone(),
            sin: sin.clone(),
            heads: cfg.heads,
            kv_heads: cfg.kv_heads,
            cache: None,
        })
    }

    fn forward(&mut self, x: &Tensor, position: usize) -> Result<Tensor> {
        let (batch, tokens, _) = x.dims3()?;
        let split = |t: Tensor, heads: usize| {
            t.reshape((batch, tokens, heads, ()))?
                .transpose(1, 2)?
                .contiguous()
        };
        let q = split(self.q_proj.forward(x)?, self.heads)?;
        let k = split(self.k_proj.forward(x)?, self.kv_heads)?;
        let v = split(self.v_proj.forward(x)?, self.kv_heads)?;
        let cos = self.cos.narrow(0, position, tokens)?;
        let sin = self.sin.narrow(0, position, tokens)?;
        let (q, k) = (rope(&q, &cos, &sin)?, rope(&k, &cos, &sin)?);
        let (k, v) = match &self.cache {
            Some((past_k, past_v)) => (
                Tensor::cat(&[past_k, &k], 2)?,
                Tensor::cat(&[past_v, &v], 2)?,
            ),
            None => (k, v),
        };
        self.cache = Some((k.clone(), v.clone()));
        let groups = self.heads / self.kv_heads;
        let (k, v) = (repeat_kv(&k, groups)?, repeat_kv(&v, groups)?);
        let scale = 1. / (q.dim(3)? as f64).sqrt();
        let mut scores = (q.matmul(&k.t()?)? * scale)?;
        if tokens > 1 {
            let mask = causal_mask(tokens, position, x.device())?;
            scores = scores.broadcast_add(&mask.to_dtype(x.dtype())?)?;
        }
        let y = softmax_last_dim(&scores)?.matmul(&v)?;
        let y = y.transpose(1, 2)?.reshape((batch, tokens, ()))?;
        self.o_proj.forward(&y)
    }
}

/// Every key and value head once for each query head that reads it.
fn repeat_kv(x: &Tensor, groups: usize) -> Result<Tensor> {
    let (batch, heads, tokens, dim) = x.dims4()?;
    x.unsqueeze(2)?
        .expand((batch, heads, groups, tokens, dim))?
        .reshape((batch, heads * groups, tokens, dim))
}

fn causal_mask(tokens: usize, position: usize, device: &Device) -> Result<Tensor> {
    let keys = position + tokens;
    let mask: Vec<f32> = (0..tokens)
        .flat_map(|i| {
            (0..keys).map(move |j| {
                if j > position + i {
                    f32::NEG_INFINITY
                } else {
                    0.
                }
            })
        })
        .collect();
    Tensor::from_vec(mask, (tokens, keys), device)
}

struct Mlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl Mlp {
    fn new(cfg: &Config, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            gate_proj: linear_no_bias(cfg.hidden, cfg.inner, vb.pp("gate_proj"))?,
            up_proj: linear_no_bias(cfg.hidden, cfg.inner, vb.pp("up_proj"))?,
            down_proj: linear_no_bias(cfg.inner, cfg.hidden, vb.pp("down_proj"))?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let hidden = (self.gate_proj.forward(x)?.silu()? * self.up_proj.forward(x)?)?;
        self.down_proj.forward(&hidden)
    }
}

struct Block {
    input_norm: RmsNorm,
    attention: Attention,
    post_norm: RmsNorm,
    mlp: Mlp,
}

impl Block {
    fn new(cfg: &Config, rotary: &(Tensor, Tensor), vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            input_norm: rms_norm(cfg.hidden, cfg.eps, vb.pp("input_layernorm"))?,
            attention: Attention::new(cfg, rotary, vb.pp("self_attn"))?,
            post_norm: rms_norm(cfg.hidden, cfg.eps, vb.pp("post_attention_layernorm"))?,
            mlp: Mlp::new(cfg, vb.pp("mlp"))?,
        })
    }

    fn forward(&mut self, x: &Tensor, position: usize) -> Result<Tensor> {
        let normed = self.input_norm.forward(x)?;
        let x = (x + self.attention.forward(&normed, position)?)?;
        let normed = self.post_norm.forward(&x)?;
        &x + self.mlp.forward(&normed)?
    }
}

pub struct Model {
    embed_tokens: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    lm_head: Linear,
}

impl Model {
    pub fn new(cfg: &Config, vb: VarBuilder) -> Result<Self> {
        let rotary = rotary_tables(cfg, vb.dtype(), vb.device())?;
        let blocks = (0..cfg.layers)
            .map(|i| Block::new(cfg, &rotary, vb.pp(format!("model.layers.{i}"))))
            .collect::<Result<_>>()?;
        Ok(Self {
            embed_tokens: embedding(cfg.vocab, cfg.hidden, vb.pp("model.embed_tokens"))?,
            blocks,
            norm: rms_norm(cfg.hidden, cfg.eps, vb.pp("model.norm"))?,
            lm_head: linear_no_bias(cfg.hidden, cfg.vocab, vb.pp("lm_head"))?,
        })
    }
}

/// Cosines and sines of every position, `[positions, head_dim / 2]`.
fn rotary_tables(cfg: &Config, dtype: DType, device: &Device) -> Result<(Tensor, Tensor)> {
    let dim = cfg.head_dim();
    let frequencies: Vec<f32> = (0..dim)
        .step_by(2)
        .map(|i| 1. / cfg.theta.powf(i as f32 / dim as f32))
        .collect();
    let frequencies = Tensor::from_vec(frequencies, (1, dim / 2), device)?;
    let positions = Tensor::arange(0, cfg.positions as u32, device)?.to_dtype(DType::F32)?;
    let angles = positions.unsqueeze(1)?.matmul(&frequencies)?;
    Ok((
        angles.cos()?.to_dtype(dtype)?,
        angles.sin()?.to_dtype(dtype)?,
    ))
}

impl super::Model for Model {
    fn forward(&mut self, ids: &Tensor, position: usize) -> Result<Tensor> {
        let mut x = self.embed_tokens.forward(ids)?;
        for block in &mut self.blocks {
            x = block.forward(&x, position)?;
        }
        let last = x.narrow(1, x.dim(1)? - 1, 1)?.squeeze(1)?;
        let logits = self.lm_head.forward(&self.norm.forward(&last)?)?;
        logits.to_dtype(DType::F32)
    }

    fn clear(&mut self) {
        for block in &mut self.blocks {
            block.attention.cache = None;
        }
    }
}
