//! A `config.json`, and the model that it describes.

use crate::common::architecture::{Architecture, Config};
use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use candle_fused::Fusion;
use candle_fused::models::{self, CausalLm, llama};
use candle_fused::quant::{Quantization, Recipe};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use serde_json::Value;
use std::sync::atomic::{AtomicUsize, Ordering};

pub fn run(data: &[u8]) {
    let Ok(json) = serde_json::from_slice::<Value>(data) else {
        return;
    };
    let named = json["model_type"].as_str().unwrap_or("llama");
    let Ok(config) = Architecture::named(named).map(|a| a.config(json)) else {
        return;
    };
    let Ok(config) = config else { return };
    for fusion in [Fusion::all(), Fusion::none()] {
        let _ = match &config {
            Config::Llama(config) => llama_model(config, fusion),
            Config::Qwen2(config) => model(config, fusion),
            Config::Qwen3(config) => model(config, fusion),
            Config::GptNeox(config) => model(config, fusion),
            Config::Mistral(config) => model(config, fusion),
            Config::Phi3(config) => model(config, fusion),
            Config::SmolLm3(config) => model(config, fusion),
            Config::BitNet(config) => model(config, fusion),
        };
    }
}

fn llama_model(config: &llama::Config, fusion: Fusion) -> Result<()> {
    let mut cache = llama::Cache::new(true, DType::F32, config, &Device::Cpu)?;
    let model = llama::Llama::load_fused(checkpoint(), config, fusion)?;
    model.forward(&ids(&[0, 1, 0])?, 0, &mut cache)?;
    model.forward(&ids(&[1])?, 3, &mut cache)?;
    Ok(())
}

fn model<C: models::Architecture>(config: &C, fusion: Fusion) -> Result<()> {
    let recipe = Recipe::new(Quantization::Int8);
    let quantized = CausalLm::new_quantized(config, checkpoint(), &recipe, fusion);
    for model in [CausalLm::new_fused(config, checkpoint(), fusion), quantized] {
        let mut model = model?;
        model.forward(&ids(&[0, 1, 0])?, 0)?;
        model.forward(&ids(&[1])?, 3)?;
    }
    Ok(())
}

fn ids(tokens: &[u32]) -> Result<Tensor> {
    Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)
}

/// Values of all tensors together: as few as a small file has.
const VALUES: usize = 1 << 16;

fn checkpoint() -> VarBuilder<'static> {
    let left = AtomicUsize::new(VALUES);
    VarBuilder::from_backend(Box::new(Small { left }), DType::F32, Device::Cpu)
}

/// A checkpoint that has every tensor in the shape that is expected, until its values run out.
struct Small {
    left: AtomicUsize,
}

impl SimpleBackend for Small {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let count = shape
            .dims()
            .iter()
            .try_fold(1usize, |n, d| n.checked_mul(*d));
        // A tensor without values takes room in a file's header too.
        let count = count.unwrap_or(usize::MAX).max(16);
        let taken = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(count)
            });
        if taken.is_err() {
            bail!("tensor `{name}` is missing");
        }
        Tensor::full(0.01f32, shape, device)?.to_dtype(dtype)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        bail!("tensor `{name}` is missing");
    }

    fn contains_tensor(&self, name: &str) -> bool {
        name != "lm_head.weight"
    }
}
