//! Step 1: single ops stand where several of candle's did. Layers, weights and cache are as before.

use super::Config;
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_fused::ops::{
    self, Activation, AttentionParams, Epilogue, RopeStyle, Rotation, flash_attention, rope,
};
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

    /// `x + attention(norm(x))`.
    fn forward(&mut self, x: &Tensor, norm: &RmsNorm, position: usize) -> Result<Tensor> {
        let (batch, tokens, _) = x.dims3()?;
        let split =
            |t: &Tensor, heads: usize| t.reshape((batch, tokens, heads, ()))?.transpose(1, 2);
        let weights = [
            self.q_proj.weight(),
            self.k_proj.weight(),
            self.v_proj.weight(),
        ];
        let qkv =
            ops::rms_norm_linear(x, norm.weight(), norm.eps(), &weights, &Epilogue::default())?;
        let q = split(&qkv[0], self.heads)?;
        let k = split(&qkv[1], self.kv_heads)?;
        let v = split(&qkv[2], self.kv_heads)?;
        let rotation = Rotation {
            cos: &self.cos,
            sin: &self.sin,
            position,
            style: RopeStyle::HalfSplit,
        };
        let (q, k) = (rope(&q, &rotation)?, rope(&k, &rotation)?);
        let (k, v) = match &self.cache {
            Some((past_k, past_v)) => (
                Tensor::cat(&[past_k, &k], 2)?,
                Tensor::cat(&[past_v, &v], 2)?,
            ),
            None => (k, v),
        };
        self.cache = Some((k.clone(), v.clone()));
        let params = AttentionParams {
            scale: 1. / (q.dim(3)? as f32).sqrt(),
            causal: true,
            ..Default::default()
        };
        let y = flash_attention(&q, &k, &v, &params)?;
        let y = y.transpose(1, 2)?.reshape((batch, tokens, ()))?;
        let add = Epilogue {
            residuals: &[x],
            ..Default::default()
        };
        ops::linear(&y, self.o_proj.weight(), &add)
    }
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

    /// `x + mlp(norm(x))`.
    fn forward(&self, x: &Tensor, norm: &RmsNorm) -> Result<Tensor> {
        let weights = [self.gate_proj.weight(), self.up_proj.weight()];
        let gate = Epilogue {
            activation: Activation::SwiGlu,
            ..Default::default()
        };
        let hidden = ops::rms_norm_linear(x, norm.weight(), norm.eps(), &weights, &gate)?;
        let add = Epilogue {
            residuals: &[x],
            ..Default::default()
        };
        ops::linear(&hidden[0], self.down_proj.weight(), &add)
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
        let x = self.attention.forward(x, &self.input_norm, position)?;
        self.mlp.forward(&x, &self.post_norm)
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
        let (norm, head) = (&self.norm, self.lm_head.weight());
        let plain = Epilogue::default();
        let logits = ops::rms_norm_linear(&last, norm.weight(), norm.eps(), &[head], &plain)?;
        logits[0].to_dtype(DType::F32)
    }

    fn clear(&mut self) {
        for block in &mut self.blocks {
            block.attention.cache = None;
        }
    }
}
