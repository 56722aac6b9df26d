//! Models that are loaded on one thread and used on another. On CUDA each thread has a stream of its own.

use crate::gguf_file;
use crate::golden::Golden;
use crate::support::devices;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::Fusion;
use candle_fused::models::llama::{Cache, Llama, LlamaConfig, ModelWeights};
use candle_fused::quant::{Quantization, Recipe};
use candle_nn::VarBuilder;
use std::io::Cursor;

/// Loads that follow each other with nothing in between.
const ROUNDS: usize = 8;

fn dense(recipe: Option<&Recipe>, device: &Device) -> Result<Llama> {
    let golden = Golden::open("llama_gqa_tied")?;
    let file = std::fs::read(golden.folder.join("model.safetensors"))?;
    let vb = VarBuilder::from_buffered_safetensors(file, DType::F32, device)?;
    let config = golden.config::<LlamaConfig>().into_config(false);
    match recipe {
        Some(recipe) => Llama::load_quantized(vb, &config, recipe, Fusion::all()),
        None => Llama::load(vb, &config),
    }
}

fn blocks(dtype: GgmlDType, device: &Device) -> Result<ModelWeights> {
    let bytes = gguf_file::bytes(&Golden::open("llama_gqa_tied")?, dtype)?;
    let mut reader = Cursor::new(&bytes);
    let content = Content::read(&mut reader)?;
    ModelWeights::from_gguf(content, &mut reader, device)
}

fn logits(model: &Llama, device: &Device) -> Result<Vec<f32>> {
    let golden = Golden::open("llama_gqa_tied")?;
    let config = golden.config::<LlamaConfig>().into_config(false);
    let mut cache = Cache::new(true, DType::F32, &config, device)?;
    let ids = Tensor::new(&[[1u32, 5, 9, 2, 77]], device)?;
    let logits = model.forward(&ids, 0, &mut cache)?;
    logits.flatten_all()?.to_vec1()
}

/// What `load` gives on a thread of its own.
fn elsewhere<M: Send + 'static>(load: impl FnOnce() -> Result<M> + Send + 'static) -> Result<M> {
    std::thread::spawn(load).join().expect("no panic")
}

#[test]
fn a_model_loaded_on_another_thread_computes_the_same() -> Result<()> {
    for device in devices() {
        let recipes = [
            None,
            Some(Quantization::Int8),
            Some("int4-g32".parse::<Quantization>()?),
            Some("ternary".parse::<Quantization>()?),
        ];
        for quantization in recipes {
            // Whose columns do not divide by a group.
            let recipe = quantization
                .map(|q| Recipe::new(q).with("*.down_proj.weight", Some(Quantization::Int8)));
            let expected = logits(&dense(recipe.as_ref(), &device)?, &device)?;
            for _ in 0..ROUNDS {
                let (there, recipe) = (device.clone(), recipe.clone());
                let model = elsewhere(move || dense(recipe.as_ref(), &there))?;
                assert_eq!(logits(&model, &device)?, expected, "{device:?}");
            }
        }
        let ids = Tensor::new(&[[1u32, 5, 9, 2, 77]], &device)?;
        let run = |mut model: ModelWeights| model.forward(&ids, 0)?.flatten_all()?.to_vec1::<f32>();
        for dtype in [GgmlDType::Q4_0, GgmlDType::Q6K, GgmlDType::F32] {
            let expected = run(blocks(dtype, &device)?)?;
            for _ in 0..ROUNDS {
                let there = device.clone();
                let model = elsewhere(move || blocks(dtype, &there))?;
                assert_eq!(run(model)?, expected, "{device:?} {dtype:?}");
            }
        }
    }
    Ok(())
}
