//! One row of x and many weights of its 16-bit type, which come through a pipeline in shared memory
//! (`kernels/linear/gemv_dense_pipelined.cuh`).
//!
//! Where x takes long to stage, behind a layer norm or in front of two matrices, this is the faster way
//! (Pythia-2.8B on an H100: 11 % of the second product of a layer, 5 % of the first). Behind an RMS norm the
//! products alone gain too, but the steps of Llama's models lose 4 %: the kernel leaves the next one no
//! room to begin beside it.

use super::super::plan::{Kernel, Planned};
use super::super::problem::{Case, NormKind, Operand, Operands};
use super::gemv::{Gemv, is_bf16};
use super::gemv_dense::{check_vectors, is_large};
use crate::cuda::abi::{
    GEMV_THREADS as THREADS, GEMV_WARPS, GemvPipelinedParams, PIPELINED_PACKS, PIPELINED_STAGE,
    Second,
};
use crate::cuda::{Address, GpuSpec, Grid, Launcher, Module, Scratch, fatbin};
use crate::ops::linear::Activation;
use candle_core::{DType, Result};
use std::sync::Arc;

/// The rule's name.
pub(crate) const NAME: &str = "gemv_dense_pipelined";

pub(super) static MODULE: Module = Module::new(
    "gemv_dense_pipelined",
    fatbin!("gemv_dense_pipelined"),
    &[
        "gemv_dense_pipelined_f16",
        "gemv_dense_pipelined_bf16",
        "gemv_dense_pipelined_pair_f16",
        "gemv_dense_pipelined_pair_bf16",
    ],
);

const PAIR: usize = 2;

/// Values of k behind a norm, which a block holds in registers.
const MAX_K: usize = 8 * PIPELINED_PACKS * THREADS;

/// Blocks of an SM: two, or one where shared memory is small or rows are long.
const BLOCKS_AT_ONCE: [usize; 2] = [2, 1];

/// Bytes of a stage of each of a block's pipelines.
const STAGE_BYTES: usize = GEMV_WARPS * PIPELINED_STAGE;

/// Stages that a pipeline can have. On an H100 12 of them, in two blocks, are what keeps its memory busy; fewer
/// are for GPUs with less shared memory, or longer rows.
const STAGES: [usize; 5] = [12, 10, 8, 6, 4];

/// Those of a product that leaves room for others' reads.
const BESIDE: usize = 4;

/// Of so many blocks one may be left out for the others' shares to be equal.
const EVEN: usize = 16;

/// Static shared memory of the kernel at most.
pub(super) const FIXED_SHARED: usize = 256;

/// What a product may take of a GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    /// Of a launch.
    pub blocks: usize,
    /// Of a pipeline.
    pub stages: usize,
    /// Whether to take fewer blocks where all then have equal shares.
    pub even: bool,
}

impl Room {
    /// That of a GPU which does nothing else.
    pub fn whole(gpu: &GpuSpec) -> Self {
        Self {
            blocks: BLOCKS_AT_ONCE[0] * gpu.sms as usize,
            stages: STAGES[0],
            even: false,
        }
    }

    /// So many blocks at most beside others whose reads are not to wait long in line behind those of the
    /// weights. With fewer of equal shares a step of Pythia-2.8B on an H100 takes 0.3 to 0.6 % less. A product
    /// that has the GPU to itself gets faster by them, too, but the step 0.7 to 3 % slower.
    pub fn beside(blocks: usize) -> Self {
        Self {
            blocks,
            stages: BESIDE,
            even: true,
        }
    }

    /// Blocks for so many N tiles, the dynamic shared memory of each, and the stages of its pipelines;
    /// none if the GPU has too little.
    fn share(self, gpu: &GpuSpec, k: usize, n_tiles: usize) -> Option<(usize, usize, usize)> {
        let row = 2 * (k.next_multiple_of(64) + 32);
        BLOCKS_AT_ONCE.into_iter().find_map(|at_once| {
            let most = n_tiles
                .min(self.blocks * at_once / BLOCKS_AT_ONCE[0])
                .max(1);
            let room = gpu.share(at_once) - FIXED_SHARED;
            let with = |blocks: usize| {
                let sums = 8 * n_tiles.div_ceil(blocks);
                let other = (row + sums).next_multiple_of(16);
                let fits =
                    |stages: &usize| *stages <= self.stages && stages * STAGE_BYTES + other <= room;
                let stages = STAGES.into_iter().find(fits)?;
                Some((blocks, stages * STAGE_BYTES + other, stages))
            };
            let equal = self.even.then(|| with(even(n_tiles, most))).flatten();
            equal.or_else(|| with(most))
        })
    }
}

/// The most blocks up to `most` that have equally many N tiles, if hardly any are left out; else `most`.
fn even(n_tiles: usize, most: usize) -> usize {
    let mut counts = (most - most / EVEN..=most).rev();
    counts
        .find(|count| n_tiles.is_multiple_of(*count))
        .unwrap_or(most)
}

/// The grid in that room, and the stages of a pipeline.
pub(crate) fn spread(case: &Case, room: Room) -> std::result::Result<(Grid, usize), &'static str> {
    let dtype = case.dense().ok_or("the weights are not dense")?;
    check_vectors(case, dtype)?;
    if case.x != dtype || dtype == DType::F32 {
        return Err("x and weights are not of one 16-bit type");
    }
    if case.m != 1 || case.gpu.arch < 80 {
        return Err("it takes one row, on compute capability 8.0 or newer");
    }
    if case.norm.is_some() && case.k > MAX_K {
        return Err("a normed row does not fit into registers");
    }
    let outputs = if case.gates() { 1 } else { 2 };
    let n_tiles = case.width().div_ceil(outputs);
    let shares = room.share(&case.gpu, case.k, n_tiles);
    let (blocks, shared, stages) = shares.ok_or("a row does not fit into shared memory")?;
    let grid = Grid::new([blocks as u32, 1, 1], THREADS as u32, shared as u32);
    Ok((grid, stages))
}

/// The plan where it is the faster kernel: a large product with a layer norm as its prologue, or two matrices along K.
pub(crate) fn plan(case: &Case) -> Planned {
    let faster = case.k_split.is_some() || (case.norm == Some(NormKind::Layer) && is_large(case));
    if !faster {
        return Err("other kernels are faster without a layer norm or for few weights");
    }
    Ok(Arc::new(Pipelined::new(case)?))
}

/// The sum of the products `first`, of one row and one matrix, and `second` as one: `second`'s x lies behind
/// `first`'s, it has as many output channels and no norm, and everything behind the product is `first`'s. None if
/// they are not so.
pub(crate) fn pair(first: &Operands, second: &Operands) -> Option<Operands> {
    let one = |operands: &Operands| match operands.weights[..] {
        [Operand::Dense { address, rows, .. }] => Some((address, rows)),
        _ => None,
    };
    let ((_, rows), (second_weight, second_rows)) = (one(first)?, one(second)?);
    let (a, b) = (&first.at, &second.at);
    let size = a.x_dtype.size_in_bytes();
    let fits = a.m == 1
        && b.m == 1
        && a.norm.is_none()
        && b.norm.is_none()
        && b.x == a.x + (a.k * size) as Address
        && rows == second_rows
        && b.activation == Activation::None
        && a.x_dtype == b.x_dtype
        && [a.k, b.k].iter().all(|k| (k * size).is_multiple_of(16));
    let mut both = first.clone();
    both.second = Some((second_weight, a.k));
    both.at.k += b.k;
    (fits && first.weights[0].format() == second.weights[0].format()).then_some(both)
}

/// How the kernels carry out a product.
#[derive(Debug)]
pub(super) struct Pipelined {
    index: usize,
    grid: Grid,
    stages: usize,
}

impl Kernel for Pipelined {
    fn entry(&self) -> &'static str {
        MODULE.names(self.index).1
    }

    fn grid(&self) -> Option<Grid> {
        Some(self.grid)
    }

    fn details(&self) -> String {
        format!("{} stages", self.stages)
    }

    unsafe fn run(&self, launcher: &Launcher, _: &mut Scratch, operands: &Operands) -> Result<()> {
        let mut product = Gemv::of(operands)?;
        product.stages = self.stages as u32;
        let second = |(data, border): (_, usize)| Second {
            data,
            border: border as u32,
        };
        let streamed = GemvPipelinedParams {
            product,
            second: operands.second.map(second).unwrap_or_default(),
            fetch: operands.fetch.unwrap_or_default(),
        };
        // SAFETY: the kernels take `GemvPipelinedParams`; the addresses are the caller's.
        unsafe {
            launcher
                .moving(operands.weight_bytes() as u64)
                .run(&MODULE, self.index, self.grid, &streamed)
        }
    }
}

impl Pipelined {
    /// On the whole GPU, whatever other kernels there are.
    pub fn new(case: &Case) -> std::result::Result<Self, &'static str> {
        let (grid, stages) = spread(case, Room::whole(&case.gpu))?;
        let pair = if case.k_split.is_some() { PAIR } else { 0 };
        Ok(Self {
            index: pair + is_bf16(case.x),
            grid,
            stages,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::even;

    #[test]
    fn blocks_are_left_out_for_equal_shares() {
        assert_eq!(even(5120, 136), 128);
        assert_eq!(even(5120, 128), 128);
        assert_eq!(even(5121, 136), 136);
        // A third of the blocks would be too many.
        assert_eq!(even(200, 150), 150);
        assert_eq!(even(1, 1), 1);
    }
}
