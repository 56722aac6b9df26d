//! The CUDA form. A [`Product`] is cut into parts of one weight format ([`problem`]); the table ([`dispatch`]) chooses
//! a kernel for each; its host file in [`kernels`] has worked out a [`plan`], which launches it.

mod dispatch;
mod kernels;
mod owned;
mod plan;
mod problem;
mod product;
#[cfg(test)]
pub(crate) mod tests;

use super::op::LinearOp;
use crate::cuda::{Launcher, Scratch, address, alloc};
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Layout, Result, Shape};
use owned::Owned;

pub use dispatch::kernels as kernel_table;
pub(crate) use kernels::gemm_dequantized::dequantize_together;
pub(crate) use kernels::gemv::Gemv;
pub(crate) use kernels::gemv_dense_pipelined;
pub(crate) use problem::{Case, Fetch, NormAt, NormKind, Operands, ProductAt};
pub(crate) use product::Product;

pub(super) fn forward(
    op: &LinearOp<'_>,
    x: &CudaStorage,
    layout: &Layout,
) -> Result<(CudaStorage, Shape)> {
    let device = x.device();
    let mut dims = layout.dims().to_vec();
    let k = dims.pop().unwrap_or(1);
    let m = dims.iter().product::<usize>();
    dims.push(op.width());
    let out = alloc(op.name, device, x.dtype(), m * op.width())?;
    if m * op.width() == 0 {
        return Ok((out, Shape::from(dims)));
    }
    let owned = Owned::new(op)?;
    let at = ProductAt {
        x: address(x, layout)?,
        norm: owned.norm()?,
        bias: owned.bias()?,
        activation: op.epilogue.activation,
        residuals: owned.residuals()?,
        out: address(&out, &Layout::contiguous(m * op.width()))?,
        stride: op.width(),
        m,
        k,
        x_dtype: x.dtype(),
        out_dtype: x.dtype(),
    };
    let launcher = Launcher::new(device)?;
    let product = Product::new(&launcher, &owned.weights, &at)?;
    // SAFETY: the guards have checked that the tensors have these shapes and lie on the device; the
    // stream that runs the kernels is the one that frees them.
    unsafe { product.run(&launcher, &mut Scratch::new(device))? };
    trace::record(op.name, || format!("cuda {} {product}", op.path()));
    Ok((out, Shape::from(dims)))
}
