//! Models whose outputs Hugging Face transformers gave in float64, and models in a quantized file.

use candle_core::{DType, Device, Result, Tensor, safetensors};
use candle_fused::Fusion;
use candle_fused::generation::{Generation, Options};
use candle_fused::models::llama::{Cache, Config, Llama, LlamaConfig};
use candle_fused::models::{CausalLm, qwen3};
use candle_fused::quant::{QuantizedFile, Recipe};
use candle_nn::VarBuilder;
use serde::de::DeserializeOwned;
use std::collections::HashMap;

const CPU: Device = Device::Cpu;

/// What quantized activations may change of a tiny random model's logits. Single products are held closer, in `ops.rs`.
const OF_ACTIVATIONS: f64 = 2e-2;

/// A folder of tests/data/goldens.
struct Golden {
    config: &'static str,
    weights: &'static [u8],
    outputs: &'static [u8],
}

macro_rules! golden {
    ($name:literal) => {
        Golden {
            config: include_str!(concat!("../../data/goldens/", $name, "/config.json")),
            weights: include_bytes!(concat!("../../data/goldens/", $name, "/model.safetensors")),
            outputs: include_bytes!(concat!("../../data/goldens/", $name, "/golden.safetensors")),
        }
    };
}

const LLAMA: Golden = golden!("llama_gqa_tied");
const QWEN3: Golden = golden!("qwen3_qknorm");

impl Golden {
    fn config<C: DeserializeOwned>(&self) -> C {
        serde_json::from_str(self.config).expect("a configuration")
    }

    fn vb(&self) -> Result<VarBuilder<'static>> {
        VarBuilder::from_buffered_safetensors(self.weights.to_vec(), DType::F32, &CPU)
    }

    fn outputs(&self) -> Result<HashMap<String, Tensor>> {
        safetensors::load_buffer(self.outputs, &CPU)
    }

    fn ids(&self) -> Result<Tensor> {
        self.outputs()?["input_ids"].to_dtype(DType::U32)
    }
}

/// `max |a - b| / max |b|`.
fn relative_error(a: &Tensor, b: &Tensor) -> Result<f64> {
    let values = |t: &Tensor| t.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    let (a, b) = (values(a)?, values(b)?);
    assert_eq!(a.len(), b.len());
    assert!(a.iter().chain(&b).all(|v| v.is_finite()));
    let differences = a.iter().zip(&b).map(|(a, b)| (a - b).abs());
    let largest = b.iter().fold(0f64, |most, b| most.max(b.abs()));
    Ok(differences.fold(0f64, f64::max) / largest)
}

fn llama(fusion: Fusion) -> Result<(Llama, Config)> {
    let config = LLAMA.config::<LlamaConfig>().into_config(false);
    Ok((Llama::load_fused(LLAMA.vb()?, &config, fusion)?, config))
}

pub fn goldens() -> Result<()> {
    for fusion in [Fusion::all(), Fusion::none()] {
        let (model, config) = llama(fusion)?;
        let mut cache = Cache::new(true, DType::F32, &config, &CPU)?;
        let (_, logits) = model.hidden_states(&LLAMA.ids()?, 0, &mut cache)?;
        let error = relative_error(&logits, &LLAMA.outputs()?["logits"])?;
        assert!(error < 1e-4, "llama, {fusion}: {error:e}");

        let config: qwen3::Config = QWEN3.config();
        let mut model = CausalLm::new_fused(&config, QWEN3.vb()?, fusion)?;
        let (_, logits) = model.hidden_states(&QWEN3.ids()?, 0)?;
        let error = relative_error(&logits, &QWEN3.outputs()?["logits"])?;
        assert!(error < 1e-4, "qwen3, {fusion}: {error:e}");
    }
    Ok(())
}

/// The likeliest tokens are those of transformers.
pub fn tokens() -> Result<()> {
    let (model, _) = llama(Fusion::all())?;
    let expected = LLAMA.outputs()?["greedy"].to_dtype(DType::U32)?;
    let expected = expected.get(0)?.to_vec1::<u32>()?;
    let options = Options {
        positions: Some(64),
        ..Default::default()
    };
    let mut generation = Generation::new(&model, &options)?;
    let mut tokens = vec![generation.extend(0, &LLAMA.ids()?.get(0)?.to_vec1::<u32>()?)?];
    while tokens.len() < expected.len() {
        tokens.extend(generation.step()?[0]);
    }
    assert_eq!(tokens, expected);
    Ok(())
}

/// Quantized weights in fused products, against the same weights as numbers.
pub fn quantized() -> Result<()> {
    let config = LLAMA.config::<LlamaConfig>().into_config(false);
    for scheme in ["int8", "ternary-row"] {
        let logits = |fusion| -> Result<Tensor> {
            let recipe = Recipe::new(scheme.parse()?);
            let model = Llama::load_quantized(LLAMA.vb()?, &config, &recipe, fusion)?;
            let mut cache = Cache::new(true, DType::F32, &config, &CPU)?;
            model.forward(&LLAMA.ids()?, 0, &mut cache)
        };
        let error = relative_error(&logits(Fusion::all())?, &logits(Fusion::none())?)?;
        assert!(error < OF_ACTIVATIONS, "{scheme}: {error:e}");
    }
    Ok(())
}

/// The configuration of the files that are the seeds of the fuzz target.
const FILES_CONFIG: &str = r#"{"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "vocab_size": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": true, "hidden_act": "silu", "attention_bias": false}"#;

pub fn quantized_file() -> Result<()> {
    let files: [(&str, &[u8]); 3] = [
        (
            "int8",
            include_bytes!("../../data/fuzz/quantized_file/seed-int8"),
        ),
        (
            "int4-g32-z",
            include_bytes!("../../data/fuzz/quantized_file/seed-int4-g32-z"),
        ),
        (
            "ternary-row",
            include_bytes!("../../data/fuzz/quantized_file/seed-ternary-row"),
        ),
    ];
    let config: qwen3::Config = serde_json::from_str(FILES_CONFIG).expect("a configuration");
    let ids = Tensor::new(&[[1u32, 5, 9, 2]], &CPU)?;
    for (name, bytes) in files {
        let file = QuantizedFile::from_bytes(bytes)?;
        let logits = |fusion| {
            let mut model = CausalLm::from_quantized(&config, &file, DType::F32, &CPU, fusion)?;
            model.forward(&ids, 0)
        };
        let error = relative_error(&logits(Fusion::all())?, &logits(Fusion::none())?)?;
        assert!(error < OF_ACTIVATIONS, "{name}: {error:e}");
    }
    assert!(QuantizedFile::from_bytes(&files[0].1[..4096]).is_err());
    Ok(())
}
