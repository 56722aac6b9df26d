//! Mistral from GGUF files that have the names of safetensors, as candle's `tensor-tools` writes them, under the
//! names of `candle_transformers::models::quantized_mistral`. Those of llama.cpp are
//! [`mistral::ModelWeights`]'.

pub use super::mistral::Config;
pub use super::quantized_var_builder::VarBuilder;

use super::decoder::{Decoder, DecoderCache, Rotaries};
use super::mistral;
use super::parts::Parts;
use super::quantized_var_builder::Tensors;
use super::shape::Describe;
use super::weights::Loader;
use crate::Fusion;
use crate::ops::RopeStyle;
use candle_core::{Result, Tensor, bail};

/// A Mistral model with weights in blocks and a configuration that comes from elsewhere.
///
/// ```no_run
/// use candle_core::{Device, Tensor};
/// use candle_fused::models::quantized_mistral::{Config, Model, VarBuilder};
/// let vb = VarBuilder::from_gguf("model-q4k.gguf", &Device::Cpu)?;
/// let mut model = Model::new(&Config::config_7b_v0_1(false), vb)?;
/// let logits = model.forward(&Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?, 0)?;
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// ```
/// use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::Fusion;
/// use candle_fused::models::quantized_mistral::{Config, Model, VarBuilder};
/// # let mut tensors = Vec::new();
/// # for (name, shape) in [
/// #     ("model.embed_tokens", vec![32, 64]),
/// #     ("model.norm", vec![64]),
/// #     ("lm_head", vec![32, 64]),
/// #     ("model.layers.0.input_layernorm", vec![64]),
/// #     ("model.layers.0.self_attn.q_proj", vec![64, 64]),
/// #     ("model.layers.0.self_attn.k_proj", vec![32, 64]),
/// #     ("model.layers.0.self_attn.v_proj", vec![32, 64]),
/// #     ("model.layers.0.self_attn.o_proj", vec![64, 64]),
/// #     ("model.layers.0.post_attention_layernorm", vec![64]),
/// #     ("model.layers.0.mlp.gate_proj", vec![96, 64]),
/// #     ("model.layers.0.mlp.up_proj", vec![96, 64]),
/// #     ("model.layers.0.mlp.down_proj", vec![64, 96]),
/// # ] {
/// #     let values = Tensor::ones(shape, DType::F32, &Device::Cpu)?;
/// #     tensors.push((format!("{name}.weight"), QTensor::quantize(&values, GgmlDType::Q8_0)?));
/// # }
/// # let tensors: Vec<_> = tensors.iter().map(|(k, t)| (k.as_str(), t)).collect();
/// # let mut file = std::io::Cursor::new(Vec::new());
/// # gguf_file::write(&mut file, &[], &tensors)?;
/// # let bytes = file.into_inner();
/// // The bytes of a GGUF file of one layer.
/// let vb = VarBuilder::from_gguf_buffer(&bytes, &Device::Cpu)?;
/// let config = Config {
///     vocab_size: 32,
///     hidden_size: 64,
///     intermediate_size: 96,
///     num_hidden_layers: 1,
///     num_attention_heads: 4,
///     num_key_value_heads: 2,
///     ..Config::config_7b_v0_1(false)
/// };
/// let ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?;
/// for mut model in [Model::new(&config, vb.clone())?, Model::new_fused(&config, vb, Fusion::none())?] {
///     assert_eq!(model.forward(&ids, 0)?.dims(), [1, 1, 32]);
///     model.clear_kv_cache();
/// }
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Model(mistral::ModelWeights);

impl Model {
    /// Loads the weights with every fusion on. On the CPU blocks are repacked as they are read.
    ///
    /// # Errors
    /// If the configuration is impossible, a tensor is missing or does not have the shape that `cfg` asks for, by its
    /// name, or the file has llama.cpp's names.
    pub fn new(cfg: &Config, vb: VarBuilder) -> Result<Self> {
        Self::new_fused(cfg, vb, Fusion::all())
    }

    /// Loads the weights with the fusions that are on in `fusion`.
    ///
    /// # Errors
    /// As [`Model::new`].
    pub fn new_fused(cfg: &Config, vb: VarBuilder, fusion: Fusion) -> Result<Self> {
        if vb.contains_key("token_embd.weight") {
            bail!(
                "gguf: `token_embd.weight` is a name of llama.cpp's, expected those of safetensors; \
                 `candle_fused::models::mistral::ModelWeights` takes it"
            );
        }
        let (shape, device) = (cfg.shape()?, vb.device().clone());
        let rotaries = Rotaries::new(&shape, RopeStyle::HalfSplit, &device)?;
        let source = Tensors::new(vb, fusion);
        let dtype = source.cache_dtype(fusion)?;
        let loader = Loader {
            source,
            names: &Config::KIND.names,
            shape: &shape,
            fusion,
        };
        let decoder = loader.decoder()?;
        let cache = DecoderCache::new(shape.layers, rotaries, true, dtype, &device);
        Ok(Self(mistral::ModelWeights::of(decoder, cache)))
    }

    /// The logits `[B, 1, vocab]` (f32) after the last of `input_ids` `[B, T]` (u32), which stand at positions
    /// `seqlen_offset..seqlen_offset + T`. Position 0 starts over.
    ///
    /// # Errors
    /// If `input_ids` is empty, an id is out of the vocabulary, or the context length is passed.
    pub fn forward(&mut self, input_ids: &Tensor, seqlen_offset: usize) -> Result<Tensor> {
        self.0.forward(input_ids, seqlen_offset)?.unsqueeze(1)
    }

    /// Forgets all positions.
    pub fn clear_kv_cache(&mut self) {
        self.0.clear_kv_cache();
    }
}

impl Parts for Model {
    fn decoder(&self) -> &Decoder {
        self.0.decoder()
    }

    fn empty_cache(&self) -> Result<DecoderCache> {
        self.0.empty_cache()
    }
}
