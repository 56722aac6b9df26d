//! The CUDA form: one kernel for few rows of x, the library's matrix product for many.

mod blocks;
mod few;
mod gemm;
pub(crate) mod gemv;
mod held;
mod many;
mod parts;
mod quantized;

pub(crate) use few::{FEW, FewRows, few_rows};
pub(crate) use gemv::{NormAt, NormKind};
pub(crate) use parts::{Few, FewAt, few};

use super::Weight;
use super::launch::LinearOp;
use crate::cuda::{Address, Launcher, address, address_of, alloc};
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Layout, Result, Shape, bail};
use held::Held;
use many::{ManyRows, many_rows};

pub(super) fn forward(
    op: &LinearOp<'_>,
    x: &CudaStorage,
    layout: &Layout,
) -> Result<(CudaStorage, Shape)> {
    if op.weights.iter().any(|w| matches!(w, Weight::Blocks(_))) {
        return quantized::forward(op, x, layout);
    }
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
    let many = ManyRows {
        x: address(x, layout)?,
        norm: held.norm()?,
        weights: dense(op, &held.weights)?,
        bias: held.bias()?,
        activation: op.epilogue.activation,
        residuals: held.residuals()?,
        out: address(&out, &Layout::contiguous(m * op.width()))?,
        m,
        k,
        dtype: x.dtype(),
    };
    let launcher = Launcher::new(device)?;
    let few = match few_at(&many) {
        Some(few) if few.fits(&launcher) => Some(few),
        _ => None,
    };
    trace::record(op.name, || {
        let rows = if few.is_some() {
            "few rows"
        } else {
            "many rows"
        };
        format!("cuda {rows} {}", op.path())
    });
    match few {
        // SAFETY: the guards have checked that the tensors have these shapes and lie on the device;
        // the stream that runs the kernels is the one that frees them.
        Some(few) => unsafe { few_rows(&launcher, &few)? },
        // SAFETY: as above.
        None => unsafe { many_rows(&launcher, device, &many)? },
    }
    Ok((out, Shape::from(dims)))
}

/// The same as one product of few rows, if it is one.
fn few_at(many: &ManyRows) -> Option<FewRows> {
    let [(_, _, w_dtype), ..] = many.weights[..] else {
        return None;
    };
    let alike = many.weights.iter().all(|(_, _, dtype)| *dtype == w_dtype);
    if many.m > FEW || many.weights.len() > 3 || !alike {
        return None;
    }
    let mut weights = [(0, 0); 3];
    for (to, (at, rows, _)) in weights.iter_mut().zip(&many.weights) {
        *to = (*at, *rows);
    }
    let few = FewRows {
        x: many.x,
        norm: many.norm,
        weights,
        bias: many.bias,
        activation: many.activation,
        residuals: many.residuals,
        out: many.out,
        stride: 0,
        m: many.m,
        k: many.k,
        x_dtype: many.dtype,
        w_dtype,
        out_dtype: many.dtype,
    };
    let stride = few.width();
    Some(FewRows { stride, ..few })
}

/// The matrices with their rows and dtypes.
fn dense(op: &LinearOp<'_>, weights: &[Weight]) -> Result<Vec<(Address, usize, DType)>> {
    let at = |weight: &Weight| match weight {
        Weight::Dense(w) => Ok((address_of(w)?, w.dims()[0], w.dtype())),
        _ => bail!("{}: expected dense weights", op.name),
    };
    weights.iter().map(at).collect()
}
