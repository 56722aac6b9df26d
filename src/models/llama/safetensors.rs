//! Llama from a `VarBuilder`, under Hugging Face's tensor names.

use super::Config;
use crate::Fusion;
use crate::models::decoder::{Block, Decoder};
use crate::nn::{
    Attention, AttentionConfig, Embedding, GatedMlp, LinearWeight, Projection, RmsNorm,
};
use candle_core::{Result, Tensor, bail};
use candle_nn::VarBuilder;

pub(super) fn load(vb: VarBuilder, cfg: &Config, fusion: Fusion) -> Result<Decoder> {
    check(cfg)?;
    let table = vb
        .pp("model.embed_tokens")
        .get((cfg.vocab_size, cfg.hidden_size), "weight")?;
    let head = if cfg.tie_word_embeddings {
        table.clone()
    } else {
        vb.pp("lm_head")
            .get((cfg.vocab_size, cfg.hidden_size), "weight")?
    };
    let blocks = (0..cfg.num_hidden_layers)
        .map(|i| block(vb.pp(format!("model.layers.{i}")), cfg, fusion))
        .collect::<Result<_>>()?;
    Ok(Decoder {
        embedding: Embedding::Dense(table),
        blocks,
        norm: RmsNorm::load(
            cfg.hidden_size,
            cfg.rms_norm_eps,
            vb.pp("model.norm"),
            fusion,
        )?,
        head: Projection::new(vec![LinearWeight::Dense(head)], None, fusion)?,
        max_positions: cfg.max_position_embeddings,
    })
}

fn check(cfg: &Config) -> Result<()> {
    let (heads, kv_heads) = (cfg.num_attention_heads, cfg.num_key_value_heads);
    if heads == 0 || !cfg.hidden_size.is_multiple_of(heads) {
        bail!(
            "config: hidden_size {} does not divide by {heads} heads",
            cfg.hidden_size
        );
    }
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        bail!("config: {heads} heads do not divide by {kv_heads} key and value heads");
    }
    Ok(())
}

fn block(vb: VarBuilder, cfg: &Config, fusion: Fusion) -> Result<Block> {
    let hidden = cfg.hidden_size;
    let head_dim = cfg.head_dim();
    let kv_rows = head_dim * cfg.num_key_value_heads;
    let attn = vb.pp("self_attn");
    let mlp = vb.pp("mlp");
    let qkv = [("q_proj", hidden), ("k_proj", kv_rows), ("v_proj", kv_rows)];
    let gate_up = [
        ("gate_proj", cfg.intermediate_size),
        ("up_proj", cfg.intermediate_size),
    ];
    let norm = |name| RmsNorm::load(hidden, cfg.rms_norm_eps, vb.pp(name), fusion);
    Ok(Block {
        attention_norm: norm("input_layernorm")?,
        attention: Attention::new(
            linear(&attn, &qkv, hidden, fusion)?,
            linear(&attn, &[("o_proj", hidden)], hidden, fusion)?,
            AttentionConfig {
                heads: cfg.num_attention_heads,
                kv_heads: cfg.num_key_value_heads,
                head_dim,
            },
            fusion,
        ),
        mlp_norm: norm("post_attention_layernorm")?,
        mlp: GatedMlp::new(
            linear(&mlp, &gate_up, hidden, fusion)?,
            linear(
                &mlp,
                &[("down_proj", hidden)],
                cfg.intermediate_size,
                fusion,
            )?,
        ),
    })
}

/// Matrices `[rows, cols]` under `names`, and their biases if the checkpoint has them.
fn linear(
    vb: &VarBuilder,
    names: &[(&str, usize)],
    cols: usize,
    fusion: Fusion,
) -> Result<Projection> {
    let weights = names
        .iter()
        .map(|(name, rows)| {
            Ok(LinearWeight::Dense(
                vb.pp(name).get((*rows, cols), "weight")?,
            ))
        })
        .collect::<Result<_>>()?;
    let has_bias = names
        .iter()
        .any(|(name, _)| vb.pp(name).contains_tensor("bias"));
    let bias = if has_bias {
        let parts = names
            .iter()
            .map(|(name, rows)| vb.pp(name).get(*rows, "bias"))
            .collect::<Result<Vec<_>>>()?;
        Some(Tensor::cat(&parts, 0)?)
    } else {
        None
    };
    Projection::new(weights, bias, fusion)
}
