//! The CUDA form: which kernel a call gets, and its launch.

mod mma;
mod plain;
mod wgmma;

use super::AttentionParams;
use crate::cuda::abi::AttentionParams as Params;
use crate::cuda::{Address, Launcher, address, alloc, cuda_storage};
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Layout, Result, Shape, Tensor, bail};

const OP: &str = "flash_attention";

/// A tensor of four dimensions, batch, head, token, dim: where it starts, and its strides in
/// elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand {
    pub address: Address,
    pub strides: [i64; 4],
}

impl Operand {
    fn new(name: &str, storage: &CudaStorage, layout: &Layout) -> Result<Self> {
        let Ok(strides) = <[usize; 4]>::try_from(layout.stride()) else {
            bail!(
                "{OP}: {name} is {:?}, expected four dimensions",
                layout.dims()
            );
        };
        Ok(Self {
            address: address(storage, layout)?,
            strides: strides.map(|s| s as i64),
        })
    }

    /// Whether every row is contiguous and starts at a multiple of `bytes`.
    fn rows_at(&self, bytes: u64, dtype: DType) -> bool {
        let size = dtype.size_in_bytes() as i64;
        let [outer @ .., last] = self.strides;
        last == 1
            && self.address.is_multiple_of(bytes)
            && outer.iter().all(|s| (s * size) % bytes as i64 == 0)
    }
}

/// One attention over addresses on a GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub q: Operand,
    pub k: Operand,
    pub v: Operand,
    /// In f32.
    pub mask: Option<Operand>,
    /// `[batch, queries, heads, dim]`, dense, in q's dtype.
    pub y: Address,
    pub q_dtype: DType,
    pub kv_dtype: DType,
    pub batch: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub queries: usize,
    pub keys: usize,
    pub dim: usize,
    pub scale: f32,
    pub softcap: Option<f32>,
    pub causal: bool,
    pub window: Option<usize>,
}

impl Call {
    /// Query heads that read one key/value head.
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Rows of one key/value head: every query of every head that reads it.
    fn rows(&self) -> usize {
        self.queries * self.group()
    }

    /// The window if it hides anything: from as many keys as there are, it does not.
    fn narrow_window(&self) -> Option<usize> {
        self.window.filter(|w| *w < self.keys)
    }

    /// A grid of so many blocks for each key/value head.
    fn blocks(&self, each: usize) -> Result<[u32; 3]> {
        if each.max(self.batch) > 65535 {
            bail!(
                "{OP}: {} queries of {} sequences are past what a launch takes",
                self.queries,
                self.batch
            );
        }
        Ok([self.kv_heads as u32, each as u32, self.batch as u32])
    }

    /// Fails where a kernel's 32-bit counters would not do.
    fn check(&self) -> Result<()> {
        let counts = [self.rows(), self.keys + self.queries, self.heads, self.dim];
        if counts.iter().any(|n| i32::try_from(*n).is_err()) {
            bail!(
                "{OP}: {} queries of {} heads over {} keys are past what a GPU form counts",
                self.queries,
                self.heads,
                self.keys
            );
        }
        Ok(())
    }
}

impl From<&Call> for Params {
    fn from(call: &Call) -> Self {
        let index = |dtype| crate::ops::view::dtype_index(dtype) as i32;
        let group = call.group() as u32;
        Self {
            q: call.q.address,
            k: call.k.address,
            v: call.v.address,
            mask: call.mask.map_or(0, |m| m.address),
            y: call.y,
            q_strides: call.q.strides,
            k_strides: call.k.strides,
            v_strides: call.v.strides,
            mask_strides: call.mask.map_or([0; 4], |m| m.strides),
            q_type: index(call.q_dtype),
            kv_type: index(call.kv_dtype),
            heads: call.heads as i32,
            kv_heads: call.kv_heads as i32,
            queries: call.queries as i32,
            keys: call.keys as i32,
            dim: call.dim as i32,
            group,
            group_magic: if group > 1 {
                (1u64 << 32).div_ceil(group.into()) as u32
            } else {
                0
            },
            scale: call.scale,
            softcap: call.softcap.unwrap_or(0.0),
            causal: call.causal.into(),
            window: call.narrow_window().unwrap_or(0) as i32,
            row_warps: 0,
            key_groups: 0,
            stages: 0,
            group_bytes: 0,
        }
    }
}

/// Computes attention with the fastest form that takes the call: Hopper's asynchronous tensor cores,
/// or any tensor cores where keys and values are 16 bits wide and lie in whole 16-byte pieces, or
/// plain f32 arithmetic.
///
/// # Errors
/// If no form takes the call, or the launch fails.
///
/// # Safety
/// The addresses are valid for what shapes and strides reach, until the stream has passed the
/// launch.
pub(crate) unsafe fn launch(launcher: &Launcher, call: &Call) -> Result<()> {
    if call.batch * call.rows() == 0 {
        return Ok(());
    }
    call.check()?;
    let (q, kv) = (call.q_dtype.as_str(), call.kv_dtype.as_str());
    let hopper = wgmma::Form::of(launcher, call)?;
    if let Ok(form) = hopper {
        trace::record(OP, || format!("cuda wgmma {form} q {q} kv {kv}"));
        // SAFETY: the caller's.
        return unsafe { form.launch(launcher) };
    }
    match mma::Form::of(launcher, call)? {
        Ok(form) => {
            trace::record(OP, || {
                let reason = hopper.err().unwrap_or_default();
                format!("cuda mma {form} q {q} kv {kv}: {reason}")
            });
            // SAFETY: the caller's.
            unsafe { form.launch(launcher, call) }
        }
        Err(reason) => {
            trace::record(OP, || format!("cuda plain q {q} kv {kv}: {reason}"));
            // SAFETY: the caller's.
            unsafe { plain::launch(launcher, call) }
        }
    }
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
        Some((storage, layout)) => Some(Operand::new("mask", cuda_storage(storage)?, layout)?),
        None => None,
    };
    let len = batch * queries * heads * dim;
    // The driver gives no memory of no bytes.
    let out = alloc(OP, device, q.dtype(), len.max(1))?;
    let call = Call {
        q: Operand::new("q", q, q_layout)?,
        k: Operand::new("k", k, k_layout)?,
        v: Operand::new("v", v, v_layout)?,
        mask,
        y: address(&out, &Layout::contiguous(len))?,
        q_dtype: q.dtype(),
        kv_dtype: k.dtype(),
        batch,
        heads,
        kv_heads,
        queries,
        keys,
        dim,
        scale: params.scale,
        softcap: params.softcap,
        causal: params.causal,
        window: params.window,
    };
    // SAFETY: the layouts are the storages' own, and `out` has room for the result.
    unsafe { launch(&Launcher::new(device)?, &call)? };
    Ok((out, Shape::from((batch, queries, heads, dim))))
}
