//! Residual additions in one pass.

#[cfg(feature = "cuda")]
mod cuda;

use super::view::{
    Float, check_like, check_tensors, cpu_storage, dense_on_cuda, dispatch_float, elements, float,
    float64, gathered,
};
use crate::cpu::{norm, pool, simd};
use crate::trace;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};

const OP: &str = "residual_add";

/// Elements above which an addition is spread over the pool: about 4 microseconds of work.
const GRAIN: usize = 16 * 1024;

/// `y = x + residuals[0]`, or `y = (x + residuals[0]) + residuals[1]`, in one pass.
///
/// * `x`: any shape and layout, f32, f16 or bf16
/// * `residuals`: one or two tensors of x's shape and dtype; broadcast views are welcome
/// * result: contiguous, x's shape and dtype
///
/// Each sum is computed in f32 and rounded to the dtype, so the result is bit for bit that of one or
/// two additions in candle. GPT-NeoX in Hugging Face adds its parallel residuals in this order:
/// `mlp + attention + x`.
///
/// # Errors
/// If there are no residuals or more than two, or one differs from x in shape, dtype or device.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
/// let y = candle_fused::ops::residual_add(&x, &[&x, &x])?;
/// assert_eq!(y.to_vec2::<f32>()?, [[3.; 4]; 2]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn residual_add(x: &Tensor, residuals: &[&Tensor]) -> Result<Tensor> {
    if !(1..=2).contains(&residuals.len()) {
        bail!(
            "{OP}: residuals holds {} tensors, expected one or two",
            residuals.len()
        );
    }
    for (i, residual) in residuals.iter().enumerate() {
        check_like(OP, &format!("residuals[{i}]"), residual, x)?;
    }
    float(OP, "x", x.dtype())?;
    let residual = residuals.iter().map(|r| ("a residual", *r));
    check_tensors(OP, residual.chain([("x", x)]))?;
    dense_on_cuda(x)?.apply_op1_no_bwd(&ResidualAdd { residuals })
}

struct ResidualAdd<'a> {
    residuals: &'a [&'a Tensor],
}

impl CustomOp1 for ResidualAdd<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        dispatch_float!(x.dtype(), OP, "x", T => self.forward::<T>(x, layout))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        cuda::forward(self.residuals, x, layout)
    }
}

impl ResidualAdd<'_> {
    fn forward<T: Float>(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let level = simd::level();
        trace::record(OP, || {
            let gathered = gathered(layout);
            format!("cpu {} {}{gathered}", level.name(), T::DTYPE.as_str())
        });
        let x = elements::<T>(x, layout)?;
        let guards: Vec<_> = self
            .residuals
            .iter()
            .map(|r| r.storage_and_layout())
            .collect();
        let residuals = guards
            .iter()
            .map(|(storage, layout)| elements::<T>(cpu_storage(storage)?, layout))
            .collect::<Result<Vec<_>>>()?;
        let mut out = vec![T::from_f32(0.); x.len()];
        pool::for_rows(&mut out, 1, GRAIN, |start, part| {
            let range = start..start + part.len();
            let second = residuals.get(1).map(|r| &r[range.clone()]);
            norm::add(level, &x[range.clone()], &residuals[0][range], second, part);
        });
        Ok((T::to_cpu_storage_owned(out), layout.shape().clone()))
    }
}

/// The plain form: float64, one element at a time, in x's row-major order.
///
/// # Errors
/// If a tensor cannot be read as float64.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fused::ops::residual_add;
/// let x = Tensor::new(&[1f32, 2.], &Device::Cpu)?;
/// assert_eq!(residual_add::reference(&x, &[&x, &x])?, [3., 6.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn reference(x: &Tensor, residuals: &[&Tensor]) -> Result<Vec<f64>> {
    let mut y = float64(x)?;
    for residual in residuals {
        y.iter_mut()
            .zip(float64(residual)?)
            .for_each(|(y, r)| *y += r);
    }
    Ok(y)
}
