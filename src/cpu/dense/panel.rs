//! Products with many tokens, by panels of weight rows.
//!
//! A panel is `VECTORS` vectors of weight rows, widened to f32 and transposed so that all rows of one k
//! lie side by side. Tokens need no packing: a tile broadcasts their floats one by one against the
//! panel's vectors, and the results leave as whole vectors. A panel is packed once for all tokens,
//! which is what makes this the better way from some tens of tokens on, and
//! [`dot`](super::dot) below. The loops around the tile are those of BLIS (Van Zee and van de Geijn,
//! 2015) without its copy of the left operand.
//!
//! On a Zen 3 core this reaches 91 to 95 Gflop/s where the gemm crate reaches 81 to 93 with f32
//! weights, and it needs no second copy of f16 and bf16 weights.

use super::dot::Operands;
use super::prefetch;
use crate::cpu::simd::Level;
use crate::cpu::vector::{Element, Kernel, Vector, dispatch};
use std::cell::RefCell;

/// Most columns of a piece: with them a panel and the tokens of a tile stay in the second-level
/// cache, and the results are seldom written more than once.
const DEPTH: usize = 768;

/// Tokens that meet all pieces of a panel before the next ones do, so that their results stay in the
/// first-level cache meanwhile; a multiple of every tile's tokens.
const BLOCK: usize = 96;

/// Vectors of a panel; with six tokens that makes twelve sums, which leaves four of sixteen registers
/// for the operands; with twelve tokens twenty-four of thirty-two.
const VECTORS: usize = 2;

/// Floats of a cache line.
const LINE: usize = 16;

thread_local! {
    /// The packed panel of the task that runs on this thread.
    static PACKED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// All dot products of the operands.
///
/// # Safety
/// As [`dot::rows`](super::dot::rows).
#[inline(always)]
pub(super) unsafe fn panels<V: Vector, T: Element>(level: Level, o: Operands<T>) {
    let width = VECTORS * V::LANES;
    let mut packed = PACKED.take();
    if packed.len() < o.k * width {
        packed.resize(o.k * width, 0.0);
    }
    let depth = o.k.div_ceil(o.k.div_ceil(DEPTH).max(1)).max(1);
    let mut j = 0;
    // SAFETY: each panel has `rows` <= n - j rows, each block starts at a token i < m and each piece
    // has `len` <= k - p columns; `packed` holds `k * width` floats.
    unsafe {
        while j < o.n {
            let rows = width.min(o.n - j);
            pack::<V, T>(o.w.add(j * o.k), o.k, rows, packed.as_mut_ptr());
            for i in (0..o.m).step_by(BLOCK) {
                let mut p = 0;
                loop {
                    let len = depth.min(o.k - p);
                    let piece = Piece {
                        x: o.x.add(i * o.k + p),
                        stride: o.k,
                        len,
                        panel: packed.as_ptr().add(p * width),
                        rows,
                        out: o.out.add(i * o.out_stride + j),
                        out_stride: o.out_stride,
                        first: p == 0,
                    };
                    piece.run::<V>(level, BLOCK.min(o.m - i));
                    p += len;
                    if p == o.k {
                        break;
                    }
                }
            }
            j += rows;
        }
    }
    PACKED.set(packed);
}

/// Writes `panel[p * width + r] = w[r * k + p]`, with zeros where there are fewer than `width` rows.
///
/// # Safety
/// `rows` rows of `k` elements may be read from `w` and `k * width` floats written to `panel`, and
/// the processor has the instruction set of `V`.
#[inline(always)]
unsafe fn pack<V: Vector, T: Element>(w: *const T, k: usize, rows: usize, panel: *mut f32) {
    let width = VECTORS * V::LANES;
    let step = V::SQUARE;
    // SAFETY: whole squares are taken only where `step` rows and columns are left; single elements
    // stay within `rows` x `k` of `w` and `width` x `k` of `panel`.
    unsafe {
        for top in (0..width).step_by(step) {
            let mut p = 0;
            while top + step <= rows && p + step <= k {
                V::transpose(w.add(top * k + p), k, panel.add(p * width + top), width);
                p += step;
            }
            while p < k {
                for r in top..top + step {
                    let value = if r < rows {
                        (*w.add(r * k + p)).to_f32()
                    } else {
                        0.0
                    };
                    *panel.add(p * width + r) = value;
                }
                p += 1;
            }
        }
    }
}

/// One packed piece and the tokens that it meets.
pub(super) struct Piece {
    /// `m` rows of `len` floats at distances of `stride`.
    x: *const f32,
    stride: usize,
    len: usize,
    /// `len` rows of a panel's width.
    panel: *const f32,
    /// Weight rows of the panel that exist, at most its width.
    rows: usize,
    /// `m` rows of `rows` floats at distances of `out_stride`.
    out: *mut f32,
    out_stride: usize,
    /// Whether the results are written, or added to what earlier pieces wrote.
    first: bool,
}

impl Piece {
    /// The piece against all `m` tokens, in tiles as large as the registers allow.
    ///
    /// # Safety
    /// The pointers are valid as their fields say, and the processor has the instruction set of `V`,
    /// which is that of `level`.
    #[inline(always)]
    unsafe fn run<V: Vector>(&self, level: Level, m: usize) {
        let mut i = 0;
        // SAFETY: each tile covers no more tokens than are left.
        unsafe {
            while V::LANES == 16 && i + 12 <= m {
                dispatch(level, Tile::<12>(self, i));
                i += 12;
            }
            while i + 6 <= m {
                dispatch(level, Tile::<6>(self, i));
                i += 6;
            }
            while i + 3 <= m {
                dispatch(level, Tile::<3>(self, i));
                i += 3;
            }
            while i < m {
                dispatch(level, Tile::<1>(self, i));
                i += 1;
            }
        }
    }

    /// The piece against tokens `i` to `i + M`.
    ///
    /// # Safety
    /// As [`Piece::run`], with `i + M <= m`, and the processor has the instruction set of `V`.
    #[inline(always)]
    unsafe fn tile<V: Vector, const M: usize>(&self, i: usize) {
        // SAFETY: every column up to `len` is visited once, of tokens and rows that exist;
        // prefetches may point anywhere.
        unsafe {
            let mut x = self.x.add(i * self.stride);
            let mut w = self.panel;
            let mut acc = [[V::splat(0.0); VECTORS]; M];
            for _ in 0..self.len / LINE {
                // The next tile's tokens, which the processor does not foresee.
                for t in 0..M {
                    prefetch(x.wrapping_add((M + t) * self.stride));
                }
                for p in 0..LINE {
                    step::<V, M>(
                        &mut acc,
                        x.add(p),
                        self.stride,
                        w.add(p * VECTORS * V::LANES),
                    );
                }
                x = x.add(LINE);
                w = w.add(LINE * VECTORS * V::LANES);
            }
            for p in 0..self.len % LINE {
                step::<V, M>(
                    &mut acc,
                    x.add(p),
                    self.stride,
                    w.add(p * VECTORS * V::LANES),
                );
            }
            for (t, sums) in acc.into_iter().enumerate() {
                self.write(sums, self.out.add((i + t) * self.out_stride));
            }
        }
    }

    /// Writes or adds one token's results.
    ///
    /// # Safety
    /// `rows` floats may be read from and written to `out`.
    #[inline(always)]
    unsafe fn write<V: Vector>(&self, sums: [V; VECTORS], out: *mut f32) {
        let mut whole = [0f32; VECTORS * 16];
        let full = self.rows == VECTORS * V::LANES;
        // SAFETY: `to` has the panel's width: `out` if the panel is full, else `whole`, with `rows`
        // floats copied in and out.
        unsafe {
            let to = if full { out } else { whole.as_mut_ptr() };
            if !full {
                std::ptr::copy_nonoverlapping(out, to, self.rows);
            }
            for (v, sum) in sums.into_iter().enumerate() {
                let to = to.add(v * V::LANES);
                let sum = if self.first {
                    sum
                } else {
                    sum.add(V::load(to))
                };
                sum.store(to);
            }
            if !full {
                std::ptr::copy_nonoverlapping(to, out, self.rows);
            }
        }
    }
}

/// A tile of `M` tokens, as a kernel of its own: inlined into the loops around it, it would have to
/// share the registers with them.
struct Tile<'a, const M: usize>(&'a Piece, usize);

impl<const M: usize> Kernel for Tile<'_, M> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller's obligation is the same.
        unsafe { self.0.tile::<V, M>(self.1) }
    }
}

/// One column: `M` tokens' floats at distances of `stride` against the panel's vectors.
///
/// # Safety
/// `M` floats may be read at `x` and `VECTORS` vectors at `w`, and the processor has the instruction set
/// of `L`.
#[inline(always)]
unsafe fn step<V: Vector, const M: usize>(
    acc: &mut [[V; VECTORS]; M],
    x: *const f32,
    stride: usize,
    w: *const f32,
) {
    // SAFETY: the caller's obligation.
    unsafe {
        let w: [V; VECTORS] = std::array::from_fn(|v| V::load(w.add(v * V::LANES)));
        for (t, sums) in acc.iter_mut().enumerate() {
            let x = V::splat(*x.add(t * stride));
            for v in 0..VECTORS {
                sums[v] = x.mul_add(w[v], sums[v]);
            }
        }
    }
}
