//! Small dense matrices of x's 16-bit type, where latency bounds a product: weights are in registers before x comes
//! (`kernels/linear/gemv_dense_latency.cuh`).

use super::super::plan::Planned;
use super::super::problem::Case;
use super::gemv::{GemvPlan, is_bf16};
use super::gemv_dense::on_tensor_cores;
use crate::cuda::abi::{
    GEMV_DENSE_LATENCY as FORMS, GEMV_DENSE_LATENCY_NORMED, GemvDenseLatencyForm,
};
use crate::cuda::{Grid, Module, fatbin};
use std::sync::Arc;

/// The kernels for f16, then those for bf16, each in the order of [`FORMS`].
pub(super) static MODULE: Module = Module::new(
    "gemv_dense_latency",
    fatbin!("gemv_dense_latency"),
    &[
        "gemv_dense_latency_1024_1_8_f16",
        "gemv_dense_latency_1536_1_8_f16",
        "gemv_dense_latency_1024_3_8_f16",
        "gemv_dense_latency_768_1_16_f16",
        "gemv_dense_latency_1536_1_16_f16",
        "gemv_dense_latency_768_3_16_f16",
        "gemv_dense_latency_768_1_32_f16",
        "gemv_dense_latency_768_2_32_f16",
        "gemv_dense_latency_768_3_32_f16",
        "gemv_dense_latency_768_6_32_f16",
        "gemv_dense_latency_1536_1_32_f16",
        "gemv_dense_latency_1536_2_32_f16",
        "gemv_dense_latency_1024_4_8_f16",
        "gemv_dense_latency_1024_6_8_f16",
        "gemv_dense_latency_2048_1_8_f16",
        "gemv_dense_latency_2048_2_8_f16",
        "gemv_dense_latency_2048_3_8_f16",
        "gemv_dense_latency_3072_1_8_f16",
        "gemv_dense_latency_1024_4_16_f16",
        "gemv_dense_latency_1024_6_16_f16",
        "gemv_dense_latency_2048_1_16_f16",
        "gemv_dense_latency_2048_2_16_f16",
        "gemv_dense_latency_2048_3_16_f16",
        "gemv_dense_latency_3072_1_16_f16",
        "gemv_dense_latency_1024_4_32_f16",
        "gemv_dense_latency_1024_6_32_f16",
        "gemv_dense_latency_2048_1_32_f16",
        "gemv_dense_latency_1536_3_32_f16",
        "gemv_dense_latency_3072_2_16_f16",
        "gemv_dense_latency_1024_1_8_bf16",
        "gemv_dense_latency_1536_1_8_bf16",
        "gemv_dense_latency_1024_3_8_bf16",
        "gemv_dense_latency_768_1_16_bf16",
        "gemv_dense_latency_1536_1_16_bf16",
        "gemv_dense_latency_768_3_16_bf16",
        "gemv_dense_latency_768_1_32_bf16",
        "gemv_dense_latency_768_2_32_bf16",
        "gemv_dense_latency_768_3_32_bf16",
        "gemv_dense_latency_768_6_32_bf16",
        "gemv_dense_latency_1536_1_32_bf16",
        "gemv_dense_latency_1536_2_32_bf16",
        "gemv_dense_latency_1024_4_8_bf16",
        "gemv_dense_latency_1024_6_8_bf16",
        "gemv_dense_latency_2048_1_8_bf16",
        "gemv_dense_latency_2048_2_8_bf16",
        "gemv_dense_latency_2048_3_8_bf16",
        "gemv_dense_latency_3072_1_8_bf16",
        "gemv_dense_latency_1024_4_16_bf16",
        "gemv_dense_latency_1024_6_16_bf16",
        "gemv_dense_latency_2048_1_16_bf16",
        "gemv_dense_latency_2048_2_16_bf16",
        "gemv_dense_latency_2048_3_16_bf16",
        "gemv_dense_latency_3072_1_16_bf16",
        "gemv_dense_latency_1024_4_32_bf16",
        "gemv_dense_latency_1024_6_32_bf16",
        "gemv_dense_latency_2048_1_32_bf16",
        "gemv_dense_latency_1536_3_32_bf16",
        "gemv_dense_latency_3072_2_16_bf16",
    ],
);

/// K at most.
pub(crate) const MAX_K: usize = 3072;

/// Rows of x at most. Several dozen take several blocks, and with more of them other kernels are faster.
pub(crate) const MAX_M: usize = 128;

/// Rows of x up to which the largest blocks are faster than a GEMM that norms x, too.
const LARGE_BLOCKS_MAX_M: usize = 64;

/// Rows of x up to which other GPUs than Hopper were measured, too, with forms that have room for a norm.
const ANY_GPU_MAX_M: usize = 64;

/// Output channels of an N tile.
const N_TILE: usize = 8;
const THREADS: u32 = 256;

/// Values of K that the warps of a block have in one K block each.
const K_BLOCK: usize = 256;

/// Blocks of output channels by blocks of rows of x.
fn blocks(case: &Case, form: &GemvDenseLatencyForm) -> [usize; 2] {
    let outputs = case.activation.outputs(form.n_tiles * N_TILE);
    [case.width().div_ceil(outputs), case.m.div_ceil(form.rows)]
}

/// Whether blocks of this form can take the product, and are fast at it.
pub(super) fn fits(case: &Case, form: &GemvDenseLatencyForm) -> bool {
    // More blocks would have to load x again, which costs what the short way through the kernel saves.
    let at_once = blocks(case, form).iter().product::<usize>() <= case.gpu.sms as usize;
    // One row of long K has kernels that read ahead further: Llama-3.2-1B's output product, and Qwen3-0.6B's down
    // product on an H200.
    let one_row = case.m > 1 || form.k < 2048 || [1, 3].contains(&form.n_tiles) && form.k == 2048;
    // Rows that are not there are loaded and multiplied all the same.
    let few_absent = form.rows <= case.m.next_multiple_of(8).next_power_of_two();
    // The largest blocks are the faster ones because they need no kernel for the norm: without one they take up to 1.3
    // times as long as the others.
    let large = form.n_tiles >= 4 && form.rows == 32;
    let faster = case.norm.is_some() && case.m <= LARGE_BLOCKS_MAX_M;
    let pieces = form.k / K_BLOCK * (form.n_tiles + form.rows / 8);
    let norms = pieces <= GEMV_DENSE_LATENCY_NORMED;
    let measured = case.gpu.arch == 90 || (case.m <= ANY_GPU_MAX_M && norms);
    let fits = case.k <= form.k && at_once && few_absent && (norms || case.norm.is_none());
    fits && one_row && measured && (!large || faster)
}

/// The first of the forms that fits.
pub(crate) fn plan(case: &Case) -> Planned {
    let dtype = on_tensor_cores(case)?;
    match FORMS.iter().position(|form| fits(case, form)) {
        Some(form) => Ok(Arc::new(of(case, form, is_bf16(dtype)))),
        None => Err("no block fits K and the rows, or there are more blocks than multiprocessors"),
    }
}

/// The product by one of the forms that take it.
pub(super) fn of(case: &Case, form: usize, is_bf16: usize) -> GemvPlan {
    let GemvDenseLatencyForm { n_tiles, rows, .. } = &FORMS[form];
    let [n_blocks, m_blocks] = blocks(case, &FORMS[form]);
    // Each warp's two sums of a lane for each tile of 8 channels and 8 rows.
    let sums = n_tiles * (rows / 8) * THREADS as usize * 2 * size_of::<f32>();
    GemvPlan {
        module: &MODULE,
        index: is_bf16 * FORMS.len() + form,
        grid: Grid::new([n_blocks as u32, m_blocks as u32, 1], THREADS, sums as u32),
        split_k: 1,
        stages: 0,
        once: case.m,
        row: None,
    }
}
