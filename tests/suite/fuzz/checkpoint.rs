//! A quantized checkpoint of the hub: a line with the `quantization_config`, and a safetensors file.

use super::CONFIG;
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::Fusion;
use candle_fused::models::{CausalLm, Checkpoint, qwen3};
use serde_json::Value;
use std::io::Write;

pub fn run(data: &[u8]) {
    let end = data.iter().position(|byte| *byte == b'\n');
    let (quantization, file) = data.split_at(end.unwrap_or(data.len()));
    let Ok(quantization) = serde_json::from_slice::<Value>(quantization) else {
        return;
    };
    let mut config: Value = serde_json::from_str(CONFIG).expect("a configuration");
    config["quantization_config"] = quantization;
    let mut path = tempfile::NamedTempFile::new().expect("a file");
    path.write_all(file.get(1..).unwrap_or_default())
        .expect("room");
    for fusion in [Fusion::all(), Fusion::none()] {
        let Ok(file) = Checkpoint::open(&[path.path()], &config.to_string()) else {
            return;
        };
        let _ = model(file, fusion);
    }
}

fn model(file: Checkpoint, fusion: Fusion) -> Result<()> {
    let config: qwen3::Config = serde_json::from_str(CONFIG).expect("a configuration");
    let vb = file.var_builder(DType::F32, &Device::Cpu);
    let mut model = CausalLm::new_fused(&config, vb, fusion)?;
    let ids = |tokens: &[u32]| Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0);
    model.forward(&ids(&[0, 1, 2])?, 0)?;
    model.forward(&ids(&[1])?, 3)?;
    Ok(())
}
