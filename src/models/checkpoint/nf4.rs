//! bitsandbytes' 4-bit NormalFloat.
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
//! With bitsandbytes' own table, and blocks and rows of multiples of 64 values, the codes are the crate's; else the matrix
//! is numbers.
//!
//! Method: QLoRA (Dettmers et al. 2023).

use super::kept::Kept;
use super::tensors::Tensors;
use crate::pool;
use crate::quant::words::{UPPER_FIRST, WordLayout, Words};
use crate::quant::{Codes, NF4_GROUP, Scheme, nf4};
use candle_core::{Device, Result, Tensor, bail};
use serde::Deserialize;

const STATE: &str = "weight.quant_state.bitsandbytes__nf4";

/// Values that a task takes at least.
const GRAIN: usize = 1 << 16;

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

/// A matrix as it is stored.
pub struct Blocks {
    rows: usize,
    cols: usize,
    /// A byte for each two values, on the host or on the GPU that takes them.
    codes: Tensor,
    table: Vec<f32>,
    /// Of each `size` values.
    scales: Vec<f32>,
    size: usize,
}

/// The matrix `[rows, cols]` of a layer.
pub fn read(tensors: &Tensors<'_>, (rows, cols): (usize, usize)) -> Result<Blocks> {
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
    Ok(Blocks {
        rows,
        cols,
        codes: tensors.codes_in_bytes("weight", &[count / 2, 1])?,
        scales: scales(tensors, &state, count.div_ceil(state.blocksize))?,
        table: numbers(tensors, "weight.quant_map", 16)?,
        size: state.blocksize,
    })
}

impl Blocks {
    /// The matrix in the crate's own scheme, if it holds the numbers as they are.
    pub fn kept(&self) -> Option<Kept> {
        let (rows, cols) = (self.rows, self.cols);
        // No group of the scheme reaches into a second block.
        let fits = self.size.is_multiple_of(NF4_GROUP) && cols.is_multiple_of(NF4_GROUP);
        let known = pool::all(&self.scales, |scale| scale.is_finite());
        if rows * cols == 0 || !fits || !known || self.table != nf4::TABLE {
            return None;
        }
        let of_block = self.size / NF4_GROUP;
        let mut scales = vec![0.; rows * cols / NF4_GROUP];
        pool::for_rows(&mut scales, 1, GRAIN, |first, part| {
            for (at, scale) in (first..).zip(part) {
                *scale = self.scales[at / of_block];
            }
        });
        Some(Kept {
            shell: Codes {
                scheme: Scheme::Nf4,
                rows,
                cols,
                codes: Vec::new(),
                scales,
                zeros: Vec::new(),
                group_scales: Vec::new(),
            },
            words: Words {
                words: self.codes.clone(),
                layout: WordLayout::of_rows(4, cols, UPPER_FIRST)?,
            },
        })
    }

    /// The numbers, in f32 on the host.
    pub fn into_values(self) -> Result<Tensor> {
        let bytes = self.codes.to_device(&Device::Cpu)?.to_vec1::<u8>()?;
        let log = self.size.trailing_zeros();
        let mut values = vec![0f32; self.rows * self.cols];
        pool::for_rows(&mut values, 1, GRAIN, |first, part| {
            for (at, value) in (first..).zip(part) {
                let code = bytes[at / 2] >> (4 * (1 - at % 2)) & 15;
                *value = self.table[usize::from(code)] * self.scales[at >> log];
            }
        });
        Tensor::from_vec(values, (self.rows, self.cols), &Device::Cpu)
    }
}

fn state(tensors: &Tensors<'_>) -> Result<State> {
    match serde_json::from_slice(&tensors.all_bytes(STATE)?.0) {
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
    let mut values = vec![0.; count];
    pool::for_rows(&mut values, 1, GRAIN, |first, part| {
        for (at, value) in (first..).zip(part) {
            *value = table[usize::from(codes[at])] * scales[at / size] + offset;
        }
    });
    Ok(values)
}

/// Numbers of this count.
fn numbers(tensors: &Tensors<'_>, part: &str, count: usize) -> Result<Vec<f32>> {
    let (values, dims) = tensors.numbers(part)?;
    if dims != [count] {
        bail!("{part} has shape {dims:?}, expected [{count}]");
    }
    Ok(values)
}

#[cfg(test)]
mod tests;
