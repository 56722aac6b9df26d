//! The CPU form: one row after the other.

use super::{Logprobs, NONE, OP};
use crate::ops::view::{Float, dispatch_float, elements};
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Device, Layout, Result, Tensor};

pub(super) fn forward(
    logits: &CpuStorage,
    layout: &Layout,
    tokens: &Tensor,
    top: usize,
) -> Result<Logprobs> {
    trace::record(OP, || format!("cpu scalar {}", logits.dtype().as_str()));
    let (rows, vocab) = layout.shape().dims2()?;
    let tokens = tokens.to_vec1::<u32>()?;
    let mut all = Lists::default();
    dispatch_float!(logits.dtype(), OP, "logits", T => {
        let values = elements::<T>(logits, layout)?;
        let values = T::widen_slice(&values);
        for (row, token) in values.chunks_exact(vocab).zip(tokens) {
            all.add(row, token as usize, top);
        }
    });
    Ok(Logprobs {
        chosen: Tensor::from_vec(all.chosen, rows, &Device::Cpu)?,
        top_ids: Tensor::from_vec(all.top_ids, (rows, top), &Device::Cpu)?,
        top: Tensor::from_vec(all.top, (rows, top), &Device::Cpu)?,
    })
}

/// The rows of the results, one behind the other.
#[derive(Default)]
struct Lists {
    chosen: Vec<f32>,
    top_ids: Vec<u32>,
    top: Vec<f32>,
}

impl Lists {
    fn add(&mut self, row: &[f32], token: usize, top: usize) {
        let highest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        // The highest is 0 below itself, also if it is infinite.
        let below = |logit: f32| match logit == highest {
            true => 0.,
            false => logit - highest,
        };
        let numbers = row.iter().filter(|logit| !logit.is_nan());
        let sum: f64 = numbers.map(|logit| f64::from(below(*logit).exp())).sum();
        let logprob = |logit: f32| below(logit) - sum.ln() as f32;
        let chosen = row.get(token).copied().unwrap_or(f32::NAN);
        self.chosen.push(logprob(chosen));
        let best = likeliest(row, top);
        let ids = best.iter().map(|(id, _)| *id);
        self.top_ids.extend(ids);
        self.top
            .extend(best.iter().map(|(_, logit)| logprob(*logit)));
        let rows = self.chosen.len();
        self.top_ids.resize(rows * top, NONE);
        self.top.resize(rows * top, f32::NEG_INFINITY);
    }
}

/// The highest logits with their tokens, the highest first and of equal ones the lowest token.
fn likeliest(row: &[f32], top: usize) -> Vec<(u32, f32)> {
    let mut best: Vec<(u32, f32)> = Vec::with_capacity(top + 1);
    if top == 0 {
        return best;
    }
    for (token, logit) in row.iter().enumerate() {
        let least = best.get(top - 1).map(|(_, logit)| *logit);
        if logit.is_nan() || least.is_some_and(|least| *logit <= least) {
            continue;
        }
        let place = best.partition_point(|(_, other)| other >= logit);
        best.insert(place, (token as u32, *logit));
        best.truncate(top);
    }
    best
}
