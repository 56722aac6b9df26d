//! RMSNorm, alone or with the residual addition before it.

#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use super::view::{
    Float, check_kind, check_like, check_tensors, cpu_storage, dense_on_cuda, dispatch_float,
    elements, float64, gathered,
};
use crate::cpu::{norm, pool, simd};
use crate::trace;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};

const OP: &str = "rms_norm";

/// Elements above which rows are spread over the pool: about 4 microseconds of work.
const GRAIN: usize = 16 * 1024;

/// `y = x / sqrt(mean(x^2) + eps) * weight` over the last dimension.
///
/// * `x`: `[.., K]`, f32, f16 or bf16, any layout
/// * `weight`: `[K]`, in x's dtype
/// * result: contiguous, x's shape and dtype
///
/// Statistics are in f32 (a row with magnitudes above 1e19 gives zeros). Rounding order is that of
/// Hugging Face's Llama: the normalised row is rounded to the dtype, then multiplied by the weight.
///
/// Source: Root Mean Square Layer Normalization (Zhang, Sennrich 2019).
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// let x = Tensor::new(&[[3f32, 4.]], &Device::Cpu)?;
/// let weight = Tensor::ones(2, DType::F32, &Device::Cpu)?;
/// let y = candle_fused::ops::rms_norm(&x, &weight, 0.)?;
/// assert!((y.to_vec2::<f32>()?[0][0] - 3. / 12.5f32.sqrt()).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    check(x, weight)?;
    dense_on_cuda(x)?.apply_op1_no_bwd(&RmsNorm {
        weight,
        eps: eps as f32,
        residual: None,
    })
}

/// `s = x + residual` and `y = rms_norm(s)`, in one pass: `(s, y)`.
///
/// * `x`: as [`rms_norm`]; `residual`: of x's shape and dtype
/// * results: contiguous views of one buffer, each of x's shape and dtype
///
/// The sum is rounded to the dtype before it is normalised, as in the plain form.
///
/// # Errors
/// As [`rms_norm`], or if `residual` differs from x in shape, dtype or device.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// let x = Tensor::ones((1, 4), DType::F32, &Device::Cpu)?;
/// let weight = Tensor::ones(4, DType::F32, &Device::Cpu)?;
/// let (sum, normed) = candle_fused::ops::rms_norm_residual(&x, &x, &weight, 0.)?;
/// assert_eq!(sum.to_vec2::<f32>()?, [[2.; 4]]);
/// assert_eq!(normed.to_vec2::<f32>()?, [[1.; 4]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn rms_norm_residual(
    x: &Tensor,
    residual: &Tensor,
    weight: &Tensor,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    check(x, weight)?;
    check_like(OP, "residual", residual, x)?;
    check_tensors(OP, [("residual", residual)])?;
    let op = RmsNorm {
        weight,
        eps: eps as f32,
        residual: Some(residual),
    };
    let both = dense_on_cuda(x)?.apply_op1_no_bwd(&op)?;
    Ok((both.get(0)?, both.get(1)?))
}

fn check(x: &Tensor, weight: &Tensor) -> Result<()> {
    check_tensors(OP, [("x", x), ("weight", weight)])?;
    let Some(&k) = x.dims().last() else {
        bail!("{OP}: x is a scalar, expected [.., K]");
    };
    if k == 0 {
        bail!(
            "{OP}: x has shape {:?}, expected a last dimension above 0",
            x.shape()
        );
    }
    if weight.dims() != [k] {
        bail!(
            "{OP}: weight has shape {:?}, expected [{k}]",
            weight.shape()
        );
    }
    check_kind(OP, "weight", weight, x)
}

struct RmsNorm<'a> {
    weight: &'a Tensor,
    eps: f32,
    /// With a residual the output is `[2, ..x]`: the sum, then the norm.
    residual: Option<&'a Tensor>,
}

impl CustomOp1 for RmsNorm<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        dispatch_float!(x.dtype(), OP, "x", T => self.forward::<T>(x, layout))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        cuda::forward(x, layout, self.weight, self.residual, self.eps)
    }
}

impl RmsNorm<'_> {
    fn forward<T: Float>(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let level = simd::level();
        trace::record(OP, || {
            let residual = if self.residual.is_some() {
                " +residual"
            } else {
                ""
            };
            let gathered = gathered(layout);
            format!(
                "cpu {} {}{residual}{gathered}",
                level.name(),
                T::DTYPE.as_str()
            )
        });
        let x = elements::<T>(x, layout)?;
        let (storage, weight_layout) = self.weight.storage_and_layout();
        let weight = elements::<T>(cpu_storage(&storage)?, weight_layout)?;
        let k = weight.len();
        let grain = (GRAIN / k).max(1);
        let Some(residual) = self.residual else {
            let mut out = vec![T::from_f32(0.); x.len()];
            pool::for_rows(&mut out, k, grain, |first, rows| {
                for (row, y) in x[first * k..].chunks_exact(k).zip(rows.chunks_exact_mut(k)) {
                    norm::rms_norm(level, row, &weight, self.eps, y);
                }
            });
            return Ok((T::to_cpu_storage_owned(out), layout.shape().clone()));
        };
        let (storage, residual_layout) = residual.storage_and_layout();
        let residual = elements::<T>(cpu_storage(&storage)?, residual_layout)?;
        let mut out = vec![T::from_f32(0.); 2 * x.len()];
        let (sums, norms) = out.split_at_mut(x.len());
        pool::for_row_pairs(sums, norms, k, grain, |first, sums, norms| {
            let start = first * k;
            let range = start..start + sums.len();
            norm::add(level, &x[range.clone()], &residual[range], None, sums);
            for (row, y) in sums.chunks_exact(k).zip(norms.chunks_exact_mut(k)) {
                norm::rms_norm(level, row, &weight, self.eps, y);
            }
        });
        let dims: Vec<_> = [&[2], layout.dims()].concat();
        Ok((T::to_cpu_storage_owned(out), Shape::from(dims)))
    }
}

/// The plain form: float64, one row at a time, in x's row-major order.
///
/// # Errors
/// If a tensor cannot be read as float64.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fused::ops::rms_norm;
/// let (x, weight) = (Tensor::new(&[3f32, 4.], &Device::Cpu)?, Tensor::new(&[1f32, 2.], &Device::Cpu)?);
/// let exact = rms_norm::reference(&x, &weight, 0.)?;
/// let y = rms_norm(&x, &weight, 0.)?.to_vec1::<f32>()?;
/// assert!(y.iter().zip(exact).all(|(y, exact)| (f64::from(*y) - exact).abs() < 1e-6));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn reference(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Vec<f64>> {
    let (mut y, weight) = (float64(x)?, float64(weight)?);
    for row in y.chunks_mut(weight.len().max(1)) {
        let mean = row.iter().map(|v| v * v).sum::<f64>() / row.len() as f64;
        row.iter_mut()
            .zip(&weight)
            .for_each(|(v, w)| *v = *v / (mean + eps).sqrt() * w);
    }
    Ok(y)
}
