//! What configurations of transformers 4 and 5 have in common.

use super::modules;
use serde::Deserialize;

/// The rotary part of a `config.json`: `rope_theta` and `rope_scaling` (transformers 4) or
/// `rope_parameters` (transformers 5).
#[derive(Deserialize)]
pub struct RawPositions {
    rope_theta: Option<f64>,
    rope_scaling: Option<RawRope>,
    rope_parameters: Option<RawRope>,
}

/// `rope_scaling` or `rope_parameters`.
#[derive(Deserialize)]
pub struct RawRope {
    rope_type: Option<String>,
    /// The older name; some files have both.
    r#type: Option<String>,
    rope_theta: Option<f64>,
    pub partial_rotary_factor: Option<f64>,
    pub factor: Option<f32>,
    pub short_factor: Option<Vec<f32>>,
    pub long_factor: Option<Vec<f32>>,
    pub attention_factor: Option<f64>,
    pub low_freq_factor: Option<f32>,
    pub high_freq_factor: Option<f32>,
    pub original_max_position_embeddings: Option<usize>,
}

impl RawRope {
    /// How frequencies are scaled.
    pub fn kind(&self) -> Option<&str> {
        self.rope_type.as_deref().or(self.r#type.as_deref())
    }
}

impl RawPositions {
    /// The one of the two that is there.
    pub fn rope(&self) -> Option<&RawRope> {
        self.rope_parameters.as_ref().or(self.rope_scaling.as_ref())
    }

    /// The base of the frequencies, 10000 or `other` where nothing is said.
    pub fn theta(&self, other: Option<f64>) -> Result<f64, String> {
        let inner = self.rope().and_then(|r| r.rope_theta);
        let theta = inner.or(self.rope_theta).or(other).unwrap_or(10_000.);
        if !(theta > 0. && theta.is_finite()) {
            return Err(format!("rope_theta is {theta}, expected a number above 0"));
        }
        Ok(theta)
    }

    /// Refuses scaled frequencies, for models that do not have them.
    pub fn unscaled(&self) -> Result<(), String> {
        match self.rope().and_then(RawRope::kind) {
            None | Some("default") => Ok(()),
            Some(other) => Err(format!("rope type `{other}` is not `default`")),
        }
    }
}

/// Models whose layers differ from those of any other module in what no field of their configuration
/// says.
const UNLIKE_OTHERS: [&str; 21] = [
    "bitnet",
    "qwen3",
    "gpt_neox",
    "phi3",
    "smollm3",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "cohere",
    "cohere2",
    "olmo",
    "olmo2",
    "olmo3",
    "stablelm",
    "starcoder2",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "minicpm",
    "nemotron",
];

/// What other models than those here have, and what they may have it say.
#[derive(Deserialize)]
pub struct RawOther {
    attention_multiplier: Option<f64>,
    embedding_multiplier: Option<f64>,
    residual_multiplier: Option<f64>,
    logits_scaling: Option<f64>,
    logit_scale: Option<f64>,
    attn_logit_softcapping: Option<f64>,
    final_logit_softcapping: Option<f64>,
    clip_qkv: Option<f64>,
    num_local_experts: Option<f64>,
    num_experts: Option<f64>,
    pub no_rope_layers: Option<Vec<f64>>,
}

impl RawOther {
    /// Refuses a `model_type` of another model, and what would change results here and be ignored.
    /// A type that nobody knows is fine if its fields are.
    pub fn check(&self, given: Option<&str>, expected: &str) -> Result<(), String> {
        if let Some(kind) = given.filter(|kind| *kind != expected) {
            let module = modules::of_model_type(kind);
            let here = UNLIKE_OTHERS.contains(&expected) && module.is_some();
            if here || UNLIKE_OTHERS.contains(&kind) {
                return Err(format!(
                    "model_type is `{kind}`, expected `{expected}`{}",
                    modules::hint(module)
                ));
            }
        }
        let factors = [
            ("embedding_multiplier", self.embedding_multiplier),
            ("residual_multiplier", self.residual_multiplier),
            ("logits_scaling", self.logits_scaling),
            ("logit_scale", self.logit_scale),
        ];
        // The first takes the place of 1 / sqrt(D), so that no value leaves results as they are.
        let caps = [
            ("attention_multiplier", self.attention_multiplier),
            ("attn_logit_softcapping", self.attn_logit_softcapping),
            ("final_logit_softcapping", self.final_logit_softcapping),
            ("clip_qkv", self.clip_qkv),
        ];
        let experts = [
            ("num_local_experts", self.num_local_experts),
            ("num_experts", self.num_experts),
        ];
        for (neutral, fields) in [
            (Some(1.), &factors[..]),
            (None, &caps),
            (Some(0.), &experts),
        ] {
            let other = |(_, value): &&(_, Option<f64>)| value.is_some() && *value != neutral;
            if let Some((name, Some(value))) = fields.iter().find(other) {
                return Err(format!(
                    "{name} is {value}, which the model here does not have"
                ));
            }
        }
        match &self.no_rope_layers {
            Some(layers) if layers.contains(&0.) && expected != "smollm3" => Err(
                "no_rope_layers names layers without rotary, which the model here does not have"
                    .into(),
            ),
            _ => Ok(()),
        }
    }
}
