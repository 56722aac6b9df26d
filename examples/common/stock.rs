//! Plain candle: the models of candle-transformers as they are.

use anyhow::{Context, Result, anyhow, ensure};
use candle_core::{DType, Device, Tensor};
use candle_fused::models::llama::gguf_config;
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Config, Llama, LlamaConfig};
use candle_transformers::models::quantized_llama::{MAX_SEQ_LEN, ModelWeights};
use serde_json::Value;
use std::panic;

use super::fused;
use super::generate::TextModel;
use super::gguf_vocab;
use super::weights::Weights;

/// Loads weights into candle-transformers' own model.
pub fn load(weights: Weights, dtype: Option<DType>, device: &Device) -> Result<Box<dyn TextModel>> {
    let architecture = weights.architecture()?;
    ensure!(
        architecture == "llama",
        "models of the architecture '{architecture}' are not run here; take a llama model"
    );
    let in_dtype = weights.dtype(dtype)?;
    match weights {
        Weights::Gguf {
            path,
            content,
            mut reader,
        } if dtype.is_some() => {
            let (vb, config) = fused::dequantized(&content, &mut reader, in_dtype, device)
                .with_context(|| format!("{} cannot be loaded", path.display()))?;
            plain(vb, own(&config), in_dtype, device)
        }
        Weights::Gguf {
            path,
            content,
            mut reader,
        } => {
            let vocab_size = content
                .tensor_infos
                .get("token_embd.weight")
                .and_then(|tensor| tensor.shape.dims().first().copied())
                .with_context(|| {
                    format!(
                        "{} has no tensor token_embd.weight; fetch it again",
                        path.display()
                    )
                })?;
            let context =
                gguf_vocab::number(&content, "llama.context_length").unwrap_or(MAX_SEQ_LEN as u64);
            gguf_config(&content)
                .with_context(|| format!("{} cannot be loaded; fetch it again", path.display()))?;
            let model = guarded(|| Ok(ModelWeights::from_gguf(content, &mut reader, device)?))
                .with_context(|| format!("{} cannot be loaded; fetch it again", path.display()))?;
            let context_length = MAX_SEQ_LEN.min(usize::try_from(context).unwrap_or(MAX_SEQ_LEN));
            Ok(Box::new(Quantized {
                model,
                device: device.clone(),
                vocab_size,
                context_length,
            }))
        }
        Weights::Safetensors { files, config } => {
            let checked =
                serde_json::from_value::<candle_fused::models::llama::LlamaConfig>(config.clone());
            checked.with_context(|| {
                format!(
                    "{} is no usable llama configuration",
                    files.config.display()
                )
            })?;
            let config: LlamaConfig = serde_json::from_value(older(config)).with_context(|| {
                format!(
                    "{} is no usable llama configuration",
                    files.config.display()
                )
            })?;
            let config = config.into_config(false);
            // SAFETY: the files are mapped read-only; like every memory-mapped loader this one asks
            // that nobody truncates them while the model is in use.
            let vb =
                unsafe { VarBuilder::from_mmaped_safetensors(&files.weights, in_dtype, device) }
                    .context("the weights cannot be opened; fetch them again")?;
            plain(vb, config, in_dtype, device)
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

fn plain(
    vb: VarBuilder,
    config: Config,
    dtype: DType,
    device: &Device,
) -> Result<Box<dyn TextModel>> {
    let model = guarded(|| Ok(Llama::load(vb, &config)?))
        .context("the weights do not fit the configuration; fetch both again")?;
    let cache = Cache::new(true, dtype, &config, device)?;
    Ok(Box::new(Plain {
        model,
        cache,
        config,
        dtype,
        device: device.clone(),
    }))
}

/// The configuration of a GGUF file in candle-transformers' type; such files have no scaled rotary
/// frequencies.
fn own(config: &candle_fused::models::llama::Config) -> Config {
    Config {
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
        rope_scaling: None,
        max_position_embeddings: config.max_position_embeddings,
        tie_word_embeddings: config.tie_word_embeddings,
    }
}

/// candle-transformers reads configurations of transformers 4; version 5 moved the rotary settings
/// into one object.
fn older(mut config: Value) -> Value {
    let rope = config["rope_parameters"].clone();
    if let Some(theta) = rope.get("rope_theta") {
        config["rope_theta"] = theta.clone();
    }
    let scaled = |rope: &Value| {
        rope["rope_type"]
            .as_str()
            .is_some_and(|kind| kind != "default")
    };
    if scaled(&rope) {
        config["rope_scaling"] = rope;
    } else if !scaled(&config["rope_scaling"]) {
        config["rope_scaling"] = Value::Null;
    }
    config
}

#[derive(Clone)]
struct Quantized {
    model: ModelWeights,
    device: Device,
    vocab_size: usize,
    context_length: usize,
}

impl TextModel for Quantized {
    fn forward(&mut self, tokens: &[u32], position: usize) -> Result<Tensor> {
        let input = Tensor::new(tokens, &self.device)?.unsqueeze(0)?;
        Ok(self.model.forward(&input, position)?.squeeze(0)?)
    }

    fn clear(&mut self) -> Result<()> {
        self.model.clear_kv_cache();
        Ok(())
    }

    fn device(&self) -> Device {
        self.device.clone()
    }

    fn fork(&self) -> Option<Box<dyn TextModel>> {
        Some(Box::new(self.clone()))
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn context_length(&self) -> usize {
        self.context_length
    }
}

#[derive(Clone)]
struct Plain {
    model: Llama,
    cache: Cache,
    config: Config,
    dtype: DType,
    device: Device,
}

impl TextModel for Plain {
    fn forward(&mut self, tokens: &[u32], position: usize) -> Result<Tensor> {
        let input = Tensor::new(tokens, &self.device)?.unsqueeze(0)?;
        Ok(self
            .model
            .forward(&input, position, &mut self.cache)?
            .squeeze(0)?)
    }

    fn clear(&mut self) -> Result<()> {
        self.cache = Cache::new(true, self.dtype, &self.config, &self.device)
            .map_err(|error| anyhow!(error))?;
        Ok(())
    }

    fn device(&self) -> Device {
        self.device.clone()
    }

    fn fork(&self) -> Option<Box<dyn TextModel>> {
        Some(Box::new(self.clone()))
    }

    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn context_length(&self) -> usize {
        self.config.max_position_embeddings
    }
}
