//! Dense products of random tensors with their results in float64, for tests of kernels.

use super::super::plan::Kernel;
use super::super::problem::{NormAt, NormKind, Operand, Operands, ProductAt};
use crate::cuda::{Launcher, Scratch, address_of};
use crate::ops::{Activation, ActivationBits};
use candle_core::{D, DType, Device, Result, Tensor};

/// What a product is of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub m: usize,
    pub k: usize,
    pub weights: [usize; 3],
    pub activation: Activation,
    pub norm: bool,
    pub residuals: bool,
    pub dtype: DType,
}

/// M, K, the rows of up to three weights, what becomes of the sums, and whether x is normed.
pub(super) type Size = (usize, usize, [usize; 3], Activation, bool);

/// Calls `check` with a random product of each size, in both 16-bit types, with bias and residuals and without.
pub(super) fn each_product(
    device: &Device,
    sizes: &[Size],
    mut check: impl FnMut(&Product) -> Result<()>,
) -> Result<()> {
    for &(m, k, weights, activation, norm) in sizes {
        for dtype in [DType::BF16, DType::F16] {
            for residuals in [false, true] {
                let shape = Shape {
                    m,
                    k,
                    weights,
                    activation,
                    norm,
                    residuals,
                    dtype,
                };
                check(&Product::new(device, shape)?)?;
            }
        }
    }
    Ok(())
}

pub(super) struct Product {
    pub shape: Shape,
    x: Tensor,
    gain: Tensor,
    pub w: Vec<Tensor>,
    bias: Tensor,
    residual: Tensor,
    y: Tensor,
}

impl Product {
    pub fn new(device: &Device, shape: Shape) -> Result<Self> {
        let k = shape.k;
        let present = shape.weights.iter().filter(|rows| **rows > 0);
        let w = present.map(|rows| {
            let w = Tensor::randn(0f32, 1. / (k as f32).sqrt(), (*rows, k), device)?;
            w.to_dtype(shape.dtype)
        });
        Self::of(device, shape, w.collect::<Result<_>>()?)
    }

    pub fn of(device: &Device, shape: Shape, w: Vec<Tensor>) -> Result<Self> {
        let randn = |dims: &[usize]| Tensor::randn(0f32, 1., dims, device)?.to_dtype(shape.dtype);
        let Shape { m, k, weights, .. } = shape;
        let rows = weights.iter().sum::<usize>();
        let width = shape.activation.outputs(rows);
        Ok(Self {
            x: randn(&[m, k])?,
            gain: randn(&[k])?,
            w,
            bias: randn(&[rows])?,
            residual: randn(&[m, width])?,
            y: Tensor::zeros((m, width), shape.dtype, device)?,
            shape,
        })
    }

    pub fn operands(&self, w: &[Tensor]) -> Result<Operands> {
        let Shape {
            m, k, dtype, norm, ..
        } = self.shape;
        let weights = w.iter().map(|w| {
            Ok(Operand::Dense {
                address: address_of(w)?,
                rows: w.dims()[0],
                dtype,
            })
        });
        let weight = address_of(&self.gain)?;
        let norm_at = NormAt {
            kind: NormKind::Rms,
            weight,
            bias: 0,
            eps: 1e-5,
        };
        let added = |t: &Tensor| match self.shape.residuals {
            true => address_of(t),
            false => Ok(0),
        };
        Ok(Operands {
            weights: weights.collect::<Result<_>>()?,
            at: ProductAt {
                x: address_of(&self.x)?,
                norm: norm.then_some(norm_at),
                bias: added(&self.bias)?,
                activation: self.shape.activation,
                residuals: [added(&self.residual)?; 2],
                out: address_of(&self.y)?,
                stride: self.y.dims()[1],
                m,
                k,
                x_dtype: dtype,
                x_bits: ActivationBits::Auto,
                out_dtype: dtype,
            },
            second: None,
            fetch: None,
            dequantized: None,
        })
    }

    fn expected(&self) -> Result<Tensor> {
        let exact = |t: &Tensor| t.to_device(&Device::Cpu)?.to_dtype(DType::F64);
        let mut x = exact(&self.x)?;
        if self.shape.norm {
            let squares = (x.sqr()?.mean_keepdim(D::Minus1)? + 1e-5)?;
            let normed = x.broadcast_div(&squares.sqrt()?)?;
            let normed = normed.broadcast_mul(&exact(&self.gain)?)?;
            // As the kernel in front rounds it.
            x = normed.to_dtype(self.shape.dtype)?.to_dtype(DType::F64)?;
        }
        let all = Tensor::cat(&self.w, 0)?;
        let mut y = x.matmul(&exact(&all)?.t()?)?;
        if self.shape.residuals {
            y = y.broadcast_add(&exact(&self.bias)?)?;
        }
        if self.shape.activation == Activation::SwiGlu {
            let width = self.y.dims()[1];
            let up = y.narrow(1, width, width)?;
            y = y.narrow(1, 0, width)?.silu()?.mul(&up)?;
        }
        match self.shape.residuals {
            true => y + (exact(&self.residual)? * 2.)?,
            false => Ok(y),
        }
    }

    /// Runs the product by `kernel` and holds it to float64.
    pub fn assert_close(
        &self,
        launcher: &Launcher,
        kernel: &dyn Kernel,
        operands: &Operands,
        what: &str,
    ) -> Result<()> {
        let Device::Cuda(cuda) = self.y.device() else {
            candle_core::bail!("expected tensors on a GPU");
        };
        let expected = self.expected()?;
        let most = expected.abs()?.max_all()?.to_scalar::<f64>()?;
        let bound = match self.shape.dtype {
            DType::BF16 => 8e-3,
            _ => 1e-3,
        } * most.max(1.);
        let mut scratch = Scratch::new(cuda);
        // SAFETY: the tensors have the sizes that the product takes.
        unsafe { kernel.run(launcher, &mut scratch, operands)? };
        let y = self.y.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
        let error = (y - &expected)?.abs()?.max_all()?.to_scalar::<f64>()?;
        assert!(error <= bound, "{:?} {what}: {error} of {most}", self.shape);
        Ok(())
    }
}
