//! Models of every architecture behind one face.

use crate::golden::Golden;
use crate::support::device;
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Result, Tensor};
use candle_fused::Fusion;
use candle_fused::generation::{Generation, Options};
use candle_fused::models::llama::{Cache, Llama, LlamaConfig};
use candle_fused::models::smol::smollm3;
use candle_fused::models::{
    Architecture, CausalLm, GgufModel, gpt_neox, llama, mistral, phi3, qwen2, qwen3,
};
use candle_fused::serving::{self, Engine};
use candle_nn::VarBuilder;
use std::io::Cursor;
use std::sync::Arc;

/// Goldens of the models that the examples run.
pub const GOLDENS: [&str; 6] = [
    "llama_gqa_tied",
    "llama3_rope",
    "qwen2_bias",
    "qwen3_qknorm",
    "gpt_neox_parallel",
    "gpt_neox_sequential",
];

/// All goldens.
pub const ALL: [&str; 10] = [
    "llama_gqa_tied",
    "llama3_rope",
    "qwen2_bias",
    "qwen3_qknorm",
    "gpt_neox_parallel",
    "gpt_neox_sequential",
    "mistral_window",
    "phi3_partial",
    "phi3_long",
    "smollm3_nope",
];

/// A model with its cache.
pub trait Subject {
    /// The logits `[B, vocab]` (f32) after the last of `ids`.
    fn forward(&mut self, ids: &Tensor, position: usize) -> Result<Tensor>;

    /// Every hidden state, and the logits of every position.
    fn hidden_states(&mut self, ids: &Tensor, position: usize) -> Result<(Vec<Tensor>, Tensor)>;

    fn clear(&mut self) -> Result<()>;

    fn generation(&self, options: &Options) -> Result<Generation>;

    fn engine(&self, options: &serving::Options) -> Result<Engine>;
}

impl<C: Architecture> Subject for CausalLm<C> {
    fn forward(&mut self, ids: &Tensor, position: usize) -> Result<Tensor> {
        let logits = CausalLm::forward(self, ids, position)?;
        assert_eq!(logits.dim(1)?, 1);
        logits.squeeze(1)?.to_dtype(DType::F32)
    }

    fn hidden_states(&mut self, ids: &Tensor, position: usize) -> Result<(Vec<Tensor>, Tensor)> {
        CausalLm::hidden_states(self, ids, position)
    }

    fn clear(&mut self) -> Result<()> {
        self.clear_kv_cache();
        Ok(())
    }

    fn generation(&self, options: &Options) -> Result<Generation> {
        Generation::new(self, options)
    }

    fn engine(&self, options: &serving::Options) -> Result<Engine> {
        Engine::new(self, options)
    }
}

impl<C: Architecture> Subject for GgufModel<C> {
    fn forward(&mut self, ids: &Tensor, position: usize) -> Result<Tensor> {
        GgufModel::forward(self, ids, position)
    }

    fn hidden_states(&mut self, ids: &Tensor, position: usize) -> Result<(Vec<Tensor>, Tensor)> {
        GgufModel::hidden_states(self, ids, position)
    }

    fn clear(&mut self) -> Result<()> {
        self.clear_kv_cache();
        Ok(())
    }

    fn generation(&self, options: &Options) -> Result<Generation> {
        Generation::new(self, options)
    }

    fn engine(&self, options: &serving::Options) -> Result<Engine> {
        Engine::new(self, options)
    }
}

impl Subject for (Llama, Cache) {
    fn forward(&mut self, ids: &Tensor, position: usize) -> Result<Tensor> {
        self.0.forward(ids, position, &mut self.1)
    }

    fn hidden_states(&mut self, ids: &Tensor, position: usize) -> Result<(Vec<Tensor>, Tensor)> {
        self.0.hidden_states(ids, position, &mut self.1)
    }

    fn clear(&mut self) -> Result<()> {
        self.1.clear();
        Ok(())
    }

    fn generation(&self, options: &Options) -> Result<Generation> {
        Generation::new(&self.0, options)
    }

    fn engine(&self, options: &serving::Options) -> Result<Engine> {
        Engine::new(&self.0, options)
    }
}

/// A golden model from its safetensors, on the device in hand.
pub fn dense(golden: &Golden, dtype: DType, fusion: Fusion) -> Result<Box<dyn Subject>> {
    over(golden, golden.weights(dtype)?, fusion)
}

/// The same with other weights.
pub fn over(golden: &Golden, weights: VarBuilder, fusion: Fusion) -> Result<Box<dyn Subject>> {
    let dtype = weights.dtype();
    Ok(match golden.model_type().as_str() {
        "llama" => {
            let config = golden.config::<LlamaConfig>().into_config(false);
            let cache = Cache::new(true, dtype, &config, &device())?;
            Box::new((Llama::load_fused(weights, &config, fusion)?, cache))
        }
        "qwen2" => causal::<qwen2::Config>(golden, weights, fusion)?,
        "qwen3" => causal::<qwen3::Config>(golden, weights, fusion)?,
        "gpt_neox" => causal::<gpt_neox::Config>(golden, weights, fusion)?,
        "mistral" => causal::<mistral::Config>(golden, weights, fusion)?,
        "phi3" => causal::<phi3::Config>(golden, weights, fusion)?,
        "smollm3" => causal::<smollm3::Config>(golden, weights, fusion)?,
        other => panic!("no model is called {other}"),
    })
}

fn causal<C>(golden: &Golden, weights: VarBuilder, fusion: Fusion) -> Result<Box<dyn Subject>>
where
    C: Architecture + serde::de::DeserializeOwned + 'static,
{
    let config: C = golden.config();
    Ok(Box::new(CausalLm::new_fused(&config, weights, fusion)?))
}

/// How a GGUF file is loaded.
#[derive(Clone, Copy)]
enum Loaded {
    /// On the device in hand, for activations in this dtype.
    Read(DType),
    /// On the CPU, with the blocks left in the file.
    InPlace,
}

/// A model of a golden's kind from the bytes of a GGUF file, on the device in hand.
pub fn gguf(golden: &Golden, bytes: &[u8], fusion: Fusion) -> Result<Box<dyn Subject>> {
    gguf_with_dtype(golden, bytes, DType::F32, fusion)
}

/// The same for activations in `dtype`.
pub fn gguf_with_dtype(
    golden: &Golden,
    bytes: &[u8],
    dtype: DType,
    fusion: Fusion,
) -> Result<Box<dyn Subject>> {
    of_kind(golden, bytes, fusion, Loaded::Read(dtype))
}

/// The same on the CPU, with the blocks left in the file.
pub fn gguf_in_place(golden: &Golden, bytes: &[u8], fusion: Fusion) -> Result<Box<dyn Subject>> {
    of_kind(golden, bytes, fusion, Loaded::InPlace)
}

fn of_kind(
    golden: &Golden,
    bytes: &[u8],
    fusion: Fusion,
    loaded: Loaded,
) -> Result<Box<dyn Subject>> {
    Ok(match golden.model_type().as_str() {
        "llama" => Box::new(open_as::<llama::Config>(bytes, fusion, loaded)?),
        "qwen2" => Box::new(open_as::<qwen2::Config>(bytes, fusion, loaded)?),
        "qwen3" => Box::new(open_as::<qwen3::Config>(bytes, fusion, loaded)?),
        "gpt_neox" => Box::new(open_as::<gpt_neox::Config>(bytes, fusion, loaded)?),
        "mistral" => Box::new(open_as::<mistral::Config>(bytes, fusion, loaded)?),
        "phi3" => Box::new(open_as::<phi3::Config>(bytes, fusion, loaded)?),
        "smollm3" => Box::new(open_as::<smollm3::Config>(bytes, fusion, loaded)?),
        other => panic!("no model is called {other}"),
    })
}

/// Reads and loads a file's bytes.
pub fn open<C: Architecture>(bytes: &[u8], fusion: Fusion) -> Result<GgufModel<C>> {
    open_as(bytes, fusion, Loaded::Read(DType::F32))
}

fn open_as<C: Architecture>(bytes: &[u8], fusion: Fusion, loaded: Loaded) -> Result<GgufModel<C>> {
    let mut reader = Cursor::new(bytes);
    let content = Content::read(&mut reader)?;
    match loaded {
        Loaded::InPlace => GgufModel::from_gguf_in_place(content, Arc::new(bytes.to_vec()), fusion),
        Loaded::Read(dtype) => {
            GgufModel::from_gguf_with_dtype(content, &mut reader, &device(), dtype, fusion)
        }
    }
}
