//! Models with dense weights that keep their own cache, as candle-transformers' newer ones do.

use super::Architecture;
use super::checkpoint::Stored;
use super::decoder::{Decoder, DecoderCache, Rotaries, Stack};
use super::parts::Parts;
use super::quantized::{Mapped, QuantizedFile, Quantizing};
use super::shape::Shape;
use super::weights::Loader;
use crate::Fusion;
use crate::nn::Embedding;
use crate::nn::recipe::Recipe;
use crate::ops::RopeStyle;
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::VarBuilder;
use std::marker::PhantomData;

/// A language model of configuration `C` with its head: `ModelForCausalLM` of
/// [`qwen2`](super::qwen2::ModelForCausalLM), [`qwen3`](super::qwen3::ModelForCausalLM) and
/// [`gpt_neox`](super::gpt_neox::ModelForCausalLM).
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::Fusion;
/// use candle_fused::models::qwen3::{Config, ModelForCausalLM};
/// use candle_fused::quant::Recipe;
/// use candle_nn::VarBuilder;
/// let config: Config = serde_json::from_str(
///     r#"{"vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
///         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "attention_bias": false,
///         "max_position_embeddings": 128, "sliding_window": null, "max_window_layers": 2,
///         "tie_word_embeddings": true, "rope_theta": 1e4, "rms_norm_eps": 1e-6,
///         "use_sliding_window": false, "hidden_act": "silu"}"#,
/// ).expect("a configuration");
/// let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let mut model = ModelForCausalLM::new(&config, vb.clone())?;
/// assert_eq!((model.vocab_size(), model.max_positions()), (32, 128));
/// let ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?;
/// // Logits after the last token, then those of one token more.
/// assert_eq!(model.forward(&ids, 0)?.dims(), [1, 1, 32]);
/// assert_eq!(model.forward(&ids.narrow(1, 0, 1)?, 3)?.dims(), [1, 1, 32]);
/// model.clear_kv_cache();
/// // The embedding, then the output of each layer, and the logits of every token.
/// let (states, logits) = model.hidden_states(&ids, 0)?;
/// assert_eq!((states.len(), logits.dims()), (3, &[1, 3, 32][..]));
///
/// // In candle's own operations, and with INT8 weights.
/// let mut plain = ModelForCausalLM::new_fused(&config, vb.clone(), Fusion::none())?;
/// let recipe = Recipe::new("int8".parse()?);
/// let mut small = ModelForCausalLM::new_quantized(&config, vb, &recipe, Fusion::all())?;
/// assert_eq!(plain.forward(&ids, 0)?.dims(), small.forward(&ids, 0)?.dims());
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct CausalLm<C> {
    decoder: Decoder,
    cache: DecoderCache,
    config: PhantomData<C>,
}

impl<C> Parts for CausalLm<C> {
    fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    fn empty_cache(&self) -> Result<DecoderCache> {
        Ok(self.cache.over(Vec::new()))
    }
}

impl<C: Architecture> CausalLm<C> {
    /// Loads weights (f32, f16 or bf16, or quantized as [`Checkpoint`](super::Checkpoint) says) under
    /// Hugging Face's names, with every fusion on.
    ///
    /// # Errors
    /// If the configuration is impossible, or a tensor is missing or does not have the shape that
    /// `cfg` asks for, by its name.
    pub fn new(cfg: &C, vb: VarBuilder) -> Result<Self> {
        Self::new_fused(cfg, vb, Fusion::all())
    }

    /// Loads the weights with the fusions that are on in `fusion`; [`Fusion::none`] gives the model
    /// in candle's own operations.
    ///
    /// # Errors
    /// As [`CausalLm::new`].
    pub fn new_fused(cfg: &C, vb: VarBuilder, fusion: Fusion) -> Result<Self> {
        let shape = cfg.shape()?;
        let cache = cache(&shape, vb.dtype(), vb.device())?;
        let source = Stored::new(vb, fusion)?;
        let decoder = loader::<C, _>(&shape, source, fusion).decoder()?;
        Ok(Self {
            decoder,
            cache,
            config: PhantomData,
        })
    }

    /// Loads the weights and quantizes them by `recipe`, matrix by matrix, so that little more than the
    /// quantized model is ever held.
    ///
    /// # Errors
    /// As [`CausalLm::new`], or by the tensor's name if it is quantized already, its width does not divide
    /// by the group or block of its quantization, it holds a NaN or an infinity, or the device has no
    /// kernels for it.
    pub fn new_quantized(cfg: &C, vb: VarBuilder, recipe: &Recipe, fusion: Fusion) -> Result<Self> {
        let shape = cfg.shape()?;
        let cache = cache(&shape, vb.dtype(), vb.device())?;
        let source = Quantizing::new(Stored::new(vb, fusion)?, recipe, &shape, fusion)?;
        let decoder = loader::<C, _>(&shape, source, fusion).decoder()?;
        Ok(Self {
            decoder,
            cache,
            config: PhantomData,
        })
    }

    /// A model that [`save_quantized`](super::save_quantized) wrote; on the CPU its matrices stay where
    /// the file is mapped. Everything else is in `dtype`.
    ///
    /// # Errors
    /// As [`CausalLm::new`], or if the device has no kernels for a matrix.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_fused::Fusion;
    /// use candle_fused::models::qwen2::{Config, ModelForCausalLM};
    /// use candle_fused::models::save_quantized;
    /// use candle_fused::quant::{QuantizedFile, Recipe};
    /// # let config: Config = serde_json::from_str(
    /// #     r#"{"vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    /// #         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    /// #         "sliding_window": 128, "max_window_layers": 1, "tie_word_embeddings": true,
    /// #         "rope_theta": 1e4, "rms_norm_eps": 1e-6, "use_sliding_window": false, "hidden_act": "silu"}"#,
    /// # ).expect("a configuration");
    /// # let vb = candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu);
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("model.safetensors");
    /// save_quantized(&config, vb, &Recipe::new("int8".parse()?), &path)?;
    /// // SAFETY: the file does not change while it is open.
    /// let file = unsafe { QuantizedFile::open(&path)? };
    /// let model = ModelForCausalLM::from_quantized(&config, &file, DType::F32, &Device::Cpu, Fusion::all())?;
    /// assert_eq!(model.vocab_size(), 32);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn from_quantized(
        cfg: &C,
        file: &QuantizedFile,
        dtype: DType,
        device: &Device,
        fusion: Fusion,
    ) -> Result<Self> {
        let shape = cfg.shape()?;
        let source = Mapped {
            file,
            dtype,
            device,
            fusion,
        };
        Ok(Self {
            cache: cache(&shape, dtype, device)?,
            decoder: loader::<C, _>(&shape, source, fusion).decoder()?,
            config: PhantomData,
        })
    }

    /// The logits `[B, 1, vocab]`, in the model's dtype, after the last of `input_ids` `[B, T]` (u32),
    /// which stand at positions `seqlen_offset..seqlen_offset + T`. Position 0 starts over.
    ///
    /// # Errors
    /// If `input_ids` is empty, an id is out of the vocabulary, or the context length is passed.
    pub fn forward(&mut self, input_ids: &Tensor, seqlen_offset: usize) -> Result<Tensor> {
        let embedded = self.decoder.stack.embed(input_ids)?;
        self.forward_embedded(&embedded, seqlen_offset, None)
    }

    /// The same for embedded tokens `[B, T, hidden]`, with a mask in place of the causal one.
    pub(super) fn forward_embedded(
        &mut self,
        embedded: &Tensor,
        seqlen_offset: usize,
        mask: Option<&Tensor>,
    ) -> Result<Tensor> {
        let (stack, cache) = (&self.decoder.stack, &mut self.cache);
        let x = stack.forward_with(embedded, seqlen_offset, mask, cache, None)?;
        self.decoder.last_logits(&x)?.unsqueeze(1)
    }

    pub(super) fn embedding(&self) -> &Embedding {
        &self.decoder.stack.embedding
    }

    /// Every hidden state of `input_ids` as transformers' `output_hidden_states` counts them (the
    /// embedding, then after each layer, the last one after the final norm; `[B, T, hidden]` each),
    /// and the logits of every position, `[B, T, vocab]` (f32).
    ///
    /// # Errors
    /// As [`CausalLm::forward`].
    pub fn hidden_states(
        &mut self,
        input_ids: &Tensor,
        seqlen_offset: usize,
    ) -> Result<(Vec<Tensor>, Tensor)> {
        self.decoder
            .states_and_logits(input_ids, seqlen_offset, &mut self.cache)
    }

    /// Rows of the embedding: token ids are below this.
    pub fn vocab_size(&self) -> usize {
        self.decoder.stack.embedding.vocab_size()
    }

    /// The context length.
    pub fn max_positions(&self) -> usize {
        self.decoder.stack.max_positions
    }

    /// Forgets all positions.
    pub fn clear_kv_cache(&mut self) {
        self.cache.clear();
    }
}

/// The same without its head: `Model` of [`qwen3`](super::qwen3::Model) and
/// [`gpt_neox`](super::gpt_neox::Model).
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::Fusion;
/// use candle_fused::models::smol::smollm3::{Config, Model};
/// let config: Config = serde_json::from_str(
///     r#"{"vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
///         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
///         "tie_word_embeddings": true, "rope_theta": 1e4, "rms_norm_eps": 1e-6, "hidden_act": "silu"}"#,
/// ).expect("a configuration");
/// let vb = candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?;
/// for mut model in [Model::new(&config, vb.clone())?, Model::new_fused(&config, vb, Fusion::none())?] {
///     // Behind the last norm, without a head.
///     assert_eq!(model.forward(&ids, 0)?.dims(), [1, 3, 64]);
///     model.clear_kv_cache();
/// }
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct BaseModel<C> {
    stack: Stack,
    cache: DecoderCache,
    config: PhantomData<C>,
}

impl<C: Architecture> BaseModel<C> {
    /// As [`CausalLm::new`].
    ///
    /// # Errors
    /// As [`CausalLm::new`].
    pub fn new(cfg: &C, vb: VarBuilder) -> Result<Self> {
        Self::new_fused(cfg, vb, Fusion::all())
    }

    /// As [`CausalLm::new_fused`].
    ///
    /// # Errors
    /// As [`CausalLm::new`].
    pub fn new_fused(cfg: &C, vb: VarBuilder, fusion: Fusion) -> Result<Self> {
        let shape = cfg.shape()?;
        let cache = cache(&shape, vb.dtype(), vb.device())?;
        let source = Stored::new(vb, fusion)?;
        let stack = loader::<C, _>(&shape, source, fusion).stack()?;
        Ok(Self {
            stack,
            cache,
            config: PhantomData,
        })
    }

    /// What leaves the final norm, `[B, T, hidden]`, for `input` `[B, T]` (u32 token ids) at positions
    /// `offset..offset + T`. Position 0 starts over.
    ///
    /// # Errors
    /// As [`CausalLm::forward`].
    pub fn forward(&mut self, input: &Tensor, offset: usize) -> Result<Tensor> {
        self.forward_masked(input, offset, None)
    }

    /// The same with what is added to the scores instead of the causal mask, `[B, 1, 1, keys]`.
    pub(super) fn forward_masked(
        &mut self,
        input: &Tensor,
        offset: usize,
        mask: Option<&Tensor>,
    ) -> Result<Tensor> {
        let embedded = self.stack.embed(input)?;
        let cache = &mut self.cache;
        let x = self
            .stack
            .forward_with(&embedded, offset, mask, cache, None)?;
        self.stack.norm.forward(&x)
    }

    /// Forgets all positions.
    pub fn clear_kv_cache(&mut self) {
        self.cache.clear();
    }
}

fn loader<C: Architecture, S>(shape: &Shape, source: S, fusion: Fusion) -> Loader<'_, S> {
    Loader {
        source,
        names: &C::KIND.names,
        shape,
        fusion,
    }
}

fn cache(shape: &Shape, dtype: DType, device: &Device) -> Result<DecoderCache> {
    let rotaries = Rotaries::new(shape, RopeStyle::HalfSplit, device)?;
    let layers = shape.layers;
    Ok(DecoderCache::new(layers, rotaries, true, dtype, device))
}
