//! Dense matrix products y = x Wᵀ: the part of one task of the pool, and how to cut a product into
//! tasks.
//!
//! A single token is bound by memory: one stream of weights, asked for a page ahead. A few tokens
//! share each weight row while it is in the first-level cache. Many tokens are bound by arithmetic and
//! go to the gemm crate, or with AMX and weights in bf16 to its tiles.

#[cfg(target_arch = "x86_64")]
mod amx;
mod dot;
mod many;

use crate::cpu::simd::Level;
use crate::cpu::vector::{Element, Kernel, Vector, dispatch};
use dot::Operands;
#[cfg(target_arch = "x86_64")]
use half::bf16;
#[cfg(target_arch = "x86_64")]
use std::any::TypeId;
use std::ops::Range;

/// Tokens from which the gemm crate's packing pays; measured with SmolLM2's shapes on Zen 3.
const MANY: usize = 48;

/// `out[i * out_stride + j] = sum over p of x[i * k + p] * w[j * k + p]`, accumulated in f32.
///
/// `x` holds `m` tokens of `k` floats and `w` `n` weight rows of `k`, both row-major without gaps.
/// Only the `m * n` elements named above are written. For few tokens the order
/// of the additions depends on the level, `k` and `m` only; for many it is the gemm crate's, which
/// may differ in the last bits with how a product is cut, and so with the number of threads. Many tokens with weights
/// in bf16 and AMX have the order of its tiles, which depends on `k` only.
///
/// # Panics
/// If a slice is shorter than its shape says, or `out_stride < n` while `m > 1`.
///
/// ```
/// use candle_fused::cpu::{dense, simd};
/// // One token of two values, and three rows of weights.
/// let (x, w) = ([1., 10.], [1f32, 2., 3., 4., 5., 6.]);
/// let mut out = [0.; 3];
/// dense::matmul(simd::level(), &x, 1, 2, &w, 3, &mut out, 3);
/// assert_eq!(out, [21., 43., 65.]);
/// ```
#[expect(clippy::too_many_arguments, reason = "the operands of a GEMM")]
pub fn matmul<T: Element>(
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
    let size = |a: usize, b: usize| a.checked_mul(b).expect("a shape within the address space");
    assert!(
        x.len() >= size(m, k),
        "x holds {} floats, {m} x {k} are needed",
        x.len()
    );
    assert!(
        w.len() >= size(n, k),
        "w holds {} weights, {n} x {k} are needed",
        w.len()
    );
    assert!(
        m == 1 || out_stride >= n,
        "rows of {n} results overlap at a stride of {out_stride}"
    );
    let reach = size(m - 1, out_stride)
        .checked_add(n)
        .expect("a shape within the address space");
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
    #[cfg(target_arch = "x86_64")]
    if m >= MANY
        && k > 0
        && level.supported() == Level::Amx
        && TypeId::of::<T>() == TypeId::of::<bf16>()
    {
        let o = Operands {
            w: w.as_ptr().cast(),
            x: o.x,
            out: o.out,
            m,
            k,
            n,
            out_stride,
        };
        // SAFETY: the weights are in bf16; the slices were just checked against the shapes, and the processor has AMX.
        if unsafe { amx::products(o) } {
            return;
        }
    }
    // SAFETY: the slices were just checked against the shapes, and `out` is borrowed mutably.
    unsafe { dispatch(level, Product(o)) }
}

struct Product<T>(Operands<T>);

impl<T: Element> Kernel for Product<T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller's obligation is the same.
        unsafe {
            match self.0.m {
                1 => dot::single::<V, T>(self.0),
                MANY.. => many::products::<V, T>(self.0),
                // Four tokens by four rows take sixteen sums, more than sixteen registers hold.
                3.. if V::REGISTERS < 32 => dot::rows::<V, T, 3>(self.0),
                _ => dot::rows::<V, T, 4>(self.0),
            }
        }
    }
}

/// How a product of `m` tokens with `n` weight rows is cut into cells, one for each task.
///
/// A cell is a range of tokens and a range of weight rows, as [`matmul`] takes them: `x` from the
/// first token on, `w` from the first row on, and `out` from their result on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskGrid {
    m: usize,
    n: usize,
    tokens: usize,
    rows: usize,
}

impl TaskGrid {
    /// How many cells there are; none if the product is empty.
    pub fn cells(&self) -> usize {
        self.m.div_ceil(self.tokens) * self.n.div_ceil(self.rows)
    }

    /// The tokens and the weight rows of the cell `index < cells()`.
    pub fn cell(&self, index: usize) -> (Range<usize>, Range<usize>) {
        let across = self.n.div_ceil(self.rows);
        let (i, j) = (index / across * self.tokens, index % across * self.rows);
        (
            i..(i + self.tokens).min(self.m),
            j..(j + self.rows).min(self.n),
        )
    }

    /// The most tokens and weight rows that a cell has.
    pub fn largest(&self) -> (usize, usize) {
        (self.tokens.min(self.m), self.rows.min(self.n))
    }
}

/// Cuts a product of `m` tokens with `n` weight rows of length `k` for `threads` threads.
///
/// Weight rows are divided and tokens kept together, since weights are what has to be read (few
/// tokens) or packed (many); tokens are divided only where there are too few rows. There are up to
/// four cells for each thread, so that a thread that is held up leaves its share to the others, but
/// no more than leave each worth handing over and divide evenly.
///
/// ```
/// let grid = candle_fused::cpu::dense::task_grid(1, 4096, 4096, 4);
/// // Every weight row is in one of the cells.
/// let rows: usize = (0..grid.cells()).map(|i| grid.cell(i).1.len()).sum();
/// assert_eq!((rows, grid.largest().0), (4096, 1));
/// ```
pub fn task_grid(m: usize, n: usize, k: usize, threads: usize) -> TaskGrid {
    /// Multiplications that take about as long as it takes to hand a task over.
    const WORTH: usize = 16 * 1024;
    let work = m.saturating_mul(n).saturating_mul(k);
    let threads = threads.clamp(1, (work / WORTH).max(1));
    let unit = if m < MANY { 8 } else { 32 };
    if m >= MANY && n <= unit * (threads - 1) {
        let tokens = m.div_ceil(threads).next_multiple_of(12).max(MANY);
        return TaskGrid {
            m,
            n,
            tokens,
            rows: n.max(1),
        };
    }
    // The rows of the thread that has most to do.
    let most = |rows: usize| n.div_ceil(rows).div_ceil(threads) * rows;
    let each = (work / WORTH / threads).clamp(1, 4);
    let rows = (1..=each)
        .rev()
        .map(|each| n.div_ceil(threads * each).next_multiple_of(unit).max(unit))
        .min_by_key(|rows| most(*rows))
        .unwrap_or(unit);
    TaskGrid {
        m,
        n,
        tokens: m.max(1),
        rows,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_cover_the_product_once() {
        for (m, n, k) in [
            (1, 1, 1),
            (1, 49152, 576),
            (7, 33, 576),
            (512, 960, 576),
            (512, 8, 4096),
        ] {
            for threads in [1, 2, 3, 16, 64] {
                let grid = task_grid(m, n, k, threads);
                let mut hits = vec![0u8; m * n];
                for c in 0..grid.cells() {
                    let (tokens, rows) = grid.cell(c);
                    assert!(tokens.len() <= grid.largest().0 && rows.len() <= grid.largest().1);
                    for i in tokens {
                        rows.clone().for_each(|j| hits[i * n + j] += 1);
                    }
                }
                assert!(
                    hits.iter().all(|h| *h == 1),
                    "{m} x {n} for {threads} threads"
                );
            }
        }
    }

    #[test]
    fn the_shapes_of_a_small_model_divide_evenly() {
        for (m, n) in [
            (1, 576),
            (1, 960),
            (1, 3072),
            (512, 576),
            (512, 960),
            (512, 3072),
        ] {
            let grid = task_grid(m, n, 576, 2);
            let (_, rows) = grid.largest();
            assert_eq!(grid.cells() % 2, 0);
            assert_eq!(grid.cells() * rows, n);
        }
    }

    #[test]
    fn an_empty_product_has_no_cells() {
        assert_eq!(task_grid(0, 5, 5, 2).cells(), 0);
        assert_eq!(task_grid(5, 0, 5, 2).cells(), 0);
    }
}
