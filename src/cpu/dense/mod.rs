//! Dense matrix products y = x Wᵀ for one task of the pool.

mod dot;

use crate::cpu::simd::Level;
use crate::cpu::vector::{Kernel, Vector, dispatch};
use crate::ops::Float;
use dot::Operands;
use std::ops::Range;

/// `out[i * out_stride + j] = sum over p of x[i * k + p] * w[j * k + p]`, accumulated in f32.
///
/// `x` holds `m` tokens of `k` floats and `w` `n` weight rows of `k`, both row-major without gaps.
/// Only the `m * n` elements named above are written.
///
/// # Panics
/// If a slice is shorter than its shape says, or `out_stride < n` while `m > 1`.
#[expect(clippy::too_many_arguments, reason = "the operands of a GEMM")]
pub fn matmul<T: Float>(
    level: Level,
    x: &[f32],
    m: usize,
    k: usize,
    w: &[T],
    n: usize,
    out: &mut [f32],
    out_stride: usize,
) {
    if m == 0 || n == 0 {
        return;
    }
    assert!(
        x.len() >= m * k,
        "x holds {} floats, {m} x {k} are needed",
        x.len()
    );
    assert!(
        w.len() >= n * k,
        "w holds {} weights, {n} x {k} are needed",
        w.len()
    );
    assert!(
        m == 1 || out_stride >= n,
        "rows of {n} results overlap at a stride of {out_stride}"
    );
    let reach = (m - 1) * out_stride + n;
    assert!(
        out.len() >= reach,
        "out holds {} floats, {reach} are needed",
        out.len()
    );
    let o = Operands {
        x: x.as_ptr(),
        m,
        k,
        w: w.as_ptr(),
        n,
        out: out.as_mut_ptr(),
        out_stride,
    };
    // SAFETY: the slices were just checked against the shapes, and `out` is borrowed mutably.
    unsafe { dispatch(level, Rows(o)) }
}

struct Rows<T>(Operands<T>);

impl<T: Float> Kernel for Rows<T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller's obligation is the same.
        unsafe {
            match self.0.m {
                1 => dot::rows::<V, T, 8>(self.0),
                2 => dot::rows::<V, T, 4>(self.0),
                _ => dot::rows::<V, T, 3>(self.0),
            }
        }
    }
}

/// How a product is cut into the pool's tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskGrid {
    m: usize,
    n: usize,
    tokens: usize,
    rows: usize,
}

impl TaskGrid {
    /// How many cells there are.
    pub fn cells(&self) -> usize {
        self.m.div_ceil(self.tokens) * self.n.div_ceil(self.rows)
    }

    /// The tokens and the weight rows of a cell.
    pub fn cell(&self, index: usize) -> (Range<usize>, Range<usize>) {
        let across = self.n.div_ceil(self.rows);
        let (i, j) = (index / across * self.tokens, index % across * self.rows);
        (
            i..(i + self.tokens).min(self.m),
            j..(j + self.rows).min(self.n),
        )
    }
}

/// Cuts `m` tokens x `n` weight rows of length `k` into cells for `threads` threads.
pub fn task_grid(m: usize, n: usize, k: usize, threads: usize) -> TaskGrid {
    let _ = k;
    let rows = n.div_ceil(4 * threads).next_multiple_of(24);
    TaskGrid {
        m: m.max(1),
        n: n.max(1),
        tokens: m.max(1),
        rows,
    }
}
