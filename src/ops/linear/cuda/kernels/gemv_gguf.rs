//! GGUF blocks and up to 8 rows of x: the weights are read as they are.

use super::super::plan::Planned;
use super::super::problem::{Case, WeightFormat};
use super::HEAD;
use super::gemv::{Core, GemvPlan};
use crate::cuda::{Grid, Module, fatbin, kernel_index};
use crate::quant::{BlockFormat, Scaling};
use candle_core::DType;
use std::sync::Arc;

/// As `FormatIndex` of `kernels/formats/gguf.cuh` numbers them.
pub(super) static MODULE: Module = Module::new(
    "gemv_gguf",
    fatbin!("gemv_gguf"),
    &[
        "gemv_gguf_q4_0",
        "gemv_gguf_q4_1",
        "gemv_gguf_q5_0",
        "gemv_gguf_q5_1",
        "gemv_gguf_q8_0",
        "gemv_gguf_q2_k",
        "gemv_gguf_q3_k",
        "gemv_gguf_q4_k",
        "gemv_gguf_q5_k",
        "gemv_gguf_q6_k",
    ],
);

/// The kernels with 8 output channels for a block, and then with 24; by the dtype of x.
static LATENCY: Module = Module::new(
    "gemv_gguf_latency",
    fatbin!("gemv_gguf_latency"),
    &[
        "gemv_gguf_latency_f32_q4_0",
        "gemv_gguf_latency_f32_q4_1",
        "gemv_gguf_latency_f32_q5_0",
        "gemv_gguf_latency_f32_q5_1",
        "gemv_gguf_latency_f32_q8_0",
        "gemv_gguf_latency_f32_q2_k",
        "gemv_gguf_latency_f32_q3_k",
        "gemv_gguf_latency_f32_q4_k",
        "gemv_gguf_latency_f32_q5_k",
        "gemv_gguf_latency_f32_q6_k",
        "gemv_gguf_latency_f16_q4_0",
        "gemv_gguf_latency_f16_q4_1",
        "gemv_gguf_latency_f16_q5_0",
        "gemv_gguf_latency_f16_q5_1",
        "gemv_gguf_latency_f16_q8_0",
        "gemv_gguf_latency_f16_q2_k",
        "gemv_gguf_latency_f16_q3_k",
        "gemv_gguf_latency_f16_q4_k",
        "gemv_gguf_latency_f16_q5_k",
        "gemv_gguf_latency_f16_q6_k",
        "gemv_gguf_latency_bf16_q4_0",
        "gemv_gguf_latency_bf16_q4_1",
        "gemv_gguf_latency_bf16_q5_0",
        "gemv_gguf_latency_bf16_q5_1",
        "gemv_gguf_latency_bf16_q8_0",
        "gemv_gguf_latency_bf16_q2_k",
        "gemv_gguf_latency_bf16_q3_k",
        "gemv_gguf_latency_bf16_q4_k",
        "gemv_gguf_latency_bf16_q5_k",
        "gemv_gguf_latency_bf16_q6_k",
        "gemv_gguf_latency_wide_f32_q4_0",
        "gemv_gguf_latency_wide_f32_q4_1",
        "gemv_gguf_latency_wide_f32_q5_0",
        "gemv_gguf_latency_wide_f32_q5_1",
        "gemv_gguf_latency_wide_f32_q8_0",
        "gemv_gguf_latency_wide_f32_q2_k",
        "gemv_gguf_latency_wide_f32_q3_k",
        "gemv_gguf_latency_wide_f32_q4_k",
        "gemv_gguf_latency_wide_f32_q5_k",
        "gemv_gguf_latency_wide_f32_q6_k",
        "gemv_gguf_latency_wide_f16_q4_0",
        "gemv_gguf_latency_wide_f16_q4_1",
        "gemv_gguf_latency_wide_f16_q5_0",
        "gemv_gguf_latency_wide_f16_q5_1",
        "gemv_gguf_latency_wide_f16_q8_0",
        "gemv_gguf_latency_wide_f16_q2_k",
        "gemv_gguf_latency_wide_f16_q3_k",
        "gemv_gguf_latency_wide_f16_q4_k",
        "gemv_gguf_latency_wide_f16_q5_k",
        "gemv_gguf_latency_wide_f16_q6_k",
        "gemv_gguf_latency_wide_bf16_q4_0",
        "gemv_gguf_latency_wide_bf16_q4_1",
        "gemv_gguf_latency_wide_bf16_q5_0",
        "gemv_gguf_latency_wide_bf16_q5_1",
        "gemv_gguf_latency_wide_bf16_q8_0",
        "gemv_gguf_latency_wide_bf16_q2_k",
        "gemv_gguf_latency_wide_bf16_q3_k",
        "gemv_gguf_latency_wide_bf16_q4_k",
        "gemv_gguf_latency_wide_bf16_q5_k",
        "gemv_gguf_latency_wide_bf16_q6_k",
    ],
);

/// GGUF formats.
const FORMATS: usize = BlockFormat::DTYPES.len();

/// Dtypes of x, in the order of the kernels for small products.
const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Output channels of a block of a small product, and the groups of k that it has warps for.
const LATENCY_SHAPES: [(usize, usize); 2] = [(8, 16), (24, 8)];

/// Rows of x that a launch takes.
const ROWS_OF_LAUNCH: usize = 4;

/// Output channels that a warp computes together.
const N_TILE: usize = 16;

/// Values of a group of blocks.
const GROUP: usize = 128;

/// Inputs up to which a row is short, and output channels from which on there are many.
const SHORT: usize = 2048;
const MANY: usize = 16 << 10;

/// The format's place among the kernels.
fn format(case: &Case) -> Result<usize, &'static str> {
    if !case.alignment.x || !case.alignment.norm {
        return Err("x or the norm does not begin at 16 bytes");
    }
    match case.weight {
        WeightFormat::Quantized(format) => Ok(kernel_index(format)),
        _ => Err("the weights are not in GGUF blocks"),
    }
}

/// Small products, a block for each SM at most.
pub(crate) fn latency(case: &Case) -> Planned {
    let format = format(case)?;
    let dtype = DTYPES.iter().position(|dtype| *dtype == case.x);
    let dtype = dtype.ok_or("x is of another dtype")?;
    if case.out != DType::F32 && case.out != case.x {
        return Err("the output is neither f32 nor of x's dtype");
    }
    let groups = case.k.div_ceil(GROUP);
    let shapes = LATENCY_SHAPES.iter().enumerate();
    let mut fitting = shapes
        .map(|(wide, (n_tile, warps))| (wide, case.n().div_ceil(*n_tile), *n_tile / 8, *warps))
        .filter(|(_, blocks, n_tiles, warps)| {
            *blocks <= case.gpu.sms as usize && (*n_tiles..=*warps).contains(&groups)
        });
    let (wide, blocks, ..) = fitting
        .next()
        .ok_or("there are more blocks than multiprocessors, or K is too long")?;
    Ok(Arc::new(GemvPlan {
        module: &LATENCY,
        index: (wide * DTYPES.len() + dtype) * FORMATS + format,
        grid: Grid::line(blocks as u32, 32 * groups as u32),
        split_k: 1,
        stages: 0,
        once: case.m,
        row: None,
    }))
}

/// Sums of x of a group: of the blocks, or of their halves where these have an offset each.
fn sums_of_group(case: &Case) -> usize {
    match case.block_scaling() {
        Some(Scaling::Super16) => 8,
        _ => 4,
    }
}

/// K of a head up to which kernels that keep x in shared memory are slower than those that read more of it: 2 rows of 49152x576 in Q4_0 take 11.0 us here, 16 rows 14.6 by `gemm_wna16_sm90`, where `gemm_wna16_skinny_sm90`
/// takes 16.2 and 18.2 (H200). With K = 2,048 it is the fastest.
const HEAD_K: usize = 1024;

/// Whether a product is a head with short K in blocks with scales of their own (Q4_0, Q4_1, Q5_0 and Q8_0 were measured).
pub(super) fn check_head(case: &Case) -> Result<(), &'static str> {
    let measured = matches!(
        case.block_scaling(),
        Some(Scaling::Symmetric | Scaling::Affine)
    );
    match case.n() >= HEAD && case.k <= HEAD_K && measured {
        true => Ok(()),
        false => Err("no head with short K in Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0"),
    }
}

/// Few rows of a head with short K.
pub(crate) fn plan_head(case: &Case) -> Planned {
    check_head(case)?;
    plan(case)
}

/// Four rows a launch.
pub(crate) fn plan(case: &Case) -> Planned {
    let short = case.k < SHORT;
    let core = Core {
        kernel: format(case)?,
        max_m: ROWS_OF_LAUNCH,
        n_tile: N_TILE,
        // A warp takes a group at a time, and that is enough for one.
        k_block: GROUP / 4,
        // Warps that share a short row run out of groups: with N tiles enough they need not.
        prefetched: if short && case.n() >= MANY { 8 } else { 2 },
        // Two parts of 16 bits for each value, and twice for each sum.
        row: case.k.div_ceil(GROUP) * (4 * GROUP + 8 * sums_of_group(case)),
        padded: false,
        fills: false,
    };
    GemvPlan::of_core(case, &MODULE, &core)
}
