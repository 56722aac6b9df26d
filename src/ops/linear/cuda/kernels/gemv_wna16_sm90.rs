//! One row of x and FP8, NVFP4, NF4, INT4 or ternary weights on Hopper, which come through a pipeline in shared memory
//! (`kernels/linear/gemv_wna16_sm90.cuh`).
//!
//! On an H100, in graphs of dependent launches, the products of a layer of Llama-3-8B take 46.9 us in INT4
//! and 29.9 us in ternary; by the kernels for several rows they take 59.7 and 40.8.

use super::super::plan::Planned;
use super::super::problem::Case;
use super::gemv::GemvPlan;
use crate::cuda::abi::{
    GEMV_SM90_K_BLOCKS as STAGE_K_BLOCKS, GEMV_SM90_MAX_STAGES, GEMV_SM90_OWNED as OWNED,
    GEMV_THREADS, INT4_PADDING, K_BLOCK, ROW_GROUP, WARP,
};
use crate::cuda::{Grid, Module, fatbin};
use crate::quant::{NF4_GROUP, NVFP4_GROUP, Scheme, TernaryScale};
use candle_core::DType;
use std::sync::Arc;

/// As [`Sm90Format::index`] numbers them.
pub(super) static MODULE: Module = Module::new(
    "gemv_wna16_sm90",
    fatbin!("gemv_wna16_sm90"),
    &[
        "gemv_wna16_sm90_int4_g128",
        "gemv_wna16_sm90_ternary_rows",
        "gemv_wna16_sm90_fp8",
        "gemv_wna16_sm90_fp8_block",
        "gemv_wna16_sm90_nvfp4",
        "gemv_wna16_sm90_nf4",
    ],
);

/// Threads of a block: those that multiply, and a warp that loads weights.
const THREADS: usize = GEMV_THREADS + WARP;

/// Static shared memory of the kernels at most.
pub(super) const FIXED_SHARED: usize = 4480;

/// A format that there is a kernel for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sm90Format {
    /// In groups of 128, without zero points.
    Int4,
    /// With a scale for each row.
    Ternary,
    /// Likewise.
    Fp8,
    /// In blocks.
    Fp8Block,
    Nvfp4,
    Nf4,
}

impl Sm90Format {
    /// That of a scheme, if it has one.
    pub(super) fn of(scheme: Option<Scheme>) -> Option<Self> {
        match scheme? {
            Scheme::Int4 {
                group: K_BLOCK,
                zero_point: false,
            } => Some(Self::Int4),
            Scheme::Ternary {
                scale: TernaryScale::Row | TernaryScale::Tensor,
            } => Some(Self::Ternary),
            Scheme::Fp8 => Some(Self::Fp8),
            Scheme::Fp8Block128 => Some(Self::Fp8Block),
            Scheme::Nvfp4 => Some(Self::Nvfp4),
            Scheme::Nf4 => Some(Self::Nf4),
            _ => None,
        }
    }

    /// The kernel's place in its module.
    pub(super) fn index(self) -> usize {
        match self {
            Self::Int4 => 0,
            Self::Ternary => 1,
            Self::Fp8 => 2,
            Self::Fp8Block => 3,
            Self::Nvfp4 => 4,
            Self::Nf4 => 5,
        }
    }

    /// Whether a block is to be alone on its SM among kernels of other kinds, see
    /// [`Case::one_cta_per_sm`]: Llama-3-8B on an H100 makes 484 tokens a second in INT4 so, and 396 with half of an
    /// SM for each. Ternary products are so short that the next one's weights had better be on
    /// their way (Llama-3.2-1B: 1,708 and 1,885).
    fn is_alone(self, case: &Case) -> bool {
        case.one_cta_per_sm && self != Self::Ternary
    }

    /// Stages of a pipeline at least. Those of FP8 are twice as large as INT4's.
    pub(super) fn least_stages(self) -> usize {
        match self {
            Self::Int4 | Self::Ternary | Self::Nvfp4 | Self::Nf4 => 3,
            Self::Fp8 | Self::Fp8Block => 2,
        }
    }

    /// What a block that is alone takes of an SM's shared memory past half of it: anything will do, and what is left
    /// stays the first level's cache.
    fn past_half(self, shared: usize) -> usize {
        match self {
            Self::Int4 | Self::Ternary | Self::Nvfp4 | Self::Nf4 => shared / 16,
            Self::Fp8 | Self::Fp8Block => shared / 8,
        }
    }

    /// Bytes of a stage.
    pub(super) fn stage_bytes(self) -> usize {
        // Codes of 8 rows in a K block, and the scales that come with them.
        let k_block = match self {
            Self::Int4 => ROW_GROUP * (K_BLOCK / 2 + 2),
            Self::Ternary => ROW_GROUP * K_BLOCK / 4,
            Self::Nvfp4 => ROW_GROUP * (K_BLOCK / 2 + K_BLOCK / NVFP4_GROUP),
            Self::Nf4 => ROW_GROUP * (K_BLOCK / 2 + 4 * (K_BLOCK / NF4_GROUP)),
            Self::Fp8 | Self::Fp8Block => ROW_GROUP * K_BLOCK,
        };
        2 * STAGE_K_BLOCKS * k_block
    }

    /// Shared memory that x takes.
    fn row(self, case: &Case) -> usize {
        let k = case.k;
        let values = k.next_multiple_of(K_BLOCK);
        let is_bf16 = case.x == DType::BF16;
        let owns =
            is_bf16 && (case.norm.is_none() || k.div_ceil(K_BLOCK * STAGE_K_BLOCKS) <= OWNED);
        match self {
            Self::Int4 | Self::Fp8 | Self::Fp8Block | Self::Nvfp4 | Self::Nf4 => {
                (2 * values + INT4_PADDING) * if is_bf16 { 1 } else { 2 }
            }
            Self::Ternary if owns => 2 * (values + 16),
            // Two parts, the values they are made from, and what they are multiplied by.
            Self::Ternary => 2 * (values + 16) + 4 * k + 16,
        }
    }
}

/// The format of the weights, if they can be copied in groups of 8 rows.
pub(super) fn streamed(case: &Case) -> Result<Sm90Format, &'static str> {
    let format =
        Sm90Format::of(case.scheme()).ok_or("there is no kernel of this group or scale")?;
    let mut first = 0;
    let row_groups = case.matrices().all(|rows| {
        first += rows;
        first == case.n() || first.is_multiple_of(ROW_GROUP)
    });
    if !row_groups
        || !case.k.is_multiple_of(8)
        || (case.gates() && !case.width().is_multiple_of(ROW_GROUP))
    {
        return Err("matrices do not end with whole 8 rows, or K is no multiple of 8");
    }
    Ok(format)
}

/// One row of INT4 in groups of 128, of ternary weights with a scale for each row, of FP8, NVFP4 or NF4.
pub(crate) fn plan(case: &Case) -> Planned {
    let format = streamed(case)?;
    if !case.alignment.x || !case.alignment.norm {
        return Err("x or the norm does not begin at 16 bytes");
    }
    if case.is_rounded() && format != Sm90Format::Ternary {
        return Err("it rounds x for ternary weights alone");
    }
    let gpu = &case.gpu;
    let alone = format.is_alone(case);
    let more = if alone {
        format.past_half(gpu.shared as usize)
    } else {
        0
    };
    let room = gpu.share(2) + more - FIXED_SHARED;
    let row = format.row(case);
    let stages = (room.saturating_sub(row) / format.stage_bytes()).min(GEMV_SM90_MAX_STAGES);
    if stages < format.least_stages() {
        return Err("a row of x leaves too little shared memory for a pipeline");
    }
    // As many blocks as SMs, even if there is no work for all: none gets two of one kernel.
    // All have a pipeline of the same size, even if it is more than they need: where the next kernel takes more
    // shared memory, an SM has to be idle before it divides its cache anew.
    let used = stages * format.stage_bytes() + row;
    let shared = if alone { room } else { used };
    Ok(Arc::new(GemvPlan {
        module: &MODULE,
        index: format.index(),
        grid: Grid::new([gpu.sms, 1, 1], THREADS as u32, shared as u32),
        split_k: 1,
        stages,
        once: 1,
        row: None,
    }))
}
