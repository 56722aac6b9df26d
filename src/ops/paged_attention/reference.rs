//! The plain form: float64, one score at a time.

use super::{OP, Op, PagedAttention, RaggedQueries};
use crate::ops::pages::{PageLayout, PagePool, PageTable, check_page};
use crate::ops::view::float64;
use candle_core::{Result, Tensor};

/// [`paged_attention`](fn@super::paged_attention) in float64, `[B, T, Hq, D]` in row-major order.
///
/// # Errors
/// As [`paged_attention`](fn@super::paged_attention) on the CPU.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::ops::{PageLayout, PagePool, PageTable, PagedAttention, paged_attention};
/// let device = Device::Cpu;
/// let pages = Tensor::ones((4, 2, 8, 1, 16), DType::F32, &device)?;
/// let pool = PagePool::combined(&pages, PageLayout::Nhd)?;
/// let table = PageTable::Padded {
///     block_table: Tensor::new(&[[3u32, 1]], &device)?,
///     lengths: Tensor::new(&[10u32], &device)?,
/// };
/// let q = Tensor::randn(0f32, 1., (1, 1, 2, 16), &device)?;
/// // All values are 1, and so is any mean of them.
/// let y = paged_attention::reference(&q, &pool, &table, &PagedAttention::default())?;
/// assert!(y.len() == 32 && y.iter().all(|y| (y - 1.).abs() < 1e-12));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn reference(
    q: &Tensor,
    pool: &PagePool,
    table: &PageTable,
    params: &PagedAttention,
) -> Result<Vec<f64>> {
    reference_of(OP, q, pool, table, params, None)
}

/// The same of ragged queries too.
pub(in crate::ops) fn reference_of(
    name: &'static str,
    q: &Tensor,
    pool: &PagePool,
    table: &PageTable,
    params: &PagedAttention,
    ragged: Option<&RaggedQueries>,
) -> Result<Vec<f64>> {
    let op = Op::new(name, q, pool, table, params, ragged)?;
    let sizes = op.pool;
    let (q, k, v) = (float64(q)?, pool.numbers(false)?, pool.numbers(true)?);
    let slopes = op.slopes.as_ref().map(float64).transpose()?;
    let rows = table.rows(name)?;
    let lengths = table.lengths(name, sizes.page, &rows)?;
    // Where a token's head begins in the pool.
    let place = |b: usize, token: usize, head: usize| -> Result<usize> {
        let (at, slot) = (token / sizes.page, token % sizes.page);
        let id = check_page(name, rows[b][at], sizes.pages, [b, at])?;
        let row = match pool.layout {
            PageLayout::Nhd => (id * sizes.page + slot) * sizes.kv_heads + head,
            PageLayout::Hnd => (id * sizes.kv_heads + head) * sizes.page + slot,
        };
        Ok(row * sizes.dim)
    };
    let mut out = vec![0.; q.len()];
    let asked = op.rows(q.len() / (op.heads * sizes.dim).max(1))?;
    let queries = q
        .chunks_exact(sizes.dim)
        .zip(out.chunks_exact_mut(sizes.dim));
    for (row, (q, y)) in queries.enumerate() {
        let (query, head) = (row / op.heads, row % op.heads);
        let Some(b) = asked.iter().position(|own| own.contains(&query)) else {
            continue;
        };
        // One past the query's position.
        let end = (lengths[b] + query + 1).saturating_sub(asked[b].end);
        let first = params.window.map_or(0, |w| end.saturating_sub(w));
        let mut seen = Vec::new();
        for j in first..end {
            let at = place(b, j, head / (op.heads / sizes.kv_heads))?;
            let dot: f64 = q.iter().zip(&k[at..]).map(|(a, b)| a * b).sum();
            let mut score = dot * f64::from(params.scale);
            if let Some(cap) = params.softcap.map(f64::from) {
                score = cap * (score / cap).tanh();
            }
            if let Some(slopes) = &slopes {
                score -= slopes[head] * (end - 1 - j) as f64;
            }
            seen.push((at, score));
        }
        let top = seen
            .iter()
            .fold(f64::NEG_INFINITY, |top, (_, s)| top.max(*s));
        if top == f64::NEG_INFINITY {
            continue;
        }
        let total: f64 = seen.iter().map(|(_, s)| (s - top).exp()).sum();
        for (at, score) in seen {
            let weight = (score - top).exp() / total;
            y.iter_mut()
                .zip(&v[at..])
                .for_each(|(y, v)| *y += weight * v);
        }
    }
    Ok(out)
}
