//! The CUDA form: one kernel for few rows of x, the library's matrix product for many.

mod blocks;
mod few;
mod gemm;
pub(crate) mod gemv;
mod many;
mod parts;
mod quantized;

pub(crate) use few::{FEW, FewRows, few_rows};
pub(crate) use parts::{Few, FewAt, few};

use super::launch::LinearOp;
use super::{Prologue, Weight};
use crate::cuda::{Address, Launcher, address, address_of, alloc, contiguous};
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Layout, Result, Shape, Tensor, bail};
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
    // Copies of views live until the launches are made; the stream that runs those frees them.
    let tensors = Tensors::new(op)?;
    let many = ManyRows {
        x: address(x, layout)?,
        norm: tensors.norm()?,
        weights: tensors.weights()?,
        bias: tensors.bias.as_ref().map_or(Ok(0), address_of)?,
        activation: op.epilogue.activation,
        residuals: tensors.residuals()?,
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

/// What the op holds, in row-major order.
struct Tensors {
    norm: Option<(Tensor, f32)>,
    weights: Vec<Tensor>,
    bias: Option<Tensor>,
    residuals: Vec<Tensor>,
}

impl Tensors {
    fn new(op: &LinearOp<'_>) -> Result<Self> {
        let dense = |weight: &Weight| match weight {
            Weight::Dense(w) => contiguous(w),
            _ => bail!("{}: expected dense weights", op.name),
        };
        Ok(Self {
            norm: match op.prologue {
                Prologue::None => None,
                Prologue::RmsNorm { weight, eps } => Some((contiguous(weight)?, eps as f32)),
            },
            weights: op.weights.iter().map(dense).collect::<Result<_>>()?,
            bias: op.epilogue.bias.map(contiguous).transpose()?,
            residuals: op
                .epilogue
                .residuals
                .iter()
                .map(|r| contiguous(r))
                .collect::<Result<_>>()?,
        })
    }

    fn norm(&self) -> Result<Option<(Address, f32)>> {
        let at = |(weight, eps): &(Tensor, f32)| Ok((address_of(weight)?, *eps));
        self.norm.as_ref().map(at).transpose()
    }

    fn weights(&self) -> Result<Vec<(Address, usize, DType)>> {
        let at = |w: &Tensor| Ok((address_of(w)?, w.dims()[0], w.dtype()));
        self.weights.iter().map(at).collect()
    }

    fn residuals(&self) -> Result<[Address; 2]> {
        let mut at = [0; 2];
        for (at, residual) in at.iter_mut().zip(&self.residuals) {
            *at = address_of(residual)?;
        }
        Ok(at)
    }
}
