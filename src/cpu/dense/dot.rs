//! Register tiles of dot products, for every instruction set.
//!
//! Both operands lie along k, so a tile of tokens x weight rows needs no packing: each step of k
//! loads one vector of each row and multiplies all pairs. The lanes are summed at the end.

use crate::cpu::simd::prefetch;
use crate::cpu::vector::{Element, Vector};

/// The operands of [`rows`]: `m` tokens of `k` floats, `n` weight rows of `k`, and where the results
/// go.
#[derive(Clone, Copy)]
pub(super) struct Operands<T, X = f32> {
    pub x: *const X,
    pub m: usize,
    pub k: usize,
    pub w: *const T,
    pub n: usize,
    pub out: *mut f32,
    pub out_stride: usize,
}

impl<T> Operands<T> {
    /// The operands from token `i` and weight row `j` on.
    ///
    /// # Safety
    /// `i <= m` and `j <= n`.
    #[inline(always)]
    unsafe fn at(self, i: usize, j: usize) -> Self {
        // SAFETY: both stay within their matrices or one past the end, by the caller.
        unsafe {
            Self {
                x: self.x.add(i * self.k),
                m: self.m - i,
                w: self.w.add(j * self.k),
                n: self.n - j,
                out: self.out.wrapping_add(i * self.out_stride + j),
                ..self
            }
        }
    }
}

/// Floats of tokens, 2 MB, that meet all weights before the next tokens do: cores have about as much of their caches.
const TOKENS: usize = 512 * 1024;

/// All dot products of the operands, in tiles of up to four tokens by `R` weight rows.
///
/// # Safety
/// The matrices of `o` are valid for their sizes, `out` for `(m - 1) * out_stride + n` floats that
/// nothing else touches meanwhile, and the processor has the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn rows<V: Vector, T: Element, const R: usize>(o: Operands<T>) {
    let most = (TOKENS / o.k.max(1)).max(4).next_multiple_of(4);
    for first in (0..o.m).step_by(most) {
        // SAFETY: first < m.
        let rest = unsafe { o.at(first, 0) };
        // SAFETY: as the caller's, of fewer tokens.
        unsafe {
            all_rows::<V, T, R>(Operands {
                m: rest.m.min(most),
                ..rest
            });
        }
    }
}

/// The same of tokens that stay in a cache: a weight row is read from memory once and meets all of them while it is in
/// the first-level cache.
///
/// # Safety
/// As [`rows`].
#[inline(always)]
unsafe fn all_rows<V: Vector, T: Element, const R: usize>(o: Operands<T>) {
    let mut j = 0;
    while j < o.n {
        // SAFETY: j < n, and each arm covers `step` rows, which are no more than are left.
        unsafe {
            let step = if o.n - j >= R {
                tokens::<V, T, R>(o.at(0, j));
                R
            } else {
                tokens::<V, T, 1>(o.at(0, j));
                1
            };
            j += step;
        }
    }
}

/// The tiles of `R` weight rows with all tokens, of which the first one prefetches the next rows.
///
/// # Safety
/// As [`rows`]; `R <= n`.
#[inline(always)]
unsafe fn tokens<V: Vector, T: Element, const R: usize>(o: Operands<T>) {
    // SAFETY: the caller's.
    unsafe { up_to_four::<V, T, R, true>(o) };
    for i in (4..o.m).step_by(4) {
        // SAFETY: i < m.
        unsafe { up_to_four::<V, T, R, false>(o.at(i, 0)) };
    }
}

/// The tile of `R` weight rows with the first tokens.
///
/// # Safety
/// As [`rows`]; `R <= n` and there is a token.
#[inline(always)]
unsafe fn up_to_four<V: Vector, T: Element, const R: usize, const PREFETCH: bool>(o: Operands<T>) {
    // SAFETY: each arm covers no more tokens than there are.
    unsafe {
        match o.m {
            1 => tile::<V, T, 1, R, PREFETCH>(o),
            2 => tile::<V, T, 2, R, PREFETCH>(o),
            3 => tile::<V, T, 3, R, PREFETCH>(o),
            _ => tile::<V, T, 4, R, PREFETCH>(o),
        }
    }
}

/// How far ahead of the row in use weights are asked for: one page, since the processor's own
/// prefetching stops at the end of a page.
const AHEAD: usize = 4096;

/// Sums of the single-token kernel, enough to hide the latency of the additions.
const SUMS: usize = 8;

/// All dot products with a single token, which is bound by memory: one stream of weights, row by
/// row, each line asked for a page ahead of its use. Only the second-level cache takes as many requests as
/// keep memory busy: on Zen 4 this reads a fifth more than asking the first level for a row at once.
///
/// # Safety
/// As [`rows`], with m = 1.
#[inline(always)]
pub(super) unsafe fn single<V: Vector, T: Element>(o: Operands<T>) {
    for j in 0..o.n {
        // SAFETY: j < n; `p` stays within the row as in `tile`; a prefetch may point anywhere.
        unsafe {
            let w = o.w.add(j * o.k);
            let ahead = |p: usize, count: usize| {
                for line in 0..(count * size_of::<T>()).div_ceil(64) {
                    prefetch::<2, _>(w.wrapping_add(p).wrapping_byte_add(AHEAD + line * 64));
                }
            };
            let mut acc = [V::splat(0.0); SUMS];
            let mut p = 0;
            while p + SUMS * V::LANES <= o.k {
                ahead(p, SUMS * V::LANES);
                for (u, sum) in acc.iter_mut().enumerate() {
                    let x = V::load(o.x.add(p + u * V::LANES));
                    *sum = x.mul_add(T::load::<V>(w.add(p + u * V::LANES)), *sum);
                }
                p += SUMS * V::LANES;
            }
            ahead(p, o.k - p);
            while p + V::LANES <= o.k {
                acc[0] = V::load(o.x.add(p)).mul_add(T::load::<V>(w.add(p)), acc[0]);
                p += V::LANES;
            }
            if p < o.k {
                let x: V = tail(o.x.add(p), o.k - p);
                acc[1] = x.mul_add(tail(w.add(p), o.k - p), acc[1]);
            }
            let mut width = SUMS / 2;
            while width > 0 {
                for u in 0..width {
                    acc[u] = acc[u].add(acc[u + width]);
                }
                width /= 2;
            }
            *o.out.add(j) = acc[0].sum();
        }
    }
}

/// One tile of `M` tokens by `R` weight rows. With `PREFETCH` it prefetches the next `R` weight rows line by line: all of
/// them at once are more misses than a core can have in flight.
///
/// # Safety
/// As [`rows`]; `M <= m` and `R <= n`.
#[inline(always)]
unsafe fn tile<V: Vector, T: Element, const M: usize, const R: usize, const PREFETCH: bool>(
    o: Operands<T>,
) {
    // SAFETY: `p + V::LANES <= k` in the loop, so that all loads stay within their rows; the tail is
    // copied to buffers of `V::LANES`; the stores are within `out` by M <= m and R <= n.
    unsafe {
        let mut acc = [[V::splat(0.0); R]; M];
        let mut p = 0;
        while p + V::LANES <= o.k {
            if PREFETCH && (p * size_of::<T>()).is_multiple_of(64) {
                for r in 0..R {
                    prefetch::<2, _>(o.w.wrapping_add((R + r) * o.k + p));
                }
            }
            let w: [V; R] = std::array::from_fn(|r| T::load::<V>(o.w.add(r * o.k + p)));
            for (i, sums) in acc.iter_mut().enumerate() {
                let x = V::load(o.x.add(i * o.k + p));
                for r in 0..R {
                    sums[r] = x.mul_add(w[r], sums[r]);
                }
            }
            p += V::LANES;
        }
        if p < o.k {
            let w: [V; R] = std::array::from_fn(|r| tail(o.w.add(r * o.k + p), o.k - p));
            for (i, sums) in acc.iter_mut().enumerate() {
                let x: V = tail(o.x.add(i * o.k + p), o.k - p);
                for r in 0..R {
                    sums[r] = x.mul_add(w[r], sums[r]);
                }
            }
        }
        for (i, sums) in acc.into_iter().enumerate() {
            for (r, sum) in sums.into_iter().enumerate() {
                *o.out.add(i * o.out_stride + r) = sum.sum();
            }
        }
    }
}

/// A vector of the `len < V::LANES` elements at `p`, filled up with zeros.
///
/// # Safety
/// `len` elements may be read from `p`, and the processor has the instruction set of `V`.
#[inline(always)]
unsafe fn tail<V: Vector, T: Element>(p: *const T, len: usize) -> V {
    let mut whole = [T::from_f32(0.0); 16];
    // SAFETY: len < V::LANES <= 16 elements are copied, and `whole` has all V::LANES.
    unsafe {
        std::ptr::copy_nonoverlapping(p, whole.as_mut_ptr(), len);
        T::load::<V>(whole.as_ptr())
    }
}
