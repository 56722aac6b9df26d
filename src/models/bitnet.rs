//! BitNet b1.58 2B4T.
//!
//! A Llama whose matrices are ternary, with a norm before the output projection and of the MLP's last matrix, and
//! squared ReLU as the gate: `down(norm(max(gate(x), 0)^2 * up(x)))`. Checkpoints are transformers' (`quant_method`
//! `bitnet`), packed or as the numbers that training left; [`Checkpoint`](super::Checkpoint) opens them. Their layers
//! take their input in 8 bits of each token, as they were trained
//! ([`PerToken8`](crate::ActivationBits::PerToken8)), unless [`Fusion::activations`](crate::Fusion) asks for other
//! bits.
//!
//! Method: BitNet b1.58 2B4T Technical Report (Ma et al. 2025); the norms are SubLN (Foundation Transformers, Wang et
//! al. 2022).

use super::config::{RawOther, RawPositions};
use super::names::{GGUF, LLAMA};
use super::shape::{self, Biases, Describe, Head, Kind, NormKind, Shape, Unrotated};
use crate::nn::AttentionConfig;
use crate::ops::{Activation, RopeStyle};
use candle_core::{Result, bail};
use serde::Deserialize;

/// A `config.json` of a BitNet model; values that the model here cannot honour are an error, not ignored.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::generation::{Generation, Options};
/// use candle_fused::models::bitnet::{Config, ModelForCausalLM};
/// use candle_nn::VarBuilder;
/// let config: Config = serde_json::from_str(
///     r#"{"model_type": "bitnet", "vocab_size": 32, "hidden_size": 64, "intermediate_size": 96,
///         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
///         "hidden_act": "relu2", "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
///         "rope_theta": 5e5, "tie_word_embeddings": true}"#,
/// ).expect("a configuration");
/// let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let mut model = ModelForCausalLM::new(&config, vb)?;
/// let ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?;
/// assert_eq!(model.forward(&ids, 0)?.dims(), [1, 1, 32]);
/// Generation::new(&model, &Options::default())?;
/// # Ok::<(), candle_core::Error>(())
/// ```
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
    /// Activation of the gate: squared ReLU, or SiLU.
    pub hidden_act: candle_nn::Activation,
    /// Context length.
    pub max_position_embeddings: usize,
    /// Added to the mean of squares in every norm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Whether the projections of attention have biases.
    pub attention_bias: bool,
    /// Whether the head shares the embedding's weights.
    pub tie_word_embeddings: bool,
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
    hidden_act: Option<candle_nn::Activation>,
    max_position_embeddings: Option<usize>,
    rms_norm_eps: Option<f64>,
    attention_bias: Option<bool>,
    tie_word_embeddings: Option<bool>,
    #[serde(flatten)]
    positions: RawPositions,
    #[serde(flatten)]
    other: RawOther,
}

impl TryFrom<RawConfig> for Config {
    type Error = String;

    fn try_from(raw: RawConfig) -> std::result::Result<Self, String> {
        raw.other.check(raw.model_type.as_deref(), "bitnet")?;
        raw.positions.unscaled()?;
        Ok(Self {
            vocab_size: raw.vocab_size,
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            num_hidden_layers: raw.num_hidden_layers,
            num_attention_heads: raw.num_attention_heads,
            num_key_value_heads: raw.num_key_value_heads.unwrap_or(raw.num_attention_heads),
            hidden_act: raw.hidden_act.unwrap_or(candle_nn::Activation::Relu2),
            max_position_embeddings: raw.max_position_embeddings.unwrap_or(2048),
            rms_norm_eps: raw.rms_norm_eps.unwrap_or(1e-5),
            rope_theta: raw.positions.theta(Some(500_000.))?,
            attention_bias: raw.attention_bias.unwrap_or(false),
            tie_word_embeddings: raw.tie_word_embeddings.unwrap_or(false),
        })
    }
}

static KIND: Kind = Kind {
    gguf: &["bitnet-b1.58"],
    names: LLAMA,
    gguf_names: GGUF,
    gguf_style: RopeStyle::HalfSplit,
    gguf_unrotated: Unrotated::None,
    norm: NormKind::Rms,
    head_norms: false,
    sub_norms: true,
    side_by_side: false,
    activation: Activation::Relu2Glu,
    biases: Biases::NONE,
};

impl Describe for Config {
    const KIND: &'static Kind = &KIND;

    fn shape(&self) -> Result<Shape> {
        use candle_nn::Activation::{Relu2, Silu, Swish};
        let head_dim = shape::head_dim(self.hidden_size, self.num_attention_heads)?;
        let activation = match self.hidden_act {
            Relu2 => Activation::Relu2Glu,
            Silu | Swish => Activation::SwiGlu,
            other => bail!("config: hidden_act is {other:?}, expected relu2 or silu"),
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
            sliding: None,
            frequencies: Vec::new(),
            long: None,
            unrotated: Unrotated::None,
            eps: self.rms_norm_eps,
            activation,
            parallel: false,
            biases: Biases {
                qkv: self.attention_bias,
                output: self.attention_bias,
                mlp: false,
            },
            head: Head::tied(self.tie_word_embeddings),
            max_positions: self.max_position_embeddings,
        };
        shape.rotated_by(|| shape::inverse_frequencies(self.rope_theta as f32, head_dim))
    }
}

/// A BitNet model with its head.
pub type ModelForCausalLM = super::CausalLm<Config>;

/// A BitNet model without its head.
pub type Model = super::BaseModel<Config>;
