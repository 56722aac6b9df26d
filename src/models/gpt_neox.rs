//! GPT-NeoX: Pythia and GPT-NeoX-20B.
//!
//! candle-transformers has no such model; the names follow its Qwen models, and
//! [`ModelForCausalLM::new_fused`] with [`Fusion::none`](crate::Fusion::none) gives the plain form in
//! candle's own operations.
//!
//! Method: GPT-NeoX-20B: An Open-Source Autoregressive Language Model (Black et al. 2022); Pythia
//! (Biderman et al. 2023).

use super::config::{RawOther, RawPositions};
use super::names::{GGUF, Names, Qkv};
use super::shape::{self, Biases, Describe, Head, Kind, NormKind, Shape, Unrotated};
use super::weights::activation;
use crate::nn::AttentionConfig;
use crate::ops::{Activation, RopeStyle};
use candle_core::{Result, bail};
use serde::Deserialize;

/// A `config.json` of a GPT-NeoX model, of transformers 4 or 5; values that the model here cannot
/// honour are an error, not ignored.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(try_from = "RawConfig")]
pub struct Config {
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Heads.
    pub num_attention_heads: usize,
    /// Activation of the MLP: GELU by the error function or by tanh, or SiLU.
    pub hidden_act: candle_nn::Activation,
    /// The part of each head that is rotated.
    pub rotary_pct: f64,
    /// Base of the rotary frequencies.
    pub rotary_emb_base: f64,
    /// Context length.
    pub max_position_embeddings: usize,
    /// Added to the variance in every norm.
    pub layer_norm_eps: f64,
    /// `x + attention(norm1(x)) + mlp(norm2(x))` instead of one after the other.
    pub use_parallel_residual: bool,
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
    hidden_act: Option<String>,
    rotary_pct: Option<f64>,
    partial_rotary_factor: Option<f64>,
    rotary_emb_base: Option<f64>,
    #[serde(flatten)]
    positions: RawPositions,
    max_position_embeddings: Option<usize>,
    layer_norm_eps: Option<f64>,
    use_parallel_residual: Option<bool>,
    attention_bias: Option<bool>,
    tie_word_embeddings: Option<bool>,
    #[serde(flatten)]
    other: RawOther,
}

impl TryFrom<RawConfig> for Config {
    type Error = String;

    fn try_from(raw: RawConfig) -> std::result::Result<Self, String> {
        raw.other.check(raw.model_type.as_deref(), "gpt_neox")?;
        raw.positions.unscaled()?;
        let rope = raw.positions.rope();
        let hidden_act = match raw.hidden_act.as_deref() {
            None | Some("gelu") => candle_nn::Activation::Gelu,
            Some("gelu_new" | "gelu_fast") => candle_nn::Activation::NewGelu,
            Some("gelu_pytorch_tanh") => candle_nn::Activation::GeluPytorchTanh,
            Some("silu" | "swish") => candle_nn::Activation::Silu,
            Some(other) => {
                return Err(format!(
                    "hidden_act is `{other}`, expected gelu, gelu_new, gelu_fast, \
                     gelu_pytorch_tanh or silu"
                ));
            }
        };
        Ok(Self {
            vocab_size: raw.vocab_size,
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            num_hidden_layers: raw.num_hidden_layers,
            num_attention_heads: raw.num_attention_heads,
            hidden_act,
            rotary_pct: rope
                .and_then(|r| r.partial_rotary_factor)
                .or(raw.partial_rotary_factor)
                .or(raw.rotary_pct)
                .unwrap_or(0.25),
            rotary_emb_base: raw.positions.theta(raw.rotary_emb_base)?,
            max_position_embeddings: raw.max_position_embeddings.unwrap_or(2048),
            layer_norm_eps: raw.layer_norm_eps.unwrap_or(1e-5),
            use_parallel_residual: raw.use_parallel_residual.unwrap_or(true),
            attention_bias: raw.attention_bias.unwrap_or(true),
            tie_word_embeddings: raw.tie_word_embeddings.unwrap_or(false),
        })
    }
}

static KIND: Kind = Kind {
    gguf: &["gptneox"],
    names: Names {
        embedding: "gpt_neox.embed_in",
        layer: "gpt_neox.layers",
        attention_norm: "input_layernorm",
        qkv: Qkv::PerHead("attention.query_key_value"),
        head_norms: ["", ""],
        sub_norms: ["", ""],
        output: "attention.dense",
        mlp_norm: "post_attention_layernorm",
        up: &["mlp.dense_h_to_4h"],
        down: "mlp.dense_4h_to_h",
        norm: "gpt_neox.final_layer_norm",
        head: "embed_out",
    },
    gguf_names: Names {
        qkv: Qkv::Joint("attn_qkv"),
        up: &["ffn_up"],
        ..GGUF
    },
    gguf_style: RopeStyle::HalfSplit,
    gguf_unrotated: Unrotated::None,
    norm: NormKind::Layer,
    head_norms: false,
    sub_norms: false,
    side_by_side: true,
    activation: Activation::Gelu,
    biases: Biases {
        qkv: true,
        output: true,
        mlp: true,
    },
};

impl Describe for Config {
    const KIND: &'static Kind = &KIND;

    fn shape(&self) -> Result<Shape> {
        let heads = self.num_attention_heads;
        let head_dim = shape::head_dim(self.hidden_size, heads)?;
        let Some(activation) = activation(self.hidden_act) else {
            bail!(
                "config: hidden_act is {:?}, expected gelu, gelu_new, gelu_pytorch_tanh or silu",
                self.hidden_act
            );
        };
        let rotated = (head_dim as f64 * self.rotary_pct) as usize;
        let within = self.rotary_pct > 0. && self.rotary_pct <= 1.;
        if !within || !rotated.is_multiple_of(2) {
            bail!(
                "config: rotary_pct is {}, expected above 0 and at most 1, and an even number of the \
                 {head_dim} dimensions of a head",
                self.rotary_pct
            );
        }
        let shape = Shape {
            kind: &KIND,
            vocab: self.vocab_size,
            hidden: self.hidden_size,
            intermediate: self.intermediate_size,
            layers: self.num_hidden_layers,
            attention: AttentionConfig {
                heads,
                kv_heads: heads,
                head_dim,
                window: None,
            },
            sliding: None,
            frequencies: Vec::new(),
            long: None,
            unrotated: Unrotated::None,
            eps: self.layer_norm_eps,
            activation,
            parallel: self.use_parallel_residual,
            biases: Biases {
                qkv: self.attention_bias,
                output: self.attention_bias,
                mlp: true,
            },
            head: Head::tied(self.tie_word_embeddings),
            max_positions: self.max_position_embeddings,
        };
        shape.rotated_by(|| shape::inverse_frequencies(self.rotary_emb_base as f32, rotated))
    }
}

/// A GPT-NeoX model with dense weights and its head.
pub type ModelForCausalLM = super::CausalLm<Config>;

/// A GPT-NeoX model with dense weights and without its head.
pub type Model = super::BaseModel<Config>;

/// A GPT-NeoX model with GGUF weights.
pub type ModelWeights = super::GgufModel<Config>;
