//! GGUF files made from the tiny models, as llama.cpp's converter makes them.

use crate::golden::Golden;
use crate::subject;
use crate::support::device;
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{D, Device, Result, Tensor};
use candle_fused::models::llama::{Config, LlamaConfig, ModelWeights};
use candle_fused::{Fusion, models::llama::Llama3RopeConfig};
use std::collections::HashMap;
use std::io::Cursor;

/// The bytes of a GGUF file with the golden model's weights, matrices in `dtype` where their width
/// divides by its blocks.
pub fn bytes(golden: &Golden, dtype: GgmlDType) -> Result<Vec<u8>> {
    let weights =
        candle_core::safetensors::load(golden.folder.join("model.safetensors"), &Device::Cpu)?;
    mixed_bytes(&golden.config(), &weights, |_| dtype)
}

/// The same of weights by Hugging Face's names, each matrix in the type that its GGUF name gets.
pub fn mixed_bytes(
    config: &serde_json::Value,
    weights: &HashMap<String, Tensor>,
    dtype: impl Fn(&str) -> GgmlDType,
) -> Result<Vec<u8>> {
    let mut tensors = HashMap::new();
    for (name, tensor) in weights {
        let (name, tensor) = converted(name, tensor, config)?;
        let dtype = dtype(&name);
        let whole = tensor.dim(D::Minus1)?.is_multiple_of(dtype.block_size());
        let dtype = if tensor.rank() == 2 && whole {
            dtype
        } else {
            GgmlDType::F32
        };
        tensors.insert(name, QTensor::quantize(&tensor, dtype)?);
    }
    if config["model_type"] == "llama" {
        let config: LlamaConfig = serde_json::from_value(config.clone()).expect("a configuration");
        let config = config.into_config(false);
        if let Some(scaling) = &config.rope_scaling {
            let factors = Tensor::new(rope_factors(&config, scaling), &Device::Cpu)?;
            let factors = QTensor::quantize(&factors, GgmlDType::F32)?;
            tensors.insert("rope_freqs.weight".into(), factors);
        }
    }
    let rope = &config["rope_parameters"];
    for (factors, name) in [
        ("short_factor", "rope_factors_short.weight"),
        ("long_factor", "rope_factors_long.weight"),
    ] {
        if let Some(factors) = rope[factors].as_array() {
            let factors: Vec<_> = factors
                .iter()
                .map(|f| f.as_f64().expect("a number") as f32)
                .collect();
            let factors = Tensor::new(factors, &Device::Cpu)?;
            tensors.insert(name.into(), QTensor::quantize(&factors, GgmlDType::F32)?);
        }
    }
    let mut file = Cursor::new(Vec::new());
    let metadata = metadata(config);
    let metadata: Vec<_> = metadata.iter().map(|(k, v)| (k.as_str(), v)).collect();
    let tensors: Vec<_> = tensors.iter().map(|(k, v)| (k.as_str(), v)).collect();
    gguf_file::write(&mut file, &metadata, &tensors)?;
    Ok(file.into_inner())
}

/// Reads and loads a llama file's bytes.
pub fn load(bytes: &[u8], fusion: Fusion) -> Result<ModelWeights> {
    subject::open(bytes, fusion)
}

fn count(config: &serde_json::Value, key: &str) -> Option<usize> {
    Some(config[key].as_u64()? as usize)
}

fn metadata(config: &serde_json::Value) -> Vec<(String, Value)> {
    let neox = config["model_type"] == "gpt_neox";
    let arch = match config["model_type"].as_str() {
        Some("gpt_neox") => "gptneox",
        Some("mistral") => "llama",
        other => other.expect("a model type"),
    };
    let number = |key: &str| count(config, key).unwrap_or_else(|| panic!("no {key}"));
    let (hidden, heads) = (number("hidden_size"), number("num_attention_heads"));
    let head_dim = count(config, "head_dim").unwrap_or(hidden / heads);
    let rope = &config["rope_parameters"];
    let part = rope["partial_rotary_factor"].as_f64().unwrap_or(1.);
    let mut values = vec![("general.architecture".into(), Value::String(arch.into()))];
    let mut add = |key: &str, value| values.push((format!("{arch}.{key}"), value));
    for (key, n) in [
        ("attention.head_count", heads),
        ("block_count", number("num_hidden_layers")),
        ("embedding_length", hidden),
        ("feed_forward_length", number("intermediate_size")),
        ("context_length", number("max_position_embeddings")),
        ("rope.dimension_count", (part * head_dim as f64) as usize),
    ] {
        add(key, Value::U32(n as u32));
    }
    let float = |value: &serde_json::Value| Value::F32(value.as_f64().expect("a number") as f32);
    if neox {
        let parallel = config["use_parallel_residual"].as_bool().expect("a bool");
        add("use_parallel_residual", Value::Bool(parallel));
        add(
            "attention.layer_norm_epsilon",
            float(&config["layer_norm_eps"]),
        );
        return values;
    }
    let kv_heads = number("num_key_value_heads");
    add("attention.head_count_kv", Value::U32(kv_heads as u32));
    add(
        "attention.layer_norm_rms_epsilon",
        float(&config["rms_norm_eps"]),
    );
    add("rope.freq_base", float(&rope["rope_theta"]));
    if let Some(window) = count(config, "sliding_window") {
        add("attention.sliding_window", Value::U32(window as u32));
    }
    if let Some(original) = count(rope, "original_max_position_embeddings") {
        add(
            "rope.scaling.original_context_length",
            Value::U32(original as u32),
        );
        let factor = number("max_position_embeddings") as f64 / original as f64;
        let magnitude = (1. + factor.ln() / (original as f64).ln()).sqrt();
        add("rope.scaling.attn_factor", Value::F32(magnitude as f32));
    }
    if config["head_dim"].is_u64() {
        add("attention.key_length", Value::U32(head_dim as u32));
        add("attention.value_length", Value::U32(head_dim as u32));
    }
    values
}

/// A tensor under its GGUF name, with its rows in GGUF's order.
fn converted(name: &str, tensor: &Tensor, config: &serde_json::Value) -> Result<(String, Tensor)> {
    for (hugging_face, gguf) in [
        ("model.embed_tokens", "token_embd"),
        ("gpt_neox.embed_in", "token_embd"),
        ("model.norm", "output_norm"),
        ("gpt_neox.final_layer_norm", "output_norm"),
        ("lm_head", "output"),
        ("embed_out", "output"),
    ] {
        if let Some(rest) = name.strip_prefix(hugging_face) {
            return Ok((format!("{gguf}{rest}"), tensor.clone()));
        }
    }
    let rest = name
        .strip_prefix("model.layers.")
        .or_else(|| name.strip_prefix("gpt_neox.layers."))
        .expect("a layer's tensor");
    let (layer, rest) = rest.split_once('.').expect("a layer's number");
    let (part, kind) = rest.rsplit_once('.').expect("a kind");
    let part = match part {
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" | "attention.dense" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "attention.query_key_value" | "self_attn.qkv_proj" => "attn_qkv",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" | "mlp.gate_up_proj" | "mlp.dense_h_to_4h" => "ffn_up",
        "mlp.down_proj" | "mlp.dense_4h_to_h" => "ffn_down",
        "input_layernorm" => "attn_norm",
        "post_attention_layernorm" => "ffn_norm",
        _ => panic!("{name} is no model's tensor"),
    };
    let heads = |key| count(config, key).expect("heads");
    let permuted =
        ["llama", "mistral", "smollm3"].contains(&config["model_type"].as_str().expect("a name"));
    let tensor = match part {
        "attn_q" if permuted => neighbouring_pairs(tensor, heads("num_attention_heads"))?,
        "attn_k" if permuted => neighbouring_pairs(tensor, heads("num_key_value_heads"))?,
        "attn_qkv" if config["model_type"] == "gpt_neox" => {
            queries_keys_values(tensor, heads("num_attention_heads"))?
        }
        _ => tensor.clone(),
    };
    Ok((format!("blk.{layer}.{part}.{kind}"), tensor))
}

/// GPT-NeoX's rows, each head's queries, keys and values in turn, as all queries, all keys, all
/// values.
fn queries_keys_values(rows: &Tensor, heads: usize) -> Result<Tensor> {
    let count = rows.dim(0)?;
    let parts = rows.reshape((heads, 3, count / 3 / heads, rows.elem_count() / count))?;
    let part = |i: usize| {
        let mut dims = rows.dims().to_vec();
        dims[0] /= 3;
        parts.narrow(1, i, 1)?.contiguous()?.reshape(dims)
    };
    Tensor::cat(&[part(0)?, part(1)?, part(2)?], 0)
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
