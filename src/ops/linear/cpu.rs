//! The CPU form: the prologue once for each row, then the outputs in cells spread over the pool,
//! each with its epilogue while it is in cache.

use super::op::LinearOp;
use super::tile::{Finish, Guard, Product, Target, guard};
use super::{ActivationBits, Prologue, Weight};
use crate::cpu::packed::{Grain, PackedMatrix, Q8Activations, ROW_GROUP};
use crate::cpu::simd::{self, Level};
use crate::cpu::{dense, norm, pool};
use crate::ops::view::{Float, cpu_storage, dispatch_float, elements, gathered};
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result, Shape, Tensor};
use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::ops::Range;

/// Rows of x above which the prologue is worth a fork of its own.
const PARALLEL_PROLOGUE: usize = 8;

/// A cell's size when there are many rows and packed weights: its f32 tile (128 KB) stays in the L2 cache beside the
/// weights it is made from.
const CELL: (usize, usize) = (256, 128);

/// Tokens of a dense cell's tile at most: what a thread keeps for it stays small however long the
/// prompt is, and a weight packed for as many costs little.
const MAX_TOKENS: usize = 512;

pub(super) fn forward(
    op: &LinearOp<'_>,
    x: &CpuStorage,
    layout: &Layout,
) -> Result<(CpuStorage, Shape)> {
    dispatch_float!(x.dtype(), op.name, "x", T => forward_as::<T>(op, x, layout))
}

fn forward_as<T: Float>(
    op: &LinearOp<'_>,
    x: &CpuStorage,
    layout: &Layout,
) -> Result<(CpuStorage, Shape)> {
    let level = simd::level();
    let mut dims = layout.dims().to_vec();
    let k = dims.pop().unwrap_or(1);
    let m = dims.iter().product::<usize>();
    dims.push(op.width());
    let shape = Shape::from(dims);

    let x = elements::<T>(x, layout)?;
    let kept = if m <= PARALLEL_PROLOGUE {
        INPUT.take()
    } else {
        Input::default()
    };
    let Input {
        mut normed,
        mut quantized,
    } = kept;
    let input = prologue(level, op.prologue, &x, k, &mut normed)?;
    let packed = op.weights.iter().any(|w| matches!(w, Weight::Packed(_)));
    if packed {
        activations(op, level, &input, (m, k), &mut quantized)?;
    }
    trace::record(op.name, || {
        let kernels = kernels(op.weights, level, &quantized, m);
        let bits = match (packed, quantized.grain().fine) {
            (false, _) => "",
            (_, false) => " x8",
            (_, true) => " x16",
        };
        format!("cpu {kernels}{bits} {}{}", op.path(), gathered(layout))
    });

    let guards: Vec<_> = op.weights.iter().map(guard).collect();
    let matrices = guards
        .iter()
        .map(Guard::matrix)
        .collect::<Result<Vec<_>>>()?;
    let bias = op.epilogue.bias.map(widened::<T>).transpose()?;
    let residual_guards: Vec<_> = op
        .epilogue
        .residuals
        .iter()
        .map(|r| r.storage_and_layout())
        .collect();
    let residuals = residual_guards
        .iter()
        .map(|(storage, layout)| elements::<T>(cpu_storage(storage)?, layout))
        .collect::<Result<Vec<_>>>()?;

    let product = Product {
        level,
        input: &input,
        quantized: packed.then_some(&quantized),
        k,
        matrices,
    };
    let finish = Finish {
        level,
        activation: op.epilogue.activation,
        bias: bias.as_deref(),
        residuals: &residuals,
        width: op.width(),
    };
    let out = run(&product, &finish, m);
    if m <= PARALLEL_PROLOGUE {
        INPUT.set(Input { normed, quantized });
    }
    Ok((T::to_cpu_storage_owned(out), shape))
}

/// All cells of the output.
fn run<T: Float>(product: &Product<'_>, finish: &Finish<'_, T>, m: usize) -> Vec<T> {
    let width = finish.width;
    let mut out = Vec::with_capacity(m * width);
    let target = Target(out.as_mut_ptr());
    let cell = |tokens: Range<usize>, columns: Range<usize>| {
        TILES.with_borrow_mut(|[first, second]| {
            let (rows, cols) = (tokens.len(), columns.len());
            first.resize(rows * cols, 0.);
            product.cell(columns.clone(), tokens.clone(), first);
            let gated = finish.activation.gate().is_some();
            if gated {
                second.resize(rows * cols, 0.);
                let up = columns.start + width..columns.end + width;
                product.cell(up, tokens.clone(), second);
            }
            for (i, token) in tokens.enumerate() {
                let row = i * cols..(i + 1) * cols;
                let up = if gated {
                    Some(&mut second[row.clone()])
                } else {
                    None
                };
                finish.row(&mut first[row], up, token, &columns, &target);
            }
        });
    };
    if m <= PARALLEL_PROLOGUE {
        pool::for_ranges(width, ROW_GROUP, |columns| cell(0..m, columns));
    } else if product.quantized.is_some() {
        let (high, wide) = CELL;
        let across = width.div_ceil(wide);
        pool::run(m.div_ceil(high) * across, |task| {
            let (i, j) = (task / across * high, task % across * wide);
            cell(i..(i + high).min(m), j..(j + wide).min(width));
        });
    } else {
        let grid = dense::task_grid(m, width, product.k, pool::threads());
        pool::run(grid.cells(), |task| {
            let (tokens, columns) = grid.cell(task);
            for start in tokens.clone().step_by(MAX_TOKENS) {
                cell(start..(start + MAX_TOKENS).min(tokens.end), columns.clone());
            }
        });
    }
    // SAFETY: the cells cover all `m * width` elements, and each wrote its own through `target`.
    unsafe { out.set_len(m * width) };
    out
}

/// The rows of x as the products read them.
#[derive(Default)]
struct Input {
    normed: Vec<f32>,
    quantized: Q8Activations,
}

thread_local! {
    /// That of few rows, kept from step to step, so that it is not allocated each time.
    static INPUT: Cell<Input> = Cell::default();
    /// The f32 tile of the cell in hand, and that of the gated half.
    static TILES: RefCell<[Vec<f32>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// The input rows, widened and normalised, in `out` where they are not x's own.
fn prologue<'a, T: Float>(
    level: Level,
    prologue: Prologue<'_>,
    x: &'a [T],
    k: usize,
    out: &'a mut Vec<f32>,
) -> Result<Cow<'a, [f32]>> {
    let (weight, bias) = match prologue {
        Prologue::None => return Ok(T::widen_slice(x)),
        Prologue::RmsNorm { weight, .. } => (weight, None),
        Prologue::LayerNorm { weight, bias, .. } => (weight, bias),
    };
    let (storage, layout) = weight.storage_and_layout();
    let weight = elements::<T>(cpu_storage(&storage)?, layout)?;
    let bias = bias.map(|b| b.storage_and_layout());
    let bias = match &bias {
        Some((storage, layout)) => Some(elements::<T>(cpu_storage(storage)?, layout)?),
        None => None,
    };
    let norm = |x: &[T], row: &mut [f32]| match prologue {
        Prologue::LayerNorm { eps, .. } => {
            norm::layer_norm(level, x, &weight, bias.as_deref(), eps as f32, row)
        }
        Prologue::RmsNorm { eps, .. } => norm::rms_norm(level, x, &weight, eps as f32, row),
        Prologue::None => {}
    };
    out.resize(x.len(), 0.);
    pool::for_rows(out, k, PARALLEL_PROLOGUE, |first, rows| {
        for (i, row) in rows.chunks_exact_mut(k).enumerate() {
            norm(&x[(first + i) * k..][..k], row);
        }
    });
    Ok(Cow::Borrowed(out))
}

/// Fills `quantized` with the input in 8 or 16 bits and what the weights need beside it.
fn activations(
    op: &LinearOp<'_>,
    level: Level,
    input: &[f32],
    (m, k): (usize, usize),
    quantized: &mut Q8Activations,
) -> Result<()> {
    let wide = k.next_multiple_of(32);
    let input = padded(input, k, wide);
    let all = |holds: fn(&PackedMatrix) -> bool| {
        let holds = |w: &Weight| matches!(w, Weight::Packed(w) if holds(w));
        op.weights.iter().all(holds)
    };
    let grain = Grain {
        wide: all(PackedMatrix::takes_wide),
        whole: op.bits == ActivationBits::PerToken8,
        fine: op.bits.are_16(m, all(PackedMatrix::is_ternary)),
    };
    quantized.refill_by(level, &input, (m, wide), grain)?;
    let looks_up = |w: &Weight| matches!(w, Weight::Packed(w) if w.looks_up(m));
    if op.weights.iter().any(looks_up) {
        quantized.prepare_look_ups(level);
    }
    Ok(())
}

/// What the products run on, for the trace: the kernels of packed weights, the level for dense ones.
fn kernels(weights: &[Weight], level: Level, quantized: &Q8Activations, m: usize) -> String {
    let mut names: Vec<_> = weights
        .iter()
        .map(|weight| match weight {
            Weight::Packed(w) => w.kernel_name(level, quantized, m.min(CELL.0)),
            _ => level.name(),
        })
        .collect();
    names.sort_unstable();
    names.dedup();
    names.join("/")
}

/// Rows of `k` values with zeros behind them up to `wide`.
fn padded(rows: &[f32], k: usize, wide: usize) -> Cow<'_, [f32]> {
    if k == wide {
        return Cow::Borrowed(rows);
    }
    let mut out = vec![0f32; rows.len() / k.max(1) * wide];
    for (row, out) in rows.chunks_exact(k).zip(out.chunks_exact_mut(wide)) {
        out[..k].copy_from_slice(row);
    }
    Cow::Owned(out)
}

fn widened<T: Float>(t: &Tensor) -> Result<Vec<f32>> {
    let (storage, layout) = t.storage_and_layout();
    Ok(elements::<T>(cpu_storage(&storage)?, layout)?
        .iter()
        .map(|v| v.to_f32())
        .collect())
}
