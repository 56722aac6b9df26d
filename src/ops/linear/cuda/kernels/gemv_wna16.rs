//! INT8, FP8, NVFP4, NF4, INT4 and ternary weights and few rows of x: the weights are read as they are.

use super::super::plan::Planned;
use super::super::problem::Case;
use super::gemv::{Core, GemvPlan};
use super::int4_form;
use crate::cuda::abi::{
    INT4_PADDING, INT8_PADDING, K_BLOCK as GROUP, N_TILE, N_TILE_MAX_M as ROWS_OF_LAUNCH,
    TERNARY_PADDING,
};
use crate::cuda::{Module, fatbin};
use crate::quant::Scheme;
use candle_core::DType;

/// One takes ternary weights in groups of any size.
pub(super) static MODULE: Module = Module::new(
    "gemv_wna16",
    fatbin!("gemv_wna16"),
    &[
        "gemv_wna16_int8",
        "gemv_wna16_fp8",
        "gemv_wna16_fp8_block",
        "gemv_wna16_int4_g128",
        "gemv_wna16_int4_g64",
        "gemv_wna16_int4_g32",
        "gemv_wna16_int4_g128_z",
        "gemv_wna16_int4_g64_z",
        "gemv_wna16_int4_g32_z",
        "gemv_wna16_ternary_rows",
        "gemv_wna16_ternary_g128",
        "gemv_wna16_ternary",
        "gemv_wna16_nvfp4",
        "gemv_wna16_nf4",
    ],
);

/// How each of them works: K blocks of [`GROUP`] values that a warp prefetches at once, and
/// bytes behind a row of x in shared memory.
const CORES: [(usize, usize); 14] = [
    (2, INT8_PADDING),
    (2, INT8_PADDING),
    (2, INT8_PADDING),
    (4, INT4_PADDING),
    (4, INT4_PADDING),
    (4, INT4_PADDING),
    (4, INT4_PADDING),
    (4, INT4_PADDING),
    (4, INT4_PADDING),
    (8, TERNARY_PADDING),
    (4, TERNARY_PADDING),
    (4, TERNARY_PADDING),
    (4, INT4_PADDING),
    (4, INT4_PADDING),
];

/// Which of the kernels takes a scheme.
pub(super) fn kernel_of(scheme: Scheme) -> usize {
    match scheme {
        Scheme::Int8 => 0,
        Scheme::Fp8 => 1,
        Scheme::Fp8Block128 => 2,
        Scheme::Int4 { group, zero_point } => 3 + int4_form(group, zero_point),
        Scheme::Ternary { .. } => match scheme.group() {
            None => 9,
            Some(GROUP) => 10,
            Some(_) => 11,
        },
        Scheme::Nvfp4 => 12,
        Scheme::Nf4 => 13,
    }
}

/// Four rows a launch.
pub(crate) fn plan(case: &Case) -> Planned {
    let scheme = case
        .scheme()
        .ok_or("the weights are not INT8, FP8, NVFP4, NF4, INT4 or ternary")?;
    if !case.alignment.x || !case.alignment.norm {
        return Err("x or the norm does not begin at 16 bytes");
    }
    let kernel = kernel_of(scheme);
    let (prefetched, padding) = CORES[kernel];
    let k_blocks = case.k.div_ceil(GROUP);
    let row = if matches!(scheme, Scheme::Ternary { .. }) {
        // Bytes, the values they are made from, and what they are multiplied by.
        k_blocks * GROUP + padding + 4 * case.k + 16
    } else {
        let parts = if case.x == DType::BF16 { 1 } else { 2 };
        parts * (2 * k_blocks * GROUP + padding)
    };
    let core = Core {
        kernel,
        max_m: ROWS_OF_LAUNCH,
        n_tile: N_TILE,
        k_block: GROUP,
        prefetched,
        row,
        padded: false,
        fills: true,
    };
    GemvPlan::of_core(case, &MODULE, &core)
}
