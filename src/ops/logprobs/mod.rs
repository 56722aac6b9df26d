//! The log-probabilities of tokens, and the likeliest tokens.

mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use super::view::{dense_on_cuda, float, float64};
use candle_core::{DType, Device, Result, Storage, Tensor, bail};

const OP: &str = "logprobs";

/// The most tokens that are listed.
pub const MAX_TOP: usize = 20;

/// Stands for a token where a row has fewer numbers.
const NONE: u32 = u32::MAX;

/// What [`logprobs()`] gives.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fused::ops::{Logprobs, logprobs};
/// let logits = Tensor::new(&[[0f32, 0.]], &Device::Cpu)?;
/// let Logprobs { chosen, top_ids, .. } = logprobs(&logits, &Tensor::new(&[1u32], &Device::Cpu)?, 2)?;
/// assert!((chosen.to_vec1::<f32>()?[0] - 0.5f32.ln()).abs() < 1e-6);
/// assert_eq!(top_ids.to_vec2::<u32>()?, [[0, 1]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Logprobs {
    /// `[B]`, f32: that of each row's chosen token.
    pub chosen: Tensor,
    /// `[B, top]`, u32: the likeliest tokens, the likeliest first and of equally likely ones the lowest.
    pub top_ids: Tensor,
    /// `[B, top]`, f32: theirs.
    pub top: Tensor,
}

/// `log_softmax(logits)` at chosen tokens, and at the likeliest.
///
/// * `logits`: `[B, V]`, f32, f16 or bf16, any layout
/// * `tokens`: `[B]`, u32: the chosen token of each row
/// * `top`: how many of the likeliest tokens are listed, 0 to [`MAX_TOP`]
/// * result: [`Logprobs`]
///
/// `log_softmax(x)[i] = x[i] - max(x) - ln(sum(exp(x - max(x))))`. A logit that is no number is left out of the sum; its
/// own log-probability is NaN, as is that of a token past the vocabulary. A row with fewer numbers than `top` is filled up
/// with the token `u32::MAX` at negative infinity.
///
/// # Errors
/// If shapes, dtypes or devices do not fit, or `top` is out of range.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fused::ops::logprobs;
/// let logits = Tensor::new(&[[1f32, 3., 2.]], &Device::Cpu)?;
/// let tokens = Tensor::new(&[0u32], &Device::Cpu)?;
/// let of = logprobs(&logits, &tokens, 2)?;
/// assert_eq!(of.top_ids.to_vec2::<u32>()?, [[1, 2]]);
/// assert!((of.top.to_vec2::<f32>()?[0][0] - of.chosen.to_vec1::<f32>()?[0] - 2.).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn logprobs(logits: &Tensor, tokens: &Tensor, top: usize) -> Result<Logprobs> {
    let [rows, vocab] = *logits.dims() else {
        bail!(
            "{OP}: logits has shape {:?}, expected [B, V]",
            logits.shape()
        );
    };
    float(OP, "logits", logits.dtype())?;
    if vocab == 0 || u32::try_from(vocab).is_err() {
        bail!(
            "{OP}: logits has shape {:?}, expected 1 to 2^32 - 1 tokens",
            logits.shape()
        );
    }
    if tokens.dtype() != DType::U32 || tokens.dims() != [rows] {
        bail!(
            "{OP}: tokens is {:?} of shape {:?}, expected u32 [{rows}]",
            tokens.dtype(),
            tokens.shape()
        );
    }
    if !tokens.device().same_device(logits.device()) {
        bail!("{OP}: tokens and logits are on different devices");
    }
    check_top(OP, "top", top, vocab)?;
    let on_host = crate::fusion::fallback(logits.device()).is_some();
    let place = |t: &Tensor| match on_host {
        true => t.to_device(&Device::Cpu),
        false => dense_on_cuda(t),
    };
    let (logits, tokens) = (place(logits)?, place(tokens)?);
    let (storage, layout) = logits.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => cpu::forward(storage, layout, &tokens, top),
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => cuda::forward(storage, layout, &tokens, top),
        _ => bail!("{OP}: expected the CPU or a CUDA device"),
    }
}

/// Fails unless this many tokens of `vocab` can be listed.
pub(super) fn check_top(op: &str, name: &str, top: usize, vocab: usize) -> Result<()> {
    let most = MAX_TOP.min(vocab);
    if top > most {
        bail!("{op}: {name} is {top}, expected 0 to {most}");
    }
    Ok(())
}

/// The plain form: the log-probability of each token of each row, in float64.
///
/// # Errors
/// If the logits are not `[B, V]`, or cannot be read as float64.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fused::ops::logprobs;
/// let logits = Tensor::new(&[[0f32, 0.]], &Device::Cpu)?;
/// assert_eq!(logprobs::reference(&logits)?, [[-2f64.ln(), -2f64.ln()]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn reference(logits: &Tensor) -> Result<Vec<Vec<f64>>> {
    let (_, vocab) = logits.dims2()?;
    let row = |row: &[f64]| {
        let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let numbers = row.iter().filter(|logit| !logit.is_nan());
        let sum: f64 = numbers.map(|logit| (logit - top).exp()).sum();
        row.iter().map(|logit| logit - top - sum.ln()).collect()
    };
    Ok(float64(logits)?.chunks_exact(vocab).map(row).collect())
}
