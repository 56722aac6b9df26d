//! Many rows against many keys: a prompt, or a chunk of one.
//!
//! Scores are formed transposed, a row of the task in each lane: `S' = K Q'` reads keys one element
//! at a time wherever they lie, and softmax runs over the keys without crossing lanes.

use super::block::{self, Left, Rows};
use super::{Plan, Task, View, padded};
use crate::cpu::math::{exp_weight_v, tanh_v};
use crate::cpu::vector::{Element, Vector, is_f32};

/// Keys between two corrections of the running maximum.
const KEYS: usize = 96;

/// Scratch elements that [`run`] uses.
pub(super) fn scratch(plan: &Plan, dim: usize) -> usize {
    let (rows, width) = (padded(plan.rows()), padded(dim));
    // Transposed queries and scores, one query row, factors, bounds, copies of keys and values.
    width * rows + KEYS * rows + width + 3 * rows + 2 * KEYS * width
}

/// The parts of the scratch.
struct Parts {
    queries: *mut f32,
    scores: *mut f32,
    factors: *mut f32,
    /// For each row, the first key it sees and the end of its keys, as floats, counted from the
    /// block's first key.
    low: *mut f32,
    high: *mut f32,
    keys: *mut f32,
    values: *mut f32,
}

/// Attends the task's rows over its keys, into its state.
///
/// # Safety
/// The processor has `V`'s instructions; state and scratch have the room that the plan asks for.
#[inline(always)]
pub(super) unsafe fn run<V: Vector, T: Element>(task: &Task<'_, T>) {
    let p = task.problem;
    let (rows, dim) = (task.rows(), p.sizes.dim);
    let (lanes, width) = (padded(rows), padded(dim));
    let (first, end) = task.reach();
    // SAFETY: the parts are as counted in `scratch`; keys stay below `end`.
    unsafe {
        let queries = task.scratch;
        let scores = queries.add(width * lanes);
        let factors = scores.add(KEYS * lanes);
        let (low, high) = (factors.add(lanes), factors.add(2 * lanes));
        let keys = factors.add(3 * lanes);
        let values = keys.add(KEYS * width);
        let parts = Parts {
            queries,
            scores,
            factors,
            low,
            high,
            keys,
            values,
        };
        transpose_queries::<V, T>(task, &parts, values.add(KEYS * width));
        let mut key = first;
        while key < end {
            let n = KEYS.min(end - key);
            // Keys are read an element at a time, values in whole vectors.
            let keys = rows_of::<V, T>(task, &p.k, key, n, true, parts.keys);
            let whole = dim.is_multiple_of(V::LANES);
            let values = rows_of::<V, T>(task, &p.v, key, n, whole, parts.values);
            score::<V, T>(task, &parts, key, n, keys);
            accumulate::<V, T>(task, &parts, key, n, values);
            key += n;
        }
    }
}

/// Keys or values `from .. from + n` as f32: where they lie, if they are f32 in one piece each, evenly apart, and
/// `direct` is set, else copied to `room`.
#[inline(always)]
unsafe fn rows_of<V: Vector, T: Element>(
    task: &Task<'_, T>,
    x: &View<'_, T>,
    from: usize,
    n: usize,
    direct: bool,
    room: *mut f32,
) -> Rows<*const f32> {
    // SAFETY: the keys exist and `room` is for `KEYS` rows; the cast is from f32 to f32.
    unsafe {
        let even = x.strides[3] == 1 && x.run(from, n) == n;
        if direct && even && is_f32::<T>() {
            let at = x.row(task.batch, task.kv_head, from).cast();
            return Rows {
                at,
                row: x.strides[2],
            };
        }
        task.copy_rows::<V>(x, from, n, room);
    }
    Rows {
        at: room,
        row: padded(task.problem.sizes.dim),
    }
}

/// Queries as columns: element `d` of row `r` at `d * padded(rows) + r`.
#[inline(always)]
unsafe fn transpose_queries<V: Vector, T: Element>(
    task: &Task<'_, T>,
    parts: &Parts,
    row: *mut f32,
) {
    let (rows, dim) = (task.rows(), task.problem.sizes.dim);
    let lanes = padded(rows);
    // SAFETY: `row` has room for a padded row, `queries` for `dim` times `lanes`.
    unsafe {
        for r in 0..lanes {
            // Lanes past the last row repeat it; nobody reads their results.
            if r < rows {
                task.load_query::<V>(r, row);
            }
            for d in 0..dim {
                *parts.queries.add(d * lanes + r) = *row.add(d);
            }
        }
    }
}

/// Scores of `n` keys from `key` on, turned into weights.
#[inline(always)]
unsafe fn score<V: Vector, T: Element>(
    task: &Task<'_, T>,
    parts: &Parts,
    key: usize,
    n: usize,
    keys: Rows<*const f32>,
) {
    let p = task.problem;
    let rows = task.rows();
    let (group, lanes) = (p.plan.group, padded(rows));
    let used = rows.next_multiple_of(V::LANES);
    let mut r = 0;
    while r < used {
        let vectors = if r + 2 * V::LANES <= used { 2 } else { 1 };
        let last = (r + vectors * V::LANES).min(rows) - 1;
        // What the rows `r ..= last` see of the block, as a whole and all of them.
        let (start, stop) = (task.visible(r / group).0, task.visible(last / group).1);
        let (start, stop) = (
            start.clamp(key, key + n) - key,
            stop.clamp(key, key + n) - key,
        );
        let (full_start, full_stop) = (task.visible(last / group).0, task.visible(r / group).1);
        // SAFETY: rows below `used` and keys below `n` are within the scratch.
        unsafe {
            let column = Rows {
                at: parts.scores.add(r),
                row: lanes,
            };
            if start < stop {
                let left = Left {
                    at: keys.at.add(start * keys.row),
                    row: keys.row,
                    step: 1,
                };
                let right = Rows {
                    at: parts.queries.add(r).cast_const(),
                    row: lanes,
                };
                let into = Rows {
                    at: column.at.add(start * lanes),
                    row: lanes,
                };
                let size = (stop - start, vectors, p.sizes.dim);
                block::multiply::<V, f32, false>(size, left, right, into, parts.factors);
            }
            for i in (0..start).chain(stop..n) {
                for j in 0..vectors {
                    V::splat(0.0).store(column.at.add(i * lanes + j * V::LANES));
                }
            }
            cap_and_mask::<V, T>(task, column, r, last, (key, start, stop));
            if full_start > key + start || full_stop < key + stop {
                hide::<V, T>(task, parts, column, r, vectors, (key, start, stop));
            }
            for j in 0..vectors {
                soften::<V, T>(task, parts, column, r + j * V::LANES, j, (start, stop));
            }
        }
        r += vectors * V::LANES;
    }
}

/// Applies the softcap, the mask and what distances take off to the scores of rows `r ..= last`.
#[inline(always)]
unsafe fn cap_and_mask<V: Vector, T: Element>(
    task: &Task<'_, T>,
    column: Rows<*mut f32>,
    r: usize,
    last: usize,
    (key, start, stop): (usize, usize, usize),
) {
    let rule = &task.problem.rule;
    // SAFETY: as in `score`.
    unsafe {
        if let Some(cap) = rule.softcap {
            for i in start..stop {
                for j in (0..=last - r).step_by(V::LANES) {
                    let at = column.at.add(i * column.row + j);
                    tanh_v(V::load(at).div(V::splat(cap)))
                        .mul(V::splat(cap))
                        .store(at);
                }
            }
        }
        if let Some(mask) = &rule.mask {
            for row in r..=last {
                let (mask, stride) = task.mask(mask, row, key);
                for i in start..stop {
                    *column.at.add(i * column.row + row - r) += *mask.add(i * stride);
                }
            }
        }
        if let Some(slopes) = rule.slopes {
            for row in r..=last {
                let (slope, position) = task.slope(slopes, row);
                for i in start..stop {
                    let distance = position.abs_diff((key + i) as i64) as f32;
                    *column.at.add(i * column.row + row - r) -= slope * distance;
                }
            }
        }
    }
}

/// Sets to -inf what a row does not see.
#[inline(always)]
unsafe fn hide<V: Vector, T: Element>(
    task: &Task<'_, T>,
    parts: &Parts,
    column: Rows<*mut f32>,
    r: usize,
    vectors: usize,
    (key, start, stop): (usize, usize, usize),
) {
    let (rows, group) = (task.rows(), task.problem.plan.group);
    // SAFETY: as in `score`; bounds are small, so floats hold them exactly.
    unsafe {
        for row in r..r + vectors * V::LANES {
            let (low, high) = task.visible(row.min(rows - 1) / group);
            *parts.low.add(row) = (low.clamp(key + start, key + stop) - key) as f32;
            *parts.high.add(row) = (high.clamp(key + start, key + stop) - key) as f32;
        }
        let hidden = V::splat(f32::NEG_INFINITY);
        for j in (0..vectors * V::LANES).step_by(V::LANES) {
            let (low, high) = (
                V::load(parts.low.add(r + j)),
                V::load(parts.high.add(r + j)),
            );
            for i in start..stop {
                let at = column.at.add(i * column.row + j);
                let here = V::splat(i as f32);
                let score = here.where_less(high, V::load(at), hidden);
                here.where_less(low, hidden, score).store(at);
            }
        }
    }
}

/// Turns one vector of rows' scores into weights `e^(score - maximum)`, updates maxima and sums,
/// and leaves the factors for what was summed up before.
#[inline(always)]
unsafe fn soften<V: Vector, T: Element>(
    task: &Task<'_, T>,
    parts: &Parts,
    column: Rows<*mut f32>,
    r: usize,
    j: usize,
    (start, stop): (usize, usize),
) {
    // SAFETY: as in `score`; maxima and sums have room for whole vectors.
    unsafe {
        let at = column.at.add(j * V::LANES);
        let before = V::load(task.state.max.add(r));
        let mut max = before;
        for i in start..stop {
            max = V::load(at.add(i * column.row)).max(max);
        }
        // With no visible key so far every weight is e^-inf = 0, whatever is taken off.
        let taken = max.where_less(V::splat(f32::MIN), V::splat(0.0), max);
        let mut sum = V::splat(0.0);
        for i in start..stop {
            let weight = exp_weight_v(V::load(at.add(i * column.row)).sub(taken));
            weight.store(at.add(i * column.row));
            sum = sum.add(weight);
        }
        let factor = exp_weight_v(before.sub(taken));
        factor.store(parts.factors.add(r));
        max.store(task.state.max.add(r));
        V::load(task.state.sum.add(r))
            .mul_add(factor, sum)
            .store(task.state.sum.add(r));
    }
}

/// `out = factor * out + weights * values`, six rows at a time over the keys that any of them sees.
#[inline(always)]
unsafe fn accumulate<V: Vector, T: Element>(
    task: &Task<'_, T>,
    parts: &Parts,
    key: usize,
    n: usize,
    values: Rows<*const f32>,
) {
    let p = task.problem;
    let rows = task.rows();
    let (group, lanes, width) = (p.plan.group, padded(rows), padded(p.sizes.dim));
    let mut r = 0;
    while r < rows {
        let m = 6.min(rows - r);
        let start = task.visible(r / group).0.clamp(key, key + n) - key;
        let stop = task.visible((r + m - 1) / group).1.clamp(key, key + n) - key;
        // SAFETY: rows below `rows` and keys below `n` are within state and scratch.
        unsafe {
            let at = parts.scores.add(start * lanes + r).cast_const();
            let left = Left {
                at,
                row: 1,
                step: lanes,
            };
            let right = Rows {
                at: values.at.add(start * values.row),
                ..values
            };
            let out = Rows {
                at: task.state.out.add(r * width),
                row: width,
            };
            let size = (
                m,
                p.sizes.dim.div_ceil(V::LANES),
                stop.saturating_sub(start),
            );
            block::multiply::<V, f32, true>(size, left, right, out, parts.factors.add(r));
        }
        r += 6;
    }
}
