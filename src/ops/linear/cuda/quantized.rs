//! Many rows of x and weights of which some are in GGUF blocks: they become the operand of the
//! library's matrix product.

use super::gemm::{self, Gemm};
use super::gemv::NormKind;
use super::many::{ManyRows, Rows, finish, normalised};
use super::parts::ProductAt;
use super::tiles;
use super::w8a8::is_in_int8;
use crate::cuda::{
    Address, Launcher, Narrow, Scratch, address_of, dequantize, narrow, product_dtype,
};
use crate::ops::linear::{Activation, Weight};
use candle_core::{DType, Result, bail};

const OP: &str = "quant_linear";

/// The product by the library, of 16-bit operands with sums in f32. `dense` is where the weights are as
/// [`dense_weights`] leaves them, if they are there already.
///
/// # Safety
/// As [`super::product`].
pub(super) unsafe fn many_blocks(
    launcher: &Launcher,
    scratch: &mut Scratch,
    weights: &[Weight],
    dense: Option<Address>,
    at: &ProductAt,
) -> Result<()> {
    let dtype = product_dtype(launcher.gpu, at.x_dtype);
    let (m, k) = (at.m, at.k);
    let rows: usize = weights.iter().map(Weight::rows).sum();
    at.check_for_library(OP, rows)?;
    let weight = match dense {
        Some(weight) => weight,
        None => {
            let weight = scratch.take(OP, dtype, rows * k)?;
            // SAFETY: the caller's; there is room for all weights.
            unsafe { under_one_another(launcher, weights, weight, k, dtype)? };
            weight
        }
    };
    // SAFETY: the caller's.
    let x = unsafe { narrowed(launcher, scratch, at, dtype)? };
    // The library adds one residual on the way, and rounds once; it writes the products' type or f32.
    let direct = at.activation == Activation::None
        && at.bias == 0
        && at.residuals[1] == 0
        && (dtype == at.x_dtype || at.x_dtype == DType::F32);
    let to = match direct {
        true => at.out,
        false => scratch.take(OP, DType::F32, m * rows)?,
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
    // SAFETY: the caller's; the scratch has room for all sums.
    unsafe {
        if !gemm::run(launcher, scratch, &gemm)? {
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

/// The rows of x as `dtype`, f16 or bf16, behind the norm.
///
/// # Safety
/// As [`super::product`].
pub(super) unsafe fn narrowed(
    launcher: &Launcher,
    scratch: &mut Scratch,
    at: &ProductAt,
    dtype: DType,
) -> Result<Address> {
    let (m, k) = (at.m, at.k);
    if at.norm.is_none() && at.x_dtype == dtype && at.x.is_multiple_of(16) {
        return Ok(at.x);
    }
    let out = scratch.take(OP, dtype, m * k)?;
    // The conversion knows the RMS norm only.
    let (x, norm) = match at.norm {
        Some(norm) if norm.kind != NormKind::Rms => {
            let rows = Rows {
                x: at.x,
                m,
                k,
                dtype: at.x_dtype,
            };
            // SAFETY: the caller's.
            (unsafe { normalised(launcher, scratch, &rows, norm)? }, None)
        }
        norm => (at.x, norm.map(|n| (n.weight, n.eps))),
    };
    let narrowed = Narrow {
        x,
        norm,
        out,
        rows: m,
        width: k,
        dtype: at.x_dtype,
        out_dtype: dtype,
    };
    // SAFETY: the caller's; the scratch has room for all rows.
    unsafe { narrow(launcher, &narrowed)? };
    Ok(out)
}

/// The weights of each of `groups` as the library takes them, under one another at the address that
/// stands for the group; no addresses if one of them has no blocks, or all are codes of which `rows` of
/// x are better taken as they are.
///
/// # Errors
/// If the device's memory does not suffice.
///
/// # Safety
/// As [`super::product`].
pub(crate) unsafe fn dense_weights(
    launcher: &Launcher,
    scratch: &mut Scratch,
    groups: &[&[Weight]],
    rows: usize,
    x_dtype: DType,
) -> Result<Option<Vec<Address>>> {
    if groups.iter().all(|group| is_in_int8(group, rows)) {
        return Ok(None);
    }
    let mut blocks = Vec::new();
    for weight in groups.iter().copied().flatten() {
        match weight {
            Weight::Blocks(w) => blocks.push(w.as_ref()),
            _ => return Ok(None),
        }
    }
    if rows <= tiles::MOST && blocks.iter().all(|w| w.codes().is_some()) {
        return Ok(None);
    }
    let dtype = product_dtype(launcher.gpu, x_dtype);
    let count = |weights: &[Weight]| weights.iter().map(|w| w.rows() * w.cols()).sum::<usize>();
    let all = groups.iter().map(|group| count(group)).sum();
    let mut at = scratch.take(OP, dtype, all)?;
    // SAFETY: the caller's; widths are multiples of 32, so each matrix begins at one of 16 bytes.
    unsafe { dequantize(launcher, &blocks, at, dtype)? };
    let starts = groups.iter().map(|group| {
        let start = at;
        at += (count(group) * dtype.size_in_bytes()) as Address;
        start
    });
    Ok(Some(starts.collect()))
}

/// All weights of a product under one another, as `dtype`.
///
/// # Safety
/// `to` has room for them; the rest is as for [`super::product`].
unsafe fn under_one_another(
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
