//! The CUDA form. The table ([`dispatch`]) chooses a kernel for a call ([`problem`]); its host file has worked out a
//! [`plan`], which launches it.

mod dispatch;
mod forms;
mod mma;
mod plain;
mod plan;
mod problem;
#[cfg(test)]
pub(crate) mod table_tests;
mod wgmma;

use super::attention::{Attention, dimensions};
use super::ragged::Lengths;
use crate::cpu::attention::Sizes;
use crate::cuda::{Launcher, address, address_of, alloc, cuda_storage};
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Layout, Result, Tensor};

pub(super) use dispatch::check_head_dim;
pub use dispatch::kernels as kernel_table;
pub(crate) use forms::{Forms, HeadSizes, NEWEST, head_sizes};
pub(crate) use plan::{Kernel, Plan, Planned, Rule, select};
pub(crate) use problem::{Call, Operand, Ragged};

/// Computes attention with the kernel that the table chooses.
///
/// # Errors
/// If no kernel takes the call, or the launch fails.
///
/// # Safety
/// The addresses are valid for what shapes and strides reach, until the stream has passed the
/// launch.
pub(crate) unsafe fn launch(launcher: &Launcher, call: &Call) -> Result<()> {
    if call.sizes.batch * call.sizes.rows() == 0 {
        return Ok(());
    }
    call.check()?;
    let plan = dispatch::select(&call.case(launcher.gpu.spec))?;
    trace::record(call.op(), || {
        let (q, kv) = (call.q_dtype.as_str(), call.kv_dtype.as_str());
        format!("cuda q {q} kv {kv} {}", plan.with_reason())
    });
    // SAFETY: the caller's; the plan was made for this call.
    unsafe { plan.how.run(launcher, call) }
}

/// The operand that a tensor of batch, heads, tokens, dim is.
fn operand(op: &str, name: &str, (storage, layout): (&CudaStorage, &Layout)) -> Result<Operand> {
    let (_, strides) = dimensions(op, layout, name)?;
    Ok(Operand {
        address: address(storage, layout)?,
        strides: strides.map(|s| s as i64),
    })
}

/// An operand whose layout has the dimensions batch, heads, tokens, dim.
type Given<'a> = (&'a CudaStorage, &'a Layout);

/// Attention of all sequences, `[B, Tq, Hq, D]` or `[total_q, Hq, D]`.
pub(super) fn forward(op: &Attention, q: Given, k: Given, v: Given) -> Result<CudaStorage> {
    let name = op.form.op;
    let ([batch, heads, queries, dim], _) = dimensions(name, q.1, "q")?;
    let ([_, kv_heads, keys, _], _) = dimensions(name, k.1, "k")?;
    let device = q.0.device();
    let mask = op.mask.as_ref().map(Tensor::storage_and_layout);
    let mask = match &mask {
        Some((storage, layout)) => Some(operand(name, "mask", (cuda_storage(storage)?, layout))?),
        None => None,
    };
    let ragged = match &op.ragged {
        Some(Lengths::Cumulative(batch)) => Some(Ragged {
            cu_q: address_of(&batch.cu_seqlens_q)?,
            cu_k: address_of(&batch.cu_seqlens_k)?,
            total_q: queries,
            pitch: 0,
        }),
        Some(Lengths::Padded { lengths, pitch }) => Some(Ragged {
            cu_q: address_of(lengths)?,
            cu_k: 0,
            total_q: queries,
            pitch: *pitch,
        }),
        None => None,
    };
    let sizes = Sizes {
        batch: op
            .ragged
            .as_ref()
            .map_or(batch, |ragged| ragged.sequences()),
        heads,
        kv_heads,
        // One launches as well where no sequence has a query: to clear what is left over.
        queries: match &op.ragged {
            Some(ragged) => ragged.longest().max(1).min(queries),
            None => queries,
        },
        keys,
        dim,
    };
    let len = batch * queries * heads * dim;
    // The driver gives no memory of no bytes.
    let out = alloc(name, device, q.0.dtype(), len.max(1))?;
    let call = Call {
        q: operand(name, "q", q)?,
        k: operand(name, "k", k)?,
        v: operand(name, "v", v)?,
        mask,
        alibi: op.slopes.as_ref().map(address_of).transpose()?,
        ragged,
        pages: None,
        y: address(&out, &Layout::contiguous(len))?,
        q_dtype: q.0.dtype(),
        kv_dtype: k.0.dtype(),
        sizes,
        scale: op.params.scale,
        softcap: op.params.softcap,
        right: op.params.right(),
        window: op.params.window,
        batch_invariant: false,
    };
    // SAFETY: the layouts are the storages' own, `out` has room for the result, and lengths are one more
    // than there are sequences.
    unsafe { launch(&Launcher::new(device)?, &call)? };
    Ok(out)
}
