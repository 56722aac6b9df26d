//! Llama 2 and 3, SmolLM2 and what shares their architecture.
//!
//! [`Llama`] has the names and signatures of `candle_transformers::models::llama`, [`ModelWeights`]
//! those of `candle_transformers::models::quantized_llama`: changing the import is the whole change.
//! What the crate adds stands in methods of its own: `load_fused` and `from_gguf_fused` take a
//! [`Fusion`], and `hidden_states` shows what every layer did.
//!
//! Method: LLaMA: Open and Efficient Foundation Language Models (Touvron et al. 2023); The Llama 3
//! Herd of Models (2024) for the scaled rotary frequencies.

mod config;
mod ggml;
mod gguf;

pub use config::{
    Config, DEFAULT_MAX_SEQ_LEN, Llama3RopeConfig, Llama3RopeType, LlamaConfig, LlamaEosToks,
};
pub use gguf::{dequantize_gguf, gguf_config};

use super::checkpoint::Stored;
use super::decoder::{Decoder, DecoderCache, Rotaries};
use super::names::{GGUF, LLAMA};
use super::parts::Parts;
use super::quantized::{Mapped, QuantizedFile, Quantizing};
use super::shape::{self, Biases, Describe, Head, Kind, NormKind, Shape, Unrotated};
use super::weights::{Loader, Source};
use crate::Fusion;
use crate::nn::AttentionConfig;
use crate::nn::recipe::Recipe;
use crate::ops::{Activation, RopeStyle};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;

static KIND: Kind = Kind {
    gguf: &["llama"],
    names: LLAMA,
    gguf_names: GGUF,
    gguf_style: RopeStyle::Interleaved,
    gguf_unrotated: Unrotated::None,
    norm: NormKind::Rms,
    head_norms: false,
    sub_norms: false,
    side_by_side: false,
    activation: Activation::SwiGlu,
    biases: Biases::NONE,
};

impl Describe for Config {
    const KIND: &'static Kind = &KIND;

    fn shape(&self) -> Result<Shape> {
        let shape = Shape {
            kind: &KIND,
            vocab: self.vocab_size,
            hidden: self.hidden_size,
            intermediate: self.intermediate_size,
            layers: self.num_hidden_layers,
            attention: AttentionConfig {
                heads: self.num_attention_heads,
                kv_heads: self.num_key_value_heads,
                head_dim: shape::head_dim(self.hidden_size, self.num_attention_heads)?,
                window: None,
            },
            sliding: None,
            frequencies: Vec::new(),
            long: None,
            unrotated: Unrotated::None,
            eps: self.rms_norm_eps,
            activation: KIND.activation,
            parallel: false,
            biases: KIND.biases,
            head: Head::tied(self.tie_word_embeddings),
            max_positions: self.max_position_embeddings,
        };
        shape.rotated_by(|| self.inverse_frequencies())
    }
}

/// A Llama model with GGUF weights.
pub type ModelWeights = super::GgufModel<Config>;

/// Keys, values and rotary tables of one batch of sequences.
#[derive(Debug, Clone)]
pub struct Cache {
    /// Whether calls use and add to what is held; without, each stands alone and changes nothing.
    pub use_kv_cache: bool,
    inner: DecoderCache,
}

impl Cache {
    /// An empty cache in the model's `dtype`.
    ///
    /// # Errors
    /// If the configuration is impossible.
    pub fn new(use_kv_cache: bool, dtype: DType, config: &Config, device: &Device) -> Result<Self> {
        Self::of(&config.shape()?, use_kv_cache, dtype, device)
    }

    fn of(shape: &Shape, use_kv_cache: bool, dtype: DType, device: &Device) -> Result<Self> {
        let rotaries = Rotaries::new(shape, RopeStyle::HalfSplit, device)?;
        Ok(Self {
            use_kv_cache,
            inner: DecoderCache::new(shape.layers, rotaries, use_kv_cache, dtype, device),
        })
    }

    /// What the layers take.
    fn decoders(&mut self) -> &mut DecoderCache {
        self.inner.set_keep(self.use_kv_cache);
        &mut self.inner
    }

    /// Forgets all positions.
    pub fn clear(&mut self) {
        self.inner.clear();
    }
}

/// A Llama model of safetensors files.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::Fusion;
/// use candle_fused::models::llama::{Cache, Config, Llama};
/// use candle_fused::quant::Recipe;
/// use candle_nn::VarBuilder;
/// let config = Config {
///     hidden_size: 64,
///     intermediate_size: 96,
///     vocab_size: 32,
///     num_hidden_layers: 2,
///     num_attention_heads: 4,
///     num_key_value_heads: 2,
///     ..Config::config_7b_v2(false)
/// };
/// let (vb, device) = (VarBuilder::zeros(DType::F32, &Device::Cpu), Device::Cpu);
/// let model = Llama::load(vb.clone(), &config)?;
/// let mut cache = Cache::new(true, DType::F32, &config, &device)?;
/// let ids = Tensor::new(&[[1u32, 2, 3]], &device)?;
/// assert_eq!(model.forward(&ids, 0, &mut cache)?.dims(), [1, 32]);
/// // From embeddings, for one token more.
/// let embedded = model.embed(&ids.narrow(1, 0, 1)?)?;
/// assert_eq!(model.forward_input_embed(&embedded, 3, &mut cache)?.dims(), [1, 32]);
/// cache.clear();
/// // The embedding, then the output of each layer, and the logits of every token.
/// let (states, logits) = model.hidden_states(&ids, 0, &mut cache)?;
/// assert_eq!((states.len(), logits.dims()), (3, &[1, 3, 32][..]));
///
/// // In candle's own operations, and with INT8 weights.
/// let plain = Llama::load_fused(vb.clone(), &config, Fusion::none())?;
/// let small = Llama::load_quantized(vb, &config, &Recipe::new("int8".parse()?), Fusion::all())?;
/// for model in [plain, small] {
///     cache.clear();
///     assert_eq!(model.forward(&ids, 0, &mut cache)?.dims(), [1, 32]);
/// }
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Llama {
    decoder: Decoder,
    /// An empty cache, as a generation takes it.
    cache: DecoderCache,
}

impl Parts for Llama {
    fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    fn empty_cache(&self) -> Result<DecoderCache> {
        Ok(self.cache.over(Vec::new()))
    }
}

impl Llama {
    /// Loads the weights (f32, f16 or bf16, or quantized as [`Checkpoint`](super::Checkpoint) says) with
    /// every fusion on.
    ///
    /// # Errors
    /// If a tensor is missing or does not have the shape that `cfg` asks for, by its name.
    pub fn load(vb: VarBuilder, cfg: &Config) -> Result<Self> {
        Self::load_fused(vb, cfg, Fusion::all())
    }

    /// Loads the weights with the fusions that are on in `fusion`.
    ///
    /// # Errors
    /// As [`Llama::load`].
    pub fn load_fused(vb: VarBuilder, cfg: &Config, fusion: Fusion) -> Result<Self> {
        let shape = cfg.shape()?;
        let cache = Cache::of(&shape, true, vb.dtype(), vb.device())?.inner;
        Self::from_source(Stored::new(vb, fusion)?, cache, &shape, fusion)
    }

    /// Loads the weights and quantizes them by `recipe`, matrix by matrix, so that little more than the
    /// quantized model is ever held.
    ///
    /// # Errors
    /// As [`Llama::load`], or by the tensor's name if it is quantized already, its width does not divide by
    /// the group or block of its quantization, it holds a NaN or an infinity, or the device has no kernels
    /// for it.
    pub fn load_quantized(
        vb: VarBuilder,
        cfg: &Config,
        recipe: &Recipe,
        fusion: Fusion,
    ) -> Result<Self> {
        let shape = cfg.shape()?;
        let cache = Cache::of(&shape, true, vb.dtype(), vb.device())?.inner;
        let source = Quantizing::new(Stored::new(vb, fusion)?, recipe, &shape, fusion)?;
        Self::from_source(source, cache, &shape, fusion)
    }

    /// A model that [`save_quantized`](super::save_quantized) wrote; on the CPU its matrices stay where
    /// the file is mapped. Everything else is in `dtype`.
    ///
    /// # Errors
    /// As [`Llama::load`], or if the device has no kernels for a matrix.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_fused::Fusion;
    /// use candle_fused::models::llama::{Config, Llama};
    /// use candle_fused::models::save_quantized;
    /// use candle_fused::quant::{QuantizedFile, Recipe};
    /// # let config = Config {
    /// #     hidden_size: 64, intermediate_size: 96, vocab_size: 32, num_hidden_layers: 1,
    /// #     num_attention_heads: 4, num_key_value_heads: 2, ..Config::config_7b_v2(false)
    /// # };
    /// # let vb = candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu);
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("model.safetensors");
    /// save_quantized(&config, vb, &Recipe::new("int8".parse()?), &path)?;
    /// // SAFETY: the file does not change while it is open.
    /// let file = unsafe { QuantizedFile::open(&path)? };
    /// let model = Llama::from_quantized(&file, &config, DType::F32, &Device::Cpu, Fusion::all())?;
    /// # let mut cache = candle_fused::models::llama::Cache::new(true, DType::F32, &config, &Device::Cpu)?;
    /// let ids = candle_core::Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?;
    /// assert_eq!(model.forward(&ids, 0, &mut cache)?.dims(), [1, 32]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn from_quantized(
        file: &QuantizedFile,
        cfg: &Config,
        dtype: DType,
        device: &Device,
        fusion: Fusion,
    ) -> Result<Self> {
        let shape = cfg.shape()?;
        let cache = Cache::of(&shape, true, dtype, device)?.inner;
        let source = Mapped {
            file,
            dtype,
            device,
            fusion,
        };
        Self::from_source(source, cache, &shape, fusion)
    }

    fn from_source(
        source: impl Source,
        cache: DecoderCache,
        shape: &Shape,
        fusion: Fusion,
    ) -> Result<Self> {
        let loader = Loader {
            source,
            names: &KIND.names,
            shape,
            fusion,
        };
        Ok(Self {
            decoder: loader.decoder()?,
            cache,
        })
    }

    /// The embeddings of `x` `[B, T]`: `[B, T, hidden]`.
    ///
    /// # Errors
    /// If an id is out of the vocabulary, or `x` is not two-dimensional.
    pub fn embed(&self, x: &Tensor) -> Result<Tensor> {
        self.decoder.stack.embed(x)
    }

    /// The logits `[B, vocab]` (f32) after the last of the embedded tokens `[B, T, hidden]`.
    pub fn forward_input_embed(
        &self,
        input_embed: &Tensor,
        index_pos: usize,
        cache: &mut Cache,
    ) -> Result<Tensor> {
        let stack = &self.decoder.stack;
        let x = stack.forward(input_embed, index_pos, cache.decoders())?;
        self.decoder.last_logits(&x)?.to_dtype(DType::F32)
    }

    /// The logits `[B, vocab]` (f32) after the last of `x` `[B, T]` (u32 token ids), which are rotated as
    /// positions `index_pos..index_pos + T` and come after those in the cache.
    ///
    /// Position 0 starts over; a position that is held is written over, and what stood after it is given
    /// up. One further on than the next leaves no hole: its tokens take the next slots.
    ///
    /// # Errors
    /// If `x` is empty, an id is out of the vocabulary, or the context length is passed.
    pub fn forward(&self, x: &Tensor, index_pos: usize, cache: &mut Cache) -> Result<Tensor> {
        self.forward_input_embed(&self.embed(x)?, index_pos, cache)
    }

    /// Every hidden state of `x` as transformers' `output_hidden_states` counts them (the embedding,
    /// then after each layer, the last one after the final norm; `[B, T, hidden]` each), and the
    /// logits of every position, `[B, T, vocab]` (f32).
    ///
    /// # Errors
    /// As [`Llama::forward`].
    pub fn hidden_states(
        &self,
        x: &Tensor,
        index_pos: usize,
        cache: &mut Cache,
    ) -> Result<(Vec<Tensor>, Tensor)> {
        self.decoder
            .states_and_logits(x, index_pos, cache.decoders())
    }
}
