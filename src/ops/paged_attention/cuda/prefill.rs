//! Ragged queries over pages, by the kernels of `flash_attention`.

use super::{Op, lengths, pages};
use crate::cpu::attention::Sizes;
use crate::cuda::abi::{KeyPages, Pages};
use crate::cuda::{Address, Launcher, address, address_of};
use crate::ops::flash_attention::cuda::{Call, Operand, Ragged, launch};
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Layout, Result, bail};

/// The table of `pages` as these kernels take it.
pub(crate) fn key_pages(pages: &Pages, lengths: Address) -> KeyPages {
    KeyPages {
        entries: pages.entries,
        indptr: pages.indptr,
        lengths,
        k_scales: pages.k_scales,
        v_scales: pages.v_scales,
        k_scale_strides: pages.k_scale_strides,
        v_scale_strides: pages.v_scale_strides,
        step: pages.step,
        width: pages.width,
        page: pages.page,
        page_bits: pages.page.trailing_zeros(),
        pages: pages.pages,
        piece: 0,
    }
}

/// Keys and values of a pool.
pub(crate) fn operands(pages: &Pages) -> [Operand; 2] {
    let operand = |address, strides: [u64; 3]| {
        let [page, head, token] = strides.map(|s| s as i64);
        Operand {
            address,
            strides: [page, head, token, 1],
        }
    };
    [
        operand(pages.k, [pages.k_page, pages.k_head, pages.k_token]),
        operand(pages.v, [pages.v_page, pages.v_head, pages.v_token]),
    ]
}

pub(super) fn run(op: &Op<'_>, q: &CudaStorage, layout: &Layout, y: Address) -> Result<()> {
    let name = op.name;
    let (&[total, heads, dim], &[row, head, element]) = (layout.dims(), layout.stride()) else {
        bail!(
            "{name}: q has shape {:?}, expected three dimensions",
            layout.shape()
        );
    };
    let Some(cu_seqlens_q) = &op.ragged else {
        bail!("{name}: there are no cumulative lengths");
    };
    let pages = pages(name, op.pages, op.pool, op.table, op.sequences)?;
    let [k, v] = operands(&pages);
    let call = Call {
        q: Operand {
            address: address(q, layout)?,
            strides: [total * row, head, row, element].map(|s| s as i64),
        },
        k,
        v,
        mask: None,
        alibi: op.slopes.as_ref().map(address_of).transpose()?,
        ragged: Some(Ragged {
            cu_q: address_of(cu_seqlens_q)?,
            cu_k: 0,
            total_q: total,
            pitch: 0,
        }),
        pages: Some(key_pages(&pages, lengths(op.table)?)),
        y,
        q_dtype: q.dtype(),
        kv_dtype: op.pages.stored(),
        sizes: Sizes {
            batch: op.sequences,
            heads,
            kv_heads: op.pool.kv_heads,
            // One launches as well where no sequence has a query: to clear what is left over.
            queries: op.queries.max(1),
            keys: pages.width as usize * op.pool.page,
            dim,
        },
        scale: op.params.scale,
        softcap: op.params.softcap,
        right: Some(0),
        window: op.params.window,
        batch_invariant: op.params.batch_invariant,
    };
    // SAFETY: the guards have checked the shapes; the op holds pool, table and lengths, and what reads them runs on the
    // stream that frees them.
    unsafe { launch(&Launcher::new(q.device())?, &call) }
}
