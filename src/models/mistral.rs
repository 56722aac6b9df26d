//! Mistral.
//!
//! [`Model`] and [`Config`] have the names and signatures of `candle_transformers::models::mistral`:
//! changing the import is the whole change. [`Model::embed_tokens`] gives this crate's [`Embedding`]. A window
//! is Hugging Face's, of `sliding_window` positions with the token's own, in every layer; candle-transformers
//! sees one more, and only within a prompt.
//!
//! Method: Mistral 7B (Jiang et al. 2023).

use super::config::{RawOther, RawPositions};
use super::names::{GGUF, LLAMA};
use super::shape::{self, Biases, Describe, Head, Kind, NormKind, Shape, Sliding, Unrotated};
use super::weights::gated;
use crate::nn::{AttentionConfig, Embedding};
use crate::ops::{Activation, RopeStyle};
use candle_core::{Result, Tensor};
use serde::Deserialize;

/// A `config.json` of a Mistral model, of transformers 4 or 5; values that the model here cannot honour are
/// an error, not ignored.
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
    /// Width of a head, if it is not that of the stream divided by the heads.
    pub head_dim: Option<usize>,
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Activation of the gate; SiLU.
    pub hidden_act: candle_nn::Activation,
    /// Context length.
    pub max_position_embeddings: usize,
    /// Added to the mean of squares in every norm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Positions that a token sees, its own included; none sees all.
    pub sliding_window: Option<usize>,
    /// candle-transformers' switch for its own CUDA kernels; the attention here is always fused unless
    /// [`Fusion`](crate::Fusion) says otherwise.
    pub use_flash_attn: bool,
}

impl Config {
    /// Mistral 7B, version 0.1.
    pub fn config_7b_v0_1(use_flash_attn: bool) -> Self {
        Self {
            vocab_size: 32_000,
            hidden_size: 4096,
            intermediate_size: 14_336,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            head_dim: None,
            num_key_value_heads: 8,
            hidden_act: candle_nn::Activation::Silu,
            max_position_embeddings: 32_768,
            rms_norm_eps: 1e-5,
            rope_theta: 10_000.,
            sliding_window: Some(4096),
            use_flash_attn,
        }
    }

    /// The same with the two tokens of ChatML.
    pub fn config_chat_ml(use_flash_attn: bool) -> Self {
        Self {
            vocab_size: 32_002,
            ..Self::config_7b_v0_1(use_flash_attn)
        }
    }

    /// Amazon's MistralLite.
    ///
    /// ```
    /// use candle_fused::models::mistral::Config;
    /// let [v01, chat, lite] = [
    ///     Config::config_7b_v0_1(false),
    ///     Config::config_chat_ml(false),
    ///     Config::config_amazon_mistral_lite(false),
    /// ];
    /// assert_eq!([v01.vocab_size, chat.vocab_size, lite.vocab_size], [32000, 32002, 32003]);
    /// ```
    pub fn config_amazon_mistral_lite(use_flash_attn: bool) -> Self {
        Self {
            vocab_size: 32_003,
            ..Self::config_7b_v0_1(use_flash_attn)
        }
    }
}

/// `config.json` as written.
#[derive(Deserialize)]
struct RawConfig {
    model_type: Option<String>,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: Option<usize>,
    head_dim: Option<usize>,
    num_key_value_heads: Option<usize>,
    hidden_act: Option<candle_nn::Activation>,
    max_position_embeddings: Option<usize>,
    rms_norm_eps: Option<f64>,
    sliding_window: Option<usize>,
    use_flash_attn: Option<bool>,
    tie_word_embeddings: Option<bool>,
    #[serde(flatten)]
    positions: RawPositions,
    #[serde(flatten)]
    other: RawOther,
}

impl TryFrom<RawConfig> for Config {
    type Error = String;

    fn try_from(raw: RawConfig) -> std::result::Result<Self, String> {
        raw.other.check(raw.model_type.as_deref(), "mistral")?;
        raw.positions.unscaled()?;
        if raw.tie_word_embeddings == Some(true) {
            return Err("tie_word_embeddings is true, expected a head of its own".into());
        }
        Ok(Self {
            vocab_size: raw.vocab_size,
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            num_hidden_layers: raw.num_hidden_layers,
            num_attention_heads: raw.num_attention_heads.unwrap_or(32),
            head_dim: raw.head_dim,
            num_key_value_heads: raw.num_key_value_heads.unwrap_or(8),
            hidden_act: raw.hidden_act.unwrap_or(candle_nn::Activation::Silu),
            max_position_embeddings: raw.max_position_embeddings.unwrap_or(131_072),
            rms_norm_eps: raw.rms_norm_eps.unwrap_or(1e-6),
            rope_theta: raw.positions.theta(None)?,
            sliding_window: raw.sliding_window,
            use_flash_attn: raw.use_flash_attn.unwrap_or(false),
        })
    }
}

static KIND: Kind = Kind {
    // Converters write Mistral as a Llama.
    gguf: &["llama", "mistral"],
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
        let head_dim = match self.head_dim {
            Some(dim) => dim,
            None => shape::head_dim(self.hidden_size, self.num_attention_heads)?,
        };
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
            sliding: self
                .sliding_window
                .map(|window| Sliding { window, from: 0 }),
            frequencies: Vec::new(),
            long: None,
            unrotated: Unrotated::None,
            eps: self.rms_norm_eps,
            activation: KIND.activation,
            parallel: false,
            biases: KIND.biases,
            head: Head::Own,
            max_positions: self.max_position_embeddings,
        };
        gated(shape, self.hidden_act)?
            .rotated_by(|| shape::inverse_frequencies(self.rope_theta as f32, head_dim))
    }
}

/// A Mistral model with dense weights and its head.
pub type Model = super::CausalLm<Config>;

/// A Mistral model with GGUF weights, whose metadata has the prefix `llama` or `mistral`.
pub type ModelWeights = super::GgufModel<Config>;

impl Model {
    /// The embedding.
    pub fn embed_tokens(&self) -> &Embedding {
        self.embedding()
    }

    /// As [`Model::forward`] for tokens that are embedded already, `[B, T, hidden]`. `attn_mask` is added
    /// to the scores in place of the causal mask and the window: f32, broadcast to `[B, heads, T, keys]`;
    /// without, every token sees every other.
    ///
    /// # Errors
    /// As [`Model::forward`], or if the mask does not fit.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_fused::models::mistral::{Config, Model};
    /// let config = Config {
    ///     vocab_size: 32,
    ///     hidden_size: 64,
    ///     intermediate_size: 96,
    ///     num_hidden_layers: 1,
    ///     num_attention_heads: 4,
    ///     num_key_value_heads: 2,
    ///     ..Config::config_7b_v0_1(false)
    /// };
    /// let vb = candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu);
    /// let mut model = Model::new(&config, vb)?;
    /// let ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?;
    /// let embedded = model.embed_tokens().forward(&ids)?;
    /// let logits = model.forward_embeds(&embedded, None, 0)?;
    /// assert_eq!(logits.dims(), [1, 1, 32]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn forward_embeds(
        &mut self,
        xs: &Tensor,
        attn_mask: Option<&Tensor>,
        seqlen_offset: usize,
    ) -> Result<Tensor> {
        let none = Tensor::zeros((1, 1, 1, 1), candle_core::DType::F32, xs.device())?;
        self.forward_embedded(xs, seqlen_offset, Some(attn_mask.unwrap_or(&none)))
    }
}
