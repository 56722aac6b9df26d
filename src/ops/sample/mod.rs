//! Choosing the next token.

mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod params;
mod philox;
mod reference;

use super::logprobs::{Logprobs, check_top, logprobs};
use super::view::float;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{
    CpuStorage, CustomOp1, DType, Device, Error, Layout, Result, Shape, Tensor, bail,
};
pub use params::SamplingParams;
pub(crate) use params::Settings;
pub use reference::reference;

const OP: &str = "sample";

/// Stands for a token where no logit is a number.
pub(crate) const NONE: u32 = u32::MAX;

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
    let sampled = sample_with(logits, params, history, &SampleOptions::default())?;
    Ok(sampled.tokens)
}

/// What [`sample_with`] does beside [`sample`].
///
/// ```
/// use candle_fused::ops::SampleOptions;
/// let options = SampleOptions { top_logprobs: Some(5), ..Default::default() };
/// assert!(options.mask.is_none());
/// ```
#[derive(Clone, Debug, Default)]
pub struct SampleOptions {
    /// Which tokens may be drawn: u32 `[B, ceil(V / 32)]`, where bit `t % 32` of word `t / 32` is set if token t may be.
    /// XGrammar and llguidance have this layout.
    pub mask: Option<Tensor>,
    /// Gives log-probabilities: of the drawn token, and of this many of the likeliest ones, 0 to
    /// [`MAX_TOP`](super::logprobs::MAX_TOP).
    pub top_logprobs: Option<usize>,
}

/// What [`sample_with`] gives.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fused::ops::{SampleOptions, SamplingParams, sample_with};
/// let logits = Tensor::new(&[[0f32, 3., 1.]], &Device::Cpu)?;
/// let params = [SamplingParams::default()];
/// let sampled = sample_with(&logits, &params, &[&[]], &SampleOptions::default())?;
/// assert_eq!(sampled.tokens.to_vec1::<u32>()?, [1]);
/// assert!(sampled.logprobs.is_none());
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Sampled {
    /// `[B]`, u32
    pub tokens: Tensor,
    /// Those of the drawn tokens and of the likeliest ones, if they were asked for: of the logits as they are, without
    /// penalty, mask and temperature, as OpenAI's API and vLLM have them.
    pub logprobs: Option<Logprobs>,
}

/// [`sample`] under a mask of allowed tokens, with log-probabilities.
///
/// A token that the mask does not allow counts as one whose logit is no number. The others' draws are those of
/// [`sample`]: each depends on seed, token, number of the draw and sequence alone.
///
/// # Errors
/// As [`sample`]; if the mask has another shape, dtype or device, or allows a sequence nothing; if `top_logprobs` is out
/// of range.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fused::ops::{SampleOptions, SamplingParams, sample_with};
/// let logits = Tensor::new(&[[0f32, 3., 1.]], &Device::Cpu)?;
/// // Not token 1.
/// let mask = Some(Tensor::new(&[[0b101u32]], &Device::Cpu)?);
/// let options = SampleOptions { mask, top_logprobs: Some(1) };
/// let sampled = sample_with(&logits, &[SamplingParams::default()], &[&[]], &options)?;
/// assert_eq!(sampled.tokens.to_vec1::<u32>()?, [2]);
/// let logprobs = sampled.logprobs.unwrap();
/// assert_eq!(logprobs.top_ids.to_vec2::<u32>()?, [[1]]);
/// let (chosen, top) = (logprobs.chosen.to_vec1::<f32>()?[0], logprobs.top.to_vec2::<f32>()?[0][0]);
/// assert!((top - chosen - 2.).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn sample_with(
    logits: &Tensor,
    params: &[SamplingParams],
    history: &[&[u32]],
    options: &SampleOptions,
) -> Result<Sampled> {
    sample_as(logits, params, history, 0, options)
}

/// [`sample_with`] for sequences that draw as numbers `first..`.
pub(crate) fn sample_as(
    logits: &Tensor,
    params: &[SamplingParams],
    history: &[&[u32]],
    first: usize,
    options: &SampleOptions,
) -> Result<Sampled> {
    let SampleOptions { mask, top_logprobs } = options;
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
    if let Some(mask) = mask {
        check_mask(mask, logits)?;
    }
    if let Some(top) = top_logprobs {
        check_top(OP, "top_logprobs", *top, vocab)?;
    }
    // Where there is no kernel, the host draws.
    let on_host = crate::fusion::fallback(logits.device()).is_some();
    let place = |t: &Tensor| match on_host {
        true => t.to_device(&Device::Cpu),
        false => super::view::dense_on_cuda(t),
    };
    let (logits, mask) = (&place(logits)?, mask.as_ref().map(place).transpose()?);
    let settings: Vec<_> = params
        .iter()
        .enumerate()
        .map(|(i, p)| p.settings(first + i).masked(mask.is_some()))
        .collect();
    let op = Sample {
        settings: &settings,
        history,
        mask: mask.as_ref(),
    };
    let tokens = logits.apply_op1_no_bwd(&op)?;
    if let Some(row) = tokens.to_vec1::<u32>()?.iter().position(|t| *t == NONE) {
        return Err(undrawn(row, vocab, mask.as_ref())?);
    }
    let logprobs = top_logprobs.map(|top| logprobs(logits, &tokens, top));
    Ok(Sampled {
        tokens,
        logprobs: logprobs.transpose()?,
    })
}

/// Fails unless `mask` fits logits `[B, V]`.
fn check_mask(mask: &Tensor, logits: &Tensor) -> Result<()> {
    let (sequences, vocab) = logits.dims2()?;
    let words = vocab.div_ceil(32);
    if mask.dtype() != DType::U32 || mask.dims() != [sequences, words] {
        bail!(
            "{OP}: mask is {:?} of shape {:?}, expected u32 [{sequences}, {words}], a bit for each token",
            mask.dtype(),
            mask.shape()
        );
    }
    if !mask.device().same_device(logits.device()) {
        bail!("{OP}: mask and logits are on different devices");
    }
    Ok(())
}

/// Why nothing was drawn for sequence `row`.
fn undrawn(row: usize, vocab: usize, mask: Option<&Tensor>) -> Result<Error> {
    let Some(mask) = mask else {
        return Ok(Error::msg(format!("{OP}: no logit is a number")));
    };
    let words = mask.get(row)?.to_vec1::<u32>()?;
    let why = match (0..vocab).any(|token| allows(&words, token)) {
        true => format!("no logit that the mask of sequence {row} allows is a number"),
        false => format!("mask allows sequence {row} nothing, expected a token at least"),
    };
    Ok(Error::msg(format!("{OP}: {why}")))
}

/// Whether a sequence's mask allows a token.
pub(crate) fn allows(mask: &[u32], token: usize) -> bool {
    mask[token / 32] >> (token % 32) & 1 == 1
}

struct Sample<'a> {
    settings: &'a [Settings],
    history: &'a [&'a [u32]],
    mask: Option<&'a Tensor>,
}

impl CustomOp1 for Sample<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        cpu::forward(self, logits, layout)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, logits: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        cuda::forward(self, logits, layout)
    }
}
