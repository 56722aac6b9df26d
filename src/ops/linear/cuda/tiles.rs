//! Some tens of rows of x and weights in INT8 or INT4 codes: tensor cores on the codes as they are.

use super::blocks::{MOST_WEIGHTS, TERNARY, code_kernel, matrices};
use super::gemv::Gemv;
use super::parts::ProductAt;
use super::quantized::narrowed;
use super::slices;
use super::tensor_map::rows_map;
use crate::cuda::{Address, BlockMatrix, Gpu, Grid, Launcher, Module, Scratch, fatbin};
use crate::ops::linear::{Activation, Weight};
use crate::ops::view::dtype_index;
use candle_core::cuda_backend::cudarc::driver::sys;
use candle_core::{DType, Result, bail};
use std::sync::Arc;

const OP: &str = "quant_linear";

/// INT8, INT4 in groups of 128 without zero points, other INT4.
static MODULE: Module = Module::new(
    "quant_tiles",
    fatbin!("quant_tiles"),
    &[
        "quant_tiles_int8",
        "quant_tiles_int4_g128",
        "quant_tiles_int4",
    ],
);

/// Rows of x of a launch, and warps of a block at most.
const ROWS: usize = 64;
const WARPS: usize = 8;

/// Rows of x at most that the kernels for [`slices::ROWS`] take, launch after launch.
const FEW_AT_ONCE: usize = 2 * slices::ROWS;

/// Bytes behind a row of x in shared memory, for INT8 and INT4.
const PADDING: [usize; 2] = [80, 64];

/// Rows of x past which the weights had better become dense for the library.
pub(super) const MOST: usize = 128;

/// Rows of bf16 that the kernels for few rows are the faster for.
const FEW: usize = 1;

/// Values of a step, rows of a unit.
const STEP: usize = 128;
const UNIT: usize = 16;

/// Stages of x that have to fit into shared memory, if not all of them do, and that are worth it.
const SLOTS: [usize; 2] = [3, 4];

/// Bytes that a multiprocessor gets in a nanosecond, of an H100: from memory, and from L2.
const RATES: [f64; 2] = [22., 40.];

/// Nanoseconds around the barrier of a stage, and for adding up and writing the outputs of units.
const STAGE: f64 = 120.;
const FINISH: f64 = 600.;

/// `Tiles` of `kernels/code_tiles.cuh` and `Slices` of `kernels/code_slices.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    product: Gemv,
    shares: [u32; 4],
}

/// `LongSlices` of `kernels/code_long.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct MappedParams {
    x: sys::CUtensorMap,
    params: Params,
}

/// How blocks and warps share a product with a run of weights.
pub(super) struct Form {
    pub module: &'static Module,
    pub kernel: usize,
    /// Rows of x of a launch.
    pub rows: usize,
    /// Warps that share a unit.
    pub split: usize,
    /// Behind the product in the parameters.
    pub shares: [u32; 4],
    /// Whether the copy engine is told of x, in front of the product in the parameters.
    pub maps_x: bool,
    pub grid: Grid,
}

/// Whether the kernels take all of the weights. Inputs of f32 that are few keep their precision
/// elsewhere.
pub(super) fn takes<'a>(
    gpu: &Gpu,
    weights: impl IntoIterator<Item = &'a BlockMatrix>,
    at: &ProductAt,
) -> bool {
    let least = match at.x_dtype {
        DType::BF16 => FEW,
        DType::F32 => super::few::FEW,
        _ => return false,
    };
    let mut weights = weights.into_iter().peekable();
    let first = weights.peek().map(|w| w.format());
    let gates = at.activation == Activation::SwiGlu;
    let (mut count, mut alike) = (0, true);
    let taken = weights.all(|w| {
        count += 1;
        alike &= Some(w.format()) == first;
        w.codes().is_some() && w.format_index() < TERNARY
    });
    gpu.arch >= 80
        && (least + 1..=MOST).contains(&at.m)
        && at.k.is_multiple_of(8)
        && taken
        && !(gates && !(alike && count <= MOST_WEIGHTS))
}

/// Launches the product: once for each run of weights of one format and for as many rows of x as a
/// kernel takes.
///
/// # Safety
/// As [`super::product`].
pub(super) unsafe fn tiles(
    launcher: &Launcher,
    scratch: &mut Scratch,
    weights: &[Weight],
    at: &ProductAt,
) -> Result<()> {
    let mut blocks = Vec::new();
    for weight in weights {
        match weight {
            Weight::Blocks(w) => blocks.push(w.clone()),
            _ => bail!("{OP}: expected weights in codes on a GPU"),
        }
    }
    // SAFETY: the caller's.
    let x = unsafe { narrowed(launcher, scratch, at, DType::BF16)? };
    let few = at.m <= FEW_AT_ONCE;
    let gates = at.activation == Activation::SwiGlu;
    let mut column = 0;
    for run in
        blocks.chunk_by(|a, b| a.format() == b.format() && (!few || gates || slices::ends_whole(a)))
    {
        for run in run.chunks(MOST_WEIGHTS) {
            // SAFETY: the caller's.
            column += unsafe { run_of_weights(launcher, run, x, column, at)? };
        }
    }
    Ok(())
}

/// Launches what weights of one format do, whose outputs begin at `column`, and says how many rows they
/// have; `x` in bf16.
///
/// # Safety
/// As [`super::product`].
unsafe fn run_of_weights(
    launcher: &Launcher,
    run: &[Arc<BlockMatrix>],
    x: Address,
    column: usize,
    at: &ProductAt,
) -> Result<usize> {
    let [x_size, out_size] = [at.x_dtype, at.out_dtype].map(|d| d.size_in_bytes());
    let rows = run.iter().map(|w| w.rows()).sum::<usize>();
    let mut product = Gemv::new(at.k, rows, at.activation);
    matrices(&mut product, run);
    let width = product.width as usize;
    let gates = at.activation == Activation::SwiGlu;
    let few = match at.m <= FEW_AT_ONCE {
        true => slices::form(launcher, run, at.k, width, gates),
        false => None,
    };
    let form = match few {
        Some(form) => form,
        None => plan(launcher.gpu, &run[0], width, at)?.form(&run[0]),
    };
    product.split = form.split as u32;
    product.prologue.dtype = dtype_index(DType::BF16) as i32;
    product.epilogue.bias = behind(at.bias, column, x_size);
    product.epilogue.stride = at.stride as u64;
    product.epilogue.dtype = dtype_index(at.x_dtype) as i32;
    product.epilogue.out_dtype = dtype_index(at.out_dtype) as i32;
    let bytes: usize = run.iter().map(|w| w.size_in_bytes()).sum();
    for start in (0..at.m).step_by(form.rows) {
        product.m = (at.m - start).min(form.rows) as u32;
        product.prologue.x = behind(x, start * at.k, 2);
        let elements = start * at.stride + column;
        product.epilogue.out = behind(at.out, elements, out_size);
        product.epilogue.residuals = at.residuals.map(|r| behind(r, elements, x_size));
        let params = Params {
            product,
            shares: form.shares,
        };
        let launcher = launcher.moving(bytes as u64);
        // SAFETY: the kernels take `Tiles`, `Slices` and `LongSlices`; the addresses are the caller's.
        unsafe {
            if form.maps_x {
                let x = rows_map(product.prologue.x, [product.m as usize, at.k])?;
                let params = MappedParams { x, params };
                launcher.run(form.module, form.kernel, form.grid, &params)?
            } else {
                launcher.run(form.module, form.kernel, form.grid, &params)?
            }
        };
    }
    Ok(rows)
}

/// An address so many elements on; 0 stays 0.
fn behind(base: Address, elements: usize, size: usize) -> Address {
    match base {
        0 => 0,
        base => base + (elements * size) as Address,
    }
}

/// How blocks and warps share a product of tens of rows.
#[derive(Clone, Copy, Debug)]
struct Plan {
    side: usize,
    split: usize,
    slots: usize,
    stages: usize,
    blocks: usize,
    shared: usize,
}

impl Plan {
    fn form(&self, weight: &BlockMatrix) -> Form {
        Form {
            module: &MODULE,
            kernel: code_kernel(weight).min(2),
            rows: ROWS,
            split: self.split,
            shares: [self.side, self.slots, self.stages, 0].map(|n| n as u32),
            maps_x: false,
            grid: Grid::new(
                [self.blocks as u32, 1, 1],
                (32 * self.side * self.split) as u32,
                self.shared as u32,
            ),
        }
    }
}

/// The plan with the shortest time of its busiest multiprocessor.
fn plan(gpu: &Gpu, weight: &BlockMatrix, width: usize, at: &ProductAt) -> Result<Plan> {
    let padding = PADDING[code_kernel(weight).min(1)];
    let outputs = if at.activation == Activation::SwiGlu {
        UNIT / 2
    } else {
        UNIT
    };
    let (units, steps) = (width.div_ceil(outputs), at.k.div_ceil(STEP));
    let of_unit = (weight.size_in_bytes() * UNIT).div_ceil(weight.rows()) as f64;
    let mut best: Option<(f64, Plan)> = None;
    for side in 1..=WARPS.min(units) {
        for split in 1..=(WARPS / side).min(steps) {
            let (stages, slot) = (steps.div_ceil(split), ROWS * (split * 2 * STEP + padding));
            // f32 sums of 16 rows of weights from each warp.
            let sums = side * split * UNIT * ROWS * 4;
            let room = (gpu.shared as usize).saturating_sub(sums) / slot;
            let stays = room >= stages;
            if !stays && room < SLOTS[0] {
                continue;
            }
            let slots = if stays { stages } else { room.min(SLOTS[1]) };
            let sets = units.div_ceil(side);
            let blocks = sets.min(gpu.sms as usize);
            let rounds = sets.div_ceil(blocks) as f64;
            let codes = rounds * side as f64 * of_unit;
            let x = 2. * (ROWS * at.k) as f64 * if stays { 1. } else { rounds };
            let time = (codes / RATES[0]).max((codes + x) / RATES[1]);
            // Warps that are not there hide nothing, and steps that are not there are waited for.
            let idle = WARPS as f64 / (side * split) as f64;
            let filled = (stages * split) as f64 / steps as f64;
            let time = time * (0.8 + 0.2 * idle) * (0.5 + 0.5 * filled);
            // Nothing is multiplied before the first stage of x is there.
            let time = time + slot as f64 / RATES[1] + rounds * (FINISH + stages as f64 * STAGE);
            if best.as_ref().is_none_or(|(least, _)| time < *least) {
                let plan = Plan {
                    side,
                    split,
                    slots,
                    stages,
                    blocks,
                    shared: sums + slots * slot,
                };
                best = Some((time, plan));
            }
        }
    }
    match best {
        Some((_, plan)) => Ok(plan),
        None => bail!(
            "{OP}: {} rows of {} inputs do not fit into the {} bytes of shared memory of a block",
            at.m,
            at.k,
            gpu.shared
        ),
    }
}
