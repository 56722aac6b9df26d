//! Copies of pages within a pool.

use super::COPY;
use crate::ops::pages::{PagePool, PoolSizes};
use crate::ops::view::check_tensors;
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Result, Tensor, bail};
use std::collections::HashSet;

/// Copies pages, keys and values, with their scales if they are quantized: page `pairs[i][0]` to page `pairs[i][1]`, as a sequence that forks needs its last,
/// unfinished page for itself.
///
/// * `pool`: written in place
/// * `pairs`: `[n, 2]`, u32. Each page is copied to once at most, and none is copied from that is copied to
///
/// On CUDA one launch does it, which reads the pairs itself; pairs with a page that is not in the pool are passed over.
///
/// # Errors
/// If shapes, dtypes or devices do not fit; on the CPU also if there is no such page, or the copies depend on their
/// order.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::ops::{PageLayout, PagePool, copy_pages};
/// let pages = Tensor::arange(0f32, 64., &Device::Cpu)?.reshape((4, 2, 2, 1, 4))?;
/// let pool = PagePool::combined(&pages, PageLayout::Nhd)?;
/// copy_pages(&pool, &Tensor::new(&[[3u32, 0]], &Device::Cpu)?)?;
/// assert_eq!(pages.get(0)?.flatten_all()?.to_vec1::<f32>()?[0], 48.);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn copy_pages(pool: &PagePool, pairs: &Tensor) -> Result<()> {
    let sizes = pool.checked(COPY)?;
    if pairs.rank() != 2 || pairs.dims()[1] != 2 || pairs.dtype() != DType::U32 {
        bail!(
            "{COPY}: pairs is {:?} {:?}, expected U32 [n, 2]",
            pairs.dtype(),
            pairs.dims()
        );
    }
    for (name, t) in [("pairs", pairs), ("pool.v", &pool.v)] {
        if !t.device().same_device(pool.k.device()) {
            bail!("{COPY}: {name} is on another device than pool.k");
        }
    }
    check_tensors(COPY, pool.named())?;
    pool.check_written(COPY, &[("pairs", pairs)])?;
    #[cfg(feature = "cuda")]
    if pairs.device().is_cuda() {
        return super::cuda::copy(pool, sizes, pairs);
    }
    let pairs = checked(sizes, pairs.to_vec2::<u32>()?)?;
    trace::record(COPY, || format!("cpu {}", pool.stored_name()));
    for (t, strides, sizes) in pool.parts(sizes) {
        t.inplace_op1(&Copies {
            sizes,
            strides,
            pairs: &pairs,
        })?;
    }
    Ok(())
}

/// The pairs, if each page is there and their order does not matter.
fn checked(sizes: PoolSizes, pairs: Vec<Vec<u32>>) -> Result<Vec<[usize; 2]>> {
    let pairs: Vec<_> = pairs
        .iter()
        .map(|pair| [pair[0] as usize, pair[1] as usize])
        .collect();
    let from: HashSet<_> = pairs.iter().map(|pair| pair[0]).collect();
    let mut to = HashSet::new();
    for (i, pair) in pairs.iter().enumerate() {
        if let Some(id) = pair.iter().find(|id| **id >= sizes.pages) {
            bail!(
                "{COPY}: pairs[{i}] has page {id}, the pool has {} pages",
                sizes.pages
            );
        }
        if !to.insert(pair[1]) || from.contains(&pair[1]) {
            bail!(
                "{COPY}: pairs[{i}] copies to page {}, which is copied to or from elsewhere",
                pair[1]
            );
        }
    }
    Ok(pairs)
}

struct Copies<'a> {
    sizes: PoolSizes,
    /// From page to page, token to token, head to head.
    strides: [usize; 3],
    pairs: &'a [[usize; 2]],
}

impl InplaceOp1 for Copies<'_> {
    fn name(&self) -> &'static str {
        COPY
    }

    fn cpu_fwd(&self, pool: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let start = layout.start_offset();
        match pool {
            CpuStorage::F32(pool) => self.copy(&mut pool[start..]),
            CpuStorage::F16(pool) => self.copy(&mut pool[start..]),
            CpuStorage::BF16(pool) => self.copy(&mut pool[start..]),
            CpuStorage::U8(pool) => self.copy(&mut pool[start..]),
            other => bail!(
                "{COPY}: pool is {:?}, expected f32, f16, bf16 or u8",
                other.dtype()
            ),
        }
        Ok(())
    }
}

impl Copies<'_> {
    fn copy<T: Copy>(&self, pool: &mut [T]) {
        let [of_page, of_token, of_head] = self.strides;
        let PoolSizes {
            page,
            kv_heads,
            dim,
            ..
        } = self.sizes;
        for [from, to] in self.pairs {
            for row in 0..page * kv_heads {
                let inner = row / kv_heads * of_token + row % kv_heads * of_head;
                let (from, to) = (from * of_page + inner, to * of_page + inner);
                pool.copy_within(from..from + dim, to);
            }
        }
    }
}
