//! Step 2: layers. q, k and v are one matrix, and so are gate and up; the cache is written in place.

use super::Config;
use candle_core::{DType, Result, Tensor};
use candle_fused::nn::{
    Attention, AttentionConfig, Embedding, KvCache, Linear, Mlp, Norm, Projection, RotaryEmbedding,
    Tokens, embedding, linear_no_bias, rms_norm,
};
use candle_fused::ops::{Activation, RopeStyle};
use candle_nn::VarBuilder;

fn attention(cfg: &Config, vb: VarBuilder) -> Result<Attention> {
    let kv = cfg.kv_heads * cfg.head_dim();
    let qkv = Projection::from_linears(vec![
        linear_no_bias(cfg.hidden, cfg.hidden, vb.pp("q_proj"))?,
        linear_no_bias(cfg.hidden, kv, vb.pp("k_proj"))?,
        linear_no_bias(cfg.hidden, kv, vb.pp("v_proj"))?,
    ])?;
    let o_proj = linear_no_bias(cfg.hidden, cfg.hidden, vb.pp("o_proj"))?;
    let config = AttentionConfig {
        heads: cfg.heads,
        kv_heads: cfg.kv_heads,
        head_dim: cfg.head_dim(),
        window: None,
    };
    Ok(Attention::new(qkv, o_proj.into(), config))
}

fn mlp(cfg: &Config, vb: VarBuilder) -> Result<Mlp> {
    let gate_up = Projection::from_linears(vec![
        linear_no_bias(cfg.hidden, cfg.inner, vb.pp("gate_proj"))?,
        linear_no_bias(cfg.hidden, cfg.inner, vb.pp("up_proj"))?,
    ])?;
    let down_proj = linear_no_bias(cfg.inner, cfg.hidden, vb.pp("down_proj"))?;
    Ok(Mlp::new(gate_up, down_proj.into(), Activation::SwiGlu))
}

struct Block {
    input_norm: Norm,
    attention: Attention,
    post_norm: Norm,
    mlp: Mlp,
    cache: KvCache,
}

impl Block {
    fn new(cfg: &Config, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            input_norm: rms_norm(cfg.hidden, cfg.eps, vb.pp("input_layernorm"))?.into(),
            attention: attention(cfg, vb.pp("self_attn"))?,
            post_norm: rms_norm(cfg.hidden, cfg.eps, vb.pp("post_attention_layernorm"))?.into(),
            mlp: mlp(cfg, vb.pp("mlp"))?,
            cache: KvCache::new(2, cfg.positions),
        })
    }

    fn forward(&mut self, x: &Tensor, at: &Tokens<'_>) -> Result<Tensor> {
        let norm = Some(&self.input_norm);
        let x = self.attention.forward(x, norm, x, at, &mut self.cache)?;
        self.mlp.forward(&x, Some(&self.post_norm), &x)
    }
}

pub struct Model {
    embed_tokens: Embedding,
    rotary: RotaryEmbedding,
    blocks: Vec<Block>,
    norm: Norm,
    lm_head: Linear,
}

impl Model {
    pub fn new(cfg: &Config, vb: VarBuilder) -> Result<Self> {
        let (dims, style) = (cfg.head_dim(), RopeStyle::HalfSplit);
        let blocks = (0..cfg.layers)
            .map(|i| Block::new(cfg, vb.pp(format!("model.layers.{i}"))))
            .collect::<Result<_>>()?;
        Ok(Self {
            embed_tokens: embedding(cfg.vocab, cfg.hidden, vb.pp("model.embed_tokens"))?,
            rotary: RotaryEmbedding::with_theta(
                dims,
                cfg.theta,
                cfg.positions,
                style,
                vb.device(),
            )?,
            blocks,
            norm: rms_norm(cfg.hidden, cfg.eps, vb.pp("model.norm"))?.into(),
            lm_head: linear_no_bias(cfg.hidden, cfg.vocab, vb.pp("lm_head"))?,
        })
    }
}

impl super::Model for Model {
    fn forward(&mut self, ids: &Tensor, position: usize) -> Result<Tensor> {
        let at = Tokens {
            position,
            rotary: &self.rotary,
            mask: None,
        };
        let mut x = self.embed_tokens.forward(ids)?;
        for block in &mut self.blocks {
            x = block.forward(&x, &at)?;
        }
        let last = x.narrow(1, x.dim(1)? - 1, 1)?.squeeze(1)?;
        let logits = self.lm_head.forward_norm(&last, &self.norm)?;
        logits.to_dtype(DType::F32)
    }

    fn clear(&mut self) {
        for block in &mut self.blocks {
            block.cache.reset();
        }
    }
}
