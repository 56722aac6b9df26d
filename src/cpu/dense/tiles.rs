//! Products with weights in bf16, in tiles.
//!
//! With AMX a token in f32 is the sum of three numbers in bf16, 24 bits in all, so that each product is three of tiles with f32
//! sums: as exact as f32, at 170 multiplications a cycle where AVX-512 has 32. The method is that of Henry, Tang and
//! Heinecke ("Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations", 2019). A
//! token in bf16 is one part.

use super::dot::Operands;
use crate::cpu::simd::{Level, prefetch};
use crate::cpu::tiles::product::{self, Results, WEIGHTS, Weights};
use crate::cpu::tiles::tokens::{TokenRows, TokenTiles};
use crate::cpu::tiles::vectors::Vectors;
use crate::cpu::tiles::{ROWS, STEP, Tile, Tiles};
use half::bf16;
use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// Parts of a token in f32.
const PARTS: usize = 3;

/// Tokens in f32 that are split at a time: a run of steps of them has 768 KB, which should stay in the second-level cache.
pub(super) const TOKENS: usize = 256;

/// Tokens in bf16 that are multiplied at a time: 1 MB.
pub(super) const TOKENS_BF16: usize = 512;

/// What a thread keeps of tokens in f32: all of them but for very long rows.
const KEPT_BYTES: usize = 8 << 20;

thread_local! {
    /// The tokens in hand.
    static SPLIT: RefCell<TokenTiles> = RefCell::default();
}

/// Weight rows in bf16. With `FINITE`, weights that are not make [`Weights::tiles`] false.
struct Rows<const FINITE: bool> {
    w: *const bf16,
    k: usize,
}

/// The columns that some steps have of `k`.
fn columns(k: usize, steps: &Range<usize>) -> Range<usize> {
    steps.start * STEP..k.min(steps.end * STEP)
}

impl<const FINITE: bool> Weights for Rows<FINITE> {
    const PARTS: usize = 1;

    unsafe fn tiles(
        &self,
        rows: &Range<usize>,
        steps: &Range<usize>,
        out: &mut [[Tile; 2]],
    ) -> bool {
        // SAFETY: the caller's.
        let finite = unsafe { interleave(self, rows, &columns(self.k, steps), out) };
        finite || !FINITE
    }

    /// Runs of columns are too short for the hardware's prefetching.
    fn prefetch(&self, rows: &Range<usize>, steps: &Range<usize>) {
        let columns = columns(self.k, steps);
        for row in rows.clone() {
            let first = self.w.wrapping_add(row * self.k + columns.start);
            for column in (0..columns.len()).step_by(STEP) {
                prefetch::<2, _>(first.wrapping_add(column));
            }
        }
    }
}

/// All dot products of the operands; false, with `out` in an unspecified state, if one of the operands is not finite: a
/// zero part of a token would make an infinite weight NaN.
///
/// # Safety
/// As [`dot::rows`](super::dot::rows); the processor has AVX-512, and AMX as [`Tiles`] need it.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn products(o: Operands<bf16>) -> bool {
    let k = o.k;
    // SAFETY: the caller's.
    let all = unsafe { std::slice::from_raw_parts(o.x, o.m * k) };
    let mut x = SPLIT.take();
    let w = Rows::<true> { w: o.w, k };
    let done = (0..o.m).step_by(TOKENS).all(|first| {
        let m = (o.m - first).min(TOKENS);
        let finite = AtomicBool::new(true);
        x.fill((m, k, PARTS), m, |token, rows| {
            let values = &all[(first + token) * k..][..k];
            // SAFETY: the processor has AVX-512, by the caller; this token is nobody else's.
            if !unsafe { split(values, token, rows) } {
                finite.store(false, Ordering::Relaxed);
            }
        });
        let results = Results {
            rows: 0..o.n,
            tokens: 0..m,
            out: o.out.wrapping_add(first * o.out_stride),
            stride: o.out_stride,
        };
        // SAFETY: the caller's; there are such tokens.
        finite.into_inner() && unsafe { product::products::<Tiles, _>(&w, &x, &results) }
    });
    if x.bytes() <= KEPT_BYTES {
        SPLIT.set(x);
    }
    done
}

/// Fills `tiles` with tokens in bf16, `m` rows of `k` values.
///
/// # Safety
/// The processor has AVX-512.
pub(super) unsafe fn fill_bf16(tiles: &mut TokenTiles, x: &[bf16], m: usize) {
    let k = x.len() / m.max(1);
    let grain = super::WORTH.div_ceil(k.max(1));
    tiles.fill((m, k, 1), grain, |token, rows| {
        // SAFETY: the caller's; this token is nobody else's.
        unsafe { copy(&x[token * k..][..k], token, rows) };
    });
}

/// All dot products of `tokens` with `n` weight rows: by AMX at its level, by AVX-512's products of bf16 at others. Weights
/// may be infinite or NaN.
///
/// # Safety
/// The matrices are valid for their sizes, of tokens and columns that `x` has, `out` for all results; the processor has
/// AVX-512, and AMX as [`Tiles`] need it or products of bf16.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn products_bf16(
    level: Level,
    x: &TokenTiles,
    tokens: Range<usize>,
    w: &[bf16],
    (n, k): (usize, usize),
    (out, stride): (*mut f32, usize),
) {
    let w = Rows::<false> { w: w.as_ptr(), k };
    let rows = 0..n;
    let results = Results {
        rows,
        tokens,
        out,
        stride,
    };
    // SAFETY: the caller's.
    unsafe {
        match level {
            Level::Amx => product::products::<Tiles, _>(&w, x, &results),
            _ => product::products::<Vectors, _>(&w, x, &results),
        }
    };
}

/// Splits a token into its parts' rows, with zeros for columns that the last tile lacks; false if a value is not finite.
///
/// # Safety
/// The processor has AVX-512, and nobody else has this token's rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn split(x: &[f32], token: usize, rows: &TokenRows<'_>) -> bool {
    // Word 2i of the first half and 2i + 1 of the second go to places i and 16 + i.
    let apart: [u16; STEP] = std::array::from_fn(|i| (2 * (i % ROWS) + i / ROWS) as u16);
    // SAFETY: a vector of as many bytes.
    let apart = unsafe { _mm512_loadu_si512(apart.as_ptr().cast()) };
    let mut exponents = _mm512_setzero_si512();
    for (step, x) in x.chunks(STEP).enumerate() {
        let mask = mask(x.len());
        // SAFETY: the mask leaves the values that are there.
        let mut rest = unsafe {
            let x = x.as_ptr();
            [
                _mm512_maskz_loadu_ps(mask as u16, x),
                _mm512_maskz_loadu_ps((mask >> ROWS) as u16, x.wrapping_add(ROWS)),
            ]
        };
        for x in rest {
            let exponent = _mm512_set1_epi32(0x7f80_0000);
            let own = _mm512_and_si512(_mm512_castps_si512(x), exponent);
            exponents = _mm512_max_epu32(exponents, own);
        }
        for part in 0..PARTS {
            // The upper 16 bits are the value truncated to bf16. What is left, value minus that, is exact in f32.
            let [low, high] = rest.map(|x| _mm512_castps_si512(x));
            let both = _mm512_mask_mov_epi16(_mm512_srli_epi32::<16>(low), 0xaaaa_aaaa, high);
            // SAFETY: the caller's; a row of a tile has 64 bytes.
            unsafe {
                let row = &raw mut *rows.row(token, step, part);
                _mm512_store_si512(row.cast(), _mm512_permutexvar_epi16(apart, both));
            }
            rest = rest.map(|x| {
                let upper = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(!0xffff));
                _mm512_sub_ps(x, _mm512_castsi512_ps(upper))
            });
        }
    }
    _mm512_cmpeq_epi32_mask(exponents, _mm512_set1_epi32(0x7f80_0000)) == 0
}

/// The same of values in bf16, which are their only part.
///
/// # Safety
/// As [`split`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn copy(x: &[bf16], token: usize, rows: &TokenRows<'_>) {
    for (step, x) in x.chunks(STEP).enumerate() {
        // SAFETY: the caller's; the mask leaves the values that are there, and a row of a tile has 64 bytes.
        unsafe {
            let values = _mm512_maskz_loadu_epi16(mask(x.len()), x.as_ptr().cast());
            let row = &raw mut *rows.row(token, step, 0);
            _mm512_store_si512(row.cast(), values);
        }
    }
}

/// The lowest `count` bits.
fn mask(count: usize) -> u32 {
    (1u64 << count).wrapping_sub(1) as u32
}

/// Interleaves the columns of up to 32 weight rows by twos, with zeros for rows and columns that a last tile lacks; false
/// if a weight is not finite.
///
/// # Safety
/// There are such rows and columns, and the processor has AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn interleave<const FINITE: bool>(
    w: &Rows<FINITE>,
    rows: &Range<usize>,
    columns: &Range<usize>,
    tiles: &mut [[Tile; 2]],
) -> bool {
    debug_assert!(rows.len() <= WEIGHTS);
    let mut exponents = _mm512_setzero_si512();
    for (step, tiles) in tiles.iter_mut().enumerate() {
        let column = columns.start + step * STEP;
        let mask = mask((columns.end - column).min(STEP));
        for (half, tile) in tiles.iter_mut().enumerate() {
            let mut words = [_mm512_setzero_si512(); ROWS];
            for (i, words) in words.iter_mut().enumerate() {
                let row = rows.start + half * ROWS + i;
                if row < rows.end {
                    // SAFETY: the mask leaves the weights of the row that are there.
                    *words = unsafe {
                        let w = w.w.add(row * w.k + column);
                        _mm512_maskz_loadu_epi16(mask, w.cast())
                    };
                }
                if FINITE {
                    let own = _mm512_and_si512(*words, _mm512_set1_epi16(0x7f80));
                    exponents = _mm512_max_epu16(exponents, own);
                }
            }
            for (to, words) in tile.iter_mut().zip(transposed(words)) {
                // SAFETY: a row of a tile has 64 bytes.
                unsafe { _mm512_store_si512((&raw mut *to).cast(), words) };
            }
        }
    }
    _mm512_cmpeq_epi16_mask(exponents, _mm512_set1_epi16(0x7f80)) == 0
}

/// Word j of row i as word i of row j: by twos, by fours, and then runs of four words.
#[inline]
#[target_feature(enable = "avx512f")]
fn transposed(r: [__m512i; 16]) -> [__m512i; 16] {
    let mut twos = r;
    for i in 0..8 {
        twos[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        twos[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    let mut fours = r;
    for i in 0..4 {
        let [a, b, c, d] = std::array::from_fn(|j| twos[4 * i + j]);
        fours[4 * i] = _mm512_unpacklo_epi64(a, c);
        fours[4 * i + 1] = _mm512_unpackhi_epi64(a, c);
        fours[4 * i + 2] = _mm512_unpacklo_epi64(b, d);
        fours[4 * i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    let mut all = r;
    for i in 0..4 {
        let [a, b, c, d] = std::array::from_fn(|j| fours[4 * j + i]);
        let even = [
            _mm512_shuffle_i32x4::<0x88>(a, b),
            _mm512_shuffle_i32x4::<0x88>(c, d),
        ];
        let odd = [
            _mm512_shuffle_i32x4::<0xdd>(a, b),
            _mm512_shuffle_i32x4::<0xdd>(c, d),
        ];
        all[i] = _mm512_shuffle_i32x4::<0x88>(even[0], even[1]);
        all[4 + i] = _mm512_shuffle_i32x4::<0x88>(odd[0], odd[1]);
        all[8 + i] = _mm512_shuffle_i32x4::<0xdd>(even[0], even[1]);
        all[12 + i] = _mm512_shuffle_i32x4::<0xdd>(odd[0], odd[1]);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd;
    use rand::{Rng, SeedableRng, rngs::StdRng};

    /// The products, between NaNs that have to stay; none if an operand is not finite.
    fn run(
        (m, n, k): (usize, usize, usize),
        products: impl FnOnce((*mut f32, usize)) -> bool,
    ) -> Option<Vec<f32>> {
        let stride = n + 3;
        let mut out = vec![f32::NAN; m * stride];
        let finite = products((out.as_mut_ptr(), stride));
        assert!(!Tiles::in_use(), "tiles are released");
        let gaps = out
            .chunks_exact(stride)
            .all(|row| row[n..].iter().all(|v| v.is_nan()));
        assert!(gaps, "{m} x {n} x {k}: written beyond a row");
        let rows = out.chunks_exact(stride).flat_map(|row| &row[..n]);
        finite.then(|| rows.copied().collect())
    }

    fn of_f32(x: &[f32], w: &[bf16], shape: (usize, usize, usize)) -> Option<Vec<f32>> {
        let (m, n, k) = shape;
        run(shape, |(out, out_stride)| {
            let (x, w) = (x.as_ptr(), w.as_ptr());
            let o = Operands {
                x,
                m,
                k,
                w,
                n,
                out,
                out_stride,
            };
            // SAFETY: the slices have these shapes; the callers have looked for AVX-512.
            unsafe { products(o) }
        })
    }

    /// The levels whose products of bf16 can run here, AMX's on emulated tiles at least.
    fn levels() -> impl Iterator<Item = Level> {
        let vectors = Some(Level::Avx512Bf16).filter(|level| level.supported() == *level);
        vectors.into_iter().chain([Level::Amx])
    }

    fn of_bf16(level: Level, x: &[bf16], w: &[bf16], shape: (usize, usize, usize)) -> Vec<f32> {
        let (m, n, k) = shape;
        let all = run(shape, |out| {
            let mut tiles = TokenTiles::default();
            // SAFETY: as above.
            unsafe {
                fill_bf16(&mut tiles, x, m);
                products_bf16(level, &tiles, 0..m, w, (n, k), out);
            }
            true
        });
        all.unwrap()
    }

    fn operands(m: usize, n: usize, k: usize) -> (Vec<f32>, Vec<bf16>) {
        let mut rng = StdRng::seed_from_u64(31);
        let x = (0..m * k).map(|_| rng.random_range(-1f32..1.)).collect();
        let w = (0..n * k).map(|_| bf16::from_f32(rng.random_range(-1f32..1.)));
        (x, w.collect())
    }

    #[test]
    fn products_of_tiles_agree_with_float64() {
        if simd::best() < Level::Avx512 {
            return;
        }
        // One value, tiles that are not full on every side, and more than a panel.
        let shapes = [
            (17, 33, 70),
            (40, 5, 64),
            (48, 1, 1),
            (49, 33, 31),
            (63, 17, 33),
            (80, 70, 545),
            (263, 40, 1030),
            (64, 64, 512),
        ];
        for (m, n, k) in shapes {
            let (x, w) = operands(m, n, k);
            let out = of_f32(&x, &w, (m, n, k)).expect("finite");
            // Tokens in bf16 are one part, and their sums are in another order.
            let narrow: Vec<_> = x.iter().map(|x| bf16::from_f32(*x)).collect();
            let wide: Vec<_> = narrow.iter().map(|x| x.to_f32()).collect();
            let of_narrow = levels().map(|level| (&wide, of_bf16(level, &narrow, &w, (m, n, k))));
            for (x, out) in of_narrow.chain([(&x, out)]) {
                for (i, got) in out.into_iter().enumerate() {
                    let (x, w) = (&x[i / n * k..][..k], &w[i % n * k..][..k]);
                    let terms = x.iter().zip(w).map(|(x, w)| f64::from(*x) * w.to_f64());
                    let (sum, size) = terms.fold((0., 0.), |(s, a), t| (s + t, a + t.abs()));
                    let limit = f64::from(f32::EPSILON) * (k as f64).sqrt().max(2.) * size;
                    let error = (f64::from(got) - sum).abs();
                    assert!(error <= limit, "{m} x {n} x {k} at {i}: {got} for {sum}");
                }
            }
        }
    }

    #[test]
    fn some_of_the_tokens_have_the_results_that_all_have() {
        if simd::best() < Level::Avx512 {
            return;
        }
        let (m, n, k) = (70, 35, 100);
        let (x, w) = operands(m, n, k);
        let x: Vec<_> = x.into_iter().map(bf16::from_f32).collect();
        for level in levels() {
            let all = of_bf16(level, &x, &w, (m, n, k));
            let mut tiles = TokenTiles::default();
            // SAFETY: the slice has this shape, and the processor has AVX-512.
            unsafe { fill_bf16(&mut tiles, &x, m) };
            for tokens in [0..9, 16..32, 5..23, 31..33, 40..70, 69..70] {
                let shape = (tokens.len(), n, k);
                let some = run(shape, |out| {
                    // SAFETY: as above, of tokens that there are.
                    unsafe { products_bf16(level, &tiles, tokens.clone(), &w, (n, k), out) };
                    true
                });
                assert_eq!(
                    some.unwrap(),
                    all[tokens.start * n..tokens.end * n],
                    "{tokens:?}"
                );
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_left_to_others() {
        if simd::best() < Level::Avx512 {
            return;
        }
        let shape = (50, 20, 70);
        let (x, w) = operands(50, 20, 70);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 69, 1399] {
                let mut w = w.clone();
                w[at] = bf16::from_f32(bad);
                assert_eq!(of_f32(&x, &w, shape), None);
                let mut x = x.clone();
                x[at] = bad;
                let (_, w) = operands(50, 20, 70);
                assert_eq!(of_f32(&x, &w, shape), None);
                let x: Vec<_> = x.into_iter().map(bf16::from_f32).collect();
                let all = levels()
                    .flat_map(|level| of_bf16(level, &x, &w, shape).into_iter().enumerate());
                for (i, y) in all {
                    assert_eq!(
                        y.is_finite(),
                        i / 20 != at / 70,
                        "{bad} at {at}: {y} at {i}"
                    );
                }
            }
        }
        assert!(of_f32(&x, &w, shape).is_some());
    }
}
