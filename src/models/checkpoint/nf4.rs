//! bitsandbytes' 4-bit NormalFloat, as numbers: no product here takes its values, which are those of a table, so that
//! they are dequantized at load.
//!
//! | tensor | | |
//! |---|---|---|
//! | `weight` | u8 `[N K / 2, 1]` | codes of the values in the order of rows, the upper half of a byte first |
//! | `weight.quant_map` | f32 `[16]` | the value of each code |
//! | `weight.absmax` | f32 `[N K / B]` rounded up | multiplies each `B` values |
//! | `weight.quant_state.bitsandbytes__nf4` | u8 | JSON: `blocksize` B, `shape` `[N, K]`, and what is nested |
//!
//! With double quantization `weight.absmax` is u8, and stands for
//! `nested_quant_map[absmax] nested_absmax[.. / nested_blocksize] + nested_offset`.
//!
//! Method: QLoRA (Dettmers et al. 2023).

use super::tensors::Tensors;
use crate::cpu::pool;
use candle_core::{Device, Result, Tensor, bail};
use serde::Deserialize;

const STATE: &str = "weight.quant_state.bitsandbytes__nf4";

/// Rows that a task dequantizes at least.
const GRAIN: usize = 32;

/// The tensor of bytes that is JSON.
#[derive(Deserialize)]
struct State {
    blocksize: usize,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f32>,
}

/// Whether a layer has such a matrix.
pub fn is_there(tensors: &Tensors<'_>) -> bool {
    tensors.has("weight") && tensors.has(STATE)
}

/// The numbers `[rows, cols]` of a layer's matrix, in f32.
pub fn read(tensors: &Tensors<'_>, (rows, cols): (usize, usize)) -> Result<Tensor> {
    let state = state(tensors)?;
    if state.shape != [rows, cols] {
        bail!(
            "{STATE} says the shape {:?}, expected {:?}",
            state.shape,
            [rows, cols]
        );
    }
    let count = rows * cols;
    if !count.is_multiple_of(2) || !state.blocksize.is_power_of_two() {
        bail!(
            "{STATE}: blocks of {} of {count} values, expected a power of two of an even number",
            state.blocksize
        );
    }
    let codes = tensors.bytes("weight", &[count / 2, 1])?;
    let scales = scales(tensors, &state, count.div_ceil(state.blocksize))?;
    let table = numbers(tensors, "weight.quant_map", 16)?;
    let log = state.blocksize.trailing_zeros();
    let mut values = vec![0f32; count];
    pool::for_rows(&mut values, cols, GRAIN, |first, part| {
        for (at, value) in (first * cols..).zip(part) {
            let code = codes[at / 2] >> (4 * (1 - at % 2)) & 15;
            *value = table[usize::from(code)] * scales[at >> log];
        }
    });
    Tensor::from_vec(values, (rows, cols), &Device::Cpu)
}

fn state(tensors: &Tensors<'_>) -> Result<State> {
    match serde_json::from_slice(&tensors.all_bytes(STATE)?) {
        Ok(state) => Ok(state),
        Err(e) => bail!("{STATE}: {e}"),
    }
}

/// What each block is multiplied by.
fn scales(tensors: &Tensors<'_>, state: &State, count: usize) -> Result<Vec<f32>> {
    let (size, offset) = match (state.nested_blocksize, state.nested_offset) {
        (Some(size), Some(offset)) => (size, offset),
        (None, None) if !tensors.has("weight.nested_absmax") => {
            return numbers(tensors, "weight.absmax", count);
        }
        _ => bail!(
            "{STATE}: expected nested_blocksize and nested_offset, or neither and plain absmax"
        ),
    };
    if size == 0 {
        bail!("{STATE}: nested_blocksize is 0");
    }
    let codes = tensors.bytes("weight.absmax", &[count])?;
    let table = numbers(tensors, "weight.nested_quant_map", 256)?;
    let scales = numbers(tensors, "weight.nested_absmax", count.div_ceil(size))?;
    let scale = |(at, code): (usize, &u8)| table[usize::from(*code)] * scales[at / size] + offset;
    Ok(codes.iter().enumerate().map(scale).collect())
}

/// Numbers of this count.
fn numbers(tensors: &Tensors<'_>, part: &str, count: usize) -> Result<Vec<f32>> {
    let (values, dims) = tensors.numbers(part)?;
    if dims != [count] {
        bail!("{part} has shape {dims:?}, expected [{count}]");
    }
    Ok(values)
}
