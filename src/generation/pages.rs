//! A layer's pages as kernels take them.

use crate::cuda::abi::Pages;
use crate::ops::PagePool;
use crate::ops::paged_attention::cuda::pool_pages;
use crate::ops::pages::PoolSizes;
use candle_core::Result;

/// Those of a pool, whose table is padded to `width` entries for each of `sequences`.
pub(super) fn padded(
    pool: &PagePool,
    [table, width, sequences]: [u64; 3],
) -> Result<(Pages, PoolSizes)> {
    const OP: &str = "generation";
    let sizes = pool.checked(OP)?;
    let rows = [table, 0, width, width, sequences];
    Ok((pool_pages(OP, pool, sizes, rows)?, sizes))
}
