//! INT8 weights and some tens of rows of x: x becomes 16-bit whole numbers in two int8 parts, with a power of two for each
//! 128 values, and the tensor cores multiply 8 bits. One kernel quantizes x, one multiplies.

use super::super::plan::{Kernel, Planned};
use super::super::problem::{Case, Operands, ProductAt};
use super::gemm_w8a8::{QuantizedAs, quantize};
use super::gemm_wna16_tiling::clusters;
use super::gemv::Gemv;
use super::tensor_map::tensor_map;
use super::w8a8_params::tensor_maps;
use crate::cuda::abi::{
    GemmW8A16Params, K_BLOCK, NORM_NONE, W8A16 as FORMS, W8A16_CHANNELS as CHANNELS, W8A16_THREADS,
    W8A16_UNIT, W8A16Form,
};
use crate::cuda::{GpuSpec, Grid, Launcher, Module, Scratch, fatbin};
use candle_core::{DType, Result};
use std::sync::Arc;

const OP: &str = "quant_linear";

/// One for each of [`FORMS`].
static MODULE: Module = Module::new(
    "gemm_w8a16_sm90",
    fatbin!("gemm_w8a16_sm90"),
    &["gemm_w8a16_sm90_32", "gemm_w8a16_sm90_64"],
);

/// Rows of x at most.
pub(crate) const MAX_M: usize = FORMS[FORMS.len() - 1].tokens;

/// The kernel that quantizes x writes scales of whole units.
const _: () = assert!(FORMS[0].tokens == W8A16_UNIT && FORMS[1].tokens == 2 * W8A16_UNIT);

/// Blocks of a cluster at most.
const MAX_SPLIT_K: usize = 8;

/// K blocks of a block at least, where a cluster shares them: fewer are not worth the exchange of sums.
const SHARE: usize = 4;

#[derive(Debug)]
struct Gemm {
    index: usize,
    split_k: usize,
    grid: Grid,
    /// Whether 16-byte accesses fit outputs.
    vectors: bool,
}

/// Weights from which on the kernel is faster than `gemm_wna16_sm90`: on an H200 with 17 to 48 rows 6144x4096 takes 0.93x to
/// 0.98x of the time, 14336x4096 0.89x to 0.92x, 28672x4096 0.80x to 0.84x, 4096x4096 0.98x to 1.11x.
const MANY_WEIGHTS: usize = 24 << 20;

/// Output channels from which on it was measured: fewer are few blocks, whatever K is.
const MANY_CHANNELS: usize = 4096;

/// The plan where there are many weights.
pub(crate) fn plan_if_fastest(case: &Case) -> Planned {
    if case.n() * case.k < MANY_WEIGHTS {
        return Err("there are few weights");
    }
    if case.n() < MANY_CHANNELS {
        return Err("there are few output channels");
    }
    plan(case)
}

/// K a multiple of 128, and of several matrices without a gate all but the last a multiple of 64 rows. A gate and what it
/// gates are halves of one matrix, or two of one size, in any product.
pub(crate) fn plan(case: &Case) -> Planned {
    if !case.k.is_multiple_of(K_BLOCK) {
        return Err("K is no multiple of 128");
    }
    if !case.alignment.x || !case.alignment.norm {
        return Err("x or the norm does not begin at 16 bytes");
    }
    let rows: Vec<_> = case.matrices().collect();
    if let [first @ .., _] = &rows[..]
        && !case.gates()
        && !first.iter().all(|rows| rows.is_multiple_of(CHANNELS / 2))
    {
        return Err("the border of two matrices lies within a tile");
    }
    let form = FORMS.iter().position(|form| case.m <= form.tokens);
    let index = form.ok_or("there are too many rows of x")?;
    let channels = if case.gates() { CHANNELS / 2 } else { CHANNELS };
    let tiles = case.width().div_ceil(channels);
    let split_k = split_k(&case.gpu, tiles, case.k / K_BLOCK);
    let blocks = (tiles * split_k) as u32;
    let mut grid = Grid::new(
        [blocks, 1, 1],
        W8A16_THREADS as u32,
        shared(&FORMS[index]) as u32,
    );
    grid.cluster = split_k as u32;
    Ok(Arc::new(Gemm {
        index,
        split_k,
        grid,
        vectors: case.alignment.outputs && case.width().is_multiple_of(8),
    }))
}

/// Blocks of a cluster: as many as there is room for at once, two on a multiprocessor.
fn split_k(gpu: &GpuSpec, tiles: usize, k_blocks: usize) -> usize {
    let most = MAX_SPLIT_K.min(k_blocks / SHARE).max(1);
    let fits = |split: &usize| tiles <= 2 * clusters(gpu, *split);
    (1..=most).rev().find(fits).unwrap_or(1)
}

/// Dynamic shared memory: stages of x, weights and x's scales, each in whole pieces of 1,024 bytes, from a multiple of those.
fn shared(form: &W8A16Form) -> usize {
    let W8A16Form { tokens, stages } = *form;
    let stage = 2 * tokens * K_BLOCK + CHANNELS * K_BLOCK + 4 * tokens;
    stages * stage.next_multiple_of(1024) + 1024
}

impl Gemm {
    fn tokens(&self) -> usize {
        FORMS[self.index].tokens
    }
}

impl Kernel for Gemm {
    fn entry(&self) -> &'static str {
        MODULE.names(self.index).1
    }

    fn grid(&self) -> Option<Grid> {
        Some(self.grid)
    }

    fn details(&self) -> String {
        let (tokens, split) = (self.tokens(), self.split_k);
        format!("tiles of {CHANNELS}x{tokens}, split-K {split}")
    }

    fn scratch(&self, operands: &Operands) -> usize {
        let (tokens, k) = (self.tokens(), operands.at.k);
        Scratch::room(DType::U8, 2 * tokens * k) + Scratch::room(DType::F32, tokens * (k / K_BLOCK))
    }

    unsafe fn run(
        &self,
        launcher: &Launcher,
        scratch: &mut Scratch,
        operands: &Operands,
    ) -> Result<()> {
        let at = &operands.at;
        let (tokens, ProductAt { m, k, .. }) = (self.tokens(), *at);
        let x = scratch.take(OP, DType::U8, 2 * tokens * k)?;
        let x_scales = scratch.take(OP, DType::F32, tokens * (k / K_BLOCK))?;
        let mut product = Gemv::of(operands)?;
        product.prologue.norm = NORM_NONE as i32;
        // Rows of x that are not there are whatever the scratch has: no other row's sums depend on them.
        let params = GemmW8A16Params {
            x: tensor_map(x, [2 * tokens, k], 2 * tokens)?,
            weights: tensor_maps(operands, CHANNELS / 2, false)?,
            product,
            x_scales,
            split_k: self.split_k as u32,
            vectors: self.vectors.into(),
        };
        let outputs = m * at.stride * at.out_dtype.size_in_bytes();
        let bytes = operands.weight_bytes() + 2 * m * k + outputs;
        // The product may begin while x is being quantized, for which all of its blocks wait.
        let launcher = &launcher.overlapping();
        let next = launcher.moving(bytes as u64);
        // SAFETY: the caller's; the scratch has room for both parts of all rows and for the scales of whole units, K is a
        // multiple of 128 and all addresses of 16 bytes, as `plan` has seen; the struct is the kernel's.
        unsafe {
            quantize(launcher, at, k, [x, x_scales], QuantizedAs::Int16)?;
            next.run(&MODULE, self.index, self.grid, &params)
        }
    }
}
