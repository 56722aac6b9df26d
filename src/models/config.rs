//! What configurations of transformers 4 and 5 have in common.

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

/// Refuses a `model_type` of another model.
pub fn check_type(given: Option<&str>, expected: &str) -> Result<(), String> {
    match given.filter(|kind| *kind != expected) {
        Some(kind) => Err(format!("model_type is `{kind}`, expected `{expected}`")),
        None => Ok(()),
    }
}
