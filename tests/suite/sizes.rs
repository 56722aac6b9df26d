//! Sizes that no model has, in configurations and in GGUF metadata: an error by the field's name, at
//! once.

use crate::gguf_file;
use crate::golden::Golden;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{DType, Device, Result};
use candle_fused::models::{gpt_neox, llama, qwen2, qwen3};
use std::io::Cursor;
use std::time::{Duration, Instant};

const FAMILIES: [&str; 4] = [
    "llama_gqa_tied",
    "qwen2_bias",
    "qwen3_qknorm",
    "gpt_neox_parallel",
];

/// The only line of the error that comes within a second.
fn refusal<T>(what: &str, load: impl FnOnce() -> Result<T>) -> String {
    let begun = Instant::now();
    let Err(error) = load() else {
        panic!("{what}: accepted");
    };
    assert!(begun.elapsed() < Duration::from_secs(1), "{what}: too slow");
    let error = error.to_string();
    let line = error.lines().next().unwrap_or_default();
    line.to_owned()
}

/// Loads a tiny model's weights with another configuration; what serde says counts as an error too.
fn load(golden: &Golden, config: serde_json::Value) -> Result<()> {
    fn read<C: serde::de::DeserializeOwned>(config: serde_json::Value) -> Result<C> {
        serde_json::from_value(config).map_err(candle_core::Error::wrap)
    }
    let vb = golden.weights(DType::F32)?;
    match golden.model_type().as_str() {
        "qwen2" => qwen2::ModelForCausalLM::new(&read(config)?, vb).map(drop),
        "qwen3" => qwen3::ModelForCausalLM::new(&read(config)?, vb).map(drop),
        "gpt_neox" => gpt_neox::ModelForCausalLM::new(&read(config)?, vb).map(drop),
        _ => {
            let config = read::<llama::LlamaConfig>(config)?.into_config(false);
            llama::Cache::new(true, DType::F32, &config, &Device::Cpu)?;
            llama::Llama::load(vb, &config).map(drop)
        }
    }
}

#[test]
fn a_configuration_with_a_huge_size_is_refused_at_once() -> Result<()> {
    for name in FAMILIES {
        let golden = Golden::open(name)?;
        load(&golden, golden.config())?;
        for field in [
            "hidden_size",
            "intermediate_size",
            "vocab_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ] {
            let mut config: serde_json::Value = golden.config();
            if config.get(field).is_none() {
                continue;
            }
            for value in [1u64 << 32, 1 << 40, (1 << 62) + 64, u64::MAX] {
                config[field] = value.into();
                let what = format!("{name} {field} = {value}");
                let said = refusal(&what, || load(&golden, config.clone()));
                assert!(said.contains(field), "{what}: {said}");
                assert!(said.contains(&value.to_string()), "{what}: {said}");
            }
        }
        let mut config: serde_json::Value = golden.config();
        config["num_hidden_layers"] = 60_000.into();
        if config.get("layer_types").is_some() {
            config["layer_types"] = serde_json::Value::Null;
        }
        let said = refusal(name, || load(&golden, config.clone()));
        assert!(said.contains("num_hidden_layers is 60000"), "{said}");
    }
    Ok(())
}

#[test]
fn a_head_too_wide_is_refused_before_its_frequencies_are_made() -> Result<()> {
    let golden = Golden::open("qwen3_qknorm")?;
    let mut config: serde_json::Value = golden.config();
    config["head_dim"] = (1u64 << 31).into();
    let said = refusal("head_dim", || load(&golden, config.clone()));
    assert!(
        said.contains("head_dim") && said.contains("2147483648"),
        "{said}"
    );
    Ok(())
}

#[test]
fn gguf_metadata_with_a_huge_size_is_refused_at_once() -> Result<()> {
    for name in FAMILIES {
        let golden = Golden::open(name)?;
        let bytes = gguf_file::bytes(&golden, GgmlDType::F32)?;
        let arch = match golden.model_type().as_str() {
            "gpt_neox" => "gptneox".to_owned(),
            other => other.to_owned(),
        };
        let refused = |field: &str, value: Value| -> Result<String> {
            let mut reader = Cursor::new(&bytes);
            let mut content = Content::read(&mut reader)?;
            let key = format!("{arch}.{field}");
            let what = format!("{name} {key} = {value:?}");
            content.metadata.insert(key, value);
            Ok(refusal(&what, || match arch.as_str() {
                "llama" => {
                    llama::ModelWeights::from_gguf(content, &mut reader, &Device::Cpu).map(drop)
                }
                "qwen2" => {
                    qwen2::ModelWeights::from_gguf(content, &mut reader, &Device::Cpu).map(drop)
                }
                "qwen3" => {
                    qwen3::ModelWeights::from_gguf(content, &mut reader, &Device::Cpu).map(drop)
                }
                _ => {
                    gpt_neox::ModelWeights::from_gguf(content, &mut reader, &Device::Cpu).map(drop)
                }
            }))
        };
        for field in [
            "attention.head_count",
            "attention.head_count_kv",
            "attention.key_length",
            "rope.dimension_count",
            "embedding_length",
            "feed_forward_length",
            "block_count",
            "vocab_size",
            "context_length",
        ] {
            for value in [1u64 << 40, u64::MAX] {
                let said = refused(field, Value::U64(value))?;
                let named = said.contains(field) && said.contains(&value.to_string());
                assert!(named, "{name} {field}: {said}");
            }
            for value in [Value::I32(-1), Value::Array(vec![Value::U32(2); 3])] {
                let said = refused(field, value)?;
                assert!(said.contains(field), "{name} {field}: {said}");
            }
        }
    }
    Ok(())
}

#[test]
fn a_tensor_whose_numbers_cannot_be_counted_is_refused() -> Result<()> {
    let golden = Golden::open("llama_gqa_tied")?;
    let bytes = gguf_file::bytes(&golden, GgmlDType::F32)?;
    let mut reader = Cursor::new(&bytes);
    let mut content = Content::read(&mut reader)?;
    let name = "blk.0.attn_norm.weight";
    let info = content.tensor_infos.get_mut(name).expect("a norm");
    info.shape = (1usize << 33, 1usize << 33).into();
    let said = refusal(name, || {
        llama::dequantize_gguf(&content, &mut reader, DType::F32, &Device::Cpu)
    });
    assert!(said.contains(name) && said.contains("8589934592"), "{said}");
    Ok(())
}
