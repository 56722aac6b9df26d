//! A safetensors file with quantized matrices, mapped.

use candle_core::{DType, Device, Result, Tensor};
use candle_fused::Fusion;
use candle_fused::models::{CausalLm, qwen3};
use candle_fused::ops::{Epilogue, Prologue, Weight, quant_linear};
use candle_fused::quant::QuantizedFile;
use candle_nn::var_builder::SimpleBackend;
use safetensors::SafeTensors;
use std::io::Write;
use std::sync::Arc;

/// The configuration of the model that the seeds hold.
pub const CONFIG: &str = r#"{"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "vocab_size": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": true, "hidden_act": "silu", "attention_bias": false}"#;

pub fn run(data: &[u8]) {
    let mut path = tempfile::NamedTempFile::new().expect("a file");
    path.write_all(data).expect("room");
    // SAFETY: the file is this function's own, and nobody changes it while it is mapped.
    let Ok(file) = (unsafe { QuantizedFile::open(path.path()) }) else {
        return;
    };
    let (_, header) = SafeTensors::read_metadata(data).expect("what has just been read");
    for name in header.tensors().into_keys() {
        let _ = tensor(&file, &name);
    }
    let _ = model(&file);
}

/// Its numbers, and as a matrix a product.
fn tensor(file: &QuantizedFile, name: &str) -> Result<()> {
    let dense = file.get_unchecked(name, DType::F32, &Device::Cpu)?;
    if !file.is_matrix(name) {
        return Ok(());
    }
    let (rows, cols) = dense.dims2()?;
    let weight = Weight::Packed(Arc::new(file.matrix(name, rows, cols)?));
    let x = Tensor::ones((2, cols), DType::F32, &Device::Cpu)?;
    quant_linear(&x, Prologue::None, &[weight], &Epilogue::default())?;
    Ok(())
}

fn model(file: &QuantizedFile) -> Result<()> {
    let config: qwen3::Config = serde_json::from_str(CONFIG).expect("a configuration");
    let (dtype, device) = (DType::F32, Device::Cpu);
    let mut model = CausalLm::from_quantized(&config, file, dtype, &device, Fusion::all())?;
    let ids = |tokens: &[u32]| Tensor::new(tokens, &device)?.unsqueeze(0);
    model.forward(&ids(&[0, 1, 2])?, 0)?;
    model.forward(&ids(&[1])?, 3)?;
    Ok(())
}
