//! Qwen3 (dense).
//!
//! [`ModelForCausalLM`] and [`Model`] have the names and signatures of
//! `candle_transformers::models::qwen3`, [`ModelWeights`] those of
//! `candle_transformers::models::quantized_qwen3`: changing the import is the whole change. Sliding
//! windows, which are an error there, are those of Hugging Face, as in [`super::qwen2`].
//!
//! Method: Qwen3 Technical Report (Yang et al. 2025).

use super::names::{GGUF, LLAMA};
use super::qwen::{self, RawConfig};
use super::shape::{self, Biases, Describe, Head, Kind, NormKind, Shape, Unrotated};
use super::weights::gated;
use crate::nn::AttentionConfig;
use crate::ops::{Activation, RopeStyle};
use candle_core::Result;
use serde::Deserialize;

/// A `config.json` of a Qwen3 model, of transformers 4 or 5; values that the model here cannot honour
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
    /// Width of a head.
    pub head_dim: usize,
    /// Whether the projections of attention have biases.
    pub attention_bias: bool,
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Context length.
    pub max_position_embeddings: usize,
    /// Positions that a sliding layer sees.
    pub sliding_window: Option<usize>,
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
        let settled = raw.settle("qwen3")?;
        Ok(Self {
            vocab_size: raw.vocab_size,
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            num_hidden_layers: raw.num_hidden_layers,
            num_attention_heads: raw.num_attention_heads,
            head_dim: raw.head_dim.unwrap_or(128),
            attention_bias: raw.attention_bias.unwrap_or(false),
            num_key_value_heads: settled.kv_heads,
            max_position_embeddings: settled.max_position_embeddings,
            sliding_window: settled.sliding_window,
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
    gguf: &["qwen3"],
    names: LLAMA,
    gguf_names: GGUF,
    gguf_style: RopeStyle::HalfSplit,
    gguf_unrotated: Unrotated::None,
    norm: NormKind::Rms,
    head_norms: true,
    sub_norms: false,
    side_by_side: false,
    activation: Activation::SwiGlu,
    biases: Biases::NONE,
};

impl Describe for Config {
    const KIND: &'static Kind = &KIND;

    fn shape(&self) -> Result<Shape> {
        let used = self.use_sliding_window;
        let shape = Shape {
            kind: &KIND,
            vocab: self.vocab_size,
            hidden: self.hidden_size,
            intermediate: self.intermediate_size,
            layers: self.num_hidden_layers,
            attention: AttentionConfig {
                heads: self.num_attention_heads,
                kv_heads: self.num_key_value_heads,
                head_dim: self.head_dim,
                window: None,
            },
            sliding: qwen::sliding(used, self.sliding_window, self.max_window_layers),
            frequencies: Vec::new(),
            long: None,
            unrotated: Unrotated::None,
            eps: self.rms_norm_eps,
            activation: KIND.activation,
            parallel: false,
            biases: Biases {
                qkv: self.attention_bias,
                output: self.attention_bias,
                mlp: false,
            },
            head: Head::tied(self.tie_word_embeddings),
            max_positions: self.max_position_embeddings,
        };
        gated(shape, self.hidden_act)?
            .rotated_by(|| shape::inverse_frequencies(self.rope_theta as f32, self.head_dim))
    }
}

/// A Qwen3 model with dense weights and its head.
pub type ModelForCausalLM = super::CausalLm<Config>;

/// A Qwen3 model with dense weights and without its head.
pub type Model = super::BaseModel<Config>;

/// A Qwen3 model with GGUF weights.
pub type ModelWeights = super::GgufModel<Config>;
