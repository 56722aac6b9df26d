//! The attention steps of a layer whose keys and values are in pages: rotation and append, then attention.

use super::plan::{PagedKeys, Work};
use super::refusal::Refusal;
use super::writer::{QKV, QUERIES, Writer};
use crate::cuda::abi::Pages;
use crate::cuda::{Address, address_of};
use crate::models::decoder::Block;
use crate::nn::RotaryEmbedding;
use crate::ops::PagePool;
use crate::ops::paged_append::cuda::AppendAt;
use crate::ops::paged_attention::cuda::{Call, planned, pool_pages, scratch};
use crate::ops::pages::PoolSizes;
use candle_core::{DType, Result};

/// A layer's pages, whose table is padded to `width` entries for each of `sequences`.
pub(super) fn padded(
    pool: &PagePool,
    [table, width, sequences]: [u64; 3],
) -> Result<(Pages, PoolSizes)> {
    const OP: &str = "generation";
    let sizes = pool.checked(OP)?;
    let rows = [table, 0, width, width, sequences];
    Ok((pool_pages(OP, pool, sizes, rows)?, sizes))
}

impl Writer<'_> {
    pub(super) fn paged(
        &mut self,
        block: &Block,
        keys: &PagedKeys<'_>,
        layer: usize,
        rotary: &RotaryEmbedding,
        out: Address,
    ) -> std::result::Result<Vec<Work>, Refusal> {
        let config = block.attention.config();
        let (heads, dim, sequences) = (config.heads, config.head_dim, self.ends.sequences);
        let rows = [keys.table, keys.width as u64, sequences as u64];
        let (pages, sizes) = padded(&keys.pools[layer], rows)?;
        let norms = block.attention.head_norms();
        self.check_head_norms(norms.as_ref())?;
        let (cos, sin) = rotary.tables();
        let q = self.between(QUERIES, heads * dim)?;
        let append = AppendAt {
            pages,
            x: self.between[QKV].0,
            y: q,
            cos: address_of(cos)?,
            sin: address_of(sin)?,
            q_norm: norms.map_or(Ok(0), |n| address_of(n.q))?,
            k_norm: norms.map_or(Ok(0), |n| address_of(n.k))?,
            at: self.ends.position,
            owners: 0,
            cu_seqlens: 0,
            tokens: sequences,
            heads,
            sizes,
            positions: cos.dim(0)?,
            pairs: cos.dim(1)?,
            style: Some(rotary.style()),
            eps: norms.map_or(0., |n| n.eps as f32),
            dtype: self.dtype,
        };
        let mut call = Call {
            pages,
            lengths: keys.lengths,
            q,
            q_strides: [heads * dim, heads * dim, dim],
            y: out,
            slopes: 0,
            means: 0,
            tops: 0,
            counters: 0,
            sizes,
            csr: false,
            queries: 1,
            heads,
            dtype: self.dtype,
            pool_dtype: keys.pools[layer].dtype(),
            scale: 1. / (dim as f32).sqrt(),
            softcap: None,
            window: config.window,
        };
        let plan = planned(&self.launcher, &call).map_err(|e| Refusal::Unfused(e.to_string()))?;
        let (floats, counters) = match self.scratch {
            Some(scratch) => scratch,
            None => {
                let [floats, counters] = scratch(&plan, &call);
                let made = (self.buffer(DType::F32, floats)?, self.zeros(counters)?);
                *self.scratch.insert(made)
            }
        };
        call.leave_at(&plan, floats, counters);
        Ok(vec![
            Work::Append(Box::new(append)),
            Work::Paged(Box::new((plan, call))),
        ])
    }
}
