//! What Qwen2 and Qwen3 share: their `config.json`, and sliding windows.

use super::config::{RawOther, RawPositions};
use super::shape::Sliding;
use serde::Deserialize;

/// transformers' default where a file that asks for windows does not name one; `null` is none.
fn usual_window() -> Option<usize> {
    Some(4096)
}

/// `config.json` as written.
#[derive(Deserialize)]
pub struct RawConfig {
    model_type: Option<String>,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    pub head_dim: Option<usize>,
    pub attention_bias: Option<bool>,
    max_position_embeddings: Option<usize>,
    #[serde(default = "usual_window")]
    sliding_window: Option<usize>,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    tie_word_embeddings: Option<bool>,
    #[serde(flatten)]
    positions: RawPositions,
    rms_norm_eps: Option<f64>,
    use_sliding_window: Option<bool>,
    hidden_act: Option<candle_nn::Activation>,
    #[serde(flatten)]
    other: RawOther,
}

/// What has to be worked out of it.
pub struct Settled {
    pub kv_heads: usize,
    pub max_position_embeddings: usize,
    pub sliding_window: Option<usize>,
    pub max_window_layers: usize,
    pub tie_word_embeddings: bool,
    pub rope_theta: f64,
    pub rms_norm_eps: f64,
    pub hidden_act: candle_nn::Activation,
}

impl RawConfig {
    /// Values with transformers' defaults for those that are missing.
    pub fn settle(&self, model_type: &str) -> std::result::Result<Settled, String> {
        self.other.check(self.model_type.as_deref(), model_type)?;
        self.positions.unscaled()?;
        // As in transformers, a window counts only where it is asked for.
        let wanted = self.use_sliding_window.unwrap_or(false);
        let sliding_window = self.sliding_window.filter(|_| wanted);
        let stated = self.max_window_layers.unwrap_or(28);
        Ok(Settled {
            kv_heads: self.num_key_value_heads.unwrap_or(self.num_attention_heads),
            max_position_embeddings: self.max_position_embeddings.unwrap_or(32_768),
            max_window_layers: match (&self.layer_types, sliding_window) {
                (Some(types), Some(_)) => first_sliding(types, self.num_hidden_layers)?,
                _ => stated,
            },
            sliding_window,
            tie_word_embeddings: self.tie_word_embeddings.unwrap_or(false),
            rope_theta: self.positions.theta(None)?,
            rms_norm_eps: self.rms_norm_eps.unwrap_or(1e-6),
            hidden_act: self.hidden_act.unwrap_or(candle_nn::Activation::Silu),
        })
    }
}

/// The layer from which on all slide, as `layer_types` says.
fn first_sliding(types: &[String], layers: usize) -> std::result::Result<usize, String> {
    if types.len() != layers {
        return Err(format!(
            "layer_types names {} layers, num_hidden_layers is {layers}",
            types.len()
        ));
    }
    let known = ["full_attention", "sliding_attention"];
    if let Some(other) = types.iter().find(|t| !known.contains(&t.as_str())) {
        return Err(format!("layer_types: `{other}` is not one of {known:?}"));
    }
    let slides = |t: &String| t == known[1];
    let first = types.iter().position(slides).unwrap_or(layers);
    if !types[first..].iter().all(slides) {
        return Err(
            "layer_types: full_attention behind sliding_attention, which \
                    max_window_layers cannot say"
                .into(),
        );
    }
    Ok(first)
}

/// A window of layers from `from` on, if it is used.
pub fn sliding(used: bool, window: Option<usize>, from: usize) -> Option<Sliding> {
    let window = window.filter(|_| used)?;
    Some(Sliding { window, from })
}
