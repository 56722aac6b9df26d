//! Dense weights and up to 8 rows of x: each weight is read once and meets all of them.

use super::super::plan::Planned;
use super::super::problem::Case;
use super::gemv::{Core, GemvPlan, is_bf16};
use crate::cuda::{Module, fatbin};
use crate::ops::view::dtype_index;
use candle_core::DType;

/// In the order of the constants below.
pub(super) static MODULE: Module = Module::new(
    "gemv_dense",
    fatbin!("gemv_dense"),
    &[
        "gemv_dense_mma_f16",
        "gemv_dense_mma_bf16",
        "gemv_dense_m1_f32",
        "gemv_dense_m1_f16",
        "gemv_dense_m1_bf16",
        "gemv_dense_m1_large_f32",
        "gemv_dense_m1_large_f16",
        "gemv_dense_m1_large_bf16",
        "gemv_dense_m8_f32",
        "gemv_dense_m8_f16",
        "gemv_dense_m8_bf16",
        "gemv_dense_m8_scalar",
    ],
);

const MMA: usize = 0;
const M1: usize = 2;
const M1_LARGE: usize = 5;
const M8: usize = 8;
const SCALAR: usize = 11;

/// Rows of x that the kernels take.
pub(super) const MAX_M: usize = 8;

/// Bytes of weights from which on a warp reads so many that it prefetches more of them.
const LARGE: usize = 24 << 20;

/// The same where rows are long, and from which on they are: in the decode step of a model (Llama-3.2-1B
/// on an H100) worth 7 %, though not to the product alone.
const LARGE_LONG: usize = 8 << 20;
const LONG: usize = 2048;

/// Whether a warp prefetches more of the weights at once.
pub(super) fn is_large(case: &Case) -> bool {
    let bytes = case.n() * case.k * case.dense().map_or(0, |d| d.size_in_bytes());
    bytes >= LARGE || (case.k >= LONG && bytes >= LARGE_LONG)
}

/// Why 16-byte accesses do not fit x, the norm or the weights.
pub(super) fn check_vectors(case: &Case, dtype: DType) -> Result<(), &'static str> {
    let whole = |dtype: DType| (case.k * dtype.size_in_bytes()).is_multiple_of(16);
    let a = &case.alignment;
    match whole(case.x) && whole(dtype) && a.x && a.norm && a.weights {
        true => Ok(()),
        false => Err("rows of x or weights are not aligned to 16 bytes"),
    }
}

/// The dtype of weights that 16-byte accesses fit.
fn vectors(case: &Case) -> Result<DType, &'static str> {
    let dtype = case.dense().ok_or("the weights are not dense")?;
    check_vectors(case, dtype)?;
    Ok(dtype)
}

/// The dtype of weights that tensor cores multiply with x as they are.
pub(super) fn on_tensor_cores(case: &Case) -> Result<DType, &'static str> {
    let dtype = vectors(case)?;
    match case.x == dtype && (case.gpu.arch >= 80 || dtype == DType::F16) {
        true => Ok(dtype),
        false => Err("tensor cores do not take these types"),
    }
}

/// Several rows of x in 16 bits, by `mma`.
pub(crate) fn mma(case: &Case) -> Planned {
    let dtype = on_tensor_cores(case)?;
    let core = Core {
        kernel: MMA + is_bf16(dtype),
        max_m: MAX_M,
        n_tile: 8,
        k_block: 32,
        prefetched: 8,
        row: 2 * (case.k.next_multiple_of(64) + 32),
        padded: false,
        fills: false,
    };
    // Another launch would read the weights again.
    if core.rows_at_once(&case.gpu) < case.m {
        return Err("rows of x do not fit into shared memory together");
    }
    GemvPlan::of_core(case, &MODULE, &core)
}

/// K of several rows from which on the library is faster: rows of x leave little shared memory for weights in flight.
/// 4 rows of 8,192 take 1.09 times as long as there on an H100, and of 14,336 1.37 times.
pub(crate) const MAX_MMA_K: usize = 8191;

/// Several rows of x by multiply-adds.
pub(crate) fn m8(case: &Case) -> Planned {
    let core = lanes(case, M8, MAX_M, 2, 2)?;
    GemvPlan::of_core(case, &MODULE, &core)
}

/// One row of x by multiply-adds.
pub(crate) fn m1(case: &Case) -> Planned {
    if case.m > 1 {
        return Err("there are several rows");
    }
    let core = match is_large(case) {
        true => lanes(case, M1_LARGE, 1, 2, 4)?,
        false => lanes(case, M1, 1, 4, 1)?,
    };
    GemvPlan::of_core(case, &MODULE, &core)
}

/// Of three kernels for f32, f16 and bf16 whose lanes multiply.
fn lanes(
    case: &Case,
    first: usize,
    max_m: usize,
    n_tile: usize,
    prefetched: usize,
) -> Result<Core, &'static str> {
    let dtype = vectors(case)?;
    Ok(Core {
        kernel: first + dtype_index(dtype),
        max_m,
        n_tile,
        k_block: 32 * 16 / dtype.size_in_bytes(),
        prefetched,
        row: 4 * case.k,
        padded: true,
        fills: false,
    })
}

/// Any alignment, value by value.
pub(crate) fn scalar(case: &Case) -> Planned {
    let core = Core {
        kernel: SCALAR,
        max_m: MAX_M,
        n_tile: 2,
        k_block: 32,
        prefetched: 4,
        row: 4 * case.k,
        padded: true,
        fills: false,
    };
    GemvPlan::of_core(case, &MODULE, &core)
}

/// The fastest of those that take several rows or one.
pub(super) fn any(case: &Case) -> Planned {
    let several = match case.m > 1 {
        true => mma(case).or_else(|_| m8(case)),
        false => Err("there is one row"),
    };
    several.or_else(|_| m1(case)).or_else(|_| scalar(case))
}
