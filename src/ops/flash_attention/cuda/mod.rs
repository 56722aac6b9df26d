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

use super::AttentionParams;
use crate::cpu::attention::Sizes;
use crate::cuda::{Launcher, address, alloc, cuda_storage};
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Layout, Result, Shape, Tensor, bail};

pub use dispatch::kernels as kernel_table;
pub(crate) use forms::{Forms, HeadSizes, NEWEST, head_sizes};
pub(crate) use plan::{Kernel, Plan, Planned, Rule, select};
pub(crate) use problem::{Call, Operand};

const OP: &str = "flash_attention";

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
    trace::record(OP, || {
        let (q, kv) = (call.q_dtype.as_str(), call.kv_dtype.as_str());
        format!("cuda q {q} kv {kv} {}", plan.with_reason())
    });
    // SAFETY: the caller's; the plan was made for this call.
    unsafe { plan.how.run(launcher, call) }
}

/// The operand that a tensor of four dimensions is.
fn operand(name: &str, storage: &CudaStorage, layout: &Layout) -> Result<Operand> {
    let Ok(strides) = <[usize; 4]>::try_from(layout.stride()) else {
        bail!(
            "{OP}: {name} is {:?}, expected four dimensions",
            layout.dims()
        );
    };
    Ok(Operand {
        address: address(storage, layout)?,
        strides: strides.map(|s| s as i64),
    })
}

pub(super) fn forward(
    params: &AttentionParams,
    mask: Option<&Tensor>,
    (q, q_layout): (&CudaStorage, &Layout),
    (k, k_layout): (&CudaStorage, &Layout),
    (v, v_layout): (&CudaStorage, &Layout),
) -> Result<(CudaStorage, Shape)> {
    let (batch, heads, queries, dim) = q_layout.shape().dims4()?;
    let (_, kv_heads, keys, _) = k_layout.shape().dims4()?;
    let device = q.device();
    let mask = mask.map(Tensor::storage_and_layout);
    let mask = match &mask {
        Some((storage, layout)) => Some(operand("mask", cuda_storage(storage)?, layout)?),
        None => None,
    };
    let len = batch * queries * heads * dim;
    // The driver gives no memory of no bytes.
    let out = alloc(OP, device, q.dtype(), len.max(1))?;
    let call = Call {
        q: operand("q", q, q_layout)?,
        k: operand("k", k, k_layout)?,
        v: operand("v", v, v_layout)?,
        mask,
        y: address(&out, &Layout::contiguous(len))?,
        q_dtype: q.dtype(),
        kv_dtype: k.dtype(),
        sizes: Sizes {
            batch,
            heads,
            kv_heads,
            queries,
            keys,
            dim,
        },
        scale: params.scale,
        softcap: params.softcap,
        causal: params.causal,
        window: params.window,
    };
    // SAFETY: the layouts are the storages' own, and `out` has room for the result.
    unsafe { launch(&Launcher::new(device)?, &call)? };
    Ok((out, Shape::from((batch, queries, heads, dim))))
}
