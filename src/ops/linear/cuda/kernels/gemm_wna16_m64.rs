//! INT8 or INT4 weights and 64 rows of x a launch, by tensor cores (`kernels/linear/gemm_wna16_m64.cuh`).

use super::super::plan::Planned;
use super::super::problem::Case;
use super::gemm_wna16::{Shares, Tensor, scheme_kernel};
use crate::cuda::abi::{
    INT4_PADDING, INT8_PADDING, STEP, TILES_MAX_WARPS as WARPS, TILES_ROWS as ROWS, UNIT, WARP,
};
use crate::cuda::{Grid, Module, fatbin, stored_bytes};
use crate::quant::Format;
use std::sync::Arc;

/// INT8, INT4 in groups of 128 without zero points, other INT4.
static MODULE: Module = Module::new(
    "gemm_wna16_m64",
    fatbin!("gemm_wna16_m64"),
    &[
        "quant_tiles_int8",
        "quant_tiles_int4_g128",
        "quant_tiles_int4",
    ],
);

/// Bytes behind a row of x in shared memory, for INT8 and INT4.
const PADDING: [usize; 2] = [INT8_PADDING, INT4_PADDING];

/// Stages of x that have to fit into shared memory, if not all of them do, and that are worth it.
const SLOTS: [usize; 2] = [3, 4];

/// Bytes that a multiprocessor gets in a nanosecond, of an H100: from memory, and from L2.
const RATES: [f64; 2] = [22., 40.];

/// Nanoseconds around the barrier of a stage, and for adding up and writing the outputs of units.
const STAGE: f64 = 120.;
const FINISH: f64 = 600.;

/// How blocks and warps share a product.
#[derive(Clone, Copy, Debug)]
struct Shape {
    side: usize,
    split: usize,
    slots: usize,
    stages: usize,
    blocks: usize,
    shared: usize,
}

/// The shape with the shortest time of its busiest multiprocessor.
pub(crate) fn plan(case: &Case) -> Planned {
    let kernel = scheme_kernel(case)?;
    let (units, steps) = units_and_steps(case);
    let mut best: Option<(f64, Shape)> = None;
    for side in 1..=WARPS.min(units) {
        for split in 1..=(WARPS / side).min(steps) {
            if let Some((time, shape)) = timed(case, kernel, side, split)
                && best.as_ref().is_none_or(|(least, _)| time < *least)
            {
                best = Some((time, shape));
            }
        }
    }
    let (_, shape) = best.ok_or("x does not fit into shared memory")?;
    Ok(Arc::new(Tensor {
        module: &MODULE,
        index: kernel,
        rows: ROWS,
        split: shape.split,
        shares: Shares::Tiles {
            side: shape.side,
            slots: shape.slots,
            stages: shape.stages,
        },
        grid: Grid::new(
            [shape.blocks as u32, 1, 1],
            (WARP * shape.side * shape.split) as u32,
            shape.shared as u32,
        ),
    }))
}

/// Units of output channels, and steps of k.
fn units_and_steps(case: &Case) -> (usize, usize) {
    let outputs = if case.gates() { UNIT / 2 } else { UNIT };
    (case.width().div_ceil(outputs), case.k.div_ceil(STEP))
}

/// The shape with `side` units beside one another in a block and `split` warps for each, and the nanoseconds that it
/// takes; none if it does not fit into shared memory.
fn timed(case: &Case, kernel: usize, side: usize, split: usize) -> Option<(f64, Shape)> {
    let gpu = &case.gpu;
    let (units, steps) = units_and_steps(case);
    let padding = PADDING[kernel.min(1)];
    let rows = case.matrices().next()?;
    let bytes = stored_bytes(Format::Scheme(case.scheme()?), rows, case.k);
    let of_unit = (bytes * UNIT).div_ceil(rows) as f64;
    let (stages, slot) = (steps.div_ceil(split), ROWS * (split * 2 * STEP + padding));
    // f32 sums of 16 output channels from each warp.
    let sums = side * split * UNIT * ROWS * 4;
    let room = (gpu.shared as usize).saturating_sub(sums) / slot;
    let stays = room >= stages;
    if !stays && room < SLOTS[0] {
        return None;
    }
    let slots = if stays { stages } else { room.min(SLOTS[1]) };
    let sets = units.div_ceil(side);
    let blocks = sets.min(gpu.sms as usize);
    let rounds = sets.div_ceil(blocks) as f64;
    let weights = rounds * side as f64 * of_unit;
    let x = 2. * (ROWS * case.k) as f64 * if stays { 1. } else { rounds };
    let time = (weights / RATES[0]).max((weights + x) / RATES[1]);
    // Warps that are not there hide nothing, and steps that are not there are waited for.
    let idle = WARPS as f64 / (side * split) as f64;
    let filled = (stages * split) as f64 / steps as f64;
    let time = time * (0.8 + 0.2 * idle) * (0.5 + 0.5 * filled);
    // Nothing is multiplied before the first stage of x is there.
    let time = time + slot as f64 / RATES[1] + rounds * (FINISH + stages as f64 * STAGE);
    let shape = Shape {
        side,
        split,
        slots,
        stages,
        blocks,
        shared: sums + slots * slot,
    };
    Some((time, shape))
}
