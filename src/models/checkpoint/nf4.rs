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

use super::tensors::Tensors;
use crate::cpu::pool;
use crate::quant::{Codes, NF4_GROUP, Scheme, nf4};
use candle_core::{Device, Result, Tensor, bail};
use serde::Deserialize;

const STATE: &str = "weight.quant_state.bitsandbytes__nf4";

/// Rows that a task takes at least.
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

/// A matrix as it is stored.
pub struct Blocks {
    rows: usize,
    cols: usize,
    /// Of each two values.
    codes: Vec<u8>,
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
        codes: tensors.bytes("weight", &[count / 2, 1])?,
        scales: scales(tensors, &state, count.div_ceil(state.blocksize))?,
        table: numbers(tensors, "weight.quant_map", 16)?,
        size: state.blocksize,
    })
}

impl Blocks {
    /// The codes in the crate's own scheme, if it holds the numbers as they are.
    pub fn codes(&self) -> Option<Codes> {
        let (rows, cols) = (self.rows, self.cols);
        // No group of the scheme reaches into a second block.
        let fits = self.size.is_multiple_of(NF4_GROUP) && cols.is_multiple_of(NF4_GROUP);
        let known = self.scales.iter().all(|scale| scale.is_finite());
        if rows * cols == 0 || !fits || !known || self.table != nf4::TABLE {
            return None;
        }
        let mut codes = vec![0i8; rows * cols];
        self.unpack(&mut codes, |code, _| code as i8);
        let scale = |first: usize| self.scales[first / self.size];
        Some(Codes {
            scheme: Scheme::Nf4,
            rows,
            cols,
            codes,
            scales: (0..rows * cols).step_by(NF4_GROUP).map(scale).collect(),
            zeros: Vec::new(),
            group_scales: Vec::new(),
        })
    }

    /// The numbers, in f32 on the host.
    pub fn into_values(self) -> Result<Tensor> {
        let mut values = vec![0f32; self.rows * self.cols];
        self.unpack(&mut values, |code, scale| {
            self.table[usize::from(code)] * scale
        });
        Tensor::from_vec(values, (self.rows, self.cols), &Device::Cpu)
    }

    /// Fills a matrix by what its codes and their scales become.
    fn unpack<T: Send>(&self, out: &mut [T], to: impl Fn(u8, f32) -> T + Sync) {
        let log = self.size.trailing_zeros();
        pool::for_rows(out, self.cols, GRAIN, |first, part| {
            for (at, value) in (first * self.cols..).zip(part) {
                let code = self.codes[at / 2] >> (4 * (1 - at % 2)) & 15;
                *value = to(code, self.scales[at >> log]);
            }
        });
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

#[cfg(test)]
mod tests;
