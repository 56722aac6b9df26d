//! Dense matrix products y = x Wᵀ: the part of one task of the pool, and how to cut a product into
//! tasks.
//!
//! A single token is bound by memory: one stream of weights, prefetched a page ahead, or eight where rows are long. A
//! few tokens share each weight row while it is in the first-level cache. Many tokens are bound by arithmetic and
//! go to the gemm crate. Where the processor has products of bf16, tokens and weights in bf16 go to tiles, and with AMX
//! tokens in f32 do, too.

mod dot;
mod many;
#[cfg(target_arch = "x86_64")]
mod tiles;

use crate::cpu::grid::Costs;
pub use crate::cpu::grid::TaskGrid;
use crate::cpu::simd::Level;
#[cfg(target_arch = "x86_64")]
use crate::cpu::tiles::tokens::TokenTiles;
use crate::cpu::vector::{Element, Kernel, Vector, dispatch, is_f32};
use dot::Operands;
use half::bf16;
#[cfg(target_arch = "x86_64")]
use std::any::TypeId;
use std::ops::Range;

/// Tokens from which the gemm crate's packing pays: with weights in f32, and in 16 bits, which are widened for it. On
/// Zen 4 it pays from about 100 and 250 on, on an Intel Xeon (Sapphire Rapids) from 50 and 90; other processors were not
/// measured.
const MANY: [usize; 2] = [72, 96];

/// Columns from which one token reads eight weight rows at once. On Zen 4 one thread is 1.2 to 1.6 times as fast so with
/// rows of 4,096 and 14,336, and about as fast with 1,536; with 576, two threads lose up to a fifth.
const LONG: usize = 2048;

/// Tokens from which AMX takes those in f32, which are split into three numbers in bf16.
#[cfg(target_arch = "x86_64")]
const SPLIT: usize = 48;

/// Tokens in bf16 from which weights are made tiles of, by AMX and without it.
#[cfg(target_arch = "x86_64")]
const TILED: [usize; 2] = [9, 16];

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
    check((x.len(), w.len(), out.len()), (m, n, k), out_stride);
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
    if k > 0 && in_tiles::<T>(level, m) {
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
        if unsafe { tiles::products(o) } {
            return;
        }
    }
    // SAFETY: the slices were just checked against the shapes, and `out` is borrowed mutably.
    unsafe { dispatch(level, Product(o)) }
}

/// Tokens in bf16 as products with weights in bf16 take them, where [`takes_bf16`] says so.
#[derive(Default)]
pub(crate) struct Bf16Tokens {
    #[cfg(target_arch = "x86_64")]
    tiles: TokenTiles,
    shape: (usize, usize),
}

impl Bf16Tokens {
    /// Of `m` rows, spread over the pool; the level is one that takes them.
    pub(crate) fn fill(&mut self, level: Level, x: &[bf16], m: usize) {
        assert!(takes_bf16(level, m));
        self.shape = (m, x.len() / m);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: such a level has AVX-512.
        unsafe {
            tiles::fill_bf16(&mut self.tiles, x, m);
        }
    }

    /// As [`matmul`], of some of the tokens with weights `[n, k]`.
    pub(crate) fn matmul(
        &self,
        level: Level,
        tokens: Range<usize>,
        (w, n): (&[bf16], usize),
        out: &mut [f32],
        out_stride: usize,
    ) {
        let (m, k) = self.shape;
        assert!(tokens.end <= m, "tokens {tokens:?} of {m}");
        assert!(takes_bf16(level, m));
        if tokens.is_empty() || n == 0 {
            return;
        }
        let count = tokens.len();
        check((count * k, w.len(), out.len()), (count, n, k), out_stride);
        let out = (out.as_mut_ptr(), out_stride);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the slices were just checked against the shapes, and the processor has the level, which takes bf16.
        unsafe {
            tiles::products_bf16(level.supported(), &self.tiles, tokens, w, (n, k), out);
        }
        let _ = (level, out);
    }

    /// Bytes of its memory.
    pub(crate) fn bytes(&self) -> usize {
        #[cfg(target_arch = "x86_64")]
        return self.tiles.bytes();
        #[cfg(not(target_arch = "x86_64"))]
        0
    }
}

/// Whether products of `m` tokens in bf16 with weights in bf16 are faster without widening the tokens, of which each
/// has a value at least.
pub(crate) fn takes_bf16(level: Level, m: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    return match level.supported() {
        Level::Amx => m >= TILED[0],
        Level::Avx512Bf16 => m >= TILED[1],
        _ => false,
    };
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (level, m);
        false
    }
}

/// Panics unless slices of these lengths hold the operands.
fn check((x, w, out): (usize, usize, usize), (m, n, k): (usize, usize, usize), out_stride: usize) {
    let size = |a: usize, b: usize| a.checked_mul(b).expect("a shape within the address space");
    assert!(x >= size(m, k), "x holds {x} values, {m} x {k} are needed");
    assert!(w >= size(n, k), "w holds {w} weights, {n} x {k} are needed");
    assert!(
        m == 1 || out_stride >= n,
        "rows of {n} results overlap at a stride of {out_stride}"
    );
    let reach = size(m - 1, out_stride)
        .checked_add(n)
        .expect("a shape within the address space");
    assert!(out >= reach, "out holds {out} floats, {reach} are needed");
}

struct Product<T>(Operands<T>);

impl<T: Element> Kernel for Product<T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller's obligation is the same.
        unsafe {
            match self.0.m {
                1 if self.0.k < LONG => dot::single::<V, T>(self.0),
                1 => dot::rows::<V, T, 8>(self.0),
                m if m >= MANY[usize::from(!is_f32::<T>())] => many::products::<V, T>(self.0),
                // Four tokens by four rows take sixteen sums, more than sixteen registers hold.
                3.. if V::REGISTERS < 32 => dot::rows::<V, T, 3>(self.0),
                _ => dot::rows::<V, T, 4>(self.0),
            }
        }
    }
}

/// What the gemm crate packs, of cells of many tokens. Its tiles have 8 tokens and 48 weight rows with AVX-512. Up to 64
/// by 64 it adds up in another order, which no cell of more tokens shall meet, nor shall a cell have too few for the gemm
/// crate where the whole product has enough.
const GEMM: Costs = Costs {
    token: 16,
    row: 20,
    task: WORTH,
    unit: (8, 48),
    least: MANY[1],
    most: (512, 512),
};

/// What AMX's tiles are made of, of tokens in f32.
#[cfg(target_arch = "x86_64")]
const TILES: Costs = Costs {
    token: 48,
    row: 48,
    task: 8 * WORTH,
    unit: (32, 32),
    least: SPLIT + 32,
    most: (tiles::TOKENS, 512),
};

/// The same of tokens in bf16, which have a third of the products.
#[cfg(target_arch = "x86_64")]
const TILES_BF16: Costs = Costs {
    token: 16,
    row: 100,
    most: (tiles::TOKENS_BF16, 256),
    ..TILES
};

/// The same with AVX-512's products of bf16, of which a cycle has a sixteenth.
#[cfg(target_arch = "x86_64")]
const VECTORS: Costs = Costs {
    token: 4,
    row: 8,
    task: 2 * WORTH,
    unit: (16, 32),
    ..TILES_BF16
};

/// Multiplications that take about as long as it takes to hand a task over.
const WORTH: usize = 16 * 1024;

/// Cuts a product of `m` tokens with `n` weight rows of length `k` for `threads` threads.
///
/// Of few tokens weight rows are divided and tokens kept together, since weights are what has to be read. There are up
/// to four cells for each thread then, so that a thread that is held up leaves its share to the others, but no more
/// than leave each worth handing over and divide evenly. Of many tokens both are divided, as evenly as what each cell
/// has to pack allows.
///
/// ```
/// let grid = candle_fused::cpu::dense::task_grid(1, 4096, 4096, 4);
/// // Every weight row is in one of the cells.
/// let rows: usize = (0..grid.cells()).map(|i| grid.cell(i).1.len()).sum();
/// assert_eq!((rows, grid.largest().0), (4096, 1));
/// ```
pub fn task_grid(m: usize, n: usize, k: usize, threads: usize) -> TaskGrid {
    if m >= MANY[0] {
        return TaskGrid::balanced(&GEMM, (m, n, k), threads);
    }
    let work = m.saturating_mul(n).saturating_mul(k);
    let threads = threads.clamp(1, (work / WORTH).max(1));
    let unit = 8;
    // The rows of the thread that has most to do.
    let most = |rows: usize| n.div_ceil(rows).div_ceil(threads) * rows;
    let each = (work / WORTH / threads).clamp(1, 4);
    let rows = (1..=each)
        .rev()
        .map(|each| n.div_ceil(threads * each).next_multiple_of(unit).max(unit))
        .min_by_key(|rows| most(*rows))
        .unwrap_or(unit);
    TaskGrid::by_rows(m, n, rows, unit)
}

/// The same at a level, for tokens and weights in bf16 or not.
pub(crate) fn task_grid_at(
    level: Level,
    [x_bf16, w_bf16]: [bool; 2],
    (m, n, k): (usize, usize, usize),
    threads: usize,
) -> TaskGrid {
    #[cfg(target_arch = "x86_64")]
    {
        let costs = match level.supported() {
            Level::Amx if x_bf16 => Some(&TILES_BF16),
            Level::Amx if w_bf16 && in_tiles::<bf16>(level, m) => Some(&TILES),
            _ if x_bf16 => Some(&VECTORS),
            _ => None,
        };
        if let Some(costs) = costs {
            return TaskGrid::balanced(costs, (m, n, k), threads);
        }
    }
    let _ = (level, x_bf16, w_bf16);
    task_grid(m, n, k, threads)
}

/// Whether products of `m` tokens in f32 with weights of type `T` go to AMX's tiles.
#[cfg(target_arch = "x86_64")]
fn in_tiles<T: Element>(level: Level, m: usize) -> bool {
    m >= SPLIT && level.supported() == Level::Amx && TypeId::of::<T>() == TypeId::of::<bf16>()
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
            let (tokens, rows) = grid.largest();
            assert_eq!(grid.cells() % 2, 0);
            assert_eq!(grid.cells() * tokens * rows, m * n);
        }
    }

    #[test]
    fn an_empty_product_has_no_cells() {
        assert_eq!(task_grid(0, 5, 5, 2).cells(), 0);
        assert_eq!(task_grid(5, 0, 5, 2).cells(), 0);
    }
}
