//! How the keys of a step are shared out among blocks, and what the blocks leave for the one that ends last.

use super::problem::StepShape;
use crate::cuda::abi::{
    DECODING_MMA_WARPS, DECODING_PAGED_KEYS, DECODING_PAGED_WARPS, MAX_HEADS, WARP,
};
use crate::cuda::{GpuSpec, Grid};

/// What a block of a kernel works on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Split {
    /// Query heads at most; a key/value head has more rows of blocks if more heads read it.
    pub heads: usize,
    pub warps: usize,
    /// Keys that a warp takes at once.
    pub keys: usize,
    /// Tiles of a warp before another block joins, where there are blocks enough for the GPU.
    pub turns: usize,
    /// Bytes of shared memory that hold queries for tensor cores.
    pub queries: usize,
    /// Bytes of shared memory of a block that keeps more there than the queries; 0 for what most keep.
    pub shared: usize,
}

/// Memory that a step needs beside its tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Partials {
    /// Bytes that the blocks of a step leave for the one that ends last.
    pub bytes: usize,
    /// u32 that count the blocks of a step that are done.
    pub counters: usize,
}

/// [`turns`](Split::turns) of warps that are several to a block.
pub(super) const TURNS: usize = 8;

/// Blocks of a sequence that is long beside many others, at most.
const MOST_BLOCKS: usize = 32;

impl Split {
    /// Of a kernel for tensor cores whose warps take so many keys at once.
    pub fn on_tensor_cores(shape: &StepShape, keys: usize) -> Self {
        let (warps, keys) = match shape.paged {
            true => (DECODING_PAGED_WARPS, DECODING_PAGED_KEYS),
            false => (DECODING_MMA_WARPS, keys),
        };
        Self {
            heads: MAX_HEADS,
            warps,
            keys,
            turns: TURNS,
            queries: shape.head_dim / 16 * 512,
            shared: 0,
        }
    }

    /// Whether there are blocks enough for the GPU if each has all keys of its heads.
    pub fn is_full(&self, gpu: &GpuSpec, shape: &StepShape) -> bool {
        shape.paged && 2 * self.rows(shape) >= gpu.sms as usize
    }

    /// Tiles of keys that a block takes before another joins. Each warp has one turn: a second one costs a little more.
    /// Where there are blocks enough for the GPU, a sequence's keys only go to several of them where they are many:
    /// sequences in pages may differ in length.
    pub fn tiles(&self, gpu: &GpuSpec, shape: &StepShape) -> usize {
        let full = self.is_full(gpu, shape);
        self.warps * if full { self.turns } else { 1 }
    }

    /// Blocks of a row.
    fn blocks(&self, gpu: &GpuSpec, shape: &StepShape) -> usize {
        // Half as many warps leave room for a second block on a multiprocessor.
        let blocks = gpu.sms as usize * (8 / self.warps);
        let tiles = self.tiles(gpu, shape);
        let useful = shape.slots.div_ceil(self.keys).div_ceil(tiles);
        let most = match tiles > self.warps {
            true => MOST_BLOCKS,
            false => blocks / self.rows(shape).max(1),
        };
        most.min(useful).max(1)
    }

    /// Rows of blocks of a key/value head: the parts of its query heads.
    fn parts(&self, shape: &StepShape) -> usize {
        shape.group().div_ceil(self.heads)
    }

    /// Rows of blocks.
    pub fn rows(&self, shape: &StepShape) -> usize {
        shape.sequences * shape.kv_heads * self.parts(shape)
    }

    /// Bytes of shared memory of a block: `Shared` of the kernel.
    fn shared(&self, shape: &StepShape) -> usize {
        if self.shared > 0 {
            return self.shared;
        }
        let (d, heads, warps) = (shape.head_dim, shape.group().min(self.heads), self.warps);
        let floats = (MAX_HEADS + 6) * d
            + MAX_HEADS
            + 2 * warps * MAX_HEADS
            + 4
            + warps * heads * (d + d % 2 + 2);
        self.queries + 4 * floats
    }

    /// The blocks of a step.
    pub fn grid(&self, gpu: &GpuSpec, shape: &StepShape) -> Result<Grid, &'static str> {
        let shared = self.shared(shape);
        if shared > gpu.shared as usize {
            return Err("the heads of a block do not fit into shared memory");
        }
        let blocks = self.blocks(gpu, shape);
        let blocks = [blocks, shape.kv_heads * self.parts(shape), shape.sequences];
        let threads = (WARP * self.warps) as u32;
        Ok(Grid::new(blocks.map(|n| n as u32), threads, shared as u32))
    }

    /// What those leave.
    pub fn partials(&self, gpu: &GpuSpec, shape: &StepShape) -> Partials {
        let rows = self.rows(shape);
        Partials {
            bytes: 8 * rows * self.blocks(gpu, shape) * MAX_HEADS * shape.head_dim,
            counters: rows,
        }
    }
}
