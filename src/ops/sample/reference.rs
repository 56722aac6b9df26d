//! The distribution that is drawn from, in float64.

use super::{SamplingParams, allows};
use candle_core::{DType, Result, Tensor};

/// The plain form: the probability of each token of one sequence, in float64; `mask` has the words of its row.
///
/// # Errors
/// If the logits cannot be read as float64.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fused::ops::sample::{self, SamplingParams};
/// let logits = Tensor::new(&[0f32, 0., -1e9], &Device::Cpu)?;
/// let params = SamplingParams { temperature: 1., ..Default::default() };
/// assert_eq!(sample::reference(&logits, &params, &[], None)?, [0.5, 0.5, 0.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn reference(
    logits: &Tensor,
    params: &SamplingParams,
    history: &[u32],
    mask: Option<&[u32]>,
) -> Result<Vec<f64>> {
    let mut scores = logits
        .to_dtype(DType::F64)?
        .flatten_all()?
        .to_vec1::<f64>()?;
    penalise(&mut scores, params, history);
    for (token, score) in scores.iter_mut().enumerate() {
        if mask.is_some_and(|mask| !allows(mask, token)) {
            *score = f64::NEG_INFINITY;
        } else if params.temperature > 0. {
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
        cut(&mut scores, least);
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
        cut(&mut scores, least);
        probabilities = softmax(&scores);
    }
    if let Some(p) = params.min_p {
        cut(&mut scores, top + p.ln());
        probabilities = softmax(&scores);
    }
    Ok(probabilities)
}

/// Divides the scores of tokens seen lately, or multiplies them.
fn penalise(scores: &mut [f64], params: &SamplingParams, history: &[u32]) {
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
    }
}

/// Takes out the scores below `least`.
fn cut(scores: &mut [f64], least: f64) {
    let below = scores.iter_mut().filter(|score| **score < least);
    below.for_each(|score| *score = f64::NEG_INFINITY);
}
