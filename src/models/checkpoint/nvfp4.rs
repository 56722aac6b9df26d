//! compressed-tensors' `nvfp4-pack-quantized`.
//!
//! | tensor | | |
//! |---|---|---|
//! | `weight_packed` | u8 `[N, K / 2]` | e2m1, the value of the lower column in the lower half of a byte |
//! | `weight_scale` | e4m3 `[N, K / 16]` | multiplies each 16 values |
//! | `weight_global_scale` | f32, of one value | divides all of them |
//!
//! Format: NVFP4 (NVIDIA, 2025). Activations are not quantized here, whatever the configuration says of them.

use super::compressed::{GROUPS, PACKED, SCALE, ZERO_POINT};
use super::kept::Kept;
use super::tensors::Tensors;
use crate::quant::words::{IN_ORDER, WordLayout, Words};
use crate::quant::{Codes, NVFP4_GROUP, Scheme};
use candle_core::{Result, bail};

const GLOBAL: &str = "weight_global_scale";

/// Whether a layer has such a matrix, by its tensors alone.
pub fn is_there(tensors: &Tensors<'_>) -> bool {
    tensors.has(PACKED) && tensors.has(GLOBAL)
}

/// The matrix `[rows, cols]` of a layer.
pub fn read(tensors: &Tensors<'_>, (rows, cols): (usize, usize)) -> Result<Kept> {
    for part in [ZERO_POINT, GROUPS] {
        if tensors.has(part) {
            bail!("{part} is there, expected none beside NVFP4");
        }
    }
    if !tensors.has(GLOBAL) {
        bail!("{GLOBAL} is missing, expected it beside {PACKED} of NVFP4");
    }
    let whole = cols.is_multiple_of(NVFP4_GROUP);
    let Some(layout) = WordLayout::of_rows(4, cols, IN_ORDER).filter(|_| whole) else {
        bail!("{PACKED}: {cols} columns, expected a multiple of {NVFP4_GROUP}");
    };
    let words = tensors.codes_in_bytes(PACKED, &[rows, cols / 2])?;
    let group_scales = tensors.floats8(SCALE, &[rows, cols / NVFP4_GROUP])?;
    let global = match tensors.numbers(GLOBAL)?.0.as_slice() {
        [global] if *global > 0. && global.is_normal() && (1. / global).is_normal() => *global,
        other => bail!(
            "{GLOBAL} is {other:?}, expected one positive normal number with such a reciprocal"
        ),
    };
    let shell = Codes {
        scheme: Scheme::Nvfp4,
        rows,
        cols,
        codes: Vec::new(),
        scales: vec![1. / global; rows],
        zeros: Vec::new(),
        group_scales,
    };
    shell.check_scales()?;
    let words = Words { words, layout };
    Ok(Kept { shell, words })
}

#[cfg(test)]
mod tests;
