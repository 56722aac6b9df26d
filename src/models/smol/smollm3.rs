//! SmolLM3: a Llama some of whose layers do not rotate queries and keys.
//!
//! [`ModelForCausalLM`], [`Model`] and [`Config`] have the names and signatures of
//! `candle_transformers::models::smol::smollm3`.
//!
//! Method: SmolLM3 (Bakouch et al. 2025); RoPE to NoRoPE and Back Again (Yang et al. 2025).

use crate::models::config::{RawOther, RawPositions};
use crate::models::names::{GGUF, LLAMA};
use crate::models::shape::{self, Biases, Describe, Head, Kind, NormKind, Shape, Unrotated};
use crate::models::weights::gated;
use crate::models::{BaseModel, CausalLm, GgufModel};
use crate::nn::AttentionConfig;
use crate::ops::{Activation, RopeStyle};
use candle_core::{Result, bail};
use serde::Deserialize;

/// By default, the last of each group of this many layers is not rotated.
pub(super) const INTERVAL: usize = 4;

/// A `config.json` of a SmolLM3 model, of transformers 4 or 5; values that the model here cannot honour are
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
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Context length.
    pub max_position_embeddings: usize,
    /// Whether the head shares the embedding's weights.
    pub tie_word_embeddings: bool,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Added to the mean of squares in every norm.
    pub rms_norm_eps: f64,
    /// Activation of the gate; SiLU.
    pub hidden_act: candle_nn::Activation,
    /// Whether the projections of attention have biases.
    pub attention_bias: Option<bool>,
    /// Of training.
    pub attention_dropout: Option<f64>,
    /// Whether the matrices of the MLP have biases.
    pub mlp_bias: Option<bool>,
    /// Positions that a token sees; only none is taken.
    pub sliding_window: Option<usize>,
    /// Whether layers slide; only false is taken.
    pub use_sliding_window: Option<bool>,
    /// Only none is taken.
    pub rope_scaling: Option<serde_json::Value>,
    /// Begin-of-sequence token.
    pub bos_token_id: Option<u32>,
    /// End-of-sequence token.
    pub eos_token_id: Option<u32>,
    /// Padding token.
    pub pad_token_id: Option<u32>,
    /// Of sliding windows.
    pub max_window_layers: Option<usize>,
    /// 0 for each layer that is not rotated, 1 for others.
    pub no_rope_layers: Option<Vec<usize>>,
    /// Without a list, the last of so many layers is not rotated.
    pub no_rope_layer_interval: Option<usize>,
}

impl Config {
    /// Whether a layer is not rotated.
    ///
    /// ```
    /// use candle_fused::models::smol::smollm3::Config;
    /// let config: Config = serde_json::from_str(
    ///     r#"{"vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    ///         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    ///         "tie_word_embeddings": true, "rope_theta": 1e4, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    ///         "no_rope_layer_interval": 4}"#,
    /// ).expect("a configuration");
    /// assert!(!config.should_skip_rope(0) && config.should_skip_rope(3));
    /// assert_eq!(config.head_dim(), 16);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn should_skip_rope(&self, layer_idx: usize) -> bool {
        match (&self.no_rope_layers, self.no_rope_layer_interval) {
            (Some(layers), _) if layer_idx < layers.len() => layers[layer_idx] == 0,
            (_, Some(interval)) => (layer_idx + 1).is_multiple_of(interval),
            _ => false,
        }
    }

    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads.max(1)
    }

    /// That nothing is asked for which would be ignored.
    fn check(&self) -> std::result::Result<(), String> {
        if self.use_sliding_window == Some(true) {
            return Err("use_sliding_window is true, expected false".into());
        }
        match self
            .rope_scaling
            .as_ref()
            .filter(|scaling| !scaling.is_null())
        {
            Some(scaling) => Err(format!("rope_scaling is {scaling}, expected none")),
            None => Ok(()),
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
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    max_position_embeddings: Option<usize>,
    tie_word_embeddings: Option<bool>,
    rms_norm_eps: Option<f64>,
    hidden_act: Option<candle_nn::Activation>,
    attention_bias: Option<bool>,
    attention_dropout: Option<f64>,
    mlp_bias: Option<bool>,
    sliding_window: Option<usize>,
    use_sliding_window: Option<bool>,
    bos_token_id: Option<u32>,
    eos_token_id: Option<u32>,
    pad_token_id: Option<u32>,
    max_window_layers: Option<usize>,
    no_rope_layer_interval: Option<usize>,
    #[serde(flatten)]
    positions: RawPositions,
    #[serde(flatten)]
    other: RawOther,
}

impl TryFrom<RawConfig> for Config {
    type Error = String;

    fn try_from(raw: RawConfig) -> std::result::Result<Self, String> {
        raw.other.check(raw.model_type.as_deref(), "smollm3")?;
        raw.positions.unscaled()?;
        let list = raw.other.no_rope_layers;
        let config = Self {
            vocab_size: raw.vocab_size,
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            num_hidden_layers: raw.num_hidden_layers,
            num_attention_heads: raw.num_attention_heads,
            num_key_value_heads: raw.num_key_value_heads.unwrap_or(raw.num_attention_heads),
            max_position_embeddings: raw.max_position_embeddings.unwrap_or(32_768),
            tie_word_embeddings: raw.tie_word_embeddings.unwrap_or(true),
            rope_theta: raw.positions.theta(Some(2e6))?,
            rms_norm_eps: raw.rms_norm_eps.unwrap_or(1e-6),
            hidden_act: raw.hidden_act.unwrap_or(candle_nn::Activation::Silu),
            attention_bias: raw.attention_bias,
            attention_dropout: raw.attention_dropout,
            mlp_bias: raw.mlp_bias,
            sliding_window: raw.sliding_window,
            use_sliding_window: raw.use_sliding_window,
            rope_scaling: None,
            bos_token_id: raw.bos_token_id,
            eos_token_id: raw.eos_token_id,
            pad_token_id: raw.pad_token_id,
            max_window_layers: raw.max_window_layers,
            no_rope_layers: list
                .map(|list| list.iter().map(|one| usize::from(*one != 0.)).collect()),
            no_rope_layer_interval: raw.no_rope_layer_interval.or(Some(INTERVAL)),
        };
        config.check()?;
        Ok(config)
    }
}

static KIND: Kind = Kind {
    gguf: &["smollm3"],
    names: LLAMA,
    gguf_names: GGUF,
    gguf_style: RopeStyle::Interleaved,
    gguf_unrotated: Unrotated::Every(INTERVAL),
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
        if let Err(why) = self.check() {
            bail!("config: {why}");
        }
        if self.no_rope_layer_interval == Some(0) {
            bail!("config: no_rope_layer_interval is 0, expected at least 1");
        }
        let head_dim = shape::head_dim(self.hidden_size, self.num_attention_heads)?;
        let bias = self.attention_bias.unwrap_or(false);
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
            sliding: None,
            frequencies: Vec::new(),
            long: None,
            unrotated: Unrotated::None,
            eps: self.rms_norm_eps,
            activation: KIND.activation,
            parallel: false,
            biases: Biases {
                qkv: bias,
                output: bias,
                mlp: self.mlp_bias.unwrap_or(false),
            },
            head: Head::tied(self.tie_word_embeddings),
            max_positions: self.max_position_embeddings,
        };
        let mut shape = gated(shape, self.hidden_act)?
            .rotated_by(|| shape::inverse_frequencies(self.rope_theta as f32, head_dim))?;
        let skips = (0..shape.layers).map(|layer| self.should_skip_rope(layer));
        shape.unrotated = Unrotated::Listed(skips.collect());
        Ok(shape)
    }
}

/// A SmolLM3 model with dense weights and its head.
pub type ModelForCausalLM = CausalLm<Config>;

/// A SmolLM3 model with dense weights and without its head.
pub type Model = BaseModel<Config>;

/// A SmolLM3 model with GGUF weights.
pub type ModelWeights = GgufModel<Config>;
