//! Choosing the next token.

mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod philox;

use super::view::float;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};

const OP: &str = "sample";

/// Stands for a token where no logit is a number.
pub(crate) const NONE: u32 = u32::MAX;

/// How the next token is chosen from its logits, in this order: repeat penalty, temperature, top-k,
/// softmax, top-p, draw.
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
        }
    }
}

/// The same as it is computed with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// 0 takes the likeliest token.
    inverse_temperature: f32,
    top_p: f32,
    /// 0 keeps all.
    top_k: u32,
    penalty: f32,
    last_n: u32,
    seed_low: u32,
    seed_high: u32,
    sequence: u32,
}

/// The next token of each sequence.
///
/// * `logits`: `[B, V]`, f32, f16 or bf16, any layout
/// * `params`: one for each sequence
/// * `history`: the tokens of each sequence so far, for the repeat penalty; their number is the
///   number of the draw
/// * result: `[B]`, u32
///
/// Draws are made with the Gumbel-max trick: the token with the highest
/// `(logit - highest logit) / temperature - ln(-ln(1 - v))` is a draw from the softmax, where v comes
/// from Philox 4x32-10 with the seed as its key and token, draw and sequence as its counter. So a draw depends on
/// nothing but these, on whatever device it is made. Of equally good tokens the lowest is taken; a
/// logit that is no number never is.
///
/// Sources: Categorical Reparameterization with Gumbel-Softmax (Jang et al. 2017, section 2) for
/// the trick; Parallel Random Numbers: As Easy as 1, 2, 3 (Salmon et al. 2011) for Philox; The
/// Curious Case of Neural Text Degeneration (Holtzman et al. 2020) for top-p.
///
/// # Errors
/// If shapes or dtypes do not fit, a parameter is out of range, or a sequence has no logit that is a
/// number.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fused::ops::{SamplingParams, sample};
/// let logits = Tensor::new(&[[0f32, 3., 1.]], &Device::Cpu)?;
/// let token = sample(&logits, &[SamplingParams::default()], &[&[]])?;
/// assert_eq!(token.to_vec1::<u32>()?, [1]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn sample(logits: &Tensor, params: &[SamplingParams], history: &[&[u32]]) -> Result<Tensor> {
    sample_as(logits, params, history, 0)
}

/// [`sample`] for sequences that draw as numbers `first..`.
pub(crate) fn sample_as(
    logits: &Tensor,
    params: &[SamplingParams],
    history: &[&[u32]],
    first: usize,
) -> Result<Tensor> {
    let [sequences, vocab] = *logits.dims() else {
        bail!(
            "{OP}: logits has shape {:?}, expected [B, V]",
            logits.shape()
        );
    };
    float(OP, "logits", logits.dtype())?;
    if params.len() != sequences {
        bail!("{OP}: {} params for {sequences} sequences", params.len());
    }
    if history.len() != sequences {
        bail!(
            "{OP}: {} histories for {sequences} sequences",
            history.len()
        );
    }
    if vocab == 0 || u32::try_from(vocab).is_err() {
        bail!(
            "{OP}: logits has shape {:?}, expected 1 to 2^32 - 1 tokens",
            logits.shape()
        );
    }
    params.iter().try_for_each(SamplingParams::check)?;
    // Where there is no kernel, the host draws.
    let on_host = crate::fusion::fallback(logits.device()).is_some();
    let logits = match on_host {
        true => &logits.to_device(&candle_core::Device::Cpu)?,
        false => logits,
    };
    let settings: Vec<_> = params
        .iter()
        .enumerate()
        .map(|(i, p)| p.settings(first + i))
        .collect();
    let op = Sample {
        settings: &settings,
        history,
    };
    let tokens = super::view::dense_on_cuda(logits)?.apply_op1_no_bwd(&op)?;
    if tokens.to_vec1::<u32>()?.contains(&NONE) {
        bail!("{OP}: no logit is a number");
    }
    Ok(tokens)
}

struct Sample<'a> {
    settings: &'a [Settings],
    history: &'a [&'a [u32]],
}

impl CustomOp1 for Sample<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        cpu::forward(self.settings, self.history, logits, layout)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, logits: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        cuda::forward(self.settings, self.history, logits, layout)
    }
}

/// The plain form: the probability of each token of one sequence, in float64.
///
/// # Errors
/// If the logits cannot be read as float64.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fused::ops::sample::{self, SamplingParams};
/// let logits = Tensor::new(&[0f32, 0., -1e9], &Device::Cpu)?;
/// let params = SamplingParams { temperature: 1., ..Default::default() };
/// assert_eq!(sample::reference(&logits, &params, &[])?, [0.5, 0.5, 0.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn reference(logits: &Tensor, params: &SamplingParams, history: &[u32]) -> Result<Vec<f64>> {
    let mut scores = logits
        .to_dtype(DType::F64)?
        .flatten_all()?
        .to_vec1::<f64>()?;
    let lately = &history[history.len().saturating_sub(params.repeat_last_n)..];
    let penalty = f64::from(params.repeat_penalty);
    for (token, score) in scores.iter_mut().enumerate() {
        if lately.contains(&(token as u32)) {
            *score = if *score >= 0. {
                *score / penalty
            } else {
                *score * penalty
            };
        }
        if params.temperature > 0. {
            *score /= params.temperature;
        }
    }
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    if params.temperature == 0. {
        let mut certain = vec![0.; scores.len()];
        certain[order[0]] = 1.;
        return Ok(certain);
    }
    if let Some(last) = params.top_k.and_then(|k| order.get(k - 1)) {
        let least = scores[*last];
        scores
            .iter_mut()
            .filter(|s| **s < least)
            .for_each(|s| *s = f64::NEG_INFINITY);
    }
    let top = scores[order[0]];
    let softmax = |scores: &[f64]| {
        let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
        scores
            .iter()
            .map(|s| (s - top).exp() / sum)
            .collect::<Vec<_>>()
    };
    let mut probabilities = softmax(&scores);
    if let Some(p) = params.top_p {
        let mut reached = 0.;
        let mut least = 0.;
        for token in &order {
            if reached >= p {
                break;
            }
            reached += probabilities[*token];
            least = scores[*token];
        }
        scores
            .iter_mut()
            .filter(|s| **s < least)
            .for_each(|s| *s = f64::NEG_INFINITY);
        probabilities = softmax(&scores);
    }
    Ok(probabilities)
}
