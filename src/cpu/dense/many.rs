//! Products with many tokens: the gemm crate's, with 16-bit weights widened piece by piece.

use super::dot::Operands;
use crate::cpu::vector::{Element, Vector, is_f32, widen};
use gemm::Parallelism;
use std::cell::RefCell;

/// Floats of a piece of widened weights: 1 MB, so that a piece is not much more than the second-level
/// cache, and the tokens, which every piece packs anew, are packed seldom.
const PIECE: usize = 256 * 1024;

thread_local! {
    /// The widened piece of the task that runs on this thread.
    static WIDENED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// All dot products of the operands.
///
/// # Safety
/// As [`dot::rows`](super::dot::rows).
#[inline(always)]
pub(super) unsafe fn products<V: Vector, T: Element>(o: Operands<T>) {
    if is_f32::<T>() {
        // SAFETY: the weights are f32; the rest is the caller's obligation.
        return unsafe { multiply(&o, o.w.cast(), 0, o.n) };
    }
    let mut piece = WIDENED.take();
    let rows = (PIECE / o.k.max(1)).clamp(1, o.n);
    piece.resize(rows * o.k, 0.);
    for first in (0..o.n).step_by(rows) {
        let len = rows.min(o.n - first);
        // SAFETY: rows `first..first + len` lie within the weights, and `piece` holds `rows * k`.
        unsafe {
            widen::<V, T>(o.w.add(first * o.k), 1, piece.as_mut_ptr(), len * o.k);
            multiply(&o, piece.as_ptr(), first, len);
        }
    }
    WIDENED.set(piece);
}

/// All tokens with `n` weight rows at `w`, whose results start at column `first`.
///
/// # Safety
/// `w` holds `n * k` floats, `first + n <= o.n`, and the rest as [`products`].
unsafe fn multiply<T>(o: &Operands<T>, w: *const f32, first: usize, n: usize) {
    // SAFETY: x is m x k and w n x k, both by rows (w read as its transpose, k x n); the results are
    // m rows of n at distances of `out_stride`, which is at least `o.n`.
    unsafe {
        gemm::gemm(
            o.m,
            n,
            o.k,
            o.out.add(first),
            1,
            o.out_stride as isize,
            false,
            o.x,
            1,
            o.k as isize,
            w,
            o.k as isize,
            1,
            0f32,
            1f32,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}
