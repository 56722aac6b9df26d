//! LayerNorm, alone or with the residual addition before it.

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

const OP: &str = "layer_norm";

/// Elements above which rows are spread over the pool: about 4 microseconds of work.
const GRAIN: usize = 16 * 1024;

/// `y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension, with the
/// variance of the whole row (divided by K).
///
/// * `x`: `[.., K]`, f32, f16 or bf16, any layout
/// * `weight`, `bias`: `[K]`, in x's dtype
/// * result: contiguous, x's shape and dtype
///
/// Computed in f32 and rounded once, as torch's `layer_norm` does. The mean is corrected in a second
/// pass, so that a large common offset costs no precision.
///
/// Source: Layer Normalization (Ba, Kiros, Hinton 2016).
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// let x = Tensor::new(&[[1f32, 3.]], &Device::Cpu)?;
/// let (one, zero) = (Tensor::ones(2, DType::F32, &Device::Cpu)?, Tensor::zeros(2, DType::F32, &Device::Cpu)?);
/// let y = candle_fused::ops::layer_norm(&x, &one, Some(&zero), 0.)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[-1., 1.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    check(x, weight, bias)?;
    dense_on_cuda(x)?.apply_op1_no_bwd(&LayerNorm {
        weight,
        bias,
        eps: eps as f32,
        residual: None,
    })
}

/// `s = x + residual` and `y = layer_norm(s)`, in one pass: `(s, y)`.
///
/// * `x`, `weight`, `bias`: as [`layer_norm`]; `residual`: of x's shape and dtype
/// * results: contiguous views of one buffer, each of x's shape and dtype
///
/// The sum is rounded to the dtype before it is normalised, as in the plain form. Encoders with norms
/// behind the residual (BERT) go on with `y`, models with norms in front of each part with both.
///
/// # Errors
/// As [`layer_norm`], or if `residual` differs from x in shape, dtype or device.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// let x = Tensor::new(&[[1f32, 3.]], &Device::Cpu)?;
/// let one = Tensor::ones(2, DType::F32, &Device::Cpu)?;
/// let (sum, normed) = candle_fused::ops::layer_norm_residual(&x, &x, &one, None, 0.)?;
/// assert_eq!(sum.to_vec2::<f32>()?, [[2., 6.]]);
/// assert_eq!(normed.to_vec2::<f32>()?, [[-1., 1.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn layer_norm_residual(
    x: &Tensor,
    residual: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    check(x, weight, bias)?;
    check_like(OP, "residual", residual, x)?;
    check_tensors(OP, [("residual", residual)])?;
    let both = dense_on_cuda(x)?.apply_op1_no_bwd(&LayerNorm {
        weight,
        bias,
        eps: eps as f32,
        residual: Some(residual),
    })?;
    Ok((both.get(0)?, both.get(1)?))
}

fn check(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<()> {
    let Some(&k) = x.dims().last() else {
        bail!("{OP}: x is a scalar, expected [.., K]");
    };
    if k == 0 {
        bail!(
            "{OP}: x has shape {:?}, expected a last dimension above 0",
            x.shape()
        );
    }
    for (argument, t) in [("weight", Some(weight)), ("bias", bias)] {
        let Some(t) = t else { continue };
        if t.dims() != [k] {
            bail!("{OP}: {argument} has shape {:?}, expected [{k}]", t.shape());
        }
        check_kind(OP, argument, t, x)?;
    }
    let bias_given = bias.map(|bias| ("bias", bias));
    check_tensors(
        OP,
        [("x", x), ("weight", weight)].into_iter().chain(bias_given),
    )
}

struct LayerNorm<'a> {
    weight: &'a Tensor,
    bias: Option<&'a Tensor>,
    eps: f32,
    /// With a residual the output is `[2, ..x]`: the sum, then the norm.
    residual: Option<&'a Tensor>,
}

impl CustomOp1 for LayerNorm<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        dispatch_float!(x.dtype(), OP, "x", T => self.forward::<T>(x, layout))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        cuda::forward(x, layout, self)
    }
}

impl LayerNorm<'_> {
    /// Of the output for an x of this layout.
    fn shape(&self, layout: &Layout) -> Shape {
        match self.residual {
            Some(_) => Shape::from([&[2], layout.dims()].concat()),
            None => layout.shape().clone(),
        }
    }

    fn forward<T: Float>(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let level = simd::level();
        trace::record(OP, || {
            let residual = self.residual.map_or("", |_| " +residual");
            let gathered = gathered(layout);
            let dtype = T::DTYPE.as_str();
            format!("cpu {} {dtype}{residual}{gathered}", level.name())
        });
        let x = elements::<T>(x, layout)?;
        let (storage, weight_layout) = self.weight.storage_and_layout();
        let weight = elements::<T>(cpu_storage(&storage)?, weight_layout)?;
        let bias = self.bias.map(|b| b.storage_and_layout());
        let bias = match &bias {
            Some((storage, layout)) => Some(elements::<T>(cpu_storage(storage)?, layout)?),
            None => None,
        };
        let k = weight.len();
        let grain = (GRAIN / k).max(1);
        let normalise = |x: &[T], y: &mut [T]| {
            for (row, y) in x.chunks_exact(k).zip(y.chunks_exact_mut(k)) {
                norm::layer_norm(level, row, &weight, bias.as_deref(), self.eps, y);
            }
        };
        let Some(residual) = self.residual else {
            let mut out = vec![T::from_f32(0.); x.len()];
            pool::for_rows(&mut out, k, grain, |first, rows| {
                normalise(&x[first * k..], rows);
            });
            return Ok((T::to_cpu_storage_owned(out), self.shape(layout)));
        };
        let (storage, residual_layout) = residual.storage_and_layout();
        let residual = elements::<T>(cpu_storage(&storage)?, residual_layout)?;
        let mut out = vec![T::from_f32(0.); 2 * x.len()];
        let (sums, norms) = out.split_at_mut(x.len());
        pool::for_row_pairs(sums, norms, k, grain, |first, sums, norms| {
            let range = first * k..first * k + sums.len();
            norm::add(level, &x[range.clone()], &residual[range], None, sums);
            normalise(sums, norms);
        });
        Ok((T::to_cpu_storage_owned(out), self.shape(layout)))
    }
}

/// The plain form: float64, one row at a time, in x's row-major order.
///
/// # Errors
/// If a tensor cannot be read as float64.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fused::ops::layer_norm;
/// let (x, weight) = (Tensor::new(&[1f32, 3.], &Device::Cpu)?, Tensor::new(&[5f32, 7.], &Device::Cpu)?);
/// assert_eq!(layer_norm::reference(&x, &weight, None, 0.)?, [-5., 7.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn reference(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, eps: f64) -> Result<Vec<f64>> {
    let (mut y, weight) = (float64(x)?, float64(weight)?);
    let bias = bias
        .map(float64)
        .transpose()?
        .unwrap_or_else(|| vec![0.; weight.len()]);
    for row in y.chunks_mut(weight.len().max(1)) {
        let n = row.len() as f64;
        let mean = row.iter().sum::<f64>() / n;
        let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
        for ((v, w), b) in row.iter_mut().zip(&weight).zip(&bias) {
            *v = (*v - mean) / (variance + eps).sqrt() * w + b;
        }
    }
    Ok(y)
}
