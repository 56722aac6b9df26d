//! INT4 weights in groups of 128 and 16 rows of x a launch (`gemm_wna16_m16.cuh`, `gemm_wna16_m16_tma.cuh` and
//! `gemm_wna16_m16_cluster.cuh` of `kernels/linear/`).

use super::super::plan::Planned;
use super::super::problem::Case;
use super::gemm_wna16::{FormParams, GemmPlan};
use crate::cuda::abi::{
    K_BLOCK, M16_BATCH, M16_DEPTH as DEPTH, M16_ROWS as ROWS, M16_WARPS as WARPS, N_TILE,
    ROW_GROUP, WARP,
};
use crate::cuda::{GpuSpec, Grid, Module, fatbin};
use std::sync::Arc;

pub(super) static MODULE: Module = Module::new(
    "gemm_wna16_m16",
    fatbin!("gemm_wna16_m16"),
    &["gemm_wna16_m16_int4_g128"],
)
.with_all_shared_memory();

/// Where k is so long that warps would read x anew for every two K blocks.
pub(super) static TMA: Module = Module::new(
    "gemm_wna16_m16_tma",
    fatbin!("gemm_wna16_m16_tma"),
    &["gemm_wna16_m16_tma_int4_g128"],
)
.with_all_shared_memory();

/// Where there are few N tiles and K blocks: without clusters, and in clusters of two to four.
static CLUSTER: Module = Module::new(
    "gemm_wna16_m16_cluster",
    fatbin!("gemm_wna16_m16_cluster"),
    &[
        "gemm_wna16_m16_cluster_int4_g128_1",
        "gemm_wna16_m16_cluster_int4_g128_2",
        "gemm_wna16_m16_cluster_int4_g128_3",
        "gemm_wna16_m16_cluster_int4_g128_4",
    ],
)
.with_all_shared_memory();

/// Bytes of the pipeline of a warp: codes and scales of its stages.
const PIPELINE: usize = 4 * (2048 + 64);

/// Bytes that a block of [`TMA`] has in shared memory: three stages of x, three stages of each warp's pipeline, sums,
/// those of another block of two batches, and what it may take to begin at a multiple of 1,024.
const TMA_SHARED: usize =
    3 * 2 * DEPTH * K_BLOCK * ROWS * 2 + WARPS * 3 * (2048 + 64) + WARPS * SUMS / 4 + SUMS + 1024;

/// N tiles that a block of it multiplies at a time.
const TMA_N_TILES: usize = 4;

/// K blocks of a product that [`CLUSTER`] takes, at most.
const CLUSTER_MAX_K_BLOCKS: usize = 16;

/// Bytes of the sums of the four N tiles of a batch.
const SUMS: usize = M16_BATCH * N_TILE * ROWS * 4;

/// Bytes for the halves of them that two blocks exchange: what comes of four batches, and what stays of one.
const EXCHANGED: usize = (4 + 1) * SUMS / 2;

/// Static shared memory at most of the kernels that need as much as that: all but [`CLUSTER`].
pub(super) const FIXED_SHARED: usize = 1056;

/// N tiles of a cluster past which SMs have two blocks: where warps have all of their K blocks at once, and where they
/// do not. As measured on an H100 with 4 to 14 N tiles.
const MANY: [usize; 2] = [16, 6];

/// What a product looks like to the kernels.
struct Shape {
    /// 16 output channels each, or 8 and the 8 that they gate.
    n_tiles: usize,
    /// Of k.
    k_blocks: usize,
}

/// # Errors
/// If not all groups of 8 output channels lie within those of one matrix: their scales lie together.
fn shape(case: &Case) -> Result<Shape, &'static str> {
    if !case.k.is_multiple_of(8) {
        return Err("K is no multiple of 8");
    }
    let gated = case.gates().then_some(case.width());
    let mut first = 0;
    let aligned = case.matrices().all(|rows| {
        let channels = first..first + rows;
        first = channels.end;
        let plain = gated.is_some_and(|g| channels.start >= g) || channels.start % ROW_GROUP == 0;
        plain
            && gated
                .is_none_or(|g| channels.end <= g || channels.start % ROW_GROUP == g % ROW_GROUP)
    });
    if !aligned {
        return Err("matrices do not begin at whole 8 output channels");
    }
    let of_n_tile = if case.gates() {
        ROW_GROUP
    } else {
        2 * ROW_GROUP
    };
    Ok(Shape {
        n_tiles: case.width().div_ceil(of_n_tile),
        k_blocks: case.k.div_ceil(K_BLOCK),
    })
}

/// In clusters that split k where there are clusters and k is long enough for all their warps.
pub(crate) fn plan(case: &Case) -> Planned {
    let Shape { n_tiles, k_blocks } = shape(case)?;
    let gpu = &case.gpu;
    let cluster_size = cluster_size_of(gpu, k_blocks);
    let cta_k_blocks = k_blocks.div_ceil(cluster_size);
    // The fewest warps that have all of their K blocks at once, or all.
    let split_k = [2, 4]
        .into_iter()
        .find(|s| cta_k_blocks.div_ceil(*s) <= DEPTH);
    let split_k = split_k.unwrap_or(WARPS);
    let shared = WARPS * (PIPELINE + SUMS) + (cluster_size - 1) * EXCHANGED;
    if shared + FIXED_SHARED > gpu.shared as usize {
        return Err("the pipelines do not fit into shared memory");
    }
    let once = (gpu.sms as usize / cluster_size).max(1);
    // Two blocks of an SM hide each other's waits, but read x twice and begin after the preceding
    // kernel.
    let room = shared + FIXED_SHARED <= gpu.share(2);
    let most = MANY[usize::from(cta_k_blocks > split_k * DEPTH)];
    let many = room && n_tiles > most.saturating_mul(once);
    let clusters = (once * if many { 2 } else { 1 }).min(n_tiles);
    // More than half of an SM's, with what is static, where two blocks of it are not to meet.
    let shared = match case.preceding.is_another() && !many {
        true => shared.max(gpu.share(2)),
        false => shared,
    };
    let mut grid = Grid::new(
        [(clusters * cluster_size) as u32, 1, 1],
        (WARP * WARPS) as u32,
        shared as u32,
    );
    grid.cluster = cluster_size as u32;
    Ok(Arc::new(GemmPlan {
        module: &MODULE,
        index: 0,
        rows: ROWS,
        split_k,
        params: FormParams::M16(cluster_size),
        grid,
    }))
}

/// Blocks of a cluster that share k.
fn cluster_size_of(gpu: &GpuSpec, k_blocks: usize) -> usize {
    match gpu.arch >= 90 && k_blocks > WARPS * DEPTH {
        true => 2,
        false => 1,
    }
}

/// INT4 in groups of 128 with few output channels and short k, which clusters share.
pub(crate) fn cluster(case: &Case) -> Planned {
    let Shape { n_tiles, k_blocks } = shape(case)?;
    let gpu = &case.gpu;
    if k_blocks > CLUSTER_MAX_K_BLOCKS {
        return Err("K is too long");
    }
    let params = cluster_shape(gpu.sms as usize, n_tiles, k_blocks);
    let (cluster_size, of_sm) = params.ok_or("there are more blocks than multiprocessors")?;
    // One for each output: a block without a cluster has two row groups of weights, others have one.
    let threads = ROWS * ROW_GROUP * if cluster_size == 1 { 2 } else { 1 };
    let mut grid = Grid::new(
        [(cluster_size * n_tiles) as u32, 1, 1],
        (WARP * k_blocks.div_ceil(cluster_size)).max(threads) as u32,
        gpu.share(of_sm) as u32,
    );
    grid.cluster = cluster_size as u32;
    Ok(Arc::new(GemmPlan {
        module: &CLUSTER,
        index: cluster_size - 1,
        rows: ROWS,
        split_k: 1,
        params: FormParams::M16(cluster_size),
        grid,
    }))
}

/// INT4 in groups of 128 and long k, x by TMA, in clusters of two. Blocks have more than half of an SM's
/// shared memory: those of the next launch begin early, and would come to stand two and two.
pub(crate) fn tma(case: &Case) -> Planned {
    let Shape { n_tiles, k_blocks } = shape(case)?;
    let gpu = &case.gpu;
    if k_blocks.div_ceil(cluster_size_of(gpu, k_blocks)) <= WARPS * DEPTH {
        return Err("K is too short");
    }
    if TMA_SHARED + FIXED_SHARED > gpu.shared as usize {
        return Err("the pipelines do not fit into shared memory");
    }
    let clusters = n_tiles
        .div_ceil(TMA_N_TILES)
        .min(gpu.sms as usize / 2)
        .max(1);
    let mut grid = Grid::new(
        [2 * clusters as u32, 1, 1],
        (WARP * WARPS) as u32,
        TMA_SHARED.max(gpu.share(2)) as u32,
    );
    grid.cluster = 2;
    Ok(Arc::new(GemmPlan {
        module: &TMA,
        index: 0,
        rows: ROWS,
        split_k: WARPS / TMA_N_TILES,
        params: FormParams::M16Tma(2),
        grid,
    }))
}

/// Blocks of a cluster, which have three K blocks or more on the average if there are several, and of which share of a
/// SM's shared memory they take more, as measured on an H100 with 8 to 128 N tiles and 4 to 16 K blocks.
fn cluster_shape(sms: usize, n_tiles: usize, k_blocks: usize) -> Option<(usize, usize)> {
    let most = (k_blocks / 3).max(1);
    let first = |sizes: &[(usize, usize)]| {
        let mut sizes = sizes
            .iter()
            .filter(|(cluster_size, _)| *cluster_size <= most);
        let size =
            sizes.find(|(cluster_size, quarters)| 4 * cluster_size * n_tiles <= quarters * sms);
        size.map(|(cluster_size, _)| *cluster_size)
    };
    // So few that those of the next launch, which read their weights meanwhile, have SMs of their own.
    if let Some(cluster_size) = first(&[(3, 2), (2, 2), (1, 2)])
        && k_blocks.div_ceil(cluster_size) <= 8
    {
        return Some((cluster_size, 2));
    }
    // Or else beside them, two on one; three of clusters of four, which the next launch's do not disturb. Larger
    // clusters do not find room everywhere.
    match first(&[(4, 5), (3, 6), (2, 8)]) {
        Some(cluster_size) => Some((cluster_size, cluster_size.max(3))),
        None => (n_tiles <= sms).then_some((1, 2)),
    }
}
