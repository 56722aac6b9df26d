//! Register tiles: the matrix products inside attention.

use crate::cpu::vector::{Element, Vector, is_f32};

/// The left operand of [`multiply`]: element `(i, p)` lies at `at[i * row + p * step]`.
#[derive(Clone, Copy)]
pub(super) struct Left {
    pub at: *const f32,
    pub row: usize,
    pub step: usize,
}

/// A matrix of vectors in rows that lie `row` elements apart.
#[derive(Clone, Copy)]
pub(super) struct Rows<P> {
    pub at: P,
    pub row: usize,
}

/// `c[i][j] = factor[i] c[i][j] + sum over p of a[i][p] b[p][j]`, or without the first term where
/// there are no factors, for `i < m`, `p < k` and `vectors` vectors of columns.
///
/// # Safety
/// The processor has `V`'s instructions; the operands have these sizes, `c` may be written and
/// overlaps neither.
#[inline(always)]
pub(super) unsafe fn multiply<V: Vector, B: Element, const FACTORS: bool>(
    (m, vectors, k): (usize, usize, usize),
    a: Left,
    b: Rows<*const B>,
    c: Rows<*mut f32>,
    factors: *const f32,
) {
    let mut i = 0;
    while i < m {
        let a = Left {
            at: a.at.wrapping_add(i * a.row),
            ..a
        };
        let c = Rows {
            at: c.at.wrapping_add(i * c.row),
            ..c
        };
        let f = if FACTORS {
            factors.wrapping_add(i)
        } else {
            factors
        };
        // SAFETY: rows `i ..` of the operands, as many as are left, up to six.
        unsafe {
            match m - i {
                1 => columns::<V, B, FACTORS, 1, 4>(vectors, k, a, b, c, f),
                2 => columns::<V, B, FACTORS, 2, 4>(vectors, k, a, b, c, f),
                // What is widened takes registers of its own.
                3 if is_f32::<B>() => columns::<V, B, FACTORS, 3, 4>(vectors, k, a, b, c, f),
                3 => columns::<V, B, FACTORS, 3, 3>(vectors, k, a, b, c, f),
                4 => columns::<V, B, FACTORS, 4, 2>(vectors, k, a, b, c, f),
                5 => columns::<V, B, FACTORS, 5, 2>(vectors, k, a, b, c, f),
                _ => columns::<V, B, FACTORS, 6, 2>(vectors, k, a, b, c, f),
            }
        }
        i += 6;
    }
}

/// `M` rows: `N` vectors at a time, then two, then one.
#[inline(always)]
unsafe fn columns<V: Vector, B: Element, const FACTORS: bool, const M: usize, const N: usize>(
    vectors: usize,
    k: usize,
    a: Left,
    b: Rows<*const B>,
    c: Rows<*mut f32>,
    factors: *const f32,
) {
    let mut j = 0;
    // SAFETY: `j` stays below `vectors`.
    unsafe {
        while j + N <= vectors {
            let b = Rows {
                at: b.at.add(j * V::LANES),
                ..b
            };
            let c = Rows {
                at: c.at.add(j * V::LANES),
                ..c
            };
            registers::<V, B, FACTORS, M, N>(k, a, b, c, factors);
            j += N;
        }
        while N > 2 && j + 2 <= vectors {
            let b = Rows {
                at: b.at.add(j * V::LANES),
                ..b
            };
            let c = Rows {
                at: c.at.add(j * V::LANES),
                ..c
            };
            registers::<V, B, FACTORS, M, 2>(k, a, b, c, factors);
            j += 2;
        }
        while j < vectors {
            let b = Rows {
                at: b.at.add(j * V::LANES),
                ..b
            };
            let c = Rows {
                at: c.at.add(j * V::LANES),
                ..c
            };
            registers::<V, B, FACTORS, M, 1>(k, a, b, c, factors);
            j += 1;
        }
    }
}

/// `M` rows of `N` vectors, all in registers.
#[inline(always)]
unsafe fn registers<V: Vector, B: Element, const FACTORS: bool, const M: usize, const N: usize>(
    k: usize,
    a: Left,
    b: Rows<*const B>,
    c: Rows<*mut f32>,
    factors: *const f32,
) {
    // SAFETY: the caller's operands have `M` rows, `N` vectors of columns and `k` steps.
    unsafe {
        let mut acc = [[V::splat(0.0); N]; M];
        if FACTORS {
            for i in 0..M {
                let factor = V::splat(*factors.add(i));
                for j in 0..N {
                    acc[i][j] = V::load(c.at.add(i * c.row + j * V::LANES)).mul(factor);
                }
            }
        }
        for p in 0..k {
            let left = |i: usize| *a.at.add(i * a.row + p * a.step);
            let right = |j: usize| b.at.add(p * b.row + j * V::LANES);
            // The shorter side stays in registers, so that the sums, it and one more fit in 16.
            if N <= M {
                let mut held = [V::splat(0.0); N];
                for j in 0..N {
                    held[j] = B::load(right(j));
                }
                for i in 0..M {
                    let left = V::splat(left(i));
                    for j in 0..N {
                        acc[i][j] = left.mul_add(held[j], acc[i][j]);
                    }
                }
            } else {
                let mut held = [V::splat(0.0); M];
                for i in 0..M {
                    held[i] = V::splat(left(i));
                }
                for j in 0..N {
                    let right: V = B::load(right(j));
                    for i in 0..M {
                        acc[i][j] = held[i].mul_add(right, acc[i][j]);
                    }
                }
            }
        }
        for i in 0..M {
            for j in 0..N {
                acc[i][j].store(c.at.add(i * c.row + j * V::LANES));
            }
        }
    }
}

/// Dot products of `m` rows with `n` keys: `s[i][p] = sum of q[i] * keys[p]`, over `vectors`
/// vectors. Writes up to three elements past the `n`-th.
///
/// # Safety
/// The processor has `V`'s instructions; the operands have these sizes and `n` is not 0.
#[inline(always)]
pub(super) unsafe fn dots<V: Vector, T: Element>(
    (m, vectors, n): (usize, usize, usize),
    q: Rows<*const f32>,
    keys: Rows<*const T>,
    s: Rows<*mut f32>,
) {
    let mut i = 0;
    while i < m {
        let q = Rows {
            at: q.at.wrapping_add(i * q.row),
            ..q
        };
        let s = Rows {
            at: s.at.wrapping_add(i * s.row),
            ..s
        };
        // SAFETY: rows `i ..`, as many as are left, up to three.
        i += unsafe {
            match m - i {
                1 => each_key::<V, T, 1, 4>(vectors, n, q, keys, s),
                2 | 4 => each_key::<V, T, 2, 4>(vectors, n, q, keys, s),
                // What is widened takes registers of its own.
                _ if is_f32::<T>() => each_key::<V, T, 3, 4>(vectors, n, q, keys, s),
                _ => each_key::<V, T, 3, 3>(vectors, n, q, keys, s),
            }
        };
    }
}

/// `M` rows with all keys, `P` at a time; returns `M`.
#[inline(always)]
unsafe fn each_key<V: Vector, T: Element, const M: usize, const P: usize>(
    vectors: usize,
    n: usize,
    q: Rows<*const f32>,
    keys: Rows<*const T>,
    s: Rows<*mut f32>,
) -> usize {
    let mut p = 0;
    while p < n {
        // Past the last key, the last one again: its scores land behind the others.
        let mut at = [keys.at; P];
        for (i, at) in at.iter_mut().enumerate() {
            *at = keys.at.wrapping_add((p + i).min(n - 1) * keys.row);
        }
        let s = Rows {
            at: s.at.wrapping_add(p),
            ..s
        };
        // SAFETY: keys that exist, and room for four scores.
        unsafe { some_keys::<V, T, M, P>(vectors, q, at, s) }
        p += P;
    }
    M
}

#[inline(always)]
unsafe fn some_keys<V: Vector, T: Element, const M: usize, const P: usize>(
    vectors: usize,
    q: Rows<*const f32>,
    keys: [*const T; P],
    s: Rows<*mut f32>,
) {
    // SAFETY: the caller's rows have `vectors` vectors; `s` has room for four.
    unsafe {
        let mut acc = [[V::splat(0.0); P]; M];
        for j in 0..vectors {
            // The rows stay in registers, so that the sums, they and one more fit in 16.
            let mut row = [V::splat(0.0); M];
            for i in 0..M {
                row[i] = V::load(q.at.add(i * q.row + j * V::LANES));
            }
            for p in 0..P {
                let key: V = T::load(keys[p].add(j * V::LANES));
                for i in 0..M {
                    acc[i][p] = row[i].mul_add(key, acc[i][p]);
                }
            }
        }
        for i in 0..M {
            let of = |p: usize| acc[i][p.min(P - 1)];
            let sums = V::sum4([of(0), of(1), of(2), of(3)]);
            s.at.add(i * s.row).cast::<[f32; 4]>().write_unaligned(sums);
        }
    }
}
