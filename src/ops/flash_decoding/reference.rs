//! The plain form: float64, one score at a time.

use super::FlashDecoding;
use crate::ops::RopeStyle;
use candle_core::{DType, Result, Tensor};

/// What [`flash_decoding`](super::flash_decoding) gives, `[B, Hq D]` in row-major order, from caches as
/// they are before the step; key and value of the step are rounded as the caches hold them.
///
/// # Errors
/// If a tensor cannot be read as float64.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::ops::{FlashDecoding, RopeStyle, flash_decoding};
/// let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu);
/// let (cos, sin) = (zeros(&[16, 4])?.cos()?, zeros(&[16, 4])?);
/// let config = FlashDecoding {
///     heads: 1,
///     cos: &cos,
///     sin: &sin,
///     style: RopeStyle::HalfSplit,
///     norms: None,
///     scale: 1.,
///     window: None,
///     softcap: None,
/// };
/// // The first token sees only itself, so its value comes out.
/// let cache = zeros(&[1, 1, 16, 8])?;
/// let qkv = Tensor::ones((1, 24), DType::F32, &Device::Cpu)?;
/// let position = Tensor::new(&[0u32], &Device::Cpu)?;
/// let y = flash_decoding::reference(&qkv, &cache, &cache, &position, &config)?;
/// assert_eq!(y, [1.; 8]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn reference(
    qkv: &Tensor,
    k_cache: &Tensor,
    v_cache: &Tensor,
    position: &Tensor,
    config: &FlashDecoding<'_>,
) -> Result<Vec<f64>> {
    let (batch, kv_heads, slots, dim) = k_cache.dims4()?;
    let flat = |t: &Tensor| t.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    let stored = |row: Vec<f64>| -> Result<Vec<f64>> {
        let row = Tensor::new(row, &candle_core::Device::Cpu)?;
        flat(&row.to_dtype(k_cache.dtype())?)
    };
    let (rows, k, v) = (flat(qkv)?, flat(k_cache)?, flat(v_cache)?);
    let (cos, sin) = (flat(config.cos)?, flat(config.sin)?);
    let norms = config
        .norms
        .map(|n| Ok::<_, candle_core::Error>((flat(n.q)?, flat(n.k)?, n.eps)));
    let norms = norms.transpose()?;
    let width = (config.heads + 2 * kv_heads) * dim;
    let group = config.heads / kv_heads;
    let mut out = Vec::new();
    for (b, position) in position.to_vec1::<u32>()?.into_iter().enumerate() {
        let position = position as usize;
        let angles = (
            &cos[..],
            &sin[..],
            position * config.cos.dims()[1],
            config.cos.dims()[1],
        );
        let head = |index: usize| rows[b * width + index * dim..][..dim].to_vec();
        let first = config
            .window
            .map_or(0, |w| (position + 1).saturating_sub(w));
        for h in 0..config.heads {
            let kv = h / group;
            let plane = (b * kv_heads + kv) * slots * dim;
            let mut q = head(h);
            let mut fresh = head(config.heads + kv);
            if let Some((wq, wk, eps)) = &norms {
                normalise(&mut q, wq, *eps);
                normalise(&mut fresh, wk, *eps);
            }
            rotate(&mut q, config.style, angles);
            rotate(&mut fresh, config.style, angles);
            let (fresh, value) = (stored(fresh)?, stored(head(config.heads + kv_heads + kv))?);
            let at = |cache: &[f64], new: &[f64], j: usize| match j == position {
                true => new.to_vec(),
                false => cache[plane + j * dim..][..dim].to_vec(),
            };
            let scores: Vec<f64> = (first..=position)
                .map(|j| {
                    let key = at(&k, &fresh, j);
                    let dot: f64 = q.iter().zip(&key).map(|(a, b)| a * b).sum();
                    let score = dot * f64::from(config.scale);
                    config
                        .softcap
                        .map_or(score, |c| f64::from(c) * (score / f64::from(c)).tanh())
                })
                .collect();
            let top = scores.iter().fold(f64::NEG_INFINITY, |m, s| m.max(*s));
            let mut y = vec![0.; dim];
            if top == f64::NEG_INFINITY {
                out.extend(y);
                continue;
            }
            let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
            for (j, score) in (first..=position).zip(&scores) {
                let weight = (score - top).exp() / total;
                y.iter_mut()
                    .zip(at(&v, &value, j))
                    .for_each(|(y, v)| *y += weight * v);
            }
            out.extend(y);
        }
    }
    debug_assert_eq!(out.len(), batch * config.heads * dim);
    Ok(out)
}

fn normalise(head: &mut [f64], weight: &[f64], eps: f64) {
    let mean = head.iter().map(|v| v * v).sum::<f64>() / head.len() as f64;
    let factor = 1. / (mean + eps).sqrt();
    head.iter_mut()
        .zip(weight)
        .for_each(|(v, w)| *v *= factor * w);
}

/// By the angles of one position: tables, where its row starts, and the pairs of a row.
fn rotate(
    head: &mut [f64],
    style: RopeStyle,
    (cos, sin, start, pairs): (&[f64], &[f64], usize, usize),
) {
    for i in 0..pairs {
        let (a, b) = match style {
            RopeStyle::HalfSplit => (i, i + pairs),
            RopeStyle::Interleaved => (2 * i, 2 * i + 1),
        };
        let (c, s) = (cos[start + i], sin[start + i]);
        (head[a], head[b]) = (head[a] * c - head[b] * s, head[b] * c + head[a] * s);
    }
}
