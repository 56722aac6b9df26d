//! INT8 or INT4 weights and 64 rows of x a launch, by tensor cores (`kernels/linear/gemm_wna16_m64.cuh`).

use super::super::plan::Planned;
use super::super::problem::Case;
use super::gemm_wna16::{FormParams, GemmPlan, scheme_kernel};
use crate::cuda::abi::{
    INT4_PADDING, INT8_PADDING, K_BLOCK, M64_MAX_WARPS as WARPS, M64_ROWS as ROWS, N_TILE, WARP,
};
use crate::cuda::{Grid, Module, fatbin, stored_bytes};
use crate::quant::Format;
use std::sync::Arc;

/// INT8, INT4 in groups of 128 without zero points, other INT4.
static MODULE: Module = Module::new(
    "gemm_wna16_m64",
    fatbin!("gemm_wna16_m64"),
    &[
        "gemm_wna16_m64_int8",
        "gemm_wna16_m64_int4_g128",
        "gemm_wna16_m64_int4",
    ],
);

/// Bytes behind a row of x in shared memory, for INT8 and INT4.
const PADDING: [usize; 2] = [INT8_PADDING, INT4_PADDING];

/// Stages of x that have to fit into shared memory, if not all of them do, and that are worth it.
const STAGES: [usize; 2] = [3, 4];

/// Bytes that an SM gets in a nanosecond, of an H100: from memory, and from L2.
const RATES: [f64; 2] = [22., 40.];

/// Nanoseconds around the barrier of a K tile, and for adding up and writing the outputs of N tiles.
const K_TILE_NS: f64 = 120.;
const EPILOGUE_NS: f64 = 600.;

/// How blocks and warps share a product.
#[derive(Clone, Copy, Debug)]
struct Shape {
    cta_n_tiles: usize,
    split_k: usize,
    stages: usize,
    k_tiles: usize,
    blocks: usize,
    shared: usize,
}

/// The shape with the shortest time of its busiest SM.
pub(crate) fn plan(case: &Case) -> Planned {
    let kernel = scheme_kernel(case)?;
    let (n_tiles, k_blocks) = n_tiles_and_k_blocks(case);
    let mut best: Option<(f64, Shape)> = None;
    for cta_n_tiles in 1..=WARPS.min(n_tiles) {
        for split_k in 1..=(WARPS / cta_n_tiles).min(k_blocks) {
            if let Some((time, shape)) = timed(case, kernel, cta_n_tiles, split_k)
                && best.as_ref().is_none_or(|(least, _)| time < *least)
            {
                best = Some((time, shape));
            }
        }
    }
    let (_, shape) = best.ok_or("x does not fit into shared memory")?;
    Ok(Arc::new(GemmPlan {
        module: &MODULE,
        index: kernel,
        rows: ROWS,
        split_k: shape.split_k,
        params: FormParams::M64 {
            cta_n_tiles: shape.cta_n_tiles,
            stages: shape.stages,
            k_tiles: shape.k_tiles,
        },
        grid: Grid::new(
            [shape.blocks as u32, 1, 1],
            (WARP * shape.cta_n_tiles * shape.split_k) as u32,
            shape.shared as u32,
        ),
    }))
}

/// N tiles of output channels, and K blocks of k.
fn n_tiles_and_k_blocks(case: &Case) -> (usize, usize) {
    let outputs = if case.gates() { N_TILE / 2 } else { N_TILE };
    (case.width().div_ceil(outputs), case.k.div_ceil(K_BLOCK))
}

/// The shape with `cta_n_tiles` N tiles side by side in a block and `split_k` warps for each, and the nanoseconds that
/// it takes; none if it does not fit into shared memory.
fn timed(case: &Case, kernel: usize, cta_n_tiles: usize, split_k: usize) -> Option<(f64, Shape)> {
    let gpu = &case.gpu;
    let (n_tiles, k_blocks) = n_tiles_and_k_blocks(case);
    let padding = PADDING[kernel.min(1)];
    let rows = case.matrices().next()?;
    let bytes = stored_bytes(Format::Scheme(case.scheme()?), rows, case.k);
    let of_n_tile = (bytes * N_TILE).div_ceil(rows) as f64;
    let (k_tiles, stage) = (
        k_blocks.div_ceil(split_k),
        ROWS * (split_k * 2 * K_BLOCK + padding),
    );
    // f32 sums of 16 output channels from each warp.
    let sums = cta_n_tiles * split_k * N_TILE * ROWS * 4;
    let room = (gpu.shared as usize).saturating_sub(sums) / stage;
    let stays = room >= k_tiles;
    if !stays && room < STAGES[0] {
        return None;
    }
    let stages = if stays { k_tiles } else { room.min(STAGES[1]) };
    let sets = n_tiles.div_ceil(cta_n_tiles);
    let blocks = sets.min(gpu.sms as usize);
    let rounds = sets.div_ceil(blocks) as f64;
    let weights = rounds * cta_n_tiles as f64 * of_n_tile;
    let x = 2. * (ROWS * case.k) as f64 * if stays { 1. } else { rounds };
    let time = (weights / RATES[0]).max((weights + x) / RATES[1]);
    // Warps that are not there hide nothing, and K blocks that are not there are waited for.
    let idle = WARPS as f64 / (cta_n_tiles * split_k) as f64;
    let filled = (k_tiles * split_k) as f64 / k_blocks as f64;
    let time = time * (0.8 + 0.2 * idle) * (0.5 + 0.5 * filled);
    // Nothing is multiplied before the first stage of x is there.
    let time = time + stage as f64 / RATES[1] + rounds * (EPILOGUE_NS + k_tiles as f64 * K_TILE_NS);
    let shape = Shape {
        cta_n_tiles,
        split_k,
        stages,
        k_tiles,
        blocks,
        shared: sums + stages * stage,
    };
    Some((time, shape))
}
