//! The CPU form: the prologue once for each row, then the outputs in cells spread over the pool,
//! each with its epilogue while it is in cache.

use super::Weight;
use super::input::{FEW_TOKENS, Input, grown};
use super::op::LinearOp;
use super::tile::{Finish, Guard, Product, Target, guard};
use crate::cpu::grid::{Costs, TaskGrid};
use crate::cpu::packed::{Q8Activations, ROW_GROUP};
use crate::cpu::simd::{self, Level};
use crate::ops::view::{Float, cpu_storage, dispatch_float, elements, gathered};
use crate::pool;
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result, Shape, Tensor};
use std::cell::RefCell;
use std::ops::Range;

/// Cells of products with packed weights, which unpack weights and fetch tokens that other cores have quantized. The
/// f32 tile of the largest (128 KB) stays in the second-level cache beside the weights it is made from.
const PACKED: Costs = Costs {
    token: 12,
    row: 6,
    task: 64 * 1024,
    unit: (8, ROW_GROUP),
    least: 32,
    most: (256, 128),
};

/// The same in AMX's tiles. Tokens are in tiles already, and weights are dequantized for the tokens of a cell.
const TILES: Costs = Costs {
    token: 4,
    row: 100,
    task: 512 * 1024,
    unit: (32, 2 * ROW_GROUP),
    least: 96,
    most: (512, 256),
};

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
    let mut input = Input::take_cached(m);
    input.fill(op, level, &x, (m, k))?;
    let quantized = &input.quantized;
    let packed = op.weights.iter().any(|w| matches!(w, Weight::Packed(_)));
    trace::record(op.name, || {
        let kernels = kernels(op.weights, level, quantized, m);
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
        input: input.rows(op, &x),
        quantized: packed.then_some(quantized),
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
    input.return_to_cache(m);
    Ok((T::to_cpu_storage_owned(out), shape))
}

/// All cells of the output.
fn run<T: Float>(product: &Product<'_>, finish: &Finish<'_, T>, m: usize) -> Vec<T> {
    let width = finish.width;
    let mut out = Vec::with_capacity(m * width);
    let target = Target(out.as_mut_ptr());
    let cell = |tokens: Range<usize>, columns: Range<usize>| {
        RESULTS.with_borrow_mut(|[first, second]| {
            let (rows, cols) = (tokens.len(), columns.len());
            let first = grown(first, rows * cols);
            product.cell(columns.clone(), tokens.clone(), first);
            let gated = finish.activation.gate().is_some();
            let second = grown(second, if gated { rows * cols } else { 0 });
            if gated {
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
    if m <= FEW_TOKENS {
        pool::for_ranges(width, ROW_GROUP, |columns| cell(0..m, columns));
    } else {
        let (shape, threads) = ((m, width, product.k), pool::threads());
        let grid = match product.quantized {
            Some(x) if product.is_packed() => {
                let costs = if x.has_tiles() { &TILES } else { &PACKED };
                TaskGrid::balanced(costs, shape, threads)
            }
            // Dense weights beside packed ones: in cells of fewer tokens their sums would be in another order.
            Some(_) => TaskGrid::balanced(&PACKED, shape, 1),
            None => product.dense_grid(shape, threads),
        };
        pool::run(grid.cells(), |task| {
            let (tokens, columns) = grid.cell(task);
            cell(tokens, columns);
        });
    }
    // SAFETY: the cells cover all `m * width` elements, and each wrote its own through `target`.
    unsafe { out.set_len(m * width) };
    out
}

thread_local! {
    /// The f32 tile of the cell in hand, and that of the gated half.
    static RESULTS: RefCell<[Vec<f32>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// What the products run on, for the trace: the kernels of packed weights, the level for dense ones.
fn kernels(weights: &[Weight], level: Level, quantized: &Q8Activations, m: usize) -> String {
    let mut names: Vec<_> = weights
        .iter()
        .map(|weight| match weight {
            Weight::Packed(w) => w.kernel_name(level, quantized, m.min(PACKED.most.0)),
            _ => level.name(),
        })
        .collect();
    names.sort_unstable();
    names.dedup();
    names.join("/")
}

fn widened<T: Float>(t: &Tensor) -> Result<Vec<f32>> {
    let (storage, layout) = t.storage_and_layout();
    Ok(elements::<T>(cpu_storage(&storage)?, layout)?
        .iter()
        .map(|v| v.to_f32())
        .collect())
}
