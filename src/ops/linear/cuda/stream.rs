//! One row of x and many weights of its 16-bit type: the host's side of `kernels/stream.cuh`.

use super::few::FewRows;
use super::gemv::Gemv;
use crate::cuda::{Gpu, Grid, Launcher, Module, fatbin};
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

/// Values of k that a block stages.
const MOST_K: usize = 8 * 8 * THREADS;

/// Bytes of a slot of each of a block's rings.
const SLOTS_BYTES: usize = THREADS / 32 * 1024;

/// Slots that a ring can have. On an H100 12 of them, in two blocks, are what keeps its memory busy; fewer
/// are for GPUs with less shared memory, or longer rows.
const SLOTS: [usize; 5] = [12, 10, 8, 6, 4];

/// Static shared memory of the kernel at most.
const FIXED_SHARED: usize = 256;

/// What the driver keeps of a multiprocessor's shared memory for each block.
const RESERVED: usize = 1024;

/// Bytes of weights from which on they are more than what small products make of them.
const LARGE: usize = 24 << 20;

/// The same where rows are long, and from which on they are: in the decode step of a model (Llama-3.2-1B
/// on an H100) worth 7 %, though not to the product alone.
const LARGE_LONG: usize = 8 << 20;
const LONG: usize = 2048;

/// Whether a product reads so many weights that a warp has more of them on the way at once.
pub(super) fn is_large(at: &FewRows) -> bool {
    at.bytes() >= LARGE || (at.k >= LONG && at.bytes() >= LARGE_LONG)
}

/// Shared memory of a block, and the slots of its rings, with `blocks` of them for `units` pairs of rows;
/// none if the GPU has too little for two blocks on a multiprocessor.
fn shared(gpu: &Gpu, k: usize, units: usize, blocks: usize) -> Option<(usize, usize)> {
    let row = 2 * (k.next_multiple_of(64) + 32);
    let sums = 8 * units.div_ceil(blocks);
    let other = (row + sums).next_multiple_of(16);
    let room = (gpu.shared as usize + RESERVED) / 2 - RESERVED - FIXED_SHARED;
    let slots = SLOTS
        .into_iter()
        .find(|slots| slots * SLOTS_BYTES + other <= room)?;
    Some((slots * SLOTS_BYTES + other, slots))
}

/// The parameters and the grid with at most `most` blocks; none if the kernels do not take the product.
pub(super) fn spread(
    gpu: &Gpu,
    at: &FewRows,
    mut params: Gemv,
    most: usize,
) -> Option<(Gemv, Grid)> {
    let alike = at.x_dtype == at.w_dtype && at.x_dtype != DType::F32;
    if at.m != 1 || !alike || gpu.arch < 80 || at.k > MOST_K || !at.vectors() {
        return None;
    }
    let outputs = if at.width() < at.rows() { 1 } else { 2 };
    let units = at.width().div_ceil(outputs);
    let blocks = units.min(most).max(1);
    let (shared, slots) = shared(gpu, at.k, units, blocks)?;
    params.split = slots as u32;
    let grid = Grid::new([blocks as u32, 1, 1], THREADS as u32, shared as u32);
    Some((params, grid))
}

/// Blocks that the GPU runs at once.
pub(super) fn blocks(gpu: &Gpu) -> usize {
    2 * gpu.sms as usize
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
    // SAFETY: the kernels take `Gemv`; the addresses are the caller's.
    unsafe {
        launcher
            .moving(at.bytes() as u64)
            .run(&MODULE, pair + bf16, grid, &params)
    }
}
