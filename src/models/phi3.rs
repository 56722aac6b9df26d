//! Phi-3, Phi-3.5 and Phi-4-mini.
//!
//! [`Model`] and [`Config`] have the names and signatures of `candle_transformers::models::phi3`, and [`Config`] one
//! field more, [`sliding_window`](Config::sliding_window), since nothing else that `Model::new` is given has it.
//! Windows, which are ignored there, and long rotary factors are Hugging Face's: a call that reaches past the first
//! context length turns all of its tokens by the long factors, and what is held stays as it was turned.
//!
//! Method: Phi-3 Technical Report (Abdin et al. 2024); LongRoPE (Ding et al. 2024).

use super::config::{RawOther, RawPositions};
use super::names::{GGUF, LLAMA, Names, Qkv};
use super::shape::{self, Biases, Describe, Head, Kind, Long, NormKind, Shape, Sliding, Unrotated};
use super::weights::gated;
use crate::nn::{self, AttentionConfig};
use crate::ops::{Activation, RopeStyle};
use candle_core::{DType, Device, Result, Tensor, bail};
use serde::Deserialize;

/// How rotary frequencies are scaled.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub enum RopeScalingType {
    /// Factors for short sequences and for long ones.
    #[serde(rename = "longrope")]
    LongRope,
}

/// The factors that frequencies are divided by, one for each rotated pair.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct RopeScaling {
    /// Up to the first context length.
    pub short_factor: Vec<f32>,
    /// Past it.
    pub long_factor: Vec<f32>,
    /// What kind of scaling it is.
    #[serde(rename = "type")]
    pub type_: RopeScalingType,
}

/// A `config.json` of a Phi-3 model, of transformers 4 or 5; values that the model here cannot honour are
/// an error, not ignored.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(try_from = "RawConfig")]
pub struct Config {
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Activation of the gate; SiLU.
    pub hidden_act: candle_nn::Activation,
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
    /// Added to the mean of squares in every norm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Begin-of-sequence token.
    pub bos_token_id: Option<u32>,
    /// End-of-sequence token, the first of several.
    pub eos_token_id: Option<u32>,
    /// Factors of the rotary frequencies.
    pub rope_scaling: Option<RopeScaling>,
    /// Context length.
    pub max_position_embeddings: usize,
    /// The context length that the model was trained with first.
    pub original_max_position_embeddings: Option<usize>,
    /// The part of each head that is rotated; all of it where nothing is said.
    pub partial_rotary_factor: Option<f64>,
    /// Whether the head shares the embedding's weights.
    pub tie_word_embeddings: bool,
    /// Positions that a token sees, its own included; none sees all. candle-transformers has no such field.
    pub sliding_window: Option<usize>,
}

impl Config {
    /// Width of a head.
    ///
    /// ```
    /// use candle_fused::models::phi3::Config;
    /// let config: Config = serde_json::from_str(
    ///     r#"{"vocab_size": 32, "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96,
    ///         "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    ///         "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 128}"#,
    /// ).expect("a configuration");
    /// assert_eq!(config.head_dim(), 16);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads.max(1)
    }

    /// What cosines and sines are multiplied by, as Hugging Face has it.
    fn magnitude(&self, original: usize) -> f32 {
        let factor = self.max_position_embeddings as f64 / original as f64;
        match factor > 1. {
            true => (1. + factor.ln() / (original as f64).ln()).sqrt() as f32,
            false => 1.,
        }
    }

    /// Frequencies up to the first context length, and past it.
    fn frequencies(&self, pairs: usize) -> Result<(Vec<f32>, Option<Long>)> {
        let plain = shape::inverse_frequencies(self.rope_theta as f32, 2 * pairs);
        let Some(scaling) = &self.rope_scaling else {
            return Ok((plain, None));
        };
        for (name, factors) in [
            ("short_factor", &scaling.short_factor),
            ("long_factor", &scaling.long_factor),
        ] {
            if factors.len() != pairs {
                bail!(
                    "config: {name} has {} numbers, expected one for each of the {pairs} rotated pairs",
                    factors.len()
                );
            }
        }
        let Some(original) = self.original_max_position_embeddings.filter(|n| *n > 1) else {
            bail!("config: longrope needs `original_max_position_embeddings`, expected at least 2");
        };
        let divided = |by: &[f32]| plain.iter().zip(by).map(|(f, by)| f / by).collect();
        let long = Long {
            frequencies: divided(&scaling.long_factor),
            from: original,
            magnitude: self.magnitude(original),
        };
        Ok((divided(&scaling.short_factor), Some(long)))
    }
}

/// One token id, or several.
#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(u32),
    Several(Vec<u32>),
}

impl Ids {
    fn first(self) -> Option<u32> {
        match self {
            Ids::One(id) => Some(id),
            Ids::Several(ids) => ids.first().copied(),
        }
    }
}

/// `config.json` as written.
#[derive(Deserialize)]
struct RawConfig {
    model_type: Option<String>,
    vocab_size: usize,
    hidden_act: Option<candle_nn::Activation>,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    rms_norm_eps: f64,
    bos_token_id: Option<u32>,
    eos_token_id: Option<Ids>,
    max_position_embeddings: usize,
    original_max_position_embeddings: Option<usize>,
    partial_rotary_factor: Option<f64>,
    tie_word_embeddings: Option<bool>,
    sliding_window: Option<usize>,
    attention_bias: Option<bool>,
    #[serde(flatten)]
    positions: RawPositions,
    #[serde(flatten)]
    other: RawOther,
}

impl TryFrom<RawConfig> for Config {
    type Error = String;

    fn try_from(raw: RawConfig) -> std::result::Result<Self, String> {
        raw.other.check(raw.model_type.as_deref(), "phi3")?;
        if raw.attention_bias == Some(true) {
            return Err("attention_bias is true, expected none".into());
        }
        let rope = raw.positions.rope();
        let missing = |name| format!("rope type longrope needs `{name}`");
        // Files of the first releases have other names for it.
        let rope_scaling = match rope.and_then(|r| r.kind()) {
            None | Some("default") => None,
            Some("longrope" | "su") => {
                let factors =
                    |from: Option<&Vec<f32>>, name| from.cloned().ok_or_else(|| missing(name));
                Some(RopeScaling {
                    short_factor: factors(
                        rope.and_then(|r| r.short_factor.as_ref()),
                        "short_factor",
                    )?,
                    long_factor: factors(rope.and_then(|r| r.long_factor.as_ref()), "long_factor")?,
                    type_: RopeScalingType::LongRope,
                })
            }
            Some(other) => {
                return Err(format!(
                    "rope type `{other}` is not one of default, longrope, su"
                ));
            }
        };
        if let Some(factor) = rope.and_then(|r| r.attention_factor) {
            return Err(format!(
                "attention_factor is {factor}, expected the one that follows from the context lengths"
            ));
        }
        Ok(Self {
            vocab_size: raw.vocab_size,
            hidden_act: raw.hidden_act.unwrap_or(candle_nn::Activation::Silu),
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            num_hidden_layers: raw.num_hidden_layers,
            num_attention_heads: raw.num_attention_heads,
            num_key_value_heads: raw.num_key_value_heads.unwrap_or(raw.num_attention_heads),
            rms_norm_eps: raw.rms_norm_eps,
            rope_theta: raw.positions.theta(None)?,
            bos_token_id: raw.bos_token_id,
            eos_token_id: raw.eos_token_id.and_then(Ids::first),
            rope_scaling,
            max_position_embeddings: raw.max_position_embeddings,
            original_max_position_embeddings: rope
                .and_then(|r| r.original_max_position_embeddings)
                .or(raw.original_max_position_embeddings),
            partial_rotary_factor: rope
                .and_then(|r| r.partial_rotary_factor)
                .or(raw.partial_rotary_factor),
            tie_word_embeddings: raw.tie_word_embeddings.unwrap_or(false),
            sliding_window: raw.sliding_window,
        })
    }
}

static KIND: Kind = Kind {
    gguf: &["phi3"],
    names: Names {
        qkv: Qkv::Joint("self_attn.qkv_proj"),
        up: &["mlp.gate_up_proj"],
        ..LLAMA
    },
    gguf_names: Names {
        qkv: Qkv::Joint("attn_qkv"),
        up: &["ffn_up"],
        ..GGUF
    },
    gguf_style: RopeStyle::HalfSplit,
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
        let head_dim = shape::head_dim(self.hidden_size, self.num_attention_heads)?;
        let part = self.partial_rotary_factor.unwrap_or(1.);
        let rotated = (head_dim as f64 * part) as usize;
        if !(part > 0. && part <= 1. && rotated.is_multiple_of(2)) {
            bail!(
                "config: partial_rotary_factor is {part}, expected above 0 and at most 1, and an even \
                 number of the {head_dim} dimensions of a head"
            );
        }
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
            head: Head::tied(self.tie_word_embeddings),
            max_positions: self.max_position_embeddings,
        };
        let mut shape = gated(shape, self.hidden_act)?.rotated_by(Vec::new)?;
        (shape.frequencies, shape.long) = self.frequencies(rotated / 2)?;
        Ok(shape)
    }
}

/// Rotary tables in half-split form, for queries and keys `[B, H, T, D]`, of which the first dimensions are rotated.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::models::phi3::{Config, RotaryEmbedding};
/// # let config: Config = serde_json::from_str(
/// #     r#"{"vocab_size": 32, "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96,
/// #         "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
/// #         "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 128}"#,
/// # ).expect("a configuration");
/// let rotary = RotaryEmbedding::new(DType::F32, &config, &Device::Cpu)?;
/// let q = Tensor::ones((1, 4, 3, 16), DType::F32, &Device::Cpu)?;
/// let (q, k) = rotary.apply_rotary_emb_qkv(&q, &q, 100)?;
/// assert_eq!((q.dims(), k.dims()), (&[1, 4, 3, 16][..], &[1, 4, 3, 16][..]));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct RotaryEmbedding(nn::RotaryEmbedding);

impl RotaryEmbedding {
    /// Tables as `cfg` has them, for all of its positions. They are kept in f32, whatever `dtype` is.
    ///
    /// # Errors
    /// If the configuration is impossible.
    pub fn new(dtype: DType, cfg: &Config, dev: &Device) -> Result<Self> {
        let _ = dtype;
        let shape = cfg.shape()?;
        shape.check()?;
        let style = RopeStyle::HalfSplit;
        let mut rotary = nn::RotaryEmbedding::new(shape.frequencies, style, dev)?;
        if let Some(long) = shape.long {
            rotary = rotary.with_long(long.frequencies, long.from, long.magnitude);
        }
        rotary.reserve(cfg.max_position_embeddings)?;
        Ok(Self(rotary))
    }

    /// Queries and keys `[B, H, T, D]` rotated as the tokens at `seqlen_offset..seqlen_offset + T`.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit, or the positions pass the tables.
    pub fn apply_rotary_emb_qkv(
        &self,
        q: &Tensor,
        k: &Tensor,
        seqlen_offset: usize,
    ) -> Result<(Tensor, Tensor)> {
        self.0.apply(q, k, seqlen_offset)
    }
}

/// A Phi-3 model with dense weights and its head.
pub type Model = super::CausalLm<Config>;

/// A Phi-3 model with GGUF weights.
pub type ModelWeights = super::GgufModel<Config>;
