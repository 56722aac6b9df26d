//! The CUDA form: one launch for all sequences, or two with batch invariance. The table ([`dispatch`]) chooses a kernel
//! for a call ([`problem`]); its host file ([`kernels`]) has planned the launch.

mod dispatch;
mod kernels;
mod prefill;
mod problem;
#[cfg(test)]
pub(crate) mod table_tests;

use super::Op;
use crate::cuda::abi::Pages;
use crate::cuda::{Address, Launcher, address, address_of, alloc, zeros_before_launch};
use crate::ops::pages::{PagePool, PageScales, PageTable, PoolSizes, scale_strides};
use crate::ops::view::dtype_index;
use crate::trace;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::cudarc::driver::DevicePtr;
use candle_core::{CudaStorage, DType, Error, Layout, Result, Shape, Tensor, bail};
pub(crate) use prefill::{key_pages, operands};
use problem::Call;

pub use dispatch::kernels as kernel_table;

/// Pages as the kernels take them.
///
/// # Errors
/// If there are more than their counters count.
pub(crate) fn pages(
    op: &str,
    pool: &PagePool,
    sizes: PoolSizes,
    table: &PageTable,
    sequences: usize,
) -> Result<Pages> {
    let (entries, indptr, width, step) = match table {
        PageTable::Csr {
            indptr, indices, ..
        } => (indices, address_of(indptr)?, indices.dims()[0], 0),
        PageTable::Padded { block_table, .. } => {
            let width = block_table.dims()[1];
            (block_table, 0, width, block_table.stride()[0])
        }
    };
    let rows = [
        address_of(entries)?,
        indptr,
        width as u64,
        step as u64,
        sequences as u64,
    ];
    pool_pages(op, pool, sizes, rows)
}

/// The same of a table by address: its entries and its ends (0 if it is padded), the entries of a sequence or in all,
/// those from one sequence to the next, and the sequences.
///
/// # Errors
/// As [`pages`].
pub(crate) fn pool_pages(
    op: &str,
    pool: &PagePool,
    sizes: PoolSizes,
    [entries, indptr, width, step, sequences]: [u64; 5],
) -> Result<Pages> {
    let PoolSizes { pages, page, .. } = sizes;
    let width = width as usize;
    // A page's number has 24 bits and a slot 8, and keys are counted in 30.
    if page > 256 || pages >= 1 << 24 || width.saturating_mul(page) >= 1 << 30 {
        bail!(
            "{op}: {pages} pages of {page} tokens, {width} of them for a sequence, are past what the kernel takes"
        );
    }
    let [k_page, k_token, k_head] = pool.strides(&pool.k).map(|s| s as u64);
    let [v_page, v_token, v_head] = pool.strides(&pool.v).map(|s| s as u64);
    let scales = |t: &Tensor| {
        let [page, _, head] = scale_strides(t).map(|s| s as u64);
        Ok::<_, Error>((address_of(t)?, [page, head]))
    };
    let ((k_scales, k_scale_strides), (v_scales, v_scale_strides)) = match &pool.scales {
        Some(PageScales { k, v, .. }) => (scales(k)?, scales(v)?),
        None => Default::default(),
    };
    Ok(Pages {
        entries,
        indptr,
        k: address_of(&pool.k)?,
        v: address_of(&pool.v)?,
        k_page,
        k_token,
        k_head,
        v_page,
        v_token,
        v_head,
        k_scales,
        v_scales,
        k_scale_strides,
        v_scale_strides,
        step: step as u32,
        width: width as u32,
        sequences: sequences as u32,
        page: page as u32,
        pages: pages as u32,
        dtype: dtype_index(pool.stored()) as i32,
    })
}

pub(super) fn forward(
    op: &Op<'_>,
    q: &CudaStorage,
    layout: &Layout,
) -> Result<(CudaStorage, Shape)> {
    let (device, len) = (q.device(), layout.shape().elem_count());
    // Rows that no sequence has are zeros; without sequences there is nothing to launch.
    if len == 0 || op.sequences == 0 {
        let zeros = device.zeros_impl(layout.shape(), q.dtype())?;
        return Ok((zeros, layout.shape().clone()));
    }
    let out = alloc(op.name, device, q.dtype(), len)?;
    let y = address(&out, &Layout::contiguous(len))?;
    match op.ragged {
        Some(_) => prefill::run(op, q, layout, y)?,
        None => run(op, q, layout, y)?,
    }
    Ok((out, layout.shape().clone()))
}

/// Tokens of each sequence, or of its last page.
fn lengths(table: &PageTable) -> Result<Address> {
    address_of(match table {
        PageTable::Csr { last_page_len, .. } => last_page_len,
        PageTable::Padded { lengths, .. } => lengths,
    })
}

/// As many queries of each sequence.
fn run(op: &Op<'_>, q: &CudaStorage, layout: &Layout, y: Address) -> Result<()> {
    let (name, device) = (op.name, q.device());
    let &[sequence, token, head, _] = layout.stride() else {
        bail!("{name}: q has strides {:?}, expected four", layout.stride());
    };
    let launcher = Launcher::new(device)?;
    let mut call = Call {
        pages: pages(name, op.pages, op.pool, op.table, op.sequences)?,
        lengths: lengths(op.table)?,
        q: address(q, layout)?,
        q_strides: [sequence, token, head],
        y,
        slopes: op.slopes.as_ref().map_or(Ok(0), address_of)?,
        means: 0,
        tops: 0,
        weights: 0,
        counters: 0,
        sizes: op.pool,
        csr: matches!(op.table, PageTable::Csr { .. }),
        queries: op.queries,
        heads: op.heads,
        dtype: q.dtype(),
        pool_dtype: op.pages.stored(),
        scale: op.params.scale,
        softcap: op.params.softcap,
        window: op.params.window,
        batch_invariant: op.params.batch_invariant,
    };
    let plan = dispatch::select(&call.case(launcher.gpu.spec))?;
    trace::record(name, || {
        let (q, kv) = (q.dtype().as_str(), call.pool_dtype.as_str());
        format!("cuda q {q} kv {kv} {}", plan.with_reason())
    });
    // Sizes for the form with the most rows.
    let (rows, counters) = match call.batch_invariant {
        true => (call.split_room().in_all * op.queries * op.heads, 0),
        false => {
            let parts = (op.queries * op.heads / op.pool.kv_heads).div_ceil(kernels::FEWEST_ROWS);
            let rows = 2 * plan.how.grid().blocks[0] as usize * kernels::MOST_ROWS;
            (rows, op.sequences * op.pool.kv_heads * parts)
        }
    };
    let partial = alloc(name, device, DType::F32, rows * (op.pool.dim + 2))?;
    let counters = match counters {
        0 => None,
        count => Some(zeros_before_launch(&launcher, device, count)?),
    };
    call.means = address(&partial, &Layout::contiguous(rows))?;
    call.tops = call.means + (4 * rows * op.pool.dim) as u64;
    call.weights = call.tops + (4 * rows) as u64;
    call.counters = counters
        .as_ref()
        .map_or(0, |counters| counters.device_ptr(&device.cuda_stream()).0);
    // SAFETY: the guards have checked the shapes; scratch memory is made above in the sizes that any kernel needs, and
    // freed behind the launch on the same stream.
    unsafe { plan.how.run(&launcher, &call) }
}
