//! INT8, INT4 and ternary weights and few rows of x: the weights are read as they are.

use super::super::plan::Planned;
use super::super::problem::Case;
use super::gemv::{Core, GemvPlan};
use crate::cuda::abi::{
    INT4_PADDING, INT8_PADDING, STEP as GROUP, TERNARY_PADDING, UNIT, UNIT_MAX_M as ROWS_OF_LAUNCH,
};
use crate::cuda::{Module, fatbin, kernel_index};
use crate::quant::{Format, Scheme};
use candle_core::DType;

/// One takes INT4 in groups that the others do not, and so for ternary. The last two are for one row.
pub(super) static MODULE: Module = Module::new(
    "gemv_wna16",
    fatbin!("gemv_wna16"),
    &[
        "quant_codes_int8",
        "quant_codes_int4_g128",
        "quant_codes_int4",
        "quant_codes_int4_g32",
        "quant_codes_ternary_rows",
        "quant_codes_ternary_g128",
        "quant_codes_ternary",
        "quant_codes_stream_int4_g128",
        "quant_codes_stream_ternary_rows",
    ],
);

/// The last two.
pub(super) const STREAM_INT4: usize = 7;
pub(super) const STREAM_TERNARY: usize = 8;

/// How each of those for several rows works: steps of [`GROUP`] values that a warp prefetches at once, and
/// bytes behind a row of x in shared memory.
const CORES: [(usize, usize); 7] = [
    (2, INT8_PADDING),
    (4, INT4_PADDING),
    (4, INT4_PADDING),
    (4, INT4_PADDING),
    (8, TERNARY_PADDING),
    (4, TERNARY_PADDING),
    (4, TERNARY_PADDING),
];

/// Which of them takes a format, as `CodeFormat` of `kernels/formats/packed.cuh` numbers those.
const KERNELS: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 6];

/// INT4 in groups of 128.
const G128: usize = 1;

/// Which of the kernels for several rows takes a scheme: those for one group know no zero points.
pub(super) fn kernel_of(scheme: Scheme) -> usize {
    let index = kernel_index(Format::Scheme(scheme));
    KERNELS[index] + usize::from(scheme.has_zeros() && index == G128)
}

/// Four rows a launch.
pub(crate) fn plan(case: &Case) -> Planned {
    let scheme = case
        .scheme()
        .ok_or("the weights are not INT8, INT4 or ternary")?;
    if !case.alignment.x || !case.alignment.norm {
        return Err("x or the norm does not begin at 16 bytes");
    }
    let kernel = kernel_of(scheme);
    let (tile, padding) = CORES[kernel];
    let steps = case.k.div_ceil(GROUP);
    let row = if matches!(scheme, Scheme::Ternary { .. }) {
        // Bytes, the values they are made from, and what they are multiplied by.
        steps * GROUP + padding + 4 * case.k + 16
    } else {
        let parts = if case.x == DType::BF16 { 1 } else { 2 };
        parts * (2 * steps * GROUP + padding)
    };
    let core = Core {
        kernel,
        most: ROWS_OF_LAUNCH,
        unit: UNIT,
        step: GROUP,
        tile,
        row,
        padded: false,
        fills: true,
    };
    GemvPlan::of_core(case, &MODULE, &core)
}
