//! From running sums to the output: one task's own, or several parts' of the same rows.

use super::{State, Task, padded};
use crate::cpu::vector::{Element, Kernel, Vector};

/// Divides the task's sums and writes them out, unless they are parts to be merged.
///
/// # Safety
/// The processor has `V`'s instructions; the task's state is filled.
#[inline(always)]
pub(super) unsafe fn finish<V: Vector, T: Element>(task: &Task<'_, T>) {
    if task.problem.plan.splits > 1 {
        return;
    }
    let width = padded(task.problem.sizes.dim);
    for r in 0..task.rows() {
        // SAFETY: the state has these rows, `width` elements each.
        unsafe {
            let row = task.state.out.add(r * width);
            let share = V::splat(inverse(*task.state.sum.add(r)));
            for j in (0..width).step_by(V::LANES) {
                V::load(row.add(j)).mul(share).store(row.add(j));
            }
            task.store_output::<V>(r, row);
        }
    }
}

/// Rows that see no key have a sum of 0 and become zeros.
#[inline(always)]
fn inverse(sum: f32) -> f32 {
    if sum == 0.0 { 0.0 } else { 1.0 / sum }
}

/// Merges all parts of the task's rows, in the order of their keys, and writes the output.
pub(super) struct Merge<'a, T> {
    /// Any of the tasks that made the parts.
    pub task: &'a Task<'a, T>,
    /// The first part's state.
    pub parts: *mut f32,
    /// Distance between two parts.
    pub len: usize,
}

impl<T: Element> Kernel for Merge<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let plan = &self.task.problem.plan;
        let dim = self.task.problem.sizes.dim;
        let width = padded(dim);
        // SAFETY: every part is filled, since all tasks have ended; the first one's rows serve as
        // the sums, and each is read before it is overwritten.
        unsafe {
            let part = |i: usize| State::at(self.parts.add(i * self.len), plan.rows(), dim);
            for r in 0..self.task.rows() {
                let mut max = f32::NEG_INFINITY;
                for i in 0..plan.splits {
                    max = (*part(i).max.add(r)).max(max);
                }
                let taken = if max == f32::NEG_INFINITY { 0.0 } else { max };
                let row = part(0).out.add(r * width);
                let mut sum = 0.0;
                for i in 0..plan.splits {
                    let factor = (*part(i).max.add(r) - taken).exp();
                    sum += factor * *part(i).sum.add(r);
                    let more = part(i).out.add(r * width).cast_const();
                    for j in (0..width).step_by(V::LANES) {
                        let scaled = V::load(more.add(j)).mul(V::splat(factor));
                        let so_far = if i == 0 {
                            V::splat(0.0)
                        } else {
                            V::load(row.add(j))
                        };
                        so_far.add(scaled).store(row.add(j));
                    }
                }
                let share = V::splat(inverse(sum));
                for j in (0..width).step_by(V::LANES) {
                    V::load(row.add(j)).mul(share).store(row.add(j));
                }
                self.task.store_output::<V>(r, row);
            }
        }
    }
}
