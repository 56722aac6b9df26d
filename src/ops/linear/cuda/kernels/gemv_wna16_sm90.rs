//! One row of x and INT4 or ternary weights on Hopper, which come through a pipeline in shared memory
//! (`kernels/linear/gemv_wna16_sm90.cuh`).
//!
//! On an H100, in graphs of dependent launches, the products of a layer of Llama-3-8B take 46.9 us in INT4
//! and 29.9 us in ternary; by the kernels for several rows they take 59.7 and 40.8.

use super::super::plan::Planned;
use super::super::problem::Case;
use super::gemv::GemvPlan;
use super::gemv_wna16::{MODULE, STREAM_INT4, STREAM_TERNARY};
use crate::cuda::Grid;
use crate::cuda::abi::{
    CODE_STREAM_HELD as HELD, CODE_STREAM_MAX_SLOTS, CODE_STREAM_SLICE as SLICE, GEMV_THREADS,
    INT4_PADDING, OCTET, STEP, WARP,
};
use crate::quant::{Scheme, TernaryScale};
use candle_core::DType;
use std::sync::Arc;

/// Threads of a block: those that multiply, and a warp that asks for weights.
const THREADS: usize = GEMV_THREADS + WARP;

/// Slots of a ring, at least and at most.
const SLOTS: [usize; 2] = [3, CODE_STREAM_MAX_SLOTS];

/// Static shared memory of the kernels at most.
pub(super) const FIXED_SHARED: usize = 4480;

/// A format that there is a kernel for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Streamed {
    /// In groups of 128, without zero points.
    Int4,
    /// With a scale for each row.
    Ternary,
}

impl Streamed {
    /// That of a scheme, if it has one.
    fn of(scheme: Option<Scheme>) -> Option<Self> {
        match scheme? {
            Scheme::Int4 {
                group: STEP,
                zero_point: false,
            } => Some(Self::Int4),
            Scheme::Ternary {
                scale: TernaryScale::Row | TernaryScale::Tensor,
            } => Some(Self::Ternary),
            _ => None,
        }
    }

    /// The kernel's place in its module.
    fn index(self) -> usize {
        match self {
            Self::Int4 => STREAM_INT4,
            Self::Ternary => STREAM_TERNARY,
        }
    }

    /// Whether a block is to be alone on its multiprocessor among kernels of other kinds, see
    /// [`Case::in_chain`]: Llama-3-8B on an H100 makes 484 tokens a second in INT4 so, and 396 with half of a
    /// multiprocessor for each. Ternary products are so short that the next one's weights had better be on
    /// their way (Llama-3.2-1B: 1,708 and 1,885).
    fn is_alone(self, case: &Case) -> bool {
        case.in_chain && self == Self::Int4
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
    fn row(self, case: &Case) -> usize {
        let k = case.k;
        let values = k.next_multiple_of(STEP);
        let is_bf16 = case.x == DType::BF16;
        let holds = is_bf16 && (case.norm.is_none() || k.div_ceil(STEP * SLICE) <= HELD);
        match self {
            Self::Int4 => (2 * values + INT4_PADDING) * if is_bf16 { 1 } else { 2 },
            Self::Ternary if holds => 2 * (values + 16),
            // Two parts, the values they are made from, and what they are multiplied by.
            Self::Ternary => 2 * (values + 16) + 4 * k + 16,
        }
    }
}

/// One row of INT4 in groups of 128, or of ternary weights with a scale for each row.
pub(crate) fn plan(case: &Case) -> Planned {
    let format = Streamed::of(case.scheme()).ok_or("there is no kernel of this group or scale")?;
    if !case.alignment.x || !case.alignment.norm {
        return Err("x or the norm does not begin at 16 bytes");
    }
    let mut first = 0;
    let octets = case.matrices().all(|rows| {
        first += rows;
        first == case.n() || first.is_multiple_of(OCTET)
    });
    if !octets || !case.k.is_multiple_of(8) || (case.gates() && !case.width().is_multiple_of(OCTET))
    {
        return Err("matrices do not end with whole 8 rows, or K is no multiple of 8");
    }
    let gpu = &case.gpu;
    let alone = format.is_alone(case);
    // Anything past half will do; what is left stays the first level's cache.
    let more = if alone { gpu.shared as usize / 16 } else { 0 };
    let room = gpu.share(2) + more - FIXED_SHARED;
    let row = format.row(case);
    let slots = (room.saturating_sub(row) / format.slot()).min(SLOTS[1]);
    if slots < SLOTS[0] {
        return Err("a row of x leaves too little shared memory for a pipeline");
    }
    // As many blocks as multiprocessors, even if there is no work for all: none gets two of one kernel.
    // All have a ring of the same size, even if it is more than they need: where the next kernel takes more
    // shared memory, a multiprocessor has to be idle before it divides its cache anew.
    let used = slots * format.slot() + row;
    let shared = if alone { room } else { used };
    Ok(Arc::new(GemvPlan {
        module: &MODULE,
        index: format.index(),
        grid: Grid::new([gpu.sms, 1, 1], THREADS as u32, shared as u32),
        split: 1,
        stages: slots,
        once: 1,
        row: None,
    }))
}
