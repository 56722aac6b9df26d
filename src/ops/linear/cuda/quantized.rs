//! The op on weights of which some are in GGUF blocks. For many rows of x the blocks become the
//! operand of the library's matrix product.

use super::gemm::{self, Gemm};
use super::gemv::NormKind;
use super::held::Held;
use super::many::{ManyRows, Rows, finish, normalised};
use super::parts::{Few, FewAt, few};
use crate::cuda::{
    Address, Launcher, Narrow, address, address_of, alloc, dequantize, narrow, product_dtype,
};
use crate::ops::linear::launch::LinearOp;
use crate::ops::linear::{Activation, Weight};
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::{CudaDevice, CudaStorage, DType, Layout, Result, Shape, bail};

const OP: &str = "quant_linear";

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
    let held = Held::new(op)?.with_aligned_norm()?;
    let at = FewAt {
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
    let product = Few::new(&launcher, &held.weights, &at)?;
    trace::record(op.name, || {
        let rows = match product {
            Some(_) => "few rows",
            None => "many rows",
        };
        format!("cuda {rows} {}", op.path())
    });
    // SAFETY: the guards have checked that the tensors have these shapes and lie on the device; the
    // stream that runs the kernels is the one that frees them.
    unsafe {
        match product {
            Some(product) => few(&launcher, &product)?,
            None => many(&launcher, device, &held.weights, op.rows, &at)?,
        }
    }
    Ok((out, Shape::from(dims)))
}

/// The product by the library, of 16-bit operands with sums in f32.
///
/// # Safety
/// As [`few`].
unsafe fn many(
    launcher: &Launcher,
    device: &CudaDevice,
    weights: &[Weight],
    rows: usize,
    at: &FewAt,
) -> Result<()> {
    let dtype = product_dtype(launcher.gpu, at.x_dtype);
    let (m, k) = (at.m, at.k);
    // Scratch is freed when this function returns, in the order of the stream.
    let dense = alloc(OP, device, dtype, rows * k)?;
    let weight = address(&dense, &Layout::contiguous(rows * k))?;
    let operand = alloc(OP, device, dtype, m * k)?;
    let x = address(&operand, &Layout::contiguous(m * k))?;
    // The conversion knows the RMS norm only.
    let normed = match at.norm {
        Some(norm) if norm.kind != NormKind::Rms => {
            let rows = Rows {
                x: at.x,
                m,
                k,
                dtype: at.x_dtype,
            };
            // SAFETY: the caller's.
            Some(unsafe { normalised(launcher, device, &rows, norm)? })
        }
        _ => None,
    };
    let (input, norm) = match &normed {
        Some(normed) => (address(normed, &Layout::contiguous(m * k))?, None),
        None => (at.x, at.norm.map(|n| (n.weight, n.eps))),
    };
    let narrowed = Narrow {
        x: input,
        norm,
        out: x,
        rows: m,
        width: k,
        dtype: at.x_dtype,
        out_dtype: dtype,
    };
    // The library adds one residual on the way, and rounds once; it writes the products' type or f32.
    let direct = at.activation == Activation::None
        && at.bias == 0
        && at.residuals[1] == 0
        && (dtype == at.x_dtype || at.x_dtype == DType::F32);
    let sums = match direct {
        true => None,
        false => Some(alloc(OP, device, DType::F32, m * rows)?),
    };
    let to = match &sums {
        Some(sums) => address(sums, &Layout::contiguous(m * rows))?,
        None => at.out,
    };
    let gemm = Gemm {
        x,
        weight,
        bias: 0,
        residual: if direct { at.residuals[0] } else { 0 },
        out: to,
        m,
        n: rows,
        k,
        stride: rows,
        dtype,
        out_dtype: if direct { at.x_dtype } else { DType::F32 },
    };
    // SAFETY: the caller's; the scratch has room for all weights, rows and sums.
    unsafe {
        dense_weights(launcher, weights, weight, k, dtype)?;
        narrow(launcher, &narrowed)?;
        if !gemm::run(launcher, device, &gemm)? {
            bail!(
                "{OP}: cuBLASLt has no product of {m} rows with weights [{rows}, {k}] in {dtype:?}"
            );
        }
        if !direct {
            let at = ManyRows {
                x,
                norm: None,
                weights: vec![(weight, rows, dtype)],
                bias: at.bias,
                activation: at.activation,
                residuals: at.residuals,
                out: at.out,
                m,
                k,
                dtype: at.x_dtype,
            };
            finish(launcher, &at, to)?;
        }
    }
    Ok(())
}

/// All weights under one another, as `dtype`.
///
/// # Safety
/// `to` has room for them; the rest is as for [`few`].
unsafe fn dense_weights(
    launcher: &Launcher,
    weights: &[Weight],
    to: Address,
    k: usize,
    dtype: DType,
) -> Result<()> {
    let mut to = to;
    for run in weights.chunk_by(|a, b| a.is_quantized() && b.is_quantized()) {
        let rows: usize = run.iter().map(Weight::rows).sum();
        if let [Weight::Dense(w)] = run {
            let narrowed = Narrow {
                x: address_of(w)?,
                norm: None,
                out: to,
                rows,
                width: k,
                dtype: w.dtype(),
                out_dtype: dtype,
            };
            // SAFETY: the caller's.
            unsafe { narrow(launcher, &narrowed)? };
        } else {
            let blocks: Vec<_> = run
                .iter()
                .filter_map(|w| match w {
                    Weight::Blocks(w) => Some(w.as_ref()),
                    _ => None,
                })
                .collect();
            // SAFETY: the caller's; k is a multiple of 32, so each matrix begins at one of 16 bytes.
            unsafe { dequantize(launcher, &blocks, to, dtype)? };
        }
        to += (rows * k * dtype.size_in_bytes()) as u64;
    }
    Ok(())
}
