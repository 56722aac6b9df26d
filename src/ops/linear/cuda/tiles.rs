//! Some tens of rows of x and weights in INT8 or INT4 codes: tensor cores on the codes as they are.

use super::blocks::{MOST_WEIGHTS, TERNARY, code_kernel, matrices};
use super::gemv::Gemv;
use super::parts::ProductAt;
use super::quantized::narrowed;
use crate::cuda::{Address, BlockMatrix, Gpu, Grid, Launcher, Module, Scratch, fatbin};
use crate::ops::linear::{Activation, Weight};
use crate::ops::view::dtype_index;
use candle_core::{DType, Result, bail};

const OP: &str = "quant_linear";

/// INT8, INT4 in groups of 128, other INT4; each for [`SHAPES`] in turn.
static MODULE: Module = Module::new(
    "quant_tiles",
    fatbin!("quant_tiles"),
    &[
        "quant_tiles_16_int8",
        "quant_tiles_64_int8",
        "quant_tiles_16_int4_g128",
        "quant_tiles_64_int4_g128",
        "quant_tiles_16_int4",
        "quant_tiles_64_int4",
    ],
);

/// Rows of x of a launch, warps of a block at most, and the steps that a warp takes at a time, of INT8
/// and INT4.
const SHAPES: [(usize, usize, [usize; 2]); 2] = [(16, 16, [1, 2]), (64, 8, [1, 1])];

/// Bytes behind a row of x in shared memory, for the same two.
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

/// `Tiles` of `kernels/code_tiles.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct TilesParams {
    product: Gemv,
    side: u32,
    slots: u32,
    stages: u32,
    unused: u32,
}

/// How blocks and warps share a product.
#[derive(Clone, Copy, Debug)]
struct Plan {
    side: usize,
    split: usize,
    slots: usize,
    stages: usize,
    blocks: usize,
    shared: usize,
}

/// Which kernel of the module, less the shape, and of [`PADDING`], takes the weight.
fn kernel_of(weight: &BlockMatrix) -> (usize, usize) {
    // INT8, INT4 in groups of 128 without zero points, other INT4.
    let kernel = code_kernel(weight).min(2);
    (2 * kernel, kernel.min(1))
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
    let shape = usize::from(at.m > 2 * SHAPES[0].0);
    let [x_size, out_size] = [at.x_dtype, at.out_dtype].map(|d| d.size_in_bytes());
    let mut column = 0;
    for run in blocks.chunk_by(|a, b| a.format() == b.format()) {
        for run in run.chunks(MOST_WEIGHTS) {
            let rows = run.iter().map(|w| w.rows()).sum::<usize>();
            let mut product = Gemv::new(at.k, rows, at.activation);
            matrices(&mut product, run);
            let plan = plan(launcher.gpu, &run[0], shape, product.width as usize, at)?;
            product.split = plan.split as u32;
            product.prologue.dtype = dtype_index(DType::BF16) as i32;
            product.epilogue.bias = behind(at.bias, column, x_size);
            product.epilogue.stride = at.stride as u64;
            product.epilogue.dtype = dtype_index(at.x_dtype) as i32;
            product.epilogue.out_dtype = dtype_index(at.out_dtype) as i32;
            let (most, _, _) = SHAPES[shape];
            let grid = Grid::new(
                [plan.blocks as u32, 1, 1],
                (32 * plan.side * plan.split) as u32,
                plan.shared as u32,
            );
            let bytes: usize = run.iter().map(|w| w.size_in_bytes()).sum();
            for start in (0..at.m).step_by(most) {
                product.m = (at.m - start).min(most) as u32;
                product.prologue.x = behind(x, start * at.k, 2);
                let elements = start * at.stride + column;
                product.epilogue.out = behind(at.out, elements, out_size);
                product.epilogue.residuals = at.residuals.map(|r| behind(r, elements, x_size));
                let params = TilesParams {
                    product,
                    side: plan.side as u32,
                    slots: plan.slots as u32,
                    stages: plan.stages as u32,
                    unused: 0,
                };
                let kernel = kernel_of(&run[0]).0 + shape;
                // SAFETY: the kernels take `Tiles`; the addresses are the caller's.
                unsafe {
                    launcher
                        .moving(bytes as u64)
                        .run(&MODULE, kernel, grid, &params)?
                };
            }
            column += rows;
        }
    }
    Ok(())
}

/// An address so many elements on; 0 stays 0.
fn behind(base: Address, elements: usize, size: usize) -> Address {
    match base {
        0 => 0,
        base => base + (elements * size) as Address,
    }
}

/// The plan with the shortest time of its busiest multiprocessor.
fn plan(
    gpu: &Gpu,
    weight: &BlockMatrix,
    shape: usize,
    width: usize,
    at: &ProductAt,
) -> Result<Plan> {
    let (rows, warps, depths) = SHAPES[shape];
    let kind = kernel_of(weight).1;
    let (depth, padding) = (depths[kind], PADDING[kind]);
    let outputs = if at.activation == Activation::SwiGlu {
        UNIT / 2
    } else {
        UNIT
    };
    let (units, steps) = (width.div_ceil(outputs), at.k.div_ceil(STEP));
    let of_unit = (weight.size_in_bytes() * UNIT).div_ceil(weight.rows()) as f64;
    let mut best: Option<(f64, Plan)> = None;
    for side in 1..=warps.min(units) {
        for split in 1..=(warps / side).min(steps.div_ceil(depth)) {
            let span = split * depth;
            let (stages, slot) = (steps.div_ceil(span), rows * (span * 2 * STEP + padding));
            // f32 sums of 16 rows of weights from each warp.
            let sums = side * split * UNIT * rows * 4;
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
            let x = 2. * (rows * at.k) as f64 * if stays { 1. } else { rounds };
            let time = (codes / RATES[0]).max((codes + x) / RATES[1]);
            // Warps that are not there hide nothing, and steps that are not there are waited for.
            let idle = warps as f64 / (side * split) as f64;
            let filled = (stages * span) as f64 / steps as f64;
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
