//! One row of x and packed weights or GGUF blocks on Hopper, which come through a pipeline in shared memory
//! (`kernels/linear/gemv_wna16_sm90.cuh`); for those of 4 bits x is quantized to 16-bit integers
//! (`kernels/linear/gemv_wna16_sm90_nibbles.cuh`).
//!
//! On an H100, in graphs of dependent launches, the products of a layer of Llama-3-8B take 29.9 us in ternary, by the
//! kernels for several rows 40.8. An H200 decodes it at 651 tokens/s in INT4.

use super::super::plan::Planned;
use super::super::problem::Case;
use super::gemv::GemvPlan;
use super::streamed::{Nibbles, Source, Streamed, streamed};
use crate::cuda::abi::{
    GEMV_SM90_K_BLOCKS as STAGE_K_BLOCKS, GEMV_SM90_MAX_STAGES, GEMV_SM90_OWNED as OWNED,
    GEMV_THREADS, INT4_PADDING, K_BLOCK, WARP,
};
use crate::cuda::{Grid, Module, fatbin};
use candle_core::DType;
use std::sync::Arc;

/// As [`Streamed::kernel`] numbers them.
pub(super) static MODULE: Module = Module::new(
    "gemv_wna16_sm90",
    fatbin!("gemv_wna16_sm90"),
    &[
        "gemv_wna16_sm90_int4_g128",
        "gemv_wna16_sm90_int4_g64",
        "gemv_wna16_sm90_int4_g32",
        "gemv_wna16_sm90_int4_g128_z",
        "gemv_wna16_sm90_int4_g64_z",
        "gemv_wna16_sm90_int4_g32_z",
        "gemv_wna16_sm90_int8",
        "gemv_wna16_sm90_ternary_rows",
        "gemv_wna16_sm90_fp8",
        "gemv_wna16_sm90_fp8_block",
        "gemv_wna16_sm90_nvfp4",
        "gemv_wna16_sm90_nf4",
    ],
);
pub(super) static GGUF: Module = Module::new(
    "gemv_wna16_sm90_gguf",
    fatbin!("gemv_wna16_sm90_gguf"),
    &[
        "gemv_wna16_sm90_gguf_q4_0",
        "gemv_wna16_sm90_gguf_q4_1",
        "gemv_wna16_sm90_gguf_q5_0",
        "gemv_wna16_sm90_gguf_q5_1",
        "gemv_wna16_sm90_gguf_q8_0",
        "gemv_wna16_sm90_gguf_q2_k",
        "gemv_wna16_sm90_gguf_q3_k",
        "gemv_wna16_sm90_gguf_q4_k",
        "gemv_wna16_sm90_gguf_q5_k",
        "gemv_wna16_sm90_gguf_q6_k",
    ],
);

/// Threads of a block: those that multiply, and a warp that loads weights.
const THREADS: usize = GEMV_THREADS + WARP;

/// Static shared memory of the kernels at most.
pub(super) const FIXED_SHARED: usize = 4480;

/// Whether a block is to be alone on its SM among kernels of other kinds (see `Preceding`): eight layers of Llama-3-8B in
/// INT4 and its head make 1,750 tokens a second on an H200 so, and 1,624 with half of an SM for each. Ternary products are so short that the next one's weights had better be on
/// their way (Llama-3.2-1B on an H100: 1,708 and 1,885).
fn is_alone(format: Streamed, case: &Case) -> bool {
    case.preceding.is_another() && format != Streamed::Ternary
}

/// What a block that is alone takes of an SM's shared memory past half of it: anything will do, and what is left
/// stays the first level's cache.
fn past_half(format: Streamed, shared: usize) -> usize {
    match format.least_stages() {
        2 => shared / 8,
        _ => shared / 16,
    }
}

/// Shared memory that x takes.
fn row(format: Streamed, case: &Case) -> usize {
    let k = case.k;
    let values = k.next_multiple_of(K_BLOCK);
    let is_bf16 = case.x == DType::BF16;
    let owns = is_bf16 && (case.norm.is_none() || k.div_ceil(K_BLOCK * STAGE_K_BLOCKS) <= OWNED);
    if format == Streamed::Ternary {
        // Two bytes of each value, the values they are made from, and what they are multiplied by.
        return 2 * (values + 16) + if owns { 0 } else { 4 * k + 16 };
    }
    if let Some(Nibbles { groups, offsets }) = format.nibbles() {
        // Two bytes of each value, and f32 of each K block, as the kernel's `Int16Row::ENTRY`: its scale, and where there
        // are offsets sums of its groups, filled up to 16 bytes.
        let entry = match (offsets, groups) {
            (false, _) => 1,
            (true, 1) => 2,
            (true, groups) => 2 * groups,
        };
        let entries = values / K_BLOCK * entry * size_of::<f32>();
        return 2 * (values + 16) + entries.next_multiple_of(16);
    }
    let parts = if is_bf16 { 1 } else { 2 };
    (2 * values + INT4_PADDING) * parts + format.x_sums(values)
}

/// One row of x.
pub(crate) fn plan(case: &Case) -> Planned {
    let format = streamed(case)?;
    if !case.alignment.x || !case.alignment.norm {
        return Err("x or the norm does not begin at 16 bytes");
    }
    if case.is_rounded() && format != Streamed::Ternary {
        return Err("it rounds x for ternary weights alone");
    }
    let gpu = &case.gpu;
    let alone = is_alone(format, case);
    let more = if alone {
        past_half(format, gpu.shared as usize)
    } else {
        0
    };
    let row = row(format, case);
    // All of it where half an SM's does not suffice: the next kernel's weights wait then.
    let room = [gpu.share(2) + more, gpu.shared as usize]
        .map(|shared| shared - FIXED_SHARED)
        .into_iter()
        .find(|room| room.saturating_sub(row) / format.stage_bytes() >= format.least_stages())
        .ok_or("a row of x leaves too little shared memory for a pipeline")?;
    let stages = ((room - row) / format.stage_bytes()).min(GEMV_SM90_MAX_STAGES);
    // As many blocks as SMs, even if there is no work for all: none gets two of one kernel.
    // All have a pipeline of the same size, even if it is more than they need: where the next kernel takes more
    // shared memory, an SM has to be idle before it divides its cache anew.
    let used = stages * format.stage_bytes() + row;
    let shared = if alone { room } else { used };
    let (source, index) = format.kernel();
    Ok(Arc::new(GemvPlan {
        module: match source {
            Source::Codes => &MODULE,
            Source::Gguf => &GGUF,
        },
        index,
        grid: Grid::new([gpu.sms, 1, 1], THREADS as u32, shared as u32),
        split_k: 1,
        stages,
        once: 1,
        row: None,
    }))
}
