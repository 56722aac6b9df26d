//! Few rows against many keys: a decode step.

use super::block::{self, Left, Rows};
use super::{Plan, Task, View, padded};
use crate::cpu::math::{exp_weight_v, tanh_v};
use crate::cpu::simd::prefetch;
use crate::cpu::vector::{Element, Vector};

/// Keys between two corrections of the running maximum.
const KEYS: usize = 128;

/// Keys that are prefetched at a time, and how many keys ahead of their use. Three and four keys, of which dot products
/// are made together, divide it.
const STEP: usize = 12;
const AHEAD: usize = 32;

/// Scratch elements that [`run`] uses.
pub(super) fn scratch(plan: &Plan, dim: usize) -> usize {
    let rows = plan.rows();
    // Queries, scores, factors, ones, and a block of keys or values where it has to be copied.
    rows * padded(dim) + rows * (KEYS + 16) + 2 * padded(rows) + KEYS * padded(dim)
}

/// Attends the task's rows over its keys, into its state.
///
/// # Safety
/// The processor has `V`'s instructions; state and scratch have the room that the plan asks for.
#[inline(always)]
pub(super) unsafe fn run<V: Vector, T: Element>(task: &Task<'_, T>) {
    let p = task.problem;
    let (rows, dim) = (task.rows(), p.sizes.dim);
    let width = padded(dim);
    let (first, end) = task.reach();
    // SAFETY: the five parts of the scratch, as counted above; keys stay below `end`.
    unsafe {
        let q = task.scratch;
        let scores = q.add(rows * width);
        let factors = scores.add(rows * (KEYS + 16));
        let ones = factors.add(padded(rows));
        let copy = ones.add(padded(rows));
        for r in 0..rows {
            *ones.add(r) = 1.0;
        }
        for r in 0..rows {
            task.load_query::<V>(r, q.add(r * width));
        }
        let q = Rows {
            at: q.cast_const(),
            row: width,
        };
        let scores = Rows {
            at: scores,
            row: KEYS + 16,
        };
        let out = Rows {
            at: task.state.out,
            row: width,
        };
        let mut key = first;
        while key < end {
            let n = KEYS.min(end - key);
            dots_of_block::<V, T>(task, (key, n), (q, scores), copy);
            for r in 0..rows {
                let row = scores.at.add(r * scores.row);
                *factors.add(r) = soften::<V, T>(task, r, key, n, row);
            }
            let left = Left {
                at: scores.at,
                row: scores.row,
                step: 1,
            };
            add_values::<V, T>(task, (key, n), (left, out), [factors, ones], copy);
            key += n;
        }
    }
}

/// Whether rows of keys or values are read where they are: whole vectors, side by side, without scales.
#[inline(always)]
fn in_place<V: Vector, T: Element>(task: &Task<'_, T>, x: &View<'_, T>) -> bool {
    x.scales.is_none() && x.strides[3] == 1 && task.problem.sizes.dim.is_multiple_of(V::LANES)
}

/// Dot products of the task's rows with the keys `key .. key + n`; `copy` has room for a block of them.
///
/// # Safety
/// As for [`run`]; the keys exist.
#[inline(always)]
unsafe fn dots_of_block<V: Vector, T: Element>(
    task: &Task<'_, T>,
    (key, n): (usize, usize),
    (q, scores): (Rows<*const f32>, Rows<*mut f32>),
    copy: *mut f32,
) {
    let (rows, keys) = (task.rows(), &task.problem.k);
    let (row, vectors) = (
        padded(task.problem.sizes.dim),
        task.problem.sizes.dim.div_ceil(V::LANES),
    );
    // SAFETY: the caller's.
    unsafe {
        if !in_place::<V, T>(task, keys) {
            task.copy_rows::<V>(keys, key, n, copy);
            let at = copy.cast_const();
            return block::dots::<V, f32>((rows, vectors, n), q, Rows { at, row }, scores);
        }
        // What is written past a run's end is written again by the next one.
        for (done, count, keys) in runs(task, keys, key, n) {
            let mut first = 0;
            while first < count {
                let len = STEP.min(count - first);
                prefetch_rows(task, key + done + first, len);
                let at = scores.at.add(done + first);
                let at = Rows { at, ..scores };
                let keys = Rows {
                    at: keys.at.add(first * keys.row),
                    ..keys
                };
                block::dots::<V, T>((rows, vectors, len), q, keys, at);
                first += len;
            }
        }
    }
}

/// Prefetches the values `key .. key + n` and as many keys, [`AHEAD`] later. The hardware's prefetching stops where rows of
/// a head do not lie side by side, as from page to page.
///
/// # Safety
/// The values exist.
#[inline(always)]
unsafe fn prefetch_rows<T: Element>(task: &Task<'_, T>, key: usize, n: usize) {
    let p = task.problem;
    let (ahead, end) = (key + AHEAD, task.reach().1);
    let later = n.min(end.saturating_sub(ahead));
    for (x, first, n) in [(&p.k, ahead, later), (&p.v, key, n)] {
        // SAFETY: these keys are below the task's end.
        for (_, count, rows) in unsafe { runs(task, x, first, n) } {
            for i in 0..count {
                for line in 0..(p.sizes.dim * size_of::<T>()).div_ceil(64) {
                    let row = rows.at.wrapping_add(i * rows.row);
                    prefetch::<2, _>(row.wrapping_byte_add(64 * line));
                }
            }
        }
    }
}

/// Adds the values `key .. key + n`, weighted by `left`, to `out` times `factors`.
///
/// # Safety
/// As for [`run`]; the values exist, and `ones` are as many as the task has rows.
#[inline(always)]
unsafe fn add_values<V: Vector, T: Element>(
    task: &Task<'_, T>,
    (key, n): (usize, usize),
    (left, out): (Left, Rows<*mut f32>),
    [factors, ones]: [*const f32; 2],
    copy: *mut f32,
) {
    let (rows, values) = (task.rows(), &task.problem.v);
    let (row, vectors) = (
        padded(task.problem.sizes.dim),
        task.problem.sizes.dim.div_ceil(V::LANES),
    );
    // SAFETY: the caller's.
    unsafe {
        if !in_place::<V, T>(task, values) {
            task.copy_rows::<V>(values, key, n, copy);
            let (at, size) = (copy.cast_const(), (rows, vectors, n));
            return block::multiply::<V, f32, true>(size, left, Rows { at, row }, out, factors);
        }
        for (done, count, values) in runs(task, values, key, n) {
            let at = left.at.add(done);
            // What the first run has added to has the block's maximum already.
            let factors = if done == 0 { factors } else { ones };
            let size = (rows, vectors, count);
            block::multiply::<V, T, true>(size, Left { at, ..left }, values, out, factors);
        }
    }
}

/// The keys or values `key .. key + n` run by run, each of tokens that lie evenly apart: how many tokens are in front
/// of a run, how many it has, and where they are. An iterator, since vector code in a closure is not inlined.
///
/// # Safety
/// The keys exist.
#[inline(always)]
unsafe fn runs<T: Element>(
    task: &Task<'_, T>,
    x: &View<'_, T>,
    key: usize,
    n: usize,
) -> impl Iterator<Item = (usize, usize, Rows<*const T>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done >= n {
            return None;
        }
        let first = done;
        let count = x.run(key + first, n - first);
        done += count;
        // SAFETY: the caller names keys that exist.
        let at = unsafe { x.row(task.batch, task.kv_head, key + first) };
        let row = x.strides[2];
        Some((first, count, Rows { at, row }))
    })
}

/// Turns the scores of row `r` for `n` keys from `key` on into weights `e^(score - maximum)`,
/// updates maximum and sum, and returns the factor for what was summed up before.
#[inline(always)]
unsafe fn soften<V: Vector, T: Element>(
    task: &Task<'_, T>,
    r: usize,
    key: usize,
    n: usize,
    scores: *mut f32,
) -> f32 {
    let rule = &task.problem.rule;
    let (low, high) = task.visible(r / task.problem.plan.group);
    let end = n.next_multiple_of(V::LANES);
    // SAFETY: `scores` has room for the keys rounded up to whole vectors.
    unsafe {
        for i in n..end {
            *scores.add(i) = f32::NEG_INFINITY;
        }
        if let Some(cap) = rule.softcap {
            for i in (0..end).step_by(V::LANES) {
                let s = V::load(scores.add(i)).div(V::splat(cap));
                tanh_v(s).mul(V::splat(cap)).store(scores.add(i));
            }
        }
        if let Some(mask) = &rule.mask {
            let (mask, stride) = task.mask(mask, r, key);
            for i in 0..n {
                *scores.add(i) += *mask.add(i * stride);
            }
        }
        if let Some(slopes) = rule.slopes {
            let (slope, position) = task.slope(slopes, r);
            for i in 0..n {
                *scores.add(i) -= slope * position.abs_diff((key + i) as i64) as f32;
            }
        }
        for i in (0..low.saturating_sub(key).min(n)).chain(high.saturating_sub(key).min(n)..end) {
            *scores.add(i) = f32::NEG_INFINITY;
        }
        let mut highest = V::splat(f32::NEG_INFINITY);
        for i in (0..end).step_by(V::LANES) {
            highest = V::load(scores.add(i)).max(highest);
        }
        let before = *task.state.max.add(r);
        let max = highest.max_lane().max(before);
        // With no visible key so far every weight is e^-inf = 0, whatever is taken off.
        let taken = if max == f32::NEG_INFINITY { 0.0 } else { max };
        let mut sum = V::splat(0.0);
        for i in (0..end).step_by(V::LANES) {
            let weight = exp_weight_v(V::load(scores.add(i)).sub(V::splat(taken)));
            weight.store(scores.add(i));
            sum = sum.add(weight);
        }
        let factor = (before - taken).exp();
        *task.state.max.add(r) = max;
        *task.state.sum.add(r) = *task.state.sum.add(r) * factor + sum.sum();
        factor
    }
}
