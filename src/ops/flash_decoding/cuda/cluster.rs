//! `kernels/attention/decode_cluster.cu`: a step of one sequence, or a few dozen, in clusters of blocks.

use super::problem::{Case, Operands, StepShape};
use super::split::Split;
use crate::cuda::abi::{DECODING_CLUSTER, DECODING_CLUSTER_WARPS, MAX_HEADS, WARP};
use crate::cuda::{GpuSpec, Grid, Launcher, Module, fatbin};
use crate::ops::flash_attention::cuda::{Kernel, Planned, head_sizes};
use candle_core::{DType, Result};

/// By head size, caches of slots before pages, projections of the caches' dtype before those in f32, f16 before bf16.
static MODULE: Module = Module::new(
    "decode_cluster",
    fatbin!("decode_cluster"),
    &[
        "flash_decoding_cluster_d64_f16",
        "flash_decoding_cluster_d64_bf16",
        "flash_decoding_cluster_d64_f32_f16",
        "flash_decoding_cluster_d64_f32_bf16",
        "flash_decoding_cluster_paged_d64_f16",
        "flash_decoding_cluster_paged_d64_bf16",
        "flash_decoding_cluster_paged_d64_f32_f16",
        "flash_decoding_cluster_paged_d64_f32_bf16",
        "flash_decoding_cluster_d128_f16",
        "flash_decoding_cluster_d128_bf16",
        "flash_decoding_cluster_d128_f32_f16",
        "flash_decoding_cluster_d128_f32_bf16",
        "flash_decoding_cluster_paged_d128_f16",
        "flash_decoding_cluster_paged_d128_bf16",
        "flash_decoding_cluster_paged_d128_f32_f16",
        "flash_decoding_cluster_paged_d128_f32_bf16",
    ],
);

/// Head sizes of these.
pub(super) const HEAD_SIZES: [usize; DECODING_CLUSTER.len()] = head_sizes!(DECODING_CLUSTER);

/// Keys of a tile, which a warp takes at once: `KEYS` of the kernel.
pub(super) const KEYS: usize = 16;

/// Tiles of a warp before another cluster joins: one more tile costs some 0.8 us, a second cluster 2.
const TURNS: usize = 4;

/// Bytes of a sequence's keys and values, as many as there are slots for, from which on memory bounds a step. Other
/// kernels have more loads in flight. Several sequences were measured at up to 384 positions: where all of them are
/// long, memory bounds this kernel sooner.
const LONG: usize = 32 << 20;

/// Blocks of a cluster at most, which every GPU with clusters takes.
const CLUSTER: usize = 8;

/// Bytes of shared memory of a block: `ClusterMemory` of the kernel.
pub(super) fn shared(shape: &StepShape, cluster: usize) -> usize {
    let (d, heads, warps) = (
        shape.head_dim,
        shape.group().min(MAX_HEADS),
        DECODING_CLUSTER_WARPS,
    );
    let before = 16 + 2 * MAX_HEADS * warps * 4;
    // What rounding leaves of f32 queries has rows, too.
    let rests = if shape.dtype == DType::F32 { heads } else { 0 };
    let rows = (heads + 1 + rests) * (2 * d + 64);
    let sums = warps * heads * if d == 64 { 320 } else { 704 };
    before + rows + sums + (cluster - 1) * heads * (4 * d + 16)
}

pub(super) fn split(shape: &StepShape) -> Option<Split> {
    HEAD_SIZES.contains(&shape.head_dim).then_some(Split {
        heads: MAX_HEADS,
        warps: DECODING_CLUSTER_WARPS,
        keys: KEYS,
        turns: TURNS,
        queries: 0,
        shared: 0,
    })
}

/// A kernel and its grid.
#[derive(Debug)]
struct Clustered {
    index: usize,
    grid: Grid,
    /// Of keys, that a cluster takes before another joins.
    tiles: usize,
}

/// Tiles that a cluster of so many blocks takes before another joins.
pub(super) fn tiles(cluster: usize) -> usize {
    cluster * DECODING_CLUSTER_WARPS * TURNS
}

/// Blocks on a GPU at once up to which the kernel was the fastest one, with heads of 64 and with wide ones.
fn at_once(gpu: &GpuSpec, shape: &StepShape) -> usize {
    gpu.sms as usize * if shape.head_dim == 64 { 4 } else { 2 }
}

/// Blocks of a row, and of a cluster. Two blocks for each multiprocessor leave room for the next kernel's.
pub(super) fn blocks(gpu: &GpuSpec, shape: &StepShape, rows: usize) -> [usize; 2] {
    let useful = shape.slots.div_ceil(KEYS * DECODING_CLUSTER_WARPS);
    // With heads of 64 two for a row are faster than one, even where they are more than two for a multiprocessor.
    let pair = (at_once(gpu, shape) / rows).min(2);
    let blocks = (2 * gpu.sms as usize / rows).max(pair).min(useful).max(1);
    let cluster = 1 << blocks.min(CLUSTER).ilog2();
    match shape.slots <= tiles(cluster) * KEYS {
        true => [cluster; 2],
        false => [blocks / cluster * cluster, cluster],
    }
}

pub(super) fn plan(case: &Case) -> Planned<Operands> {
    case.clustered?;
    let (gpu, shape) = (&case.gpu, &case.shape);
    let split = split(shape).ok_or("it is for other head sizes")?;
    let rows = split.rows(shape);
    if rows == 0 {
        return Err("there are no sequences");
    }
    if rows > at_once(gpu, shape) {
        return Err("there are more rows of blocks than fit on the GPU at once");
    }
    let key = shape.head_dim * shape.cache_dtype.size_in_bytes();
    let bytes = 2 * shape.slots * shape.kv_heads * key;
    if bytes > LONG {
        return Err("there is room for so many keys that memory bounds the step");
    }
    let [blocks, cluster] = blocks(gpu, shape, rows);
    let shared = shared(shape, cluster);
    if shared > gpu.shared as usize {
        return Err("the heads of a block do not fit into shared memory");
    }
    let place = HEAD_SIZES.iter().position(|dim| *dim == shape.head_dim);
    let form = [
        shape.paged,
        shape.dtype == DType::F32,
        shape.cache_dtype == DType::BF16,
    ];
    let form = form
        .iter()
        .fold(0, |form, bit| 2 * form + usize::from(*bit));
    let grid = [blocks, rows / shape.sequences, shape.sequences];
    let threads = (WARP * DECODING_CLUSTER_WARPS) as u32;
    Ok(Box::new(Clustered {
        index: place.map_or(0, |place| 8 * place + form),
        grid: Grid {
            cluster: cluster as u32,
            ..Grid::new(grid.map(|n| n as u32), threads, shared as u32)
        },
        tiles: tiles(cluster),
    }))
}

impl Kernel<Operands> for Clustered {
    fn entry(&self) -> &'static str {
        MODULE.names(self.index).1
    }

    fn grid(&self) -> Grid {
        self.grid
    }

    fn details(&self) -> String {
        format!("{KEYS} keys a warp")
    }

    unsafe fn run(&self, launcher: &Launcher, operands: &Operands) -> Result<()> {
        let params = operands.step.params(launcher, self.tiles);
        // SAFETY: the kernel takes `DecodingParams`; the addresses are the caller's.
        unsafe { launcher.run(&MODULE, self.index, self.grid, &params) }
    }
}
