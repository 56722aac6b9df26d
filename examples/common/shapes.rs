//! Named shapes with random weights: a model's speed without its download.

use std::thread;

use candle_core::{DType, Device, Result, Tensor, WithDType, bail};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;
use clap::ValueEnum;
use serde_json::{Value, json};

use super::source::{Located, ModelFiles};

/// A published model's shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shape {
    #[value(name = "smollm2-135m")]
    SmolLm2,
    #[value(name = "llama-3.2-1b")]
    Llama1b,
    #[value(name = "llama-3-8b")]
    Llama8b,
    #[value(name = "qwen2-0.5b")]
    Qwen2,
    #[value(name = "qwen3-0.6b")]
    Qwen3,
    #[value(name = "pythia-160m")]
    Pythia160m,
    #[value(name = "pythia-2.8b")]
    Pythia28b,
    #[value(name = "bitnet-2b-4t")]
    BitNet,
}

impl Shape {
    /// As on the command line.
    pub fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// What stands in the place of files.
    pub fn located(self) -> Located {
        Located {
            name: self.name(),
            origin: "random weights".into(),
            files: ModelFiles::Random(self),
        }
    }

    /// The model's config.json, as far as it matters here.
    pub fn config(self) -> Value {
        match self {
            Self::SmolLm2 => json!({
                "model_type": "llama",
                "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152,
                "max_position_embeddings": 8192, "rope_theta": 1e5, "rms_norm_eps": 1e-5,
                "tie_word_embeddings": true,
            }),
            Self::Llama1b => json!({
                "model_type": "llama",
                "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
                "max_position_embeddings": 131_072, "rope_theta": 5e5, "rms_norm_eps": 1e-5,
                "rope_scaling": {
                    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
                },
                "tie_word_embeddings": true,
            }),
            Self::Llama8b => json!({
                "model_type": "llama",
                "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
                "max_position_embeddings": 8192, "rope_theta": 5e5, "rms_norm_eps": 1e-5,
                "tie_word_embeddings": false,
            }),
            Self::Qwen2 => json!({
                "model_type": "qwen2",
                "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936,
                "max_position_embeddings": 131_072, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
                "use_sliding_window": false, "sliding_window": 131_072, "max_window_layers": 24,
                "hidden_act": "silu", "tie_word_embeddings": true,
            }),
            Self::Qwen3 => json!({
                "model_type": "qwen3",
                "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
                "vocab_size": 151_936, "max_position_embeddings": 40_960, "rope_theta": 1e6,
                "rms_norm_eps": 1e-6, "attention_bias": false, "use_sliding_window": false,
                "max_window_layers": 28, "hidden_act": "silu", "tie_word_embeddings": true,
            }),
            Self::Pythia160m => pythia(768, 12, 12),
            Self::Pythia28b => pythia(2560, 32, 32),
            Self::BitNet => json!({
                "model_type": "bitnet",
                "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 30,
                "num_attention_heads": 20, "num_key_value_heads": 5, "vocab_size": 128_256,
                "max_position_embeddings": 4096, "rope_theta": 5e5, "rms_norm_eps": 1e-5,
                "hidden_act": "relu2", "tie_word_embeddings": true,
            }),
        }
    }
}

/// The Pythia models differ in these only.
fn pythia(hidden: usize, layers: usize, heads: usize) -> Value {
    json!({
        "model_type": "gpt_neox",
        "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "vocab_size": 50_304, "max_position_embeddings": 2048,
        "rotary_pct": 0.25, "rotary_emb_base": 10_000, "layer_norm_eps": 1e-5,
        "hidden_act": "gelu", "use_parallel_residual": true, "tie_word_embeddings": false,
    })
}

/// Standard deviation of weights and biases, as these models have it before they are trained: the
/// rows that leave the norms keep the logits of any depth near 1.
const DEVIATION: f64 = 0.02;

/// Weights made when a loader asks for them and where it wants them, so that no second copy is ever
/// held: evenly distributed, around 1 in the norms, and the same at every call for the same name on the
/// same kind of device.
pub struct RandomWeights {
    /// Whether there is a head beside the embedding.
    pub own_head: bool,
}

impl SimpleBackend for RandomWeights {
    fn get(
        &self,
        shape: candle_core::Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let norm = shape.rank() == 1 && name.ends_with(".weight");
        let mean = if norm { 1. } else { 0. };
        let tensor = match dtype {
            DType::F32 | DType::F16 | DType::BF16 if device.is_cuda() => {
                random_on_gpu(&shape, name, mean, dtype, device)?
            }
            DType::F32 => random::<f32>(shape, name, mean)?,
            DType::F16 => random::<half::f16>(shape, name, mean)?,
            DType::BF16 => random::<half::bf16>(shape, name, mean)?,
            other => bail!("random weights are f32, f16 or bf16, not {other:?}"),
        };
        tensor.to_device(device)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        bail!("`{name}` has no shape of its own where weights are random")
    }

    /// Loaders ask about what may be missing: a head, and biases that these models do not have.
    fn contains_tensor(&self, name: &str) -> bool {
        self.own_head && name == "lm_head.weight"
    }
}

/// FNV-1a of a name.
fn seed_of(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// What the values lie between, around their mean.
fn half_range() -> f64 {
    DEVIATION * 3f64.sqrt()
}

/// Made by the GPU's generator, part after part: it makes f32 only, and a whole matrix of that would be
/// more memory than the model takes.
fn random_on_gpu(
    shape: &candle_core::Shape,
    name: &str,
    mean: f64,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    const PART: usize = 1 << 22;
    device.set_seed(seed_of(name))?;
    let count = shape.elem_count();
    let values = Tensor::zeros(count, dtype, device)?;
    let (least, most) = (mean - half_range(), mean + half_range());
    for at in (0..count).step_by(PART) {
        let part = Tensor::rand(least as f32, most as f32, PART.min(count - at), device)?;
        values.slice_set(&part.to_dtype(dtype)?, 0, at)?;
    }
    values.reshape(shape)
}

/// Made on the host by all its threads: value `i` depends on the name and on `i` alone.
fn random<T: WithDType>(shape: candle_core::Shape, name: &str, mean: f64) -> Result<Tensor> {
    let seed = seed_of(name);
    let mut values = vec![T::zero(); shape.elem_count()];
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let part = values.len().div_ceil(threads).max(1 << 16);
    thread::scope(|scope| {
        for (at, part) in (0..).step_by(part).zip(values.chunks_mut(part)) {
            scope.spawn(move || {
                for (i, value) in (at..).zip(part) {
                    *value = T::from_f64(mean + half_range() * even(seed, i));
                }
            });
        }
    });
    Tensor::from_vec(values, shape, &Device::Cpu)
}

/// Token ids of a vocabulary, always the same.
pub fn tokens(count: usize, vocab: usize) -> Vec<u32> {
    (0..count as u64)
        .map(|i| (0.5 * (even(0, i) + 1.) * vocab as f64) as u32)
        .map(|id| id.min(vocab.saturating_sub(1) as u32))
        .collect()
}

/// A value of -1 to 1: SplitMix64 (Steele et al. 2014) at its `i`th step.
fn even(seed: u64, i: u64) -> f64 {
    let mut z = seed.wrapping_add((i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let bits = (z ^ (z >> 31)) >> 11;
    bits as f64 / (1u64 << 52) as f64 - 1.
}
