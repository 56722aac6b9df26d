//! The models with candle-fused's layers.

use std::io::{Read, Seek};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Tensor};
use candle_fused::Fusion;
use candle_fused::cpu::packed::SharedBytes;
use candle_fused::generation::{Generation, Options};
use candle_fused::models::llama::{self, Cache, Llama};
use candle_fused::models::smol::smollm3;
use candle_fused::models::{self, CausalLm, GgufModel, gpt_neox, phi3, qwen2, qwen3};
use candle_fused::quant::{QuantizedFile, Recipe};
use candle_fused::serving::{self, Engine};

use super::architecture::{Architecture, Config};
use super::generate::TextModel;
use super::progress::Watched;
use super::weights::{Bytes, Checkpoint, Weights, damaged};
use crate::with_config;

/// Loads weights into the fused model, with the fusions that are on in `fusion`; [`Fusion::none`] is
/// the same model in candle's own operations. A `dtype` turns the blocks of a GGUF file into dense
/// weights, and so does a `recipe`, by which they are quantized.
pub fn load(
    weights: Weights,
    dtype: Option<DType>,
    device: &Device,
    fusion: Fusion,
    recipe: Option<&Recipe>,
) -> Result<Box<dyn TextModel>> {
    let architecture = weights.architecture()?;
    let place = |bytes| Place {
        device: device.clone(),
        plain: fusion.is_none(),
        bytes,
    };
    if let Some(file) = weights.quantized()? {
        ensure!(
            recipe.is_none(),
            "the model is quantized already; leave --quantize away"
        );
        let dtype = weights.dtype(dtype)?;
        let config = weights.config()?;
        return in_place((&file, dtype), &config, place(None), fusion);
    }
    match weights {
        Weights::Gguf {
            path,
            content,
            reader,
            compute_dtype,
            map,
            ..
        } if dtype.is_none() && recipe.is_none() => {
            ensure!(
                map.is_none() || device.is_cpu(),
                "--mmap leaves weights where the CPU reads them; add --cpu"
            );
            let bytes = Bytes::of_gguf(&content);
            let reader = Watched::new(reader, "loading weights", bytes.all());
            let place = place(Some(Arc::new(bytes)));
            let file = (content, reader, map, compute_dtype);
            match architecture {
                Architecture::Llama | Architecture::Mistral => {
                    blocks::<llama::Config>(file, place, fusion)
                }
                Architecture::Qwen2 => blocks::<qwen2::Config>(file, place, fusion),
                Architecture::Qwen3 => blocks::<qwen3::Config>(file, place, fusion),
                Architecture::GptNeox => blocks::<gpt_neox::Config>(file, place, fusion),
                Architecture::Phi3 => blocks::<phi3::Config>(file, place, fusion),
                Architecture::SmolLm3 => blocks::<smollm3::Config>(file, place, fusion),
                Architecture::BitNet => {
                    bail!("GGUF files of BitNet are not run here; take its safetensors files")
                }
            }
            .with_context(|| damaged(&path))
        }
        weights => {
            let checkpoint = weights.checkpoint(dtype, device)?;
            match recipe {
                Some(recipe) => quantized(checkpoint, place(None), fusion, recipe),
                None => {
                    let place = place(Some(Arc::clone(&checkpoint.bytes)));
                    dense(checkpoint, place, fusion)
                        .context("the weights do not fit the configuration; fetch both again")
                }
            }
        }
    }
}

fn blocks<C: models::Architecture + 'static>(
    (content, mut reader, map, dtype): (Content, impl Read + Seek, Option<SharedBytes>, DType),
    place: Place,
    fusion: Fusion,
) -> Result<Box<dyn TextModel>> {
    let model = match map {
        Some(map) => GgufModel::<C>::from_gguf_in_place(content, map, fusion)?,
        None => {
            let (reader, device) = (&mut reader, &place.device);
            GgufModel::from_gguf_with_dtype(content, reader, device, dtype, fusion)?
        }
    };
    Ok(Box::new(Placed { model, place }))
}

fn dense(checkpoint: Checkpoint, place: Place, fusion: Fusion) -> Result<Box<dyn TextModel>> {
    let Checkpoint {
        config, vb, dtype, ..
    } = checkpoint;
    Ok(with_config!(
        config,
        config => {
            let llama = Llama::load_fused(vb, &config, fusion)?;
            llama_with_cache(llama, config, dtype, place)?
        },
        config => {
            let model = CausalLm::new_fused(&config, vb, fusion)?;
            Box::new(Placed { model, place })
        },
    ))
}

/// Dense weights, quantized as they are read.
fn quantized(
    checkpoint: Checkpoint,
    place: Place,
    fusion: Fusion,
    recipe: &Recipe,
) -> Result<Box<dyn TextModel>> {
    let Checkpoint {
        config, vb, dtype, ..
    } = checkpoint;
    Ok(with_config!(
        config,
        config => {
            let llama = Llama::load_quantized(vb, &config, recipe, fusion)?;
            llama_with_cache(llama, config, dtype, place)?
        },
        config => {
            let model = CausalLm::new_quantized(&config, vb, recipe, fusion)?;
            Box::new(Placed { model, place })
        },
    ))
}

/// Weights that were quantized and saved, where the file is mapped.
fn in_place(
    (file, dtype): (&QuantizedFile, DType),
    config: &Config,
    place: Place,
    fusion: Fusion,
) -> Result<Box<dyn TextModel>> {
    let device = &place.device;
    Ok(with_config!(
        config,
        config => {
            let llama = Llama::from_quantized(file, config, dtype, device, fusion)?;
            llama_with_cache(llama, config.clone(), dtype, place)?
        },
        config => {
            let model = CausalLm::from_quantized(config, file, dtype, device, fusion)?;
            Box::new(Placed { model, place })
        },
    ))
}

fn llama_with_cache(
    llama: Llama,
    config: llama::Config,
    dtype: DType,
    place: Place,
) -> Result<Box<dyn TextModel>> {
    let model = LlamaWithCache {
        llama,
        cache: Cache::new(true, dtype, &config, &place.device)?,
        config,
    };
    Ok(Box::new(Placed { model, place }))
}

/// What candle-fused's models have in common.
trait Model {
    /// The logits `[1, vocab]` or `[1, 1, vocab]` behind `input`.
    fn logits(&mut self, input: &Tensor, position: usize) -> candle_core::Result<Tensor>;
    fn states(&mut self, input: &Tensor) -> candle_core::Result<(Vec<Tensor>, Tensor)>;
    fn clear(&mut self);
    fn generation(&self, options: &Options) -> candle_core::Result<Generation>;
    fn engine(&self, options: &serving::Options) -> candle_core::Result<Engine>;
    fn vocab_size(&self) -> usize;
    fn context_length(&self) -> usize;
}

macro_rules! with_its_own_cache {
    ($model:ident) => {
        impl<C: models::Architecture> Model for $model<C> {
            fn logits(&mut self, input: &Tensor, position: usize) -> candle_core::Result<Tensor> {
                self.forward(input, position)
            }

            fn states(&mut self, input: &Tensor) -> candle_core::Result<(Vec<Tensor>, Tensor)> {
                self.hidden_states(input, 0)
            }

            fn clear(&mut self) {
                self.clear_kv_cache();
            }

            fn generation(&self, options: &Options) -> candle_core::Result<Generation> {
                Generation::new(self, options)
            }

            fn engine(&self, options: &serving::Options) -> candle_core::Result<Engine> {
                Engine::new(self, options)
            }

            fn vocab_size(&self) -> usize {
                self.vocab_size()
            }

            fn context_length(&self) -> usize {
                self.max_positions()
            }
        }
    };
}

with_its_own_cache!(CausalLm);
with_its_own_cache!(GgufModel);

struct LlamaWithCache {
    llama: Llama,
    cache: Cache,
    config: llama::Config,
}

impl Model for LlamaWithCache {
    fn logits(&mut self, input: &Tensor, position: usize) -> candle_core::Result<Tensor> {
        self.llama.forward(input, position, &mut self.cache)
    }

    fn states(&mut self, input: &Tensor) -> candle_core::Result<(Vec<Tensor>, Tensor)> {
        self.llama.hidden_states(input, 0, &mut self.cache)
    }

    fn clear(&mut self) {
        self.cache.clear();
    }

    fn generation(&self, options: &Options) -> candle_core::Result<Generation> {
        Generation::new(&self.llama, options)
    }

    fn engine(&self, options: &serving::Options) -> candle_core::Result<Engine> {
        Engine::new(&self.llama, options)
    }

    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn context_length(&self) -> usize {
        self.config.max_position_embeddings
    }
}

/// Where a model is, and how much of it.
struct Place {
    device: Device,
    /// Whether it stands for candle's own operations, which have no token loop on the device.
    plain: bool,
    /// Of what a step reads, if that was counted.
    bytes: Option<Arc<Bytes>>,
}

struct Placed<M> {
    model: M,
    place: Place,
}

impl<M: Model> TextModel for Placed<M> {
    fn forward(&mut self, tokens: &[u32], position: usize) -> Result<Tensor> {
        let input = Tensor::new(tokens, &self.place.device)?.unsqueeze(0)?;
        let logits = self.model.logits(&input, position)?;
        Ok(logits.flatten_all()?.to_dtype(DType::F32)?)
    }

    fn clear(&mut self) -> Result<()> {
        self.model.clear();
        Ok(())
    }

    fn device(&self) -> Device {
        self.place.device.clone()
    }

    fn chooses_tokens(&self) -> bool {
        self.place.device.is_cuda() && !self.place.plain
    }

    fn generation(&self, options: &Options) -> Result<Generation> {
        Ok(self.model.generation(options)?)
    }

    fn engine(&self, options: &serving::Options) -> Result<Engine> {
        Ok(self.model.engine(options)?)
    }

    fn vocab_size(&self) -> usize {
        self.model.vocab_size()
    }

    fn context_length(&self) -> usize {
        self.model.context_length()
    }

    fn hidden_states(&mut self, ids: &Tensor) -> Result<Option<(Vec<Tensor>, Tensor)>> {
        self.model.clear();
        let input = ids.to_device(&self.place.device)?;
        Ok(Some(self.model.states(&input)?))
    }

    fn bytes_per_step(&self) -> Option<u64> {
        self.place.bytes.as_ref().map(|bytes| bytes.per_step())
    }
}
