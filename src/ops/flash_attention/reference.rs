//! The oracle: materialised scores in f64, plain loops.

use super::AttentionParams;
use crate::cpu::simd::Level;
use candle_core::{DType, Result, Tensor};

/// [`flash_attention`](fn@super::flash_attention) in f64, one score after the other; f64 result
/// `[B, Hq, Tq, D]`.
///
/// # Errors
/// As [`flash_attention`](fn@super::flash_attention).
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fused::ops::{AttentionParams, flash_attention};
/// // Equal scores: the mean of the values.
/// let (q, k) = (Tensor::new(&[[[[0f32]]]], &Device::Cpu)?, Tensor::new(&[[[[1f32], [2.]]]], &Device::Cpu)?);
/// let y = flash_attention::reference(&q, &k, &k, &AttentionParams::default())?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f64>()?, [1.5]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn reference(q: &Tensor, k: &Tensor, v: &Tensor, params: &AttentionParams) -> Result<Tensor> {
    super::checked(Level::Scalar, q, k, v, params)?;
    let ((batch, heads, queries, dim), (_, kv_heads, keys, _)) = (q.dims4()?, k.dims4()?);
    let values = |t: &Tensor| t.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    let (q, k, v) = (values(q)?, values(k)?, values(v)?);
    let mask = match &params.mask {
        Some(mask) => Some(values(&mask.broadcast_as((batch, heads, queries, keys))?)?),
        None => None,
    };
    let slopes = match &params.alibi_slopes {
        Some(slopes) => Some(values(slopes)?),
        None => None,
    };
    let signed = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
    let (window, right) = (params.window.map(signed), params.right().map(signed));
    let mut out = vec![0f64; batch * heads * queries * dim];
    for row in 0..batch * heads * queries {
        let (head, query) = (row / queries, row % queries);
        let kv_head = head / heads * kv_heads + head % heads / (heads / kv_heads);
        // The query's own position; before the first key if there are more queries than keys.
        let position = (keys + query) as i64 - queries as i64;
        let mut scores = Vec::with_capacity(keys);
        for key in 0..keys {
            let at = key as i64;
            let ahead = right.is_some_and(|r| at > position.saturating_add(r));
            let behind = window.is_some_and(|w| at <= position.saturating_sub(w));
            if ahead || behind {
                scores.push(f64::NEG_INFINITY);
                continue;
            }
            let mut score = 0.0;
            for d in 0..dim {
                score += q[row * dim + d] * k[(kv_head * keys + key) * dim + d];
            }
            score *= f64::from(params.scale);
            if let Some(cap) = params.softcap.map(f64::from) {
                score = cap * (score / cap).tanh();
            }
            if let Some(slopes) = &slopes {
                score -= slopes[head % heads] * position.abs_diff(at) as f64;
            }
            scores.push(score + mask.as_ref().map_or(0.0, |m| m[row * keys + key]));
        }
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if max == f64::NEG_INFINITY {
            continue;
        }
        let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        for (key, score) in scores.iter().enumerate() {
            let weight = (score - max).exp() / sum;
            for d in 0..dim {
                out[row * dim + d] += weight * v[(kv_head * keys + key) * dim + d];
            }
        }
    }
    Tensor::from_vec(out, (batch, heads, queries, dim), &candle_core::Device::Cpu)
}
