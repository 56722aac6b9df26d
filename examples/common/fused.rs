//! The same models with candle-fused's layers.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_fused::Fusion;
use candle_fused::generation::{Generation, Options};
use candle_fused::models::llama::{Cache, Config, Llama, LlamaConfig, ModelWeights};
use candle_nn::VarBuilder;

use super::generate::TextModel;
use super::weights::Weights;

/// Loads weights into the fused model, with the fusions that are on in `fusion`. A `dtype` turns the
/// blocks of a GGUF file into dense weights.
pub fn load(
    weights: Weights,
    dtype: Option<DType>,
    device: &Device,
    fusion: Fusion,
) -> Result<Box<dyn TextModel>> {
    let architecture = weights.architecture()?;
    ensure!(
        architecture == "llama",
        "models of the architecture '{architecture}' are not run here; take a llama model"
    );
    let in_dtype = weights.dtype(dtype)?;
    let (vb, config) = match weights {
        Weights::Gguf {
            path,
            content,
            mut reader,
        } if dtype.is_none() => {
            let model = ModelWeights::from_gguf_fused(content, &mut reader, device, fusion)
                .with_context(|| {
                    format!(
                        "{} cannot be loaded; fetch it again or take another model",
                        path.display()
                    )
                })?;
            return Ok(Box::new(Quantized {
                model,
                device: device.clone(),
            }));
        }
        Weights::Gguf {
            path,
            content,
            mut reader,
        } => dequantized(&content, &mut reader, in_dtype, device).with_context(|| {
            format!(
                "{} cannot be loaded; fetch it again or take another model",
                path.display()
            )
        })?,
        Weights::Safetensors { files, config } => {
            let config: LlamaConfig = serde_json::from_value(config).with_context(|| {
                format!(
                    "{} is no usable llama configuration",
                    files.config.display()
                )
            })?;
            // SAFETY: the files are mapped read-only; like every memory-mapped loader this one asks
            // that nobody truncates them while the model is in use.
            let vb =
                unsafe { VarBuilder::from_mmaped_safetensors(&files.weights, in_dtype, device) }
                    .context("the weights cannot be opened; fetch them again")?;
            (vb, config.into_config(false))
        }
    };
    let model = Llama::load_fused(vb, &config, fusion)
        .context("the weights do not fit the configuration; fetch both again")?;
    let cache = Cache::new(true, in_dtype, &config, device)?;
    Ok(Box::new(Dense {
        model,
        cache,
        config,
        device: device.clone(),
    }))
}

/// A GGUF file as a dense checkpoint.
pub fn dequantized(
    content: &candle_core::quantized::gguf_file::Content,
    reader: &mut (impl std::io::Read + std::io::Seek),
    dtype: DType,
    device: &Device,
) -> Result<(VarBuilder<'static>, Config)> {
    let (config, tensors) =
        candle_fused::models::llama::dequantize_gguf(content, reader, dtype, device)?;
    Ok((VarBuilder::from_tensors(tensors, dtype, device), config))
}

struct Quantized {
    model: ModelWeights,
    device: Device,
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

    fn chooses_tokens(&self) -> bool {
        self.device.is_cuda()
    }

    fn generation(&self, options: &Options) -> Result<Generation> {
        Ok(Generation::new(&self.model, options)?)
    }

    fn vocab_size(&self) -> usize {
        self.model.vocab_size()
    }

    fn context_length(&self) -> usize {
        self.model.max_positions()
    }

    fn hidden_states(&mut self, tokens: &[u32]) -> Result<Option<Vec<Tensor>>> {
        self.clear()?;
        let input = Tensor::new(tokens, &self.device)?.unsqueeze(0)?;
        Ok(Some(self.model.hidden_states(&input, 0)?.0))
    }
}

struct Dense {
    model: Llama,
    cache: Cache,
    config: Config,
    device: Device,
}

impl TextModel for Dense {
    fn forward(&mut self, tokens: &[u32], position: usize) -> Result<Tensor> {
        let input = Tensor::new(tokens, &self.device)?.unsqueeze(0)?;
        Ok(self
            .model
            .forward(&input, position, &mut self.cache)?
            .squeeze(0)?)
    }

    fn clear(&mut self) -> Result<()> {
        self.cache.clear();
        Ok(())
    }

    fn device(&self) -> Device {
        self.device.clone()
    }

    fn chooses_tokens(&self) -> bool {
        self.device.is_cuda()
    }

    fn generation(&self, options: &Options) -> Result<Generation> {
        Ok(Generation::new(&self.model, options)?)
    }

    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn context_length(&self) -> usize {
        self.config.max_position_embeddings
    }

    fn hidden_states(&mut self, tokens: &[u32]) -> Result<Option<Vec<Tensor>>> {
        self.clear()?;
        let input = Tensor::new(tokens, &self.device)?.unsqueeze(0)?;
        Ok(Some(
            self.model.hidden_states(&input, 0, &mut self.cache)?.0,
        ))
    }
}
