//! One row of x and weights in INT4 or ternary codes, on Hopper: the host's side of
//! `kernels/code_stream.cuh`.
//!
//! On an H100, in graphs of dependent launches, the products of a layer of Llama-3-8B take 46.9 us in INT4
//! and 29.9 us in ternary; by the kernels for several rows they take 59.7 and 40.8.

use super::gemv::Gemv;
use crate::cuda::{Grid, Launcher};
use crate::ops::view::dtype_index;
use candle_core::DType;

/// Values of a step, rows of weights that are together, steps of a slot.
const STEP: usize = 128;
const OCTET: usize = 8;
const SLICE: usize = 16;

/// Threads of a block: those that multiply, and a warp that asks for weights.
const THREADS: u32 = 288;

/// Slots of a ring, at least and at most.
const SLOTS: [usize; 2] = [3, 16];

/// Slices of a row that is normed in registers, at most.
const HELD: usize = 8;

/// Static shared memory of the kernels at most.
const FIXED_SHARED: usize = 4480;

/// A format that there is a kernel for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Streamed {
    /// In groups of 128, without zero points.
    Int4,
    /// With a scale for each row.
    Ternary,
}

impl Streamed {
    /// That of the kernel which takes its weights where rows are several, as `CODES` has them in
    /// `blocks.rs`, with its own place there.
    pub fn of(kernel: usize) -> Option<(Self, usize)> {
        match kernel {
            1 => Some((Self::Int4, 7)),
            4 => Some((Self::Ternary, 8)),
            _ => None,
        }
    }

    /// Whether a block is to be alone on its multiprocessor among kernels of other kinds, see
    /// [`Launcher::mixed`]: Llama-3-8B on an H100 makes 484 tokens a second in INT4 so, and 396 with half of a
    /// multiprocessor for each. Ternary products are so short that the next one's weights had better be on
    /// their way (Llama-3.2-1B: 1,708 and 1,885).
    fn is_alone(self, launcher: &Launcher) -> bool {
        launcher.mixed && self == Self::Int4
    }

    /// Bytes of a slot.
    fn slot(self) -> usize {
        // Codes and f16 scales of 8 rows in a step.
        let step = match self {
            Self::Int4 => OCTET * (STEP / 2 + 2),
            Self::Ternary => OCTET * STEP / 4,
        };
        2 * SLICE * step
    }

    /// Shared memory that x takes.
    fn row(self, params: &Gemv) -> usize {
        let k = params.k as usize;
        let values = k.next_multiple_of(STEP);
        let is_bf16 = params.prologue.dtype == dtype_index(DType::BF16) as i32;
        let holds = is_bf16 && (params.prologue.norm == 0 || k.div_ceil(STEP * SLICE) <= HELD);
        match self {
            Self::Int4 => (2 * values + 64) * if is_bf16 { 1 } else { 2 },
            Self::Ternary if holds => 2 * (values + 16),
            // Two parts, the values they are made from, and what they are multiplied by.
            Self::Ternary => 2 * (values + 16) + 4 * k + 16,
        }
    }
}

/// The parameters with the slots of a ring, and the grid; none if the kernel does not take the product.
pub(super) fn spread(launcher: &Launcher, format: Streamed, params: &Gemv) -> Option<(Gemv, Grid)> {
    let gpu = launcher.gpu;
    let gates = params.width < params.rows;
    let whole = |rows: u32| rows == u32::MAX || (rows as usize).is_multiple_of(OCTET);
    let octets = params.weights.iter().all(|w| whole(w.first)) && (!gates || whole(params.width));
    if gpu.arch < 90 || params.m != 1 || !params.k.is_multiple_of(8) || !octets {
        return None;
    }
    let alone = format.is_alone(launcher);
    // Anything past half will do; what is left stays the first level's cache.
    let more = if alone { gpu.shared as usize / 16 } else { 0 };
    let room = gpu.share(2) + more - FIXED_SHARED;
    let row = format.row(params);
    let slots = (room.checked_sub(row)? / format.slot()).min(SLOTS[1]);
    if slots < SLOTS[0] {
        return None;
    }
    let params = Gemv {
        split: slots as u32,
        ..*params
    };
    // As many blocks as multiprocessors, even if there is no work for all: none gets two of one kernel.
    // All have a ring of the same size, even if it is more than they need: where the next kernel takes more
    // shared memory, a multiprocessor has to be idle before it divides its cache anew.
    let used = slots * format.slot() + row;
    let shared = if alone { room } else { used };
    let grid = Grid::new([gpu.sms, 1, 1], THREADS, shared as u32);
    Some((params, grid))
}
