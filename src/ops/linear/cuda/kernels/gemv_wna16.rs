//! INT8, FP8, NVFP4, NF4, INT4 and ternary weights and few rows of x: the weights are read as they are.

use super::super::plan::Planned;
use super::super::problem::Case;
use super::gemv::{Core, GemvPlan};
use crate::cuda::abi::{
    INT4_PADDING, INT8_PADDING, K_BLOCK as GROUP, N_TILE, N_TILE_MAX_M as ROWS_OF_LAUNCH,
    TERNARY_PADDING,
};
use crate::cuda::{Module, fatbin, kernel_index};
use crate::quant::{Format, Scheme};
use candle_core::DType;

/// One takes INT4 in groups that the others do not, and so for ternary.
pub(super) static MODULE: Module = Module::new(
    "gemv_wna16",
    fatbin!("gemv_wna16"),
    &[
        "gemv_wna16_int8",
        "gemv_wna16_fp8",
        "gemv_wna16_fp8_block",
        "gemv_wna16_int4_g128",
        "gemv_wna16_int4",
        "gemv_wna16_int4_g32",
        "gemv_wna16_ternary_rows",
        "gemv_wna16_ternary_g128",
        "gemv_wna16_ternary",
        "gemv_wna16_nvfp4",
        "gemv_wna16_nf4",
    ],
);

/// How each of them works: K blocks of [`GROUP`] values that a warp prefetches at once, and
/// bytes behind a row of x in shared memory.
const CORES: [(usize, usize); 11] = [
    (2, INT8_PADDING),
    (2, INT8_PADDING),
    (2, INT8_PADDING),
    (4, INT4_PADDING),
    (4, INT4_PADDING),
    (4, INT4_PADDING),
    (8, TERNARY_PADDING),
    (4, TERNARY_PADDING),
    (4, TERNARY_PADDING),
    (4, INT4_PADDING),
    (4, INT4_PADDING),
];

/// Which of them takes a format, as `PackedFormat` of `kernels/formats/packed.cuh` numbers those.
const KERNELS: [usize; 12] = [0, 3, 4, 5, 6, 7, 8, 8, 1, 2, 9, 10];

/// INT4 in groups of 128.
const G128: usize = 1;

/// Which of the kernels takes a scheme: those for one group know no zero points.
pub(super) fn kernel_of(scheme: Scheme) -> usize {
    let index = kernel_index(Format::Scheme(scheme));
    KERNELS[index] + usize::from(scheme.has_zeros() && index == G128)
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
