//! Few rows against many keys: a decode step.

use super::block::{self, Left, Rows};
use super::{Plan, Task, padded};
use crate::cpu::math::{exp_weight_v, tanh_v};
use crate::cpu::vector::{Element, Vector};

/// Keys between two corrections of the running maximum.
const KEYS: usize = 128;

/// Scratch elements that [`run`] uses.
pub(super) fn scratch(plan: &Plan, dim: usize) -> usize {
    let rows = plan.rows();
    // Queries, scores, factors, and a block of keys or values where it has to be copied.
    rows * padded(dim) + rows * (KEYS + 16) + padded(rows) + KEYS * padded(dim)
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
    let vectors = dim.div_ceil(V::LANES);
    let whole = dim.is_multiple_of(V::LANES);
    let (first, end) = task.reach();
    // SAFETY: the four parts of the scratch, as counted above; keys stay below `end`.
    unsafe {
        let q = task.scratch;
        let scores = q.add(rows * width);
        let factors = scores.add(rows * (KEYS + 16));
        let copy = factors.add(padded(rows));
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
        let copied = Rows {
            at: copy.cast_const(),
            row: width,
        };
        let mut key = first;
        while key < end {
            let n = KEYS.min(end - key);
            let size = (rows, vectors, n);
            if whole && p.k.strides[3] == 1 {
                let at = p.k.row(task.batch, task.kv_head, key);
                let keys = Rows {
                    at,
                    row: p.k.strides[2],
                };
                block::dots::<V, T>(size, q, keys, scores);
            } else {
                task.copy_rows::<V>(&p.k, key, n, copy);
                block::dots::<V, f32>(size, q, copied, scores);
            }
            for r in 0..rows {
                let row = scores.at.add(r * scores.row);
                *factors.add(r) = soften::<V, T>(task, r, key, n, row);
            }
            let left = Left {
                at: scores.at,
                row: scores.row,
                step: 1,
            };
            if whole && p.v.strides[3] == 1 {
                let at = p.v.row(task.batch, task.kv_head, key);
                let values = Rows {
                    at,
                    row: p.v.strides[2],
                };
                block::multiply::<V, T, true>(size, left, values, out, factors);
            } else {
                task.copy_rows::<V>(&p.v, key, n, copy);
                block::multiply::<V, f32, true>(size, left, copied, out, factors);
            }
            key += n;
        }
    }
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
