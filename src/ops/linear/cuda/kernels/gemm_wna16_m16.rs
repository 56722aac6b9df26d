//! INT8 or INT4 weights and 16 rows of x a launch (`gemm_wna16_m16.cuh`, `gemm_wna16_m16_tma.cuh` and
//! `gemm_wna16_m16_cluster.cuh` of `kernels/linear/`).

use super::super::plan::Planned;
use super::super::problem::Case;
use super::gemm_wna16::{Shares, Tensor, scheme_kernel};
use crate::cuda::abi::{
    OCTET, SLICES_BATCH, SLICES_DEPTH as DEPTH, SLICES_ROWS as ROWS, SLICES_WARPS as WARPS, STEP,
    UNIT, WARP,
};
use crate::cuda::{GpuSpec, Grid, Module, fatbin};
use std::sync::Arc;

/// INT8, INT4 in groups of 128 without zero points, other INT4; [`LONG`] and [`SHORT`].
pub(super) static MODULE: Module = Module::new(
    "gemm_wna16_m16",
    fatbin!("gemm_wna16_m16"),
    &[
        "quant_slices_int8",
        "quant_slices_int4_g128",
        "quant_slices_int4",
        "quant_slices_int4_g128_long",
        "quant_slices_int4_g128_short_1",
        "quant_slices_int4_g128_short_2",
        "quant_slices_int4_g128_short_3",
        "quant_slices_int4_g128_short_4",
    ],
)
.beside_the_next();

/// Bytes of the ring of a warp of each kernel: codes, scales and zero points of its slots.
const RINGS: [usize; 3] = [4 * 2048, 4 * (2048 + 64), 6 * (1024 + 128 + 64)];

/// INT4 in groups of 128 where k is so long that warps would read x anew
/// for every two steps; and what its blocks have in shared memory: three stages of x, three slots of each warp's
/// ring, sums, those of another block of two batches, and what it may take to begin at a multiple of 1,024.
const LONG: usize = 3;
const LONG_SHARED: usize =
    3 * 2 * DEPTH * STEP * ROWS * 2 + WARPS * 3 * (2048 + 64) + WARPS * SUMS / 4 + SUMS + 1024;

/// Units that a block of it multiplies at a time.
const LONG_UNITS: usize = 4;

/// The first of four for INT4 in groups of 128, where there are few units and steps: without clusters, and in
/// clusters of two to four; and how many of the latter there may be.
pub(super) const SHORT: usize = 4;
const SHORT_STEPS: usize = 16;

/// Bytes of the sums of the four units of a batch.
const SUMS: usize = SLICES_BATCH * UNIT * ROWS * 4;

/// Bytes for the halves of them that two blocks exchange: what comes of four batches, and what stays of one.
const GIVEN: usize = (4 + 1) * SUMS / 2;

/// Static shared memory at most of the kernels that need as much as that: all but [`SHORT`].
pub(super) const FIXED_SHARED: usize = 1056;

/// Units of a cluster past which multiprocessors have two blocks, for each kernel: where warps have all of their
/// steps at once, and where they do not. As measured on an H100 with 4 to 14 units; INT8 with more than 4 of the
/// latter was not.
const MANY: [[usize; 2]; 3] = [[16, usize::MAX], [16, 6], [5, 3]];

/// What a product looks like to the kernels.
struct Shape {
    kernel: usize,
    /// 16 output channels each, or 8 and the 8 that they gate.
    units: usize,
    /// Of k.
    steps: usize,
}

/// # Errors
/// If not all groups of 8 output channels lie within those of one matrix: their scales lie together.
fn shape(case: &Case) -> Result<Shape, &'static str> {
    let kernel = scheme_kernel(case)?;
    let gated = case.gates().then_some(case.width());
    let mut first = 0;
    let aligned = case.matrices().all(|rows| {
        let channels = first..first + rows;
        first = channels.end;
        let plain = gated.is_some_and(|g| channels.start >= g) || channels.start % OCTET == 0;
        plain && gated.is_none_or(|g| channels.end <= g || channels.start % OCTET == g % OCTET)
    });
    if !aligned {
        return Err("matrices do not begin at whole 8 output channels");
    }
    let of_unit = if case.gates() { OCTET } else { 2 * OCTET };
    Ok(Shape {
        kernel,
        units: case.width().div_ceil(of_unit),
        steps: case.k.div_ceil(STEP),
    })
}

/// In clusters that split k where there are clusters and k is long enough for all their warps.
pub(crate) fn plan(case: &Case) -> Planned {
    let Shape {
        kernel,
        units,
        steps,
    } = shape(case)?;
    let gpu = &case.gpu;
    let slices = slices_of_cluster(gpu, steps);
    let slice = steps.div_ceil(slices);
    // The fewest warps that have all of their steps at once, or all.
    let split = [2, 4].into_iter().find(|s| slice.div_ceil(*s) <= DEPTH);
    let split = split.unwrap_or(WARPS);
    let shared = WARPS * (RINGS[kernel] + SUMS) + (slices - 1) * GIVEN;
    if shared + FIXED_SHARED > gpu.shared as usize {
        return Err("the pipelines do not fit into shared memory");
    }
    let once = (gpu.sms as usize / slices).max(1);
    // Two blocks of a multiprocessor hide each other's waits, but read x twice and begin after the preceding
    // kernel.
    let room = shared + FIXED_SHARED <= gpu.share(2);
    let most = MANY[kernel][usize::from(slice > split * DEPTH)];
    let many = room && units > most.saturating_mul(once);
    let clusters = (once * if many { 2 } else { 1 }).min(units);
    // More than half of a multiprocessor's, with what is static, where two blocks of it are not to meet.
    let shared = match case.in_chain && !many {
        true => shared.max(gpu.share(2)),
        false => shared,
    };
    let mut grid = Grid::new(
        [(clusters * slices) as u32, 1, 1],
        (WARP * WARPS) as u32,
        shared as u32,
    );
    grid.cluster = slices as u32;
    Ok(Arc::new(Tensor {
        module: &MODULE,
        index: kernel,
        rows: ROWS,
        split,
        shares: Shares::Slices(slices),
        grid,
    }))
}

/// Blocks of a cluster that share k.
fn slices_of_cluster(gpu: &GpuSpec, steps: usize) -> usize {
    match gpu.arch >= 90 && steps > WARPS * DEPTH {
        true => 2,
        false => 1,
    }
}

/// INT4 in groups of 128 with few output channels and short k, which clusters share.
pub(crate) fn cluster(case: &Case) -> Planned {
    let Shape { units, steps, .. } = shape(case)?;
    let gpu = &case.gpu;
    if steps > SHORT_STEPS {
        return Err("K is too long");
    }
    let shares = short_slices(gpu.sms as usize, units, steps);
    let (slices, share) = shares.ok_or("there are more blocks than multiprocessors")?;
    // One for each output: a block without a cluster has two eights of rows of weights, others have one.
    let threads = ROWS * OCTET * if slices == 1 { 2 } else { 1 };
    let mut grid = Grid::new(
        [(slices * units) as u32, 1, 1],
        (WARP * steps.div_ceil(slices)).max(threads) as u32,
        gpu.share(share) as u32,
    );
    grid.cluster = slices as u32;
    Ok(Arc::new(Tensor {
        module: &MODULE,
        index: SHORT + slices - 1,
        rows: ROWS,
        split: 1,
        shares: Shares::Slices(slices),
        grid,
    }))
}

/// INT4 in groups of 128 and long k, x by TMA, in clusters of two. Blocks have more than half of a multiprocessor's
/// shared memory: those of the next launch begin early, and would come to stand two and two.
pub(crate) fn tma(case: &Case) -> Planned {
    let Shape { units, steps, .. } = shape(case)?;
    let gpu = &case.gpu;
    if steps.div_ceil(slices_of_cluster(gpu, steps)) <= WARPS * DEPTH {
        return Err("K is too short");
    }
    if LONG_SHARED + FIXED_SHARED > gpu.shared as usize {
        return Err("the pipelines do not fit into shared memory");
    }
    let clusters = units.div_ceil(LONG_UNITS).min(gpu.sms as usize / 2).max(1);
    let mut grid = Grid::new(
        [2 * clusters as u32, 1, 1],
        (WARP * WARPS) as u32,
        LONG_SHARED.max(gpu.share(2)) as u32,
    );
    grid.cluster = 2;
    Ok(Arc::new(Tensor {
        module: &MODULE,
        index: LONG,
        rows: ROWS,
        split: WARPS / LONG_UNITS,
        shares: Shares::LongSlices(2),
        grid,
    }))
}

/// Blocks of a cluster, which have three steps or more on the average if there are several, and of which share of a
/// multiprocessor's shared memory they take more, as measured on an H100 with 8 to 128 units and 4 to 16 steps.
fn short_slices(sms: usize, units: usize, steps: usize) -> Option<(usize, usize)> {
    let most = (steps / 3).max(1);
    let first = |sides: &[(usize, usize)]| {
        let mut sides = sides.iter().filter(|(slices, _)| *slices <= most);
        let side = sides.find(|(slices, quarters)| 4 * slices * units <= quarters * sms);
        side.map(|(slices, _)| *slices)
    };
    // So few that those of the next launch, which read their weights meanwhile, have multiprocessors of their own.
    if let Some(slices) = first(&[(3, 2), (2, 2), (1, 2)])
        && steps.div_ceil(slices) <= 8
    {
        return Some((slices, 2));
    }
    // Or else beside them, two on one; three of clusters of four, which the next launch's do not disturb. Larger
    // clusters do not find room everywhere.
    match first(&[(4, 5), (3, 6), (2, 8)]) {
        Some(slices) => Some((slices, slices.max(3))),
        None => (units <= sms).then_some((1, 2)),
    }
}
