//! Loading a model in its stock or its fused form, behind one interface.

use super::source::ModelFiles;
use anyhow::{Context, Result, bail};
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Tensor};
use candle_fused::Fusion;
use candle_fused::models::llama::{self as fused, Config, LlamaConfig};
use candle_nn::VarBuilder;
use candle_transformers::models::{llama as stock, quantized_llama};
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

/// Which form of a model to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// candle-transformers' own.
    Stock,
    /// candle-fused's, with these fusions.
    Fused(Fusion),
}

/// A model that turns token ids into the logits of the next token.
pub trait TextModel {
    /// The logits (`[vocab]`, f32) after the last of `ids`, which stand at `position..`.
    fn forward(&mut self, ids: &[u32], position: usize) -> Result<Tensor>;

    /// Forgets everything read.
    fn clear(&mut self) -> Result<()>;

    /// Every hidden state of `ids` (`[T, hidden]` each), if the form shows them.
    fn hidden_states(&mut self, _ids: &[u32]) -> Result<Option<Vec<Tensor>>> {
        Ok(None)
    }
}

/// A loaded model and what it turned out to be.
pub struct Loaded {
    pub model: Box<dyn TextModel>,
    /// The dtype of the activations and dense weights, or the GGUF type that most weights have.
    pub dtype: String,
    /// Positions that the model can take.
    pub context: usize,
    /// End-of-sequence ids that the model's configuration names.
    pub eos: Vec<u32>,
}

/// Loads the model of `files`; `dtype` dequantizes a GGUF file or converts safetensors.
pub fn load(
    files: &ModelFiles,
    form: Form,
    dtype: Option<DType>,
    device: &Device,
) -> Result<Loaded> {
    match files {
        ModelFiles::Gguf { file, .. } => {
            load_gguf(file, form, dtype, device).with_context(|| file.display().to_string())
        }
        ModelFiles::Safetensors(files) => {
            let text = std::fs::read_to_string(&files.config)
                .with_context(|| format!("cannot read {}", files.config.display()))?;
            let config: LlamaConfig = serde_json::from_str(&text)
                .with_context(|| format!("{} is not a configuration", files.config.display()))?;
            let eos = match &config.eos_token_id {
                Some(fused::LlamaEosToks::Single(id)) => vec![*id],
                Some(fused::LlamaEosToks::Multiple(ids)) => ids.clone(),
                None => Vec::new(),
            };
            let config = config.into_config(false);
            let dtype = match dtype {
                Some(dtype) => dtype,
                None => stored_dtype(&text),
            };
            // SAFETY: the files are read while nobody writes them; a file cut short by another
            // process meanwhile ends this one, as it does for every mapped file.
            let vb = unsafe { VarBuilder::from_mmaped_safetensors(&files.weights, dtype, device) }
                .context("the weights cannot be read; download the model again")?;
            Ok(Loaded { eos, ..dense(vb, config, form, dtype, device)? })
        }
    }
}

/// What `config.json` says the weights are stored in: the same key under its two names.
fn stored_dtype(config: &str) -> DType {
    let config: serde_json::Value = serde_json::from_str(config).unwrap_or_default();
    match config.get("dtype").or(config.get("torch_dtype")).and_then(|d| d.as_str()) {
        Some("bfloat16") => DType::BF16,
        Some("float16") => DType::F16,
        _ => DType::F32,
    }
}

fn load_gguf(file: &Path, form: Form, dtype: Option<DType>, device: &Device) -> Result<Loaded> {
    let mut reader = BufReader::new(File::open(file).context("cannot open the file")?);
    let content = Content::read(&mut reader)
        .context("not a whole GGUF file; download it again or name another with --model")?;
    if let Some(dtype) = dtype {
        let (config, tensors) = fused::dequantize_gguf(&content, &mut reader, dtype, device)?;
        return dense(VarBuilder::from_tensors(tensors, dtype, device), config, form, dtype, device);
    }
    let dtype = main_type(&content);
    let context = content
        .metadata
        .get("llama.context_length")
        .and_then(|v| v.to_u64().ok())
        .map_or(fused::DEFAULT_MAX_SEQ_LEN, |n| n as usize);
    let (model, context): (Box<dyn TextModel>, _) = match form {
        Form::Stock => {
            let model = quantized_llama::ModelWeights::from_gguf(content, &mut reader, device)?;
            (Box::new(StockGguf(model)), context.min(quantized_llama::MAX_SEQ_LEN))
        }
        Form::Fused(fusion) => {
            let model =
                fused::ModelWeights::from_gguf_fused(content, &mut reader, device, fusion)?;
            (Box::new(FusedGguf(model)), context)
        }
    };
    Ok(Loaded { model, dtype, context, eos: Vec::new() })
}

/// The type that most of a file's weights have, as `q4_1`.
fn main_type(content: &Content) -> String {
    let mut sizes = std::collections::BTreeMap::<String, usize>::new();
    for info in content.tensor_infos.values() {
        *sizes.entry(format!("{:?}", info.ggml_dtype).to_lowercase()).or_default() +=
            info.shape.elem_count();
    }
    sizes.into_iter().max_by_key(|(_, n)| *n).map_or_else(String::new, |(name, _)| name)
}

fn dense(
    vb: VarBuilder,
    config: Config,
    form: Form,
    dtype: DType,
    device: &Device,
) -> Result<Loaded> {
    let context = config.max_position_embeddings;
    let model: Box<dyn TextModel> = match form {
        Form::Stock => {
            let config = stock_config(&config);
            let model = stock::Llama::load(vb, &config)?;
            let cache = stock::Cache::new(true, dtype, &config, device)?;
            Box::new(StockDense { model, empty: cache.clone(), cache })
        }
        Form::Fused(fusion) => {
            let model = fused::Llama::load_fused(vb, &config, fusion)?;
            let cache = fused::Cache::new(true, dtype, &config, device)?;
            Box::new(FusedDense { model, cache })
        }
    };
    Ok(Loaded { model, dtype: dtype.as_str().to_owned(), context, eos: Vec::new() })
}

/// The same configuration in candle-transformers' type, whose own reader knows transformers 4 only.
fn stock_config(c: &Config) -> stock::Config {
    let scaling = c.rope_scaling.as_ref().map(|s| stock::Llama3RopeConfig {
        factor: s.factor,
        low_freq_factor: s.low_freq_factor,
        high_freq_factor: s.high_freq_factor,
        original_max_position_embeddings: s.original_max_position_embeddings,
        rope_type: match s.rope_type {
            fused::Llama3RopeType::Llama3 => stock::Llama3RopeType::Llama3,
            fused::Llama3RopeType::Default => stock::Llama3RopeType::Default,
        },
    });
    stock::Config {
        hidden_size: c.hidden_size,
        intermediate_size: c.intermediate_size,
        vocab_size: c.vocab_size,
        num_hidden_layers: c.num_hidden_layers,
        num_attention_heads: c.num_attention_heads,
        num_key_value_heads: c.num_key_value_heads,
        use_flash_attn: false,
        rms_norm_eps: c.rms_norm_eps,
        rope_theta: c.rope_theta,
        bos_token_id: c.bos_token_id,
        eos_token_id: None,
        rope_scaling: scaling,
        max_position_embeddings: c.max_position_embeddings,
        tie_word_embeddings: c.tie_word_embeddings,
    }
}

/// `ids` as a batch of one; an empty prompt has no next token.
fn batch(ids: &[u32]) -> Result<Tensor> {
    if ids.is_empty() {
        bail!("the prompt is empty; give --prompt some text");
    }
    Ok(Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?)
}

fn row(logits: Tensor) -> Result<Tensor> {
    Ok(logits.squeeze(0)?.to_dtype(DType::F32)?)
}

fn rows((states, _): (Vec<Tensor>, Tensor)) -> Result<Option<Vec<Tensor>>> {
    Ok(Some(states.iter().map(|s| s.squeeze(0)).collect::<candle_core::Result<_>>()?))
}

struct StockGguf(quantized_llama::ModelWeights);

impl TextModel for StockGguf {
    fn forward(&mut self, ids: &[u32], position: usize) -> Result<Tensor> {
        row(self.0.forward(&batch(ids)?, position)?)
    }

    fn clear(&mut self) -> Result<()> {
        self.0.clear_kv_cache();
        Ok(())
    }
}

struct FusedGguf(fused::ModelWeights);

impl TextModel for FusedGguf {
    fn forward(&mut self, ids: &[u32], position: usize) -> Result<Tensor> {
        row(self.0.forward(&batch(ids)?, position)?)
    }

    fn clear(&mut self) -> Result<()> {
        self.0.clear_kv_cache();
        Ok(())
    }

    fn hidden_states(&mut self, ids: &[u32]) -> Result<Option<Vec<Tensor>>> {
        rows(self.0.hidden_states(&batch(ids)?, 0)?)
    }
}

struct StockDense {
    model: stock::Llama,
    cache: stock::Cache,
    /// A cache cannot be emptied, so a copy of the first one is kept.
    empty: stock::Cache,
}

impl TextModel for StockDense {
    fn forward(&mut self, ids: &[u32], position: usize) -> Result<Tensor> {
        row(self.model.forward(&batch(ids)?, position, &mut self.cache)?)
    }

    fn clear(&mut self) -> Result<()> {
        self.cache = self.empty.clone();
        Ok(())
    }
}

struct FusedDense {
    model: fused::Llama,
    cache: fused::Cache,
}

impl TextModel for FusedDense {
    fn forward(&mut self, ids: &[u32], position: usize) -> Result<Tensor> {
        row(self.model.forward(&batch(ids)?, position, &mut self.cache)?)
    }

    fn clear(&mut self) -> Result<()> {
        self.cache.clear();
        Ok(())
    }

    fn hidden_states(&mut self, ids: &[u32]) -> Result<Option<Vec<Tensor>>> {
        rows(self.model.hidden_states(&batch(ids)?, 0, &mut self.cache)?)
    }
}
