//! Ternary weights and one row of x, or a few, on Hopper, where all weights fit into shared memory
//! (`kernels/linear/gemv_ternary_latency.cuh`).

use super::super::plan::Planned;
use super::super::problem::Case;
use super::gemv::GemvPlan;
use super::streamed::{Streamed, streamed};
use crate::cuda::abi::{GEMV_THREADS, GEMV_WARPS as WARPS, K_BLOCK, ROW_GROUP};
use crate::cuda::{Grid, Module, Preceding, fatbin};
use crate::ops::view::dtype_index;
use std::sync::Arc;

/// For one row before several, by the dtype of x, with x in 8 bits and in 16. Products of a layer take different amounts of
/// shared memory: without one carveout for all, four of BitNet-2B-4T take 18.1 us on an H200, and 15.4 with it.
pub(super) static MODULE: Module = Module::new(
    "gemv_ternary_latency",
    fatbin!("gemv_ternary_latency"),
    &[
        "gemv_ternary_latency_8_f32",
        "gemv_ternary_latency_16_f32",
        "gemv_ternary_latency_8_f16",
        "gemv_ternary_latency_16_f16",
        "gemv_ternary_latency_8_bf16",
        "gemv_ternary_latency_16_bf16",
        "gemv_ternary_latency_rows_8_f32",
        "gemv_ternary_latency_rows_16_f32",
        "gemv_ternary_latency_rows_8_f16",
        "gemv_ternary_latency_rows_16_f16",
        "gemv_ternary_latency_rows_8_bf16",
        "gemv_ternary_latency_rows_16_bf16",
    ],
)
.with_all_shared_memory();

/// Static shared memory of the kernels at most.
pub(super) const FIXED_SHARED: usize = 288;

/// The most values of a row of x: a thread has four packs of 8.
pub(in super::super) const MAX_K: usize = GEMV_THREADS * 32;

/// Rows of x at most. In two parts they are all columns of operand B. More of them in one part are no faster than by other
/// kernels: six sequences of BitNet-2B-4T make 3,394 tokens/s on an H200, and 3,493 where a preceding kernel rounds x.
pub(in super::super) const MAX_M: usize = 4;

/// K blocks of a split-K slice at most: a warp has their x in registers.
const MAX_SLICE: usize = 6;

/// Bytes of the codes of a row group in a K block.
const CODE_BYTES: usize = ROW_GROUP * K_BLOCK / 4;

/// Up to four rows of x.
pub(crate) fn plan(case: &Case) -> Planned {
    if streamed(case)? != Streamed::Ternary {
        return Err("the weights are not ternary");
    }
    if !case.alignment.x || !case.alignment.norm {
        return Err("x or the norm does not begin at 16 bytes");
    }
    let gpu = &case.gpu;
    let parts = if case.is_rounded() { 1 } else { 2 };
    let outputs = case.width().div_ceil(ROW_GROUP).div_ceil(gpu.sms as usize);
    let row_groups = if case.gates() { 2 * outputs } else { outputs };
    let k_blocks = case.k.div_ceil(K_BLOCK);
    // Rows of x are not alike in the banks that their words are in.
    let x_row = parts * k_blocks * K_BLOCK + if case.m > 1 { 16 } else { 0 };
    // Codes, and for each row of the weights a scale and a sum for each row of x; x.
    let of_row_group = k_blocks * CODE_BYTES + ROW_GROUP * 4 * (1 + case.m);
    let shared = row_groups * of_row_group + case.m * x_row;
    // The weights of the next kernel come meanwhile.
    if shared + FIXED_SHARED > gpu.share(2) {
        return Err("a block's weights do not fit into half of a multiprocessor's shared memory");
    }
    // As many blocks as SMs, even if there is no work for all: behind a kernel with a block on each, none gets two. Behind
    // attention some would have room for two: a token of BitNet-2B-4T takes 0.81 ms on an H200 then, and 0.72 without.
    let shared = match case.preceding {
        Preceding::Attention => shared.max(gpu.share(2)),
        _ => shared,
    };
    Ok(Arc::new(GemvPlan {
        module: &MODULE,
        index: 6 * usize::from(case.m > 1) + 2 * dtype_index(case.x) + parts - 1,
        grid: Grid::new([gpu.sms, 1, 1], GEMV_THREADS as u32, shared as u32),
        split_k: slices(k_blocks, row_groups),
        stages: 0,
        once: case.m,
        row: None,
    }))
}

/// The number of split-K slices with which a warp has the least work. If there are more warps than slices, they divide
/// the N tiles of two row groups. Adding up an N tile's sums costs about as much as one of its K blocks.
fn slices(k_blocks: usize, row_groups: usize) -> usize {
    let cost = |slices: &usize| {
        let at_once = (*slices).min(WARPS);
        let tiles = row_groups.div_ceil(2).div_ceil(WARPS / at_once);
        slices.div_ceil(at_once) * tiles * (k_blocks.div_ceil(*slices) + 1)
    };
    let slices = (1..=MAX_SLICE).map(|length| k_blocks.div_ceil(length));
    slices.min_by_key(cost).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::{MAX_K, MAX_M, MAX_SLICE, slices};
    use crate::cuda::abi::GEMV_THREADS;

    const KERNEL: &str = include_str!("../../../../../kernels/linear/gemv_ternary_latency.cuh");

    #[test]
    fn limits_are_the_kernels() {
        for (name, value) in [
            ("TERNARY_SLICE", MAX_SLICE),
            ("TERNARY_PACKS", MAX_K / (8 * GEMV_THREADS)),
            ("TERNARY_ROWS", MAX_M),
        ] {
            let constant = format!("constexpr int {name} = {value};");
            assert!(KERNEL.contains(&constant), "{constant}");
        }
    }

    #[test]
    fn warps_divide_k_and_row_groups() {
        // BitNet-2B-4T: QKV, output projection, gate and up, down; then one K block.
        for (k_blocks, row_groups, expected) in
            [(20, 4, 4), (20, 3, 4), (20, 14, 4), (54, 3, 14), (1, 1, 1)]
        {
            assert_eq!(
                slices(k_blocks, row_groups),
                expected,
                "{k_blocks} K blocks, {row_groups} row groups"
            );
        }
    }

    /// No slice is empty, and the registers of a warp hold each.
    #[test]
    fn slices_are_whole() {
        for k_blocks in 1..=64 {
            for row_groups in 1..=16 {
                let slices = slices(k_blocks, row_groups);
                let length = k_blocks.div_ceil(slices);
                assert!((slices - 1) * length < k_blocks && length <= MAX_SLICE);
            }
        }
    }
}
