//! Products with many tokens: the gemm crate's, with 16-bit weights widened piece by piece.

use super::dot::Operands;
use crate::cpu::vector::{Element, Vector, is_f32, widen};
use gemm::Parallelism;
use std::cell::RefCell;
use std::ops::Range;

/// Floats of a piece of widened weights: 1 MB, so that a piece is not much more than the second-level
/// cache, and the tokens, which every piece packs anew, are packed seldom.
const PIECE: usize = 256 * 1024;

thread_local! {
    /// The widened piece of the task that runs on this thread.
    static WIDENED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Most columns of a piece. A piece of longer rows would have so few of them that the gemm crate, which packs the tokens
/// for every piece, took twice as long.
const COLUMNS: usize = 4096;

/// All dot products of the operands.
///
/// # Safety
/// As [`dot::rows`](super::dot::rows).
#[inline(always)]
pub(super) unsafe fn products<V: Vector, T: Element>(o: Operands<T>) {
    if is_f32::<T>() {
        // SAFETY: the weights are f32; the rest is the caller's obligation.
        return unsafe { multiply(&o, 0..o.n, 0..o.k, (o.w.cast(), o.k)) };
    }
    let mut piece = WIDENED.take();
    let width = o.k.clamp(1, COLUMNS);
    let height = (PIECE / width).clamp(1, o.n);
    piece.resize(height * width, 0.);
    for first in (0..o.n).step_by(height) {
        let rows = first..o.n.min(first + height);
        // Without columns the results are zeros.
        for first in (0..o.k.max(1)).step_by(width) {
            let columns = first..o.k.min(first + width);
            // SAFETY: these rows and columns lie within the weights, and `piece` holds as many floats.
            unsafe {
                for (i, row) in rows.clone().enumerate() {
                    let w = o.w.add(row * o.k + columns.start);
                    let piece = piece.as_mut_ptr().add(i * columns.len());
                    widen::<V, T>(w, 1, piece, columns.len());
                }
                multiply(
                    &o,
                    rows.clone(),
                    columns.clone(),
                    (piece.as_ptr(), columns.len()),
                );
            }
        }
    }
    WIDENED.set(piece);
}

/// Columns `columns` of all tokens with those of weight rows `rows`, of which the first starts at `w` and the next ones
/// `stride` floats apart; added to the results but for the first columns.
///
/// # Safety
/// `w` holds these rows, the operands have such rows and columns, and the rest as [`products`].
unsafe fn multiply<T>(
    o: &Operands<T>,
    rows: Range<usize>,
    columns: Range<usize>,
    (w, stride): (*const f32, usize),
) {
    let first = columns.start == 0;
    // SAFETY: x is m x k and w n x k, both by rows (w read as its transpose, k x n); the results are
    // m rows of n at distances of `out_stride`, which is at least `o.n`.
    unsafe {
        gemm::gemm(
            o.m,
            rows.len(),
            columns.len(),
            o.out.add(rows.start),
            1,
            o.out_stride as isize,
            !first,
            o.x.add(columns.start),
            1,
            o.k as isize,
            w,
            stride as isize,
            1,
            if first { 0. } else { 1. },
            1f32,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}
