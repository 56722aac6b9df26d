//! Quantized weights and many rows of x: they are dequantized and become an operand of cuBLASLt, or of another kernel for
//! dense weights.

use super::super::plan::{Kernel, Planned};
use super::super::problem::{Case, NormKind, Operand, Operands, ProductAt};
use super::super::rows::DENSE_NORMED_SM90;
use super::cublaslt::WORKSPACE;
use super::gemm_dense::{Gemms, check, normalised};
use super::{gemm_dense_normed_sm90, gemv_dense_latency};
use crate::cuda::abi::IN_ORDER;
use crate::cuda::{
    Address, Arranged, Grid, Launcher, Narrow, Scratch, dequantize, narrow, product_dtype,
};
use candle_core::{DType, Result};
use std::sync::Arc;

/// The rule's name.
pub(crate) const NAME: &str = "gemm_dequantized_cublaslt";

const OP: &str = "quant_linear";

/// Weights of a product up to which it is faster on Hopper to dequantize them for cuBLASLt from [`RECORDED`] or
/// [`LAUNCHED`] rows on. On an H200 512 rows of x in bf16, `gemm_wna16_sm90` in brackets: 576x576 5.5 us (13.9) in Q4_1
/// and 5.5 (13.5) in INT4 in groups of 32, 3072x576 8.2 (12.1) and 7.6 (11.7), 3072x2048 16.7 (22.6) and 15.4 (21.3).
/// With 96 rows 576x576 takes 5.3 (7.3) and 5.3 (6.9), 3072x2048 12.2 (15.1) and 10.9 (14.3).
const FEW_WEIGHTS: usize = 8 << 20;

/// Rows from which on few weights are dequantized: in a CUDA graph, and where kernels are launched one by one. A launch
/// costs the host more than the other kernel takes on the GPU, so that there is nothing to gain with fewer rows: a prompt of
/// 512 tokens of SmolLM2-135M in Q4_1 takes 2.1 to 2.2 ms by either kernel if launched, and 1.34 ms recorded (1.26 by the
/// kernels for dense weights that norm and gate).
const RECORDED: usize = 65;
const LAUNCHED: usize = 512;

/// More weights are dequantized from one row for each so many of them on: 512 rows of 2048x8192 take 41.3 us (43.4) in Q4_1 and 39.3 (40.6), 256 rows 36.6
/// (28.3) and 33.3 (27.1); 1,024 rows of 6144x4096 90.5 (92.4) in Q4_K, 512 rows 57.6 (49.8); 2,048 rows of 14336x4096 340
/// (344) in INT4 in groups of 128, 4,096 rows 652 (693).
const WEIGHTS_OF_ROW: usize = 1 << 15;

/// The plan on Hopper where it is faster than the kernel that dequantizes in registers.
pub(crate) fn plan_if_fastest(case: &Case) -> Planned {
    let (rows, weights) = (case.m * parts(case), case.n() * case.k);
    let fastest = match weights <= FEW_WEIGHTS {
        true => rows >= if case.recorded { RECORDED } else { LAUNCHED },
        // Gating is a kernel of its own behind the library's, with sums in f32 between them.
        false => rows >= weights / WEIGHTS_OF_ROW && !case.gates(),
    };
    if !fastest {
        return Err("another kernel is faster for so few rows and so many weights");
    }
    plan(case)
}

/// Of any number of matrices and formats, dense ones among them.
pub(crate) fn plan(case: &Case) -> Planned {
    check(case)?;
    Ok(Arc::new(Dequantized))
}

/// The library chooses how.
#[derive(Debug)]
struct Dequantized;

impl Kernel for Dequantized {
    fn entry(&self) -> &'static str {
        "cublasLtMatmul"
    }

    fn grid(&self) -> Option<Grid> {
        None
    }

    fn details(&self) -> String {
        "weights dequantized, then the library or a kernel for dense ones".into()
    }

    fn scratch(&self, operands: &Operands) -> usize {
        let ProductAt { m, k, x_dtype, .. } = operands.at;
        let rows = operands.rows();
        // Weights, normed and narrowed rows, sums, and the library's own.
        Scratch::room(DType::BF16, rows * k)
            + Scratch::room(x_dtype, m * k)
            + Scratch::room(DType::BF16, m * k)
            + Scratch::room(DType::F32, m * rows)
            + WORKSPACE
    }

    /// By 16-bit operands with sums in f32.
    unsafe fn run(
        &self,
        launcher: &Launcher,
        scratch: &mut Scratch,
        operands: &Operands,
    ) -> Result<()> {
        let at = &operands.at;
        let dtype = product_dtype(launcher.gpu, at.x_dtype);
        let rows = operands.rows();
        let weight = match operands.dequantized {
            Some(weight) => weight,
            None => {
                let weight = scratch.take(OP, dtype, rows * at.k)?;
                // SAFETY: the caller's; there is room for all weights.
                unsafe { under_one_another(launcher, &operands.weights, weight, at.k, dtype)? };
                weight
            }
        };
        if let Some((kernel, dense)) = of_dense(launcher, operands, (weight, rows, dtype)) {
            // SAFETY: the caller's; the kernel begins when the weights are there.
            return unsafe { kernel.run(&launcher.in_order(), scratch, &dense) };
        }
        // SAFETY: the caller's.
        unsafe {
            let gemms = Gemms {
                x: narrowed(launcher, scratch, at, dtype)?,
                dtype,
                weights: vec![(weight, rows, dtype)],
                at,
            };
            gemms.run(launcher, scratch)
        }
    }
}

/// The product as one of dense weights, where x is of their dtype and another kernel than the library is faster: one that
/// norms or gates in the same launch, or that the next kernel of a CUDA graph overlaps with.
fn of_dense(
    launcher: &Launcher,
    operands: &Operands,
    (address, rows, dtype): (Address, usize, DType),
) -> Option<(Arc<dyn Kernel>, Operands)> {
    if operands.at.x_dtype != dtype || launcher.gpu.arch != 90 {
        return None;
    }
    let dense = Operands {
        weights: vec![Operand::Dense {
            address,
            dtype,
            rows,
        }],
        at: operands.at,
        second: None,
        fetch: None,
        dequantized: None,
    };
    Some((faster_than_library(&dense.case(launcher))?, dense))
}

/// The kernels for dense weights that were faster than the library on Hopper, in the order of the table and in its ranges,
/// but for products behind a layer norm.
fn faster_than_library(case: &Case) -> Option<Arc<dyn Kernel>> {
    let within = |[least, most]: [usize; 2], max_k: usize| {
        let rms = case.norm != Some(NormKind::Layer);
        rms && (least..=most).contains(&case.m) && case.k <= max_k
    };
    let latency = [1, gemv_dense_latency::MAX_M];
    if within(latency, gemv_dense_latency::MAX_K)
        && let Ok(kernel) = gemv_dense_latency::plan(case)
    {
        return Some(kernel);
    }
    match within(DENSE_NORMED_SM90, gemm_dense_normed_sm90::MAX_K) {
        true => gemm_dense_normed_sm90::plan(case).ok(),
        false => None,
    }
}

/// M up to which f32 keeps 16 bits, as two rows of operand B; past it x is rounded to bf16, as for the library.
const SPLIT_M: usize = 8;

/// Rows of operand B that the kernels in bf16 have for each row of x.
pub(super) fn parts(case: &Case) -> usize {
    match case.x {
        DType::BF16 => 1,
        DType::F32 if case.m > SPLIT_M => 1,
        _ => 2,
    }
}

/// The rows of x as `dtype`, f16 or bf16, after the norm.
///
/// # Safety
/// As [`Kernel::run`].
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
    // SAFETY: the caller's; the scratch has room for all rows.
    unsafe { narrowed_to(launcher, scratch, at, dtype, out, None)? };
    Ok(out)
}

/// The rows of x after the norm as `parts` rows of bf16 each, the second what rounding to bf16 leaves over.
///
/// # Safety
/// As [`Kernel::run`].
pub(super) unsafe fn operand_b(
    launcher: &Launcher,
    scratch: &mut Scratch,
    at: &ProductAt,
    parts: usize,
) -> Result<Address> {
    if parts == 1 {
        // SAFETY: the caller's.
        return unsafe { narrowed(launcher, scratch, at, DType::BF16) };
    }
    let out = scratch.take(OP, DType::BF16, parts * at.m * at.k)?;
    let arranged = Arranged {
        order: IN_ORDER as u32,
        pitch: at.k,
        parts,
        sums: 0,
        sums_pitch: 0,
        counters: 0,
        counter_count: 0,
    };
    // SAFETY: the caller's; the scratch has room for all rows.
    unsafe { narrowed_to(launcher, scratch, at, DType::BF16, out, Some(arranged))? };
    Ok(out)
}

/// The scratch memory that [`operand_b`] takes at most.
pub(super) fn operand_b_room(at: &ProductAt, parts: usize) -> usize {
    let values = at.m * at.k;
    Scratch::room(DType::BF16, parts * values) + Scratch::room(at.x_dtype, values)
}

/// The rows of x after the norm at `out` as `dtype`, as `arranged` says.
///
/// # Safety
/// As [`Kernel::run`]; `out` has room for all rows, and their sums have room where they go.
pub(super) unsafe fn narrowed_to(
    launcher: &Launcher,
    scratch: &mut Scratch,
    at: &ProductAt,
    dtype: DType,
    out: Address,
    arranged: Option<Arranged>,
) -> Result<()> {
    let (m, k) = (at.m, at.k);
    // The conversion knows the RMS norm only.
    let (x, norm) = match at.norm {
        Some(norm) if norm.kind != NormKind::Rms => {
            // SAFETY: the caller's.
            (unsafe { normalised(launcher, scratch, at)? }, None)
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
        arranged,
    };
    // SAFETY: the caller's.
    unsafe { narrow(launcher, &narrowed) }
}

/// Dequantizes the weights of several products in one go, and gives where those of each lie: launches that a prompt
/// through a small model would wait for.
///
/// # Errors
/// If the device's memory does not suffice.
///
/// # Safety
/// The weights live until the stream has passed this.
pub(crate) unsafe fn dequantize_together(
    launcher: &Launcher,
    scratch: &mut Scratch,
    products: &[&Operands],
) -> Result<Vec<Address>> {
    let Some(first) = products.first() else {
        return Ok(Vec::new());
    };
    let dtype = product_dtype(launcher.gpu, first.at.x_dtype);
    let count = |operands: &Operands| operands.rows() * operands.at.k;
    let all = products.iter().map(|p| count(p)).sum();
    let mut at = scratch.take(OP, dtype, all)?;
    let matrices: Vec<_> = products
        .iter()
        .flat_map(|p| p.quantized())
        .map(AsRef::as_ref)
        .collect();
    // SAFETY: the caller's; there is room for all of them.
    unsafe { dequantize(launcher, &matrices, at, dtype)? };
    let starts = products.iter().map(|product| {
        let start = at;
        at += (count(product) * dtype.size_in_bytes()) as Address;
        start
    });
    Ok(starts.collect())
}

/// All weights of a product under one another, as `dtype`.
///
/// # Safety
/// `to` has room for them; the rest is as for [`Kernel::run`].
unsafe fn under_one_another(
    launcher: &Launcher,
    weights: &[Operand],
    to: Address,
    k: usize,
    dtype: DType,
) -> Result<()> {
    let mut to = to;
    let quantized = |w: &Operand| match w {
        Operand::Quantized(w) => Some(w.clone()),
        Operand::Dense { .. } => None,
    };
    for run in weights.chunk_by(|a, b| quantized(a).is_some() && quantized(b).is_some()) {
        let rows: usize = run.iter().map(Operand::rows).sum();
        if let [
            Operand::Dense {
                address,
                dtype: from,
                ..
            },
        ] = run
        {
            let narrowed = Narrow {
                x: *address,
                norm: None,
                out: to,
                rows,
                width: k,
                dtype: *from,
                out_dtype: dtype,
                arranged: None,
            };
            // SAFETY: the caller's.
            unsafe { narrow(launcher, &narrowed)? };
        } else {
            let matrices: Vec<_> = run.iter().filter_map(quantized).collect();
            let matrices: Vec<_> = matrices.iter().map(AsRef::as_ref).collect();
            // SAFETY: the caller's; k is a multiple of 32, so each matrix begins at one of 16 bytes.
            unsafe { dequantize(launcher, &matrices, to, dtype)? };
        }
        to += (rows * k * dtype.size_in_bytes()) as u64;
    }
    Ok(())
}
