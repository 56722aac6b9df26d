//! One row of x and many weights of its 16-bit type: the host's side of `kernels/stream.cuh`.
//!
//! Where x takes long to stage, behind a layer norm or in front of two matrices, this is the faster way
//! (Pythia-2.8B on an H100: 11 % of the second product of a layer, 5 % of the first). Behind an RMS norm the
//! products alone gain too, but the steps of Llama's models lose 4 %: the kernel leaves the next one no
//! room to begin beside it.

use super::few::FewRows;
use super::gemv::Gemv;
use crate::cuda::{Address, Gpu, Grid, Launcher, Module, fatbin};
use candle_core::{DType, Result};

static MODULE: Module = Module::new(
    "linear_stream",
    fatbin!("linear_stream"),
    &[
        "linear_stream_f16",
        "linear_stream_bf16",
        "linear_stream_pair_f16",
        "linear_stream_pair_bf16",
    ],
);

const PAIR: usize = 2;

/// Threads of a block.
const THREADS: usize = 256;

/// Values of k behind a norm, which a block holds in registers.
const MOST_K: usize = 8 * 8 * THREADS;

/// Blocks of a multiprocessor: two, or one where shared memory is small or rows are long.
const BLOCKS_AT_ONCE: [usize; 2] = [2, 1];

/// Bytes of a slot of each of a block's rings.
const SLOTS_BYTES: usize = THREADS / 32 * 1024;

/// Slots that a ring can have. On an H100 12 of them, in two blocks, are what keeps its memory busy; fewer
/// are for GPUs with less shared memory, or longer rows.
const SLOTS: [usize; 5] = [12, 10, 8, 6, 4];

/// Those of a product that leaves room for others' reads.
const BESIDE: usize = 4;

/// Of so many blocks one may be left out for the others' shares to be equal.
const EVEN: usize = 16;

/// Static shared memory of the kernel at most.
const FIXED_SHARED: usize = 256;

/// What a product may take of a GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// Of a launch.
    pub blocks: usize,
    /// Of a ring.
    pub slots: usize,
    /// Whether to take fewer blocks where all then have equal shares.
    pub even: bool,
}

impl Room {
    /// That of a GPU which does nothing else.
    pub fn whole(gpu: &Gpu) -> Self {
        Self {
            blocks: BLOCKS_AT_ONCE[0] * gpu.sms as usize,
            slots: SLOTS[0],
            even: false,
        }
    }

    /// So many blocks at most beside others whose reads are not to wait long in line behind those of the
    /// weights. With fewer of equal shares a step of Pythia-2.8B on an H100 takes 0.3 to 0.6 % less. A product
    /// that has the GPU to itself gets faster by them, too, but the step 0.7 to 3 % slower.
    pub fn beside(blocks: usize) -> Self {
        Self {
            blocks,
            slots: BESIDE,
            even: true,
        }
    }

    /// Blocks for so many `units` of rows, the dynamic shared memory of each, and the slots of its rings;
    /// none if the GPU has too little.
    fn share(self, gpu: &Gpu, k: usize, units: usize) -> Option<(usize, usize, usize)> {
        let row = 2 * (k.next_multiple_of(64) + 32);
        BLOCKS_AT_ONCE.into_iter().find_map(|at_once| {
            let most = units.min(self.blocks * at_once / BLOCKS_AT_ONCE[0]).max(1);
            let room = gpu.share(at_once) - FIXED_SHARED;
            let with = |blocks: usize| {
                let sums = 8 * units.div_ceil(blocks);
                let other = (row + sums).next_multiple_of(16);
                let fits =
                    |slots: &usize| *slots <= self.slots && slots * SLOTS_BYTES + other <= room;
                let slots = SLOTS.into_iter().find(fits)?;
                Some((blocks, slots * SLOTS_BYTES + other, slots))
            };
            let equal = self.even.then(|| with(even(units, most))).flatten();
            equal.or_else(|| with(most))
        })
    }
}

/// The most blocks up to `most` that have equally many units, if hardly any are left out; else `most`.
fn even(units: usize, most: usize) -> usize {
    let mut counts = (most - most / EVEN..=most).rev();
    counts
        .find(|count| units.is_multiple_of(*count))
        .unwrap_or(most)
}

/// The parameters, and the grid in that room; none if the kernels do not take the product.
pub(super) fn spread(
    gpu: &Gpu,
    at: &FewRows,
    mut params: Gemv,
    room: Room,
) -> Option<(Gemv, Grid)> {
    let alike = at.x_dtype == at.w_dtype && at.x_dtype != DType::F32;
    let long = at.norm.is_some() && at.k > MOST_K;
    if at.m != 1 || !alike || gpu.arch < 80 || long || !at.vectors() {
        return None;
    }
    let outputs = if at.width() < at.rows() { 1 } else { 2 };
    let units = at.width().div_ceil(outputs);
    let (blocks, shared, slots) = room.share(gpu, at.k, units)?;
    params.split = slots as u32;
    let grid = Grid::new([blocks as u32, 1, 1], THREADS as u32, shared as u32);
    Some((params, grid))
}

/// Keys and values that the next kernel of a chain reads, to be fetched into the L2 cache: those of `planes`
/// heads, `plane` bytes each, in front of the position, of `row` bytes each. `Fetch` of the kernels.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Fetch {
    pub k: Address,
    pub v: Address,
    /// u32; 0 for nothing to fetch.
    pub position: Address,
    pub planes: u32,
    pub plane: u32,
    pub row: u32,
}

/// `Streamed` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct Streamed {
    product: Gemv,
    fetch: Fetch,
}

/// Launches what [`spread`] gave for the product.
///
/// # Safety
/// As for [`few_rows`](super::few::few_rows).
pub(super) unsafe fn launch(
    launcher: &Launcher,
    at: &FewRows,
    (params, grid): (Gemv, Grid),
) -> Result<()> {
    let bf16 = usize::from(at.w_dtype == DType::BF16);
    let pair = if at.second.is_some() { PAIR } else { 0 };
    let streamed = Streamed {
        product: params,
        fetch: at.fetch.unwrap_or_default(),
    };
    // SAFETY: the kernels take `Streamed`; the addresses are the caller's.
    unsafe {
        launcher
            .moving(at.bytes() as u64)
            .run(&MODULE, pair + bf16, grid, &streamed)
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
