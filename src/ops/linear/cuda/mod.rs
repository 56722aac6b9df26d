//! The CUDA form: one kernel for few rows of x; for many the library's matrix product, or one of
//! integers.

mod blocks;
mod code_stream;
mod few;
mod gemm;
mod gemv;
mod held;
mod many;
mod parts;
mod quantized;
mod slices;
mod stream;
mod tensor_map;
#[cfg(test)]
mod tests;
mod tiles;
mod w8a8;
mod w8a8_direct;

pub(crate) use few::{FEW, FewRows};
pub(crate) use gemv::{Gemv, NormAt, NormKind};
pub(crate) use parts::{Few, ProductAt, few};
pub(crate) use stream::Fetch;

use super::Weight;
use super::launch::LinearOp;
use crate::cuda::{Address, Gpu, Launcher, Scratch, address, alloc};
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Layout, Result, Shape};
use held::Held;
use many::{ManyRows, many_rows};
use quantized::many_blocks;
use tiles::tiles;
use w8a8::{W8A8, w8a8};

pub(crate) use quantized::dense_weights;

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
    let held = Held::new(op)?;
    let at = ProductAt {
        x: address(x, layout)?,
        norm: held.norm()?,
        bias: held.bias()?,
        activation: op.epilogue.activation,
        residuals: held.residuals()?,
        out: address(&out, &Layout::contiguous(m * op.width()))?,
        stride: op.width(),
        m,
        k,
        x_dtype: x.dtype(),
        out_dtype: x.dtype(),
    };
    let launcher = Launcher::new(device)?;
    // SAFETY: the guards have checked that the tensors have these shapes and lie on the device; the
    // stream that runs the kernels is the one that frees them.
    unsafe {
        product(
            &launcher,
            &mut Scratch::new(device),
            &held.weights,
            None,
            &at,
        )?
    };
    trace::record(op.name, || {
        let path = op.path();
        if let Ok(Some(few)) = Few::new(&launcher, &held.weights, &at) {
            return format!("cuda few rows {path}, {}", few.path(launcher.gpu));
        }
        if let Some(product) = W8A8::new(&held.weights, &at) {
            return format!("cuda many rows {path}, {}", product.path(launcher.gpu));
        }
        match takes_tiles(launcher.gpu, &held.weights, &at) {
            true => format!("cuda tiles {path}"),
            false if m > few::FEW => format!("cuda many rows {path}"),
            false => format!("cuda many rows {path}: no kernel for few rows takes it"),
        }
    });
    Ok((out, Shape::from(dims)))
}

/// Whether all weights are codes for which there is a kernel of so many rows.
fn takes_tiles(gpu: &Gpu, weights: &[Weight], at: &ProductAt) -> bool {
    let blocks = weights.iter().map(|w| match w {
        Weight::Blocks(w) => Some(w.as_ref()),
        _ => None,
    });
    let blocks: Option<Vec<_>> = blocks.collect();
    blocks.is_some_and(|blocks| tiles::takes(gpu, blocks, at))
}

/// Launches a product of any number of rows: by the kernels for few rows if they take it, by integers
/// if there are enough rows and all weights are in INT8, by those for tens of rows of codes, else by
/// the library. `dense` is where weights in blocks lie as [`dense_weights`] leaves them, if they do.
///
/// # Errors
/// If the weights are not on the GPU, or memory is short.
///
/// # Safety
/// Each address holds what its field says, and dense weights live, until the stream has passed the
/// launches. In a dependent chain no kernel in front writes weights, norm or bias.
pub(crate) unsafe fn product(
    launcher: &Launcher,
    scratch: &mut Scratch,
    weights: &[Weight],
    dense: Option<Address>,
    at: &ProductAt,
) -> Result<()> {
    // SAFETY: the caller's.
    unsafe {
        if let Some(product) = Few::new(launcher, weights, at)? {
            few(launcher, &product)
        } else if let Some(product) = W8A8::new(weights, at) {
            w8a8(launcher, scratch, &product)
        } else if dense.is_none() && takes_tiles(launcher.gpu, weights, at) {
            tiles(launcher, scratch, weights, at)
        } else if weights.iter().any(Weight::is_quantized) {
            many_blocks(launcher, scratch, weights, dense, at)
        } else {
            many_rows(launcher, scratch, &ManyRows::new(weights, at)?)
        }
    }
}
