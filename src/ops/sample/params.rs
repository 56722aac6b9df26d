//! How a token is chosen.

use super::OP;
use candle_core::{Result, bail};

/// How the next token is chosen from its logits, in this order: repeat penalty, temperature, top-k,
/// softmax, top-p, min-p, draw. That is the order of transformers; vLLM has min-p before top-k and top-p, so that
/// top-p there is a share of what min-p has left.
///
/// ```
/// use candle_fused::ops::SamplingParams;
/// let params = SamplingParams { temperature: 0.8, top_p: Some(0.95), ..Default::default() };
/// assert!(params.check().is_ok());
/// let error = SamplingParams { top_p: Some(2.), ..params }.check().unwrap_err();
/// assert!(error.to_string().contains("top_p"));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 takes the likeliest token.
    pub temperature: f64,
    /// Draws from this many of the likeliest tokens; what is as likely as the last of them stays in.
    pub top_k: Option<usize>,
    /// Draws from the likeliest tokens whose probabilities together reach this; what is as likely as
    /// the last of them stays in.
    pub top_p: Option<f64>,
    /// Draws from the tokens that are at least this many times as likely as the likeliest one, after temperature (min-p,
    /// Nguyen et al. 2024); 0 keeps all.
    pub min_p: Option<f64>,
    /// Divides the logits of tokens seen lately, or multiplies them where they are negative (CTRL,
    /// Keskar et al. 2019); 1 does not.
    pub repeat_penalty: f32,
    /// How many of the last tokens the penalty looks at, at most [`Self::MAX_LAST_N`].
    pub repeat_last_n: usize,
    /// Seed of the draws.
    pub seed: u64,
}

impl Default for SamplingParams {
    /// The likeliest token.
    fn default() -> Self {
        Self {
            temperature: 0.,
            top_k: None,
            top_p: None,
            min_p: None,
            repeat_penalty: 1.,
            repeat_last_n: 64,
            seed: 299_792_458,
        }
    }
}

impl SamplingParams {
    /// The furthest that the repeat penalty looks back.
    pub const MAX_LAST_N: usize = 4096;

    /// Fails if a value is out of its range.
    ///
    /// # Errors
    /// By the name of the value.
    pub fn check(&self) -> Result<()> {
        if !(self.temperature >= 0. && self.temperature.is_finite()) {
            bail!(
                "{OP}: temperature is {}, expected 0 or more",
                self.temperature
            );
        }
        // Kernels multiply by the reciprocal in f32.
        if self.temperature > 0. && !self.inverse_temperature().is_normal() {
            bail!(
                "{OP}: temperature is {}, expected 1e-38 to 1e37, or 0, which takes the likeliest \
                 token",
                self.temperature
            );
        }
        if self.top_k == Some(0) {
            bail!("{OP}: top_k is 0, expected at least 1");
        }
        if let Some(p) = self.top_p.filter(|p| !(*p > 0. && *p <= 1.)) {
            bail!("{OP}: top_p is {p}, expected above 0 and at most 1");
        }
        if let Some(p) = self.min_p.filter(|p| !(0. ..=1.).contains(p)) {
            bail!("{OP}: min_p is {p}, expected 0 to 1");
        }
        if !(self.repeat_penalty > 0. && self.repeat_penalty.is_finite()) {
            bail!(
                "{OP}: repeat_penalty is {}, expected above 0",
                self.repeat_penalty
            );
        }
        if self.repeat_last_n > Self::MAX_LAST_N {
            bail!(
                "{OP}: repeat_last_n is {}, expected at most {}",
                self.repeat_last_n,
                Self::MAX_LAST_N
            );
        }
        Ok(())
    }

    /// 0 for a temperature of 0.
    fn inverse_temperature(&self) -> f32 {
        match self.temperature > 0. {
            true => (1. / self.temperature) as f32,
            false => 0.,
        }
    }

    pub(crate) fn settings(&self, sequence: usize) -> Settings {
        Settings {
            inverse_temperature: self.inverse_temperature(),
            top_p: self.top_p.unwrap_or(1.) as f32,
            top_k: u32::try_from(self.top_k.unwrap_or(0)).unwrap_or(0),
            penalty: self.repeat_penalty,
            last_n: self.repeat_last_n as u32,
            seed_low: self.seed as u32,
            seed_high: (self.seed >> 32) as u32,
            sequence: sequence as u32,
            limit: match self.min_p {
                Some(p) if p > 0. => distance(p.ln() as f32),
                _ => u32::MAX,
            },
            masked: false,
        }
    }
}

/// The same as it is computed with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// 0 takes the likeliest token.
    pub inverse_temperature: f32,
    pub top_p: f32,
    /// 0 keeps all.
    pub top_k: u32,
    pub penalty: f32,
    pub last_n: u32,
    pub seed_low: u32,
    pub seed_high: u32,
    pub sequence: u32,
    /// The [`distance`] up to which min-p keeps tokens.
    pub limit: u32,
    /// Whether the sequence has a mask.
    pub masked: bool,
}

impl Settings {
    /// The same with a mask or without.
    pub fn masked(self, masked: bool) -> Self {
        Self { masked, ..self }
    }
}

/// How far a score is below the highest, which is 0, in steps of 2^-26; ever the same for equal scores. Beyond e^64
/// they are as good as equal.
pub(super) fn distance(score: f32) -> u32 {
    (-score * 2f32.powi(26)).min(4_294_967_040.) as u32
}
