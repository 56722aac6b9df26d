//! GGUF files made from the tiny models.

use crate::golden::Golden;
use crate::support::device;
use candle_core::quantized::gguf_file::{self, Content, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{D, Device, Result, Tensor};
use candle_fused::models::llama::{Config, LlamaConfig, ModelWeights};
use candle_fused::{Fusion, models::llama::Llama3RopeConfig};
use std::collections::HashMap;
use std::io::Cursor;

/// The bytes of a GGUF file with the golden model's weights, matrices in `dtype` where their width
/// divides by its blocks.
pub fn bytes(golden: &Golden, dtype: GgmlDType) -> Result<Vec<u8>> {
    let config = golden.config::<LlamaConfig>().into_config(false);
    let weights =
        candle_core::safetensors::load(golden.folder.join("model.safetensors"), &Device::Cpu)?;
    let mut tensors = HashMap::new();
    for (name, tensor) in &weights {
        let (name, heads) = gguf_name(name, &config);
        let tensor = match heads {
            Some(heads) => neighbouring_pairs(tensor, heads)?,
            None => tensor.clone(),
        };
        let whole = tensor.dim(D::Minus1)?.is_multiple_of(dtype.block_size());
        let dtype = if tensor.rank() == 2 && whole {
            dtype
        } else {
            GgmlDType::F32
        };
        tensors.insert(name, QTensor::quantize(&tensor, dtype)?);
    }
    if let Some(scaling) = &config.rope_scaling {
        let factors = Tensor::new(rope_factors(&config, scaling), &Device::Cpu)?;
        let factors = QTensor::quantize(&factors, GgmlDType::F32)?;
        tensors.insert("rope_freqs.weight".into(), factors);
    }
    let mut file = Cursor::new(Vec::new());
    let metadata = metadata(&config);
    let metadata: Vec<_> = metadata.iter().map(|(k, v)| (*k, v)).collect();
    let tensors: Vec<_> = tensors.iter().map(|(k, v)| (k.as_str(), v)).collect();
    gguf_file::write(&mut file, &metadata, &tensors)?;
    Ok(file.into_inner())
}

/// Reads and loads a file's bytes.
pub fn load(bytes: &[u8], fusion: Fusion) -> Result<ModelWeights> {
    let mut reader = Cursor::new(bytes);
    let content = Content::read(&mut reader)?;
    ModelWeights::from_gguf_fused(content, &mut reader, &device(), fusion)
}

fn metadata(config: &Config) -> Vec<(&'static str, Value)> {
    let count = |n: usize| Value::U32(n as u32);
    let head_dim = config.hidden_size / config.num_attention_heads;
    vec![
        ("general.architecture", Value::String("llama".into())),
        (
            "llama.attention.head_count",
            count(config.num_attention_heads),
        ),
        (
            "llama.attention.head_count_kv",
            count(config.num_key_value_heads),
        ),
        ("llama.block_count", count(config.num_hidden_layers)),
        ("llama.embedding_length", count(config.hidden_size)),
        ("llama.feed_forward_length", count(config.intermediate_size)),
        (
            "llama.context_length",
            count(config.max_position_embeddings),
        ),
        ("llama.rope.dimension_count", count(head_dim)),
        ("llama.rope.freq_base", Value::F32(config.rope_theta)),
        (
            "llama.attention.layer_norm_rms_epsilon",
            Value::F32(config.rms_norm_eps as f32),
        ),
    ]
}

fn gguf_name(name: &str, config: &Config) -> (String, Option<usize>) {
    let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
    for (hugging_face, gguf) in [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
    ] {
        if let Some(rest) = name.strip_prefix(hugging_face) {
            return (format!("{gguf}{rest}"), None);
        }
    }
    let rest = name
        .strip_prefix("model.layers.")
        .expect("a layer's tensor");
    let (layer, rest) = rest.split_once('.').expect("a layer's number");
    for (hugging_face, gguf, heads) in [
        ("self_attn.q_proj", "attn_q", Some(heads)),
        ("self_attn.k_proj", "attn_k", Some(kv_heads)),
        ("self_attn.v_proj", "attn_v", None),
        ("self_attn.o_proj", "attn_output", None),
        ("mlp.gate_proj", "ffn_gate", None),
        ("mlp.up_proj", "ffn_up", None),
        ("mlp.down_proj", "ffn_down", None),
        ("input_layernorm", "attn_norm", None),
        ("post_attention_layernorm", "ffn_norm", None),
    ] {
        if let Some(rest) = rest.strip_prefix(hugging_face) {
            return (format!("blk.{layer}.{gguf}{rest}"), heads);
        }
    }
    panic!("{name} is not a llama tensor");
}

/// The row order of llama.cpp's converter: rows `i` and `i + D / 2` of a head become neighbours.
fn neighbouring_pairs(w: &Tensor, heads: usize) -> Result<Tensor> {
    let (rows, cols) = w.dims2()?;
    w.reshape((heads, 2, rows / heads / 2, cols))?
        .transpose(1, 2)?
        .reshape((rows, cols))
}

/// What llama.cpp's converter writes for scaled frequencies: each one's divisor.
fn rope_factors(config: &Config, scaling: &Llama3RopeConfig) -> Vec<f32> {
    let dim = config.hidden_size / config.num_attention_heads;
    let trained = scaling.original_max_position_embeddings as f64;
    let (low, high) = (
        f64::from(scaling.low_freq_factor),
        f64::from(scaling.high_freq_factor),
    );
    (0..dim / 2)
        .map(|i| {
            let frequency = f64::from(config.rope_theta).powf(-2. * i as f64 / dim as f64);
            let turns = trained * frequency / (2. * std::f64::consts::PI);
            let smooth = ((turns - low) / (high - low)).clamp(0., 1.);
            (1. / ((1. - smooth) / f64::from(scaling.factor) + smooth)) as f32
        })
        .collect()
}

/// Token ids `[1, T]`.
pub fn ids(tokens: &[u32]) -> Result<Tensor> {
    Tensor::new(tokens, &device())?.unsqueeze(0)
}
