//! Plain candle: the models of candle-transformers as they are, and where it has none, candle-fused's
//! with every fusion off.

use std::io::{Read, Seek};
use std::panic;

use anyhow::{Context, Result, anyhow, bail};
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Tensor};
use candle_fused::Fusion;
use candle_fused::models;
use candle_transformers::models::quantized_llama::MAX_SEQ_LEN;
use candle_transformers::models::{
    llama, quantized_llama, quantized_qwen2, quantized_qwen3, qwen2, qwen3,
};

use super::architecture::{Architecture, Config};
use super::fused;
use super::generate::TextModel;
use super::gguf_vocab;
use super::weights::{Checkpoint, Weights, damaged};

/// What [`load`] gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// candle-transformers' own model.
    Stock,
    /// candle-fused's model in candle's own operations.
    PlainCandle,
}

impl Kind {
    /// candle-transformers has no GPT-NeoX, and its Qwen and Mistral models either refuse sliding windows or
    /// mask other positions than Hugging Face. Its Phi-3 and SmolLM3 are not run here, and it has no BitNet.
    pub fn of(weights: &Weights) -> Result<Self> {
        let slides = match weights {
            Weights::Safetensors { config, .. } => config["use_sliding_window"] == true,
            _ => false,
        };
        Ok(match weights.architecture()? {
            Architecture::GptNeox
            | Architecture::Mistral
            | Architecture::Phi3
            | Architecture::SmolLm3
            | Architecture::BitNet => Self::PlainCandle,
            Architecture::Qwen2 | Architecture::Qwen3 if slides => Self::PlainCandle,
            _ => Self::Stock,
        })
    }

    /// For the head of a column.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stock => "stock",
            Self::PlainCandle => "plain candle",
        }
    }
}

/// Loads weights into plain candle's model.
pub fn load(weights: Weights, dtype: Option<DType>, device: &Device) -> Result<Box<dyn TextModel>> {
    let architecture = weights.architecture()?;
    if Kind::of(&weights)? == Kind::PlainCandle {
        return fused::load(weights, dtype, device, Fusion::none(), None);
    }
    let vocab = weights.vocab_size()?;
    match weights {
        Weights::Gguf {
            path,
            content,
            mut reader,
            ..
        } if dtype.is_none() => {
            let context = context_of(&content, architecture).with_context(|| damaged(&path))?;
            let sizes = Sizes { vocab, context };
            guarded(|| blocks(architecture, content, &mut reader, (device, sizes)))
                .with_context(|| damaged(&path))
        }
        weights => {
            let checkpoint = weights.checkpoint(dtype, device)?;
            guarded(|| dense(checkpoint, device))
                .context("the weights do not fit the configuration; fetch both again")
        }
    }
}

/// candle-transformers' loaders panic where a tensor does not fit; here that is an error like others.
fn guarded<T>(load: impl FnOnce() -> Result<T>) -> Result<T> {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| ()));
    let loaded = panic::catch_unwind(panic::AssertUnwindSafe(load));
    panic::set_hook(hook);
    loaded.unwrap_or_else(|payload| {
        let said = payload
            .downcast_ref::<String>()
            .map_or("no reason given", String::as_str);
        Err(anyhow!("candle-transformers refuses it ({said})"))
    })
}

fn blocks<R: Read + Seek>(
    architecture: Architecture,
    content: Content,
    reader: &mut R,
    (device, sizes): (&Device, Sizes),
) -> Result<Box<dyn TextModel>> {
    Ok(match architecture {
        Architecture::Llama => {
            // It refuses what candle-transformers reads past.
            models::llama::gguf_config(&content)?;
            let model = quantized_llama::ModelWeights::from_gguf(content, reader, device)?;
            Stock::boxed(model, device, sizes)
        }
        Architecture::Qwen2 => {
            let model = quantized_qwen2::ModelWeights::from_gguf(content, reader, device)?;
            Stock::boxed(model, device, sizes)
        }
        Architecture::Qwen3 => {
            let model = quantized_qwen3::ModelWeights::from_gguf(content, reader, device)?;
            Stock::boxed(model, device, sizes)
        }
        _ => return not_stock(architecture),
    })
}

fn dense(checkpoint: Checkpoint, device: &Device) -> Result<Box<dyn TextModel>> {
    let Checkpoint {
        config, vb, dtype, ..
    } = checkpoint;
    Ok(match config {
        Config::Llama(config) => {
            let (config, sizes) = llama(&config);
            let model = LlamaWithCache {
                model: llama::Llama::load(vb, &config)?,
                cache: llama::Cache::new(true, dtype, &config, device)?,
                config,
                dtype,
                device: device.clone(),
            };
            Stock::boxed(model, device, sizes)
        }
        Config::Qwen2(config) => {
            let (config, sizes) = qwen2(&config);
            let model = qwen2::ModelForCausalLM::new(&config, vb)?;
            Stock::boxed(model, device, sizes)
        }
        Config::Qwen3(config) => {
            let (config, sizes) = qwen3(&config);
            let model = qwen3::ModelForCausalLM::new(&config, vb)?;
            Stock::boxed(model, device, sizes)
        }
        _ => bail!("candle-transformers' model of this architecture is not run here"),
    })
}

fn not_stock<T>(architecture: Architecture) -> Result<T> {
    bail!("candle-transformers' {architecture} is not run here")
}

/// What a prompt is checked against.
#[derive(Clone, Copy)]
struct Sizes {
    vocab: usize,
    context: usize,
}

/// The positions that candle-transformers' model of a GGUF file has.
fn context_of(content: &Content, architecture: Architecture) -> Result<usize> {
    let key = format!("{}.context_length", architecture.gguf());
    let stated = gguf_vocab::number(content, &key).and_then(|n| usize::try_from(n).ok());
    match architecture {
        Architecture::Llama => Ok(stated.map_or(MAX_SEQ_LEN, |stated| stated.min(MAX_SEQ_LEN))),
        _ => stated.with_context(|| format!("it has no {key}")),
    }
}

/// candle-transformers' types of the same fields. Its own reading of config.json knows transformers 4
/// only.
fn llama(config: &models::llama::Config) -> (llama::Config, Sizes) {
    let scaling = config
        .rope_scaling
        .as_ref()
        .map(|scaling| llama::Llama3RopeConfig {
            factor: scaling.factor,
            low_freq_factor: scaling.low_freq_factor,
            high_freq_factor: scaling.high_freq_factor,
            original_max_position_embeddings: scaling.original_max_position_embeddings,
            rope_type: match scaling.rope_type {
                models::llama::Llama3RopeType::Llama3 => llama::Llama3RopeType::Llama3,
                models::llama::Llama3RopeType::Default => llama::Llama3RopeType::Default,
            },
        });
    let sizes = Sizes {
        vocab: config.vocab_size,
        context: config.max_position_embeddings,
    };
    let config = llama::Config {
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        vocab_size: config.vocab_size,
        num_hidden_layers: config.num_hidden_layers,
        num_attention_heads: config.num_attention_heads,
        num_key_value_heads: config.num_key_value_heads,
        use_flash_attn: false,
        rms_norm_eps: config.rms_norm_eps,
        rope_theta: config.rope_theta,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: scaling,
        max_position_embeddings: config.max_position_embeddings,
        tie_word_embeddings: config.tie_word_embeddings,
    };
    (config, sizes)
}

fn qwen2(config: &models::qwen2::Config) -> (qwen2::Config, Sizes) {
    let sizes = Sizes {
        vocab: config.vocab_size,
        context: config.max_position_embeddings,
    };
    let config = qwen2::Config {
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        num_hidden_layers: config.num_hidden_layers,
        num_attention_heads: config.num_attention_heads,
        num_key_value_heads: config.num_key_value_heads,
        max_position_embeddings: config.max_position_embeddings,
        sliding_window: config.sliding_window,
        max_window_layers: config.max_window_layers,
        tie_word_embeddings: config.tie_word_embeddings,
        rope_theta: config.rope_theta,
        rms_norm_eps: config.rms_norm_eps,
        use_sliding_window: config.use_sliding_window,
        hidden_act: config.hidden_act,
    };
    (config, sizes)
}

fn qwen3(config: &models::qwen3::Config) -> (qwen3::Config, Sizes) {
    let sizes = Sizes {
        vocab: config.vocab_size,
        context: config.max_position_embeddings,
    };
    let config = qwen3::Config {
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        num_hidden_layers: config.num_hidden_layers,
        num_attention_heads: config.num_attention_heads,
        head_dim: config.head_dim,
        attention_bias: config.attention_bias,
        num_key_value_heads: config.num_key_value_heads,
        max_position_embeddings: config.max_position_embeddings,
        sliding_window: config.sliding_window,
        max_window_layers: config.max_window_layers,
        tie_word_embeddings: config.tie_word_embeddings,
        rope_theta: config.rope_theta,
        rms_norm_eps: config.rms_norm_eps,
        use_sliding_window: config.use_sliding_window,
        hidden_act: config.hidden_act,
    };
    (config, sizes)
}

/// What candle-transformers' models have in common.
trait Model: Sized + 'static {
    /// The logits behind `input`, with any dimensions of size 1 in front.
    fn logits(&mut self, input: &Tensor, position: usize) -> candle_core::Result<Tensor>;
    fn clear(&mut self) -> candle_core::Result<()>;
    /// A copy with a cache of its own, where there is one to be had.
    fn copy(&self) -> Option<Self>;
}

macro_rules! with_its_own_cache {
    ($($model:ty => $copy:expr;)*) => {$(
        impl Model for $model {
            fn logits(&mut self, input: &Tensor, position: usize) -> candle_core::Result<Tensor> {
                self.forward(input, position)
            }

            fn clear(&mut self) -> candle_core::Result<()> {
                self.clear_kv_cache();
                Ok(())
            }

            fn copy(&self) -> Option<Self> {
                $copy(self)
            }
        }
    )*};
}

with_its_own_cache! {
    qwen2::ModelForCausalLM => |model: &Self| Some(model.clone());
    qwen3::ModelForCausalLM => |model: &Self| Some(model.clone());
    quantized_llama::ModelWeights => |model: &Self| Some(model.clone());
    quantized_qwen2::ModelWeights => |_| None;
    quantized_qwen3::ModelWeights => |model: &Self| Some(model.clone());
}

#[derive(Clone)]
struct LlamaWithCache {
    model: llama::Llama,
    cache: llama::Cache,
    config: llama::Config,
    dtype: DType,
    device: Device,
}

impl Model for LlamaWithCache {
    fn logits(&mut self, input: &Tensor, position: usize) -> candle_core::Result<Tensor> {
        self.model.forward(input, position, &mut self.cache)
    }

    fn clear(&mut self) -> candle_core::Result<()> {
        self.cache = llama::Cache::new(true, self.dtype, &self.config, &self.device)?;
        Ok(())
    }

    fn copy(&self) -> Option<Self> {
        Some(self.clone())
    }
}

struct Stock<M> {
    model: M,
    device: Device,
    sizes: Sizes,
}

impl<M: Model> Stock<M> {
    fn boxed(model: M, device: &Device, sizes: Sizes) -> Box<dyn TextModel> {
        Box::new(Self {
            model,
            device: device.clone(),
            sizes,
        })
    }
}

impl<M: Model> TextModel for Stock<M> {
    fn forward(&mut self, tokens: &[u32], position: usize) -> Result<Tensor> {
        let input = Tensor::new(tokens, &self.device)?.unsqueeze(0)?;
        let logits = self.model.logits(&input, position)?;
        Ok(logits.flatten_all()?.to_dtype(DType::F32)?)
    }

    fn clear(&mut self) -> Result<()> {
        Ok(self.model.clear()?)
    }

    fn device(&self) -> Device {
        self.device.clone()
    }

    fn fork(&self) -> Option<Box<dyn TextModel>> {
        let model = self.model.copy()?;
        Some(Self::boxed(model, &self.device, self.sizes))
    }

    fn vocab_size(&self) -> usize {
        self.sizes.vocab
    }

    fn context_length(&self) -> usize {
        self.sizes.context
    }
}
