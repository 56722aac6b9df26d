//! The CUDA form: one launch for a whole step of attention. The table ([`dispatch`]) chooses a kernel for a step
//! ([`problem`]), alone or with a product; its host file has planned the launch.

mod cluster;
#[cfg(test)]
mod codes_tests;
mod dispatch;
#[cfg(test)]
mod pages_tests;
mod problem;
mod split;
mod step;
#[cfg(test)]
pub(crate) mod table_tests;
#[cfg(test)]
mod tests;
mod with_gemv;
mod with_qkv;
#[cfg(test)]
mod with_qkv_tests;

use super::{OP, Op};
use crate::cuda::{Launcher, address, address_of, alloc, zeros_before_launch};
use crate::ops::flash_attention::cuda::Plan;
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::DevicePtr;
use candle_core::{CudaStorage, DType, Layout, Result, Shape, bail};
use problem::Operands;

pub use dispatch::kernels as kernel_table;
pub(crate) use dispatch::partials;
pub(crate) use problem::{Companion, IndependentProduct, Step, StepShape};

/// A step of attention ready to run: alone or with a product, with the kernel that takes it.
#[derive(Debug)]
pub(crate) struct Attention {
    plan: Plan<Operands>,
    operands: Operands,
}

impl Attention {
    /// Chooses a kernel.
    ///
    /// # Errors
    /// If none takes the step, with the product if there is one.
    pub fn new(launcher: &Launcher, step: Step, companion: Option<Companion>) -> Result<Self> {
        step.shape.check()?;
        let operands = Operands { step, companion };
        let plan = dispatch::select(&operands.case(launcher))?;
        Ok(Self { plan, operands })
    }

    pub fn shape(&self) -> &StepShape {
        &self.operands.step.shape
    }

    /// Launches the step.
    ///
    /// # Errors
    /// If the launch fails.
    ///
    /// # Safety
    /// Every address that is not 0 is valid for the shape given at its field until the stream has passed
    /// the launch, and the counters are zero; for the product in the same launch as for one of few rows.
    pub unsafe fn run(&self, launcher: &Launcher) -> Result<()> {
        // SAFETY: the caller's; the plan was made for these operands.
        unsafe { self.plan.how.run(launcher, &self.operands) }
    }
}

pub(super) fn forward(
    op: &Op<'_>,
    qkv: &CudaStorage,
    layout: &Layout,
) -> Result<(CudaStorage, Shape)> {
    let device = qkv.device();
    let launcher = Launcher::new(device)?;
    let config = op.config;
    let (sequences, _) = layout.shape().dims2()?;
    let [_, kv_heads, slots, head_dim] = *op.k_cache.dims() else {
        bail!("{OP}: k_cache is {:?}", op.k_cache.shape());
    };
    let [cos, sin] = [config.cos, config.sin].map(candle_core::Tensor::contiguous);
    let (cos, sin, position) = (cos?, sin?, op.position.contiguous()?);
    let shape = StepShape {
        sequences,
        heads: config.heads,
        kv_heads,
        head_dim,
        slots,
        paged: false,
        positions: cos.dim(0)?,
        pairs: cos.dim(1)?,
        dtype: qkv.dtype(),
        cache_dtype: op.k_cache.dtype(),
    };
    let width = config.heads * head_dim;
    let out = alloc(OP, device, qkv.dtype(), sequences * width)?;
    let stream = device.cuda_stream();
    let sizes = partials(launcher.gpu, &shape)?;
    let partial = alloc(OP, device, DType::U8, sizes.bytes)?;
    let counters = zeros_before_launch(&launcher, device, sizes.counters)?;
    let norms = config
        .norms
        .map(|n| Ok::<_, candle_core::Error>((n.q.contiguous()?, n.k.contiguous()?)));
    let norms = norms.transpose()?;
    let norm = |which: Option<&candle_core::Tensor>| which.map_or(Ok(0), address_of);
    let step = Step {
        qkv: address(qkv, layout)?,
        q_norm: norm(norms.as_ref().map(|n| &n.0))?,
        k_norm: norm(norms.as_ref().map(|n| &n.1))?,
        eps: config.norms.map_or(0., |n| n.eps as f32),
        cos: address_of(&cos)?,
        sin: address_of(&sin)?,
        k_cache: address_of(op.k_cache)?,
        v_cache: address_of(op.v_cache)?,
        pages: None,
        out: address(&out, &Layout::contiguous(sequences * width))?,
        partial: address(&partial, &Layout::contiguous(sizes.bytes))?,
        counters: counters.device_ptr(&stream).0,
        position: address_of(&position)?,
        shape,
        style: config.style,
        scale: config.scale,
        softcap: config.softcap.unwrap_or(0.),
        window: config.window.unwrap_or(0),
    };
    let attention = Attention::new(&launcher, step, None)?;
    trace::record(OP, || {
        let norms = if norms.is_some() { " +norms" } else { "" };
        let (q, kv) = (qkv.dtype().as_str(), op.k_cache.dtype().as_str());
        let plan = attention.plan.with_reason();
        format!("cuda q {q} kv {kv}{norms} {plan}")
    });
    // SAFETY: the guards have checked the shapes; scratch memory is made above in the sizes asked
    // for, and freed behind the launch on the same stream.
    unsafe { attention.run(&launcher)? };
    Ok((out, Shape::from((sequences, width))))
}
