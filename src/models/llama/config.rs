//! Llama configurations: candle-transformers' types, read from transformers 4 and 5 `config.json`.

use crate::models::config::{RawOther, RawPositions, RawRope};
use crate::models::shape::inverse_frequencies;
use serde::Deserialize;

/// The context length of models that do not name one.
pub const DEFAULT_MAX_SEQ_LEN: usize = 4096;

/// How rotary frequencies are scaled.
#[derive(Debug, Clone, Default, Deserialize, PartialEq, Eq)]
pub enum Llama3RopeType {
    /// Llama 3.1's smoothing between low and high frequencies.
    #[serde(rename = "llama3")]
    Llama3,
    /// No scaling.
    #[default]
    #[serde(rename = "default")]
    Default,
}

/// Llama 3.1's rotary scaling.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Llama3RopeConfig {
    /// What low frequencies are divided by.
    pub factor: f32,
    /// Wavelengths above `original_max_position_embeddings / low_freq_factor` are scaled fully.
    pub low_freq_factor: f32,
    /// Wavelengths below `original_max_position_embeddings / high_freq_factor` are not scaled.
    pub high_freq_factor: f32,
    /// The context length that the model was trained with first.
    pub original_max_position_embeddings: usize,
    /// Whether the fields above hold.
    pub rope_type: Llama3RopeType,
}

/// End-of-sequence token ids.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub enum LlamaEosToks {
    /// One id.
    Single(u32),
    /// Several ids, each of which ends the text.
    Multiple(Vec<u32>),
}

/// A `config.json` of a Llama model.
///
/// Reads what transformers 4 writes (`rope_theta`, `rope_scaling`) and what transformers 5 writes
/// (`rope_parameters`); values that the model here cannot honour are an error, not ignored.
#[derive(Debug, Clone, Deserialize)]
#[serde(try_from = "RawConfig")]
pub struct LlamaConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the gated MLP.
    pub intermediate_size: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads, if fewer.
    pub num_key_value_heads: Option<usize>,
    /// Added to the mean of squares in every norm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f32,
    /// Begin-of-sequence token.
    pub bos_token_id: Option<u32>,
    /// End-of-sequence tokens.
    pub eos_token_id: Option<LlamaEosToks>,
    /// Rotary scaling.
    pub rope_scaling: Option<Llama3RopeConfig>,
    /// Context length.
    pub max_position_embeddings: usize,
    /// Whether the head shares the embedding's weights.
    pub tie_word_embeddings: Option<bool>,
}

impl LlamaConfig {
    /// Key and value heads.
    pub fn num_key_value_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    /// The model's configuration. `use_flash_attn` is candle-transformers' switch for its own CUDA
    /// kernels; the attention here is always fused unless [`crate::Fusion`] says otherwise.
    ///
    /// ```
    /// use candle_fused::models::llama::LlamaConfig;
    /// let read: LlamaConfig = serde_json::from_str(
    ///     r#"{"hidden_size": 64, "intermediate_size": 96, "vocab_size": 32, "num_hidden_layers": 2,
    ///         "num_attention_heads": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 128}"#,
    /// ).expect("a configuration");
    /// // As many as query heads, where the file does not say.
    /// assert_eq!(read.num_key_value_heads(), 4);
    /// assert_eq!(read.into_config(false).num_key_value_heads, 4);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn into_config(self, use_flash_attn: bool) -> Config {
        Config {
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            vocab_size: self.vocab_size,
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads(),
            use_flash_attn,
            rms_norm_eps: self.rms_norm_eps,
            rope_theta: self.rope_theta,
            bos_token_id: self.bos_token_id,
            eos_token_id: self.eos_token_id,
            rope_scaling: self.rope_scaling,
            max_position_embeddings: self.max_position_embeddings,
            tie_word_embeddings: self.tie_word_embeddings.unwrap_or(false),
        }
    }
}

/// The configuration that a model is loaded with. Fields as in [`LlamaConfig`].
#[derive(Debug, Clone)]
#[allow(missing_docs, reason = "the fields are those of LlamaConfig")]
pub struct Config {
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub vocab_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub use_flash_attn: bool,
    pub rms_norm_eps: f64,
    pub rope_theta: f32,
    pub bos_token_id: Option<u32>,
    pub eos_token_id: Option<LlamaEosToks>,
    pub rope_scaling: Option<Llama3RopeConfig>,
    pub max_position_embeddings: usize,
    pub tie_word_embeddings: bool,
}

impl Config {
    /// Llama 7B, first version.
    pub fn config_7b_v1(use_flash_attn: bool) -> Self {
        Self {
            rms_norm_eps: 1e-6,
            ..Self::config_7b_v2(use_flash_attn)
        }
    }

    /// Llama 7B, second version.
    ///
    /// ```
    /// use candle_fused::models::llama::Config;
    /// assert_eq!(Config::config_7b_v1(false).rms_norm_eps, 1e-6);
    /// assert_eq!(Config::config_7b_v2(false).rms_norm_eps, 1e-5);
    /// ```
    pub fn config_7b_v2(use_flash_attn: bool) -> Self {
        Self {
            hidden_size: 4096,
            intermediate_size: 11008,
            vocab_size: 32000,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: 32,
            use_flash_attn,
            rms_norm_eps: 1e-5,
            rope_theta: 10_000.0,
            bos_token_id: None,
            eos_token_id: None,
            rope_scaling: None,
            max_position_embeddings: DEFAULT_MAX_SEQ_LEN,
            tie_word_embeddings: false,
        }
    }

    /// Width of a head.
    pub(crate) fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads.max(1)
    }

    /// Rotary frequencies, scaled as the configuration says.
    pub(crate) fn inverse_frequencies(&self) -> Vec<f32> {
        let plain = inverse_frequencies(self.rope_theta, self.head_dim());
        match &self.rope_scaling {
            Some(scaling) if scaling.rope_type == Llama3RopeType::Llama3 => {
                plain.into_iter().map(|f| scaling.smooth(f)).collect()
            }
            _ => plain,
        }
    }
}

impl Llama3RopeConfig {
    fn smooth(&self, frequency: f32) -> f32 {
        let trained = self.original_max_position_embeddings as f32;
        let wavelength = 2. * std::f32::consts::PI / frequency;
        if wavelength < trained / self.high_freq_factor {
            frequency
        } else if wavelength > trained / self.low_freq_factor {
            frequency / self.factor
        } else {
            let smooth = (trained / wavelength - self.low_freq_factor)
                / (self.high_freq_factor - self.low_freq_factor);
            (1. - smooth) * frequency / self.factor + smooth * frequency
        }
    }
}

/// `config.json` as written.
#[derive(Deserialize)]
struct RawConfig {
    model_type: Option<String>,
    hidden_size: usize,
    intermediate_size: usize,
    vocab_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    hidden_act: Option<String>,
    rms_norm_eps: f64,
    #[serde(flatten)]
    positions: RawPositions,
    bos_token_id: Option<u32>,
    eos_token_id: Option<LlamaEosToks>,
    max_position_embeddings: Option<usize>,
    tie_word_embeddings: Option<bool>,
    sliding_window: Option<usize>,
    use_sliding_window: Option<bool>,
    #[serde(flatten)]
    other: RawOther,
}

impl RawConfig {
    /// Refuses a window, for which there is no field. Where `use_sliding_window` is not said it counts,
    /// as Mistral's does.
    fn windowless(&self, positions: usize) -> Result<(), String> {
        match self.sliding_window {
            Some(window) if window < positions && self.use_sliding_window != Some(false) => {
                Err(format!(
                    "sliding_window is {window}, expected none: `candle_fused::models::mistral` has it"
                ))
            }
            _ => Ok(()),
        }
    }
}

/// Llama 3.1's scaling, if the configuration has it.
fn scaling(rope: &RawRope) -> Result<Option<Llama3RopeConfig>, String> {
    match rope.kind() {
        None | Some("default") => Ok(None),
        Some("llama3") => {
            let missing = |name| format!("rope type llama3 needs `{name}`");
            Ok(Some(Llama3RopeConfig {
                factor: rope.factor.ok_or_else(|| missing("factor"))?,
                low_freq_factor: rope
                    .low_freq_factor
                    .ok_or_else(|| missing("low_freq_factor"))?,
                high_freq_factor: rope
                    .high_freq_factor
                    .ok_or_else(|| missing("high_freq_factor"))?,
                original_max_position_embeddings: rope
                    .original_max_position_embeddings
                    .ok_or_else(|| missing("original_max_position_embeddings"))?,
                rope_type: Llama3RopeType::Llama3,
            }))
        }
        Some(other) => Err(format!("rope type `{other}` is not one of default, llama3")),
    }
}

impl TryFrom<RawConfig> for LlamaConfig {
    type Error = String;

    fn try_from(raw: RawConfig) -> Result<Self, String> {
        raw.other.check(raw.model_type.as_deref(), "llama")?;
        let positions = raw.max_position_embeddings.unwrap_or(DEFAULT_MAX_SEQ_LEN);
        raw.windowless(positions)?;
        if let Some(act) = raw.hidden_act.as_deref().filter(|a| *a != "silu") {
            return Err(format!("hidden_act is `{act}`, expected `silu`"));
        }
        let heads = raw.num_attention_heads;
        let kv_heads = raw.num_key_value_heads.unwrap_or(heads);
        if heads == 0 || !raw.hidden_size.is_multiple_of(heads) {
            return Err(format!(
                "hidden_size {} does not divide by num_attention_heads {heads}",
                raw.hidden_size
            ));
        }
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(format!(
                "num_attention_heads {heads} does not divide by num_key_value_heads {kv_heads}"
            ));
        }
        if let Some(dim) = raw
            .head_dim
            .filter(|d| d.checked_mul(heads) != Some(raw.hidden_size))
        {
            return Err(format!(
                "head_dim {dim} times num_attention_heads {heads} is not hidden_size {}",
                raw.hidden_size
            ));
        }
        if raw.num_hidden_layers == 0 {
            return Err("num_hidden_layers is 0".into());
        }
        if !(raw.rms_norm_eps >= 0. && raw.rms_norm_eps.is_finite()) {
            return Err(format!(
                "rms_norm_eps is {}, expected 0 or more",
                raw.rms_norm_eps
            ));
        }
        let rope_theta = raw.positions.theta(None)? as f32;
        Ok(Self {
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            vocab_size: raw.vocab_size,
            num_hidden_layers: raw.num_hidden_layers,
            num_attention_heads: heads,
            num_key_value_heads: raw.num_key_value_heads,
            rms_norm_eps: raw.rms_norm_eps,
            rope_theta,
            bos_token_id: raw.bos_token_id,
            eos_token_id: raw.eos_token_id,
            rope_scaling: raw.positions.rope().map(scaling).transpose()?.flatten(),
            max_position_embeddings: positions,
            tie_word_embeddings: raw.tie_word_embeddings,
        })
    }
}
