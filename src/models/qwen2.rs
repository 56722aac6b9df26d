//! Qwen2 and Qwen2.5.
//!
//! [`ModelForCausalLM`] and [`Model`] have the names and signatures of
//! `candle_transformers::models::qwen2`, [`ModelWeights`] those of
//! `candle_transformers::models::quantized_qwen2`: changing the import is the whole change. Sliding
//! windows are those of Hugging Face: only with `use_sliding_window`, only from layer
//! `max_window_layers` on, and of `sliding_window` positions with the token's own.
//!
//! Method: Qwen2 Technical Report (Yang et al. 2024).

use super::names::{GGUF, LLAMA};
use super::qwen::{self, RawConfig};
use super::shape::{self, Biases, Describe, Head, Kind, NormKind, Shape, Unrotated};
use super::weights::gated;
use crate::Fusion;
use crate::nn::AttentionConfig;
use crate::ops::{Activation, RopeStyle};
use candle_core::{DType, Result, Tensor, bail};
use candle_nn::VarBuilder;
use serde::Deserialize;

/// A `config.json` of a Qwen2 model, of transformers 4 or 5; values that the model here cannot honour
/// are an error, not ignored.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(try_from = "RawConfig")]
pub struct Config {
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the gated MLP.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Context length.
    pub max_position_embeddings: usize,
    /// Positions that a sliding layer sees.
    pub sliding_window: usize,
    /// Layers before the first that slides.
    pub max_window_layers: usize,
    /// Whether the head shares the embedding's weights.
    pub tie_word_embeddings: bool,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Added to the mean of squares in every norm.
    pub rms_norm_eps: f64,
    /// Whether layers slide at all.
    pub use_sliding_window: bool,
    /// Activation of the gate; SiLU.
    pub hidden_act: candle_nn::Activation,
}

impl TryFrom<RawConfig> for Config {
    type Error = String;

    fn try_from(raw: RawConfig) -> std::result::Result<Self, String> {
        let settled = raw.settle("qwen2")?;
        let (hidden, heads) = (raw.hidden_size, raw.num_attention_heads);
        if let Some(dim) = raw
            .head_dim
            .filter(|dim| dim.checked_mul(heads) != Some(hidden))
        {
            return Err(format!(
                "head_dim {dim} times num_attention_heads {heads} is not hidden_size {hidden}"
            ));
        }
        Ok(Self {
            vocab_size: raw.vocab_size,
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            num_hidden_layers: raw.num_hidden_layers,
            num_attention_heads: raw.num_attention_heads,
            num_key_value_heads: settled.kv_heads,
            max_position_embeddings: settled.max_position_embeddings,
            sliding_window: settled
                .sliding_window
                .unwrap_or(settled.max_position_embeddings),
            max_window_layers: settled.max_window_layers,
            tie_word_embeddings: settled.tie_word_embeddings,
            rope_theta: settled.rope_theta,
            rms_norm_eps: settled.rms_norm_eps,
            use_sliding_window: settled.sliding_window.is_some(),
            hidden_act: settled.hidden_act,
        })
    }
}

static KIND: Kind = Kind {
    gguf: &["qwen2"],
    names: LLAMA,
    gguf_names: GGUF,
    gguf_style: RopeStyle::HalfSplit,
    gguf_unrotated: Unrotated::None,
    norm: NormKind::Rms,
    head_norms: false,
    sub_norms: false,
    side_by_side: false,
    activation: Activation::SwiGlu,
    biases: Biases {
        qkv: true,
        output: false,
        mlp: false,
    },
};

impl Describe for Config {
    const KIND: &'static Kind = &KIND;

    fn shape(&self) -> Result<Shape> {
        let head_dim = shape::head_dim(self.hidden_size, self.num_attention_heads)?;
        let window = Some(self.sliding_window);
        let shape = Shape {
            kind: &KIND,
            vocab: self.vocab_size,
            hidden: self.hidden_size,
            intermediate: self.intermediate_size,
            layers: self.num_hidden_layers,
            attention: AttentionConfig {
                heads: self.num_attention_heads,
                kv_heads: self.num_key_value_heads,
                head_dim,
                window: None,
            },
            sliding: qwen::sliding(self.use_sliding_window, window, self.max_window_layers),
            frequencies: Vec::new(),
            long: None,
            unrotated: Unrotated::None,
            eps: self.rms_norm_eps,
            activation: KIND.activation,
            parallel: false,
            biases: KIND.biases,
            head: match self.tie_word_embeddings {
                true => Head::Embedding,
                // candle-transformers takes what the checkpoint has.
                false => Head::Either,
            },
            max_positions: self.max_position_embeddings,
        };
        gated(shape, self.hidden_act)?
            .rotated_by(|| shape::inverse_frequencies(self.rope_theta as f32, head_dim))
    }
}

/// A Qwen2 model with dense weights and its head.
pub type ModelForCausalLM = super::CausalLm<Config>;

/// A Qwen2 model with GGUF weights.
pub type ModelWeights = super::GgufModel<Config>;

/// A Qwen2 model without its head.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::Fusion;
/// use candle_fused::models::qwen2::{Config, Model};
/// use candle_nn::VarBuilder;
/// let config: Config = serde_json::from_str(
///     r#"{"vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
///         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
///         "sliding_window": 128, "max_window_layers": 1, "tie_word_embeddings": true,
///         "rope_theta": 1e4, "rms_norm_eps": 1e-6, "use_sliding_window": false, "hidden_act": "silu"}"#,
/// ).expect("a configuration");
/// let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?;
/// for mut model in [Model::new(&config, vb.clone())?, Model::new_fused(&config, vb, Fusion::none())?] {
///     assert_eq!(model.forward(&ids, 0, None)?.dims(), [1, 3, 64]);
///     model.clear_kv_cache();
/// }
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Model {
    base: super::BaseModel<Config>,
}

impl Model {
    /// As [`ModelForCausalLM::new`].
    ///
    /// # Errors
    /// As [`ModelForCausalLM::new`].
    pub fn new(cfg: &Config, vb: VarBuilder) -> Result<Self> {
        Self::new_fused(cfg, vb, Fusion::all())
    }

    /// As [`ModelForCausalLM::new_fused`].
    ///
    /// # Errors
    /// As [`ModelForCausalLM::new`].
    pub fn new_fused(cfg: &Config, vb: VarBuilder, fusion: Fusion) -> Result<Self> {
        let base = super::BaseModel::new_fused(cfg, vb, fusion)?;
        Ok(Self { base })
    }

    /// What leaves the final norm, `[B, T, hidden]`, for `input_ids` `[B, T]` (u32) at positions
    /// `seqlen_offset..seqlen_offset + T`. With `attn_mask` `[B, seqlen_offset + T]` (integers) every
    /// token sees all positions whose mask is not 0, before it and after it; without, attention is
    /// causal.
    ///
    /// # Errors
    /// As [`ModelForCausalLM::forward`], or if the mask does not fit.
    pub fn forward(
        &mut self,
        input_ids: &Tensor,
        seqlen_offset: usize,
        attn_mask: Option<&Tensor>,
    ) -> Result<Tensor> {
        let Some(mask) = attn_mask else {
            return self.base.forward(input_ids, seqlen_offset);
        };
        let [batch, tokens] = *input_ids.dims() else {
            bail!("input_ids: {:?}, expected [B, T]", input_ids.dims());
        };
        let keys = seqlen_offset + tokens;
        if mask.dims() != [batch, keys] {
            bail!(
                "attn_mask has shape {:?}, expected [{batch}, {keys}]",
                mask.shape()
            );
        }
        let mask = mask.reshape((batch, 1, 1, keys))?;
        let seen = mask.zeros_like()?.to_dtype(DType::F32)?;
        let hidden = Tensor::new(f32::NEG_INFINITY, mask.device())?.broadcast_as(mask.shape())?;
        let mask = mask.where_cond(&seen, &hidden)?;
        self.base
            .forward_masked(input_ids, seqlen_offset, Some(&mask))
    }

    /// Forgets all positions.
    pub fn clear_kv_cache(&mut self) {
        self.base.clear_kv_cache();
    }
}
