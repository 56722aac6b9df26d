//! FP8 (e4m3) weights, as numbers: no product here takes them, so that they are dequantized at load.
//!
//! | tensor | | |
//! |---|---|---|
//! | `weight` | e4m3 `[N, K]` | |
//! | `weight_scale_inv` or `weight_scale` | of one value, `[N]`, `[N, 1]` or, for blocks of `[B, C]` values, `[N / B, K / C]` rounded up | multiplies |
//!
//! Formats: FP8 Formats for Deep Learning (Micikevicius et al. 2022); blocks as in DeepSeek-V3 (2024).

use super::compressed::SCALE;
use super::tensors::Tensors;
use candle_core::{Device, Result, Tensor, bail};

/// What the scale is called where it belongs to blocks.
const BLOCK_SCALE: &str = "weight_scale_inv";

/// Rows and columns of values that share a scale.
pub type Block = Option<[usize; 2]>;

/// Whether a layer has such a matrix.
pub fn is_there(tensors: &Tensors<'_>) -> bool {
    tensors.has("weight") && (tensors.has(SCALE) || tensors.has(BLOCK_SCALE))
}

/// The numbers `[rows, cols]` of a layer's matrix, in f32.
pub fn read(tensors: &Tensors<'_>, (rows, cols): (usize, usize), block: Block) -> Result<Tensor> {
    let (mut values, dims) = tensors.numbers("weight")?;
    if dims != [rows, cols] {
        bail!("weight has shape {dims:?}, expected {:?}", [rows, cols]);
    }
    let name = match tensors.has(BLOCK_SCALE) {
        true => BLOCK_SCALE,
        false => SCALE,
    };
    let (scales, dims) = tensors.numbers(name)?;
    let [height, width] = match (dims.as_slice(), block) {
        _ if scales.len() == 1 => [rows, cols],
        ([n] | [n, 1], None) if *n == rows => [1, cols],
        ([n, k], Some([height, width]))
            if [*n, *k] == [rows.div_ceil(height), cols.div_ceil(width)] =>
        {
            [height, width]
        }
        _ => bail!(
            "{name} has shape {dims:?}, expected one value, {rows} rows, or the blocks of \
             {rows} x {cols} values that the configuration names"
        ),
    };
    let across = cols.div_ceil(width);
    for (row, values) in values.chunks_exact_mut(cols).enumerate() {
        for (at, values) in values.chunks_mut(width).enumerate() {
            let scale = scales[row / height * across + at];
            values.iter_mut().for_each(|w| *w *= scale);
        }
    }
    Tensor::from_vec(values, (rows, cols), &Device::Cpu)
}
