//! The CPU form: one sequence after the other.

use super::params::distance;
use super::philox::philox;
use super::{NONE, OP, Sample, Settings, allows};
use crate::ops::view::{Float, dispatch_float, elements};
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result, Shape};

pub(super) fn forward(
    op: &Sample<'_>,
    logits: &CpuStorage,
    layout: &Layout,
) -> Result<(CpuStorage, Shape)> {
    trace::record(OP, || format!("cpu scalar {}", logits.dtype().as_str()));
    let (sequences, vocab) = layout.shape().dims2()?;
    let mask = op.mask.map(|mask| mask.to_vec2::<u32>()).transpose()?;
    let mask = |row: usize| mask.as_ref().map(|mask| &mask[row][..]);
    let tokens = dispatch_float!(logits.dtype(), OP, "logits", T => {
        let values = elements::<T>(logits, layout)?;
        let values = T::widen_slice(&values);
        let rows = values.chunks_exact(vocab).enumerate();
        rows.map(|(i, row)| choose(row, &op.settings[i], op.history[i], mask(i))).collect()
    });
    Ok((CpuStorage::U32(tokens), Shape::from(sequences)))
}

/// The token that follows `history`, of those that a mask allows.
fn choose(logits: &[f32], settings: &Settings, history: &[u32], mask: Option<&[u32]>) -> u32 {
    let mask = mask.filter(|_| settings.masked);
    let greedy = settings.inverse_temperature == 0.;
    if greedy && settings.penalty == 1. && mask.is_none() {
        return first_highest(logits);
    }
    let mut scores = logits.to_vec();
    if settings.penalty != 1. {
        let known = history.len().saturating_sub(settings.last_n as usize);
        for token in &history[known..] {
            let token = *token as usize;
            // From the logit itself, so that a token seen twice is penalised once.
            if let (Some(score), Some(logit)) = (scores.get_mut(token), logits.get(token)) {
                *score = if *logit >= 0. {
                    logit / settings.penalty
                } else {
                    logit * settings.penalty
                };
            }
        }
    }
    if let Some(mask) = mask {
        let tokens = scores.iter_mut().enumerate();
        let forbidden = tokens.filter(|(token, _)| !allows(mask, *token));
        forbidden.for_each(|(_, score)| *score = f32::NAN);
    }
    let likeliest = first_highest(&scores);
    if greedy || likeliest == NONE {
        return likeliest;
    }
    let top = scores[likeliest as usize];
    for score in &mut scores {
        *score = below(*score, top, settings.inverse_temperature);
    }
    let limit = limit(&scores, settings).min(settings.limit);
    let draw = history.len() as u32;
    let drawn = scores
        .iter()
        .enumerate()
        .filter(|(_, score)| distance(**score) <= limit)
        .map(|(token, score)| (token, score + gumbel(settings, draw, token as u32)));
    best(drawn)
}

/// How far a logit is below the highest, over the temperature: at most 0, so that it cannot overflow to
/// where two logits are the same. Equal ones have no distance, infinite ones neither.
fn below(logit: f32, top: f32, inverse_temperature: f32) -> f32 {
    match logit == top {
        true => 0.,
        false => (logit - top) * inverse_temperature,
    }
}

/// As [`best`] of all tokens, in loops that vectorize.
fn first_highest(scores: &[f32]) -> u32 {
    const LANES: usize = 16;
    let higher = |top: f32, score: f32| if score > top { score } else { top };
    let (chunks, rest) = scores.as_chunks::<LANES>();
    let mut tops = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for (top, score) in tops.iter_mut().zip(chunk) {
            *top = higher(*top, *score);
        }
    }
    let top = tops
        .iter()
        .chain(rest)
        .fold(f32::NEG_INFINITY, |top, score| higher(top, *score));
    let holds = |chunk: &[f32; LANES]| chunk.iter().fold(false, |any, s| any | (*s == top));
    let start = LANES * chunks.iter().take_while(|chunk| !holds(chunk)).count();
    let place = scores[start..].iter().position(|score| *score == top);
    place.map_or(NONE, |place| (start + place) as u32)
}

/// The token with the highest score; of equal ones the lowest.
fn best(scores: impl Iterator<Item = (usize, f32)>) -> u32 {
    let start = (NONE, f32::NEG_INFINITY);
    let (token, _) = scores.fold(start, |(token, top), (i, score)| {
        if score > top || (score == top && (i as u32) < token) {
            (i as u32, score)
        } else {
            (token, top)
        }
    });
    token
}

/// A standard Gumbel variate, `-ln(-ln(1 - v))`: exact where v is small, which is where the winners
/// are.
fn gumbel(settings: &Settings, draw: u32, token: u32) -> f32 {
    let counter = [token, draw, settings.sequence, 0];
    let bits = philox(counter, [settings.seed_low, settings.seed_high]);
    let v = (bits as f32 + 0.5) * 2f32.powi(-32);
    -(-(-v).ln_1p()).ln()
}

/// The distance up to which top-k and top-p keep tokens.
fn limit(scores: &[f32], settings: &Settings) -> u32 {
    let nucleus = settings.top_p < 1.;
    let few = settings.top_k > 0 && (settings.top_k as usize) < scores.len();
    if !nucleus && !few {
        return u32::MAX;
    }
    let mut kept: Vec<(u32, f32)> = scores
        .iter()
        .filter(|score| !score.is_nan())
        .map(|score| (distance(*score), *score))
        .collect();
    kept.sort_unstable_by_key(|(distance, _)| *distance);
    let mut limit = u32::MAX;
    if few && let Some((distance, _)) = kept.get(settings.top_k as usize - 1) {
        limit = *distance;
        kept.retain(|(distance, _)| *distance <= limit);
    }
    if nucleus {
        // In fixed point, so that sums do not depend on their order.
        let mass = |score: f32| (score.exp() * 2f32.powi(27)).round_ties_even() as u64;
        let total = kept.iter().map(|(_, score)| mass(*score)).sum::<u64>();
        let target =
            ((f64::from(settings.top_p) * total as f64).ceil() as u64).clamp(1, total.max(1));
        let mut reached = 0;
        for (distance, score) in kept {
            reached += mass(score);
            if reached >= target {
                return limit.min(distance);
            }
        }
    }
    limit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_highest_is_the_best_of_all() {
        let (nan, low) = (f32::NAN, f32::NEG_INFINITY);
        let mut rows = vec![
            vec![],
            vec![nan; 40],
            vec![low; 40],
            vec![nan, low, nan],
            [vec![1.; 37], vec![2., nan, 2.], vec![0.; 20]].concat(),
            [vec![nan; 16], vec![-1.; 3]].concat(),
        ];
        rows.extend((1..70).map(|len| (0..len).map(|i| (i * 37 % 23) as f32).collect()));
        for row in rows {
            let expected = best(row.iter().copied().enumerate());
            assert_eq!(first_highest(&row), expected, "{row:?}");
        }
    }
}
