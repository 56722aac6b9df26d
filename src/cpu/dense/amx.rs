//! Products of many tokens with weights in bf16, in AMX's tiles.
//!
//! A token in f32 is the sum of three numbers in bf16, 24 bits in all, so that each product is three of tiles with f32
//! sums: as exact as f32, at 170 multiplications a cycle where AVX-512 has 32. The method is that of Henry, Tang and
//! Heinecke ("Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations", 2019). A
//! token in bf16 is one part: the two others would only add zeros.
//!
//! Loops from the outside: [`TOKENS`] tokens, [`DEPTH`] of k (of both, what stays in the second-level cache, split once),
//! [`WEIGHTS`] weight rows (in the first-level cache, interleaved once), 32 tokens: four tiles of sums.

use super::dot::Operands;
use crate::cpu::amx::{self, Config, ROW_BYTES, ROWS, TileOps};
use half::bf16;
use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

/// Tokens that are split at a time: with [`DEPTH`] and three parts 768 KB.
pub(super) const TOKENS: usize = 256;
/// Columns of them.
const DEPTH: usize = 512;
/// Weight rows of a panel, which are two tiles side by side.
const WEIGHTS: usize = 2 * ROWS;
/// Columns of a tile.
const STEP: usize = ROW_BYTES / size_of::<bf16>();

/// A row of a tile.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Row([u16; STEP]);

/// A tile of operands.
type Tile = [Row; ROWS];

/// Sums of a token tile and a weight tile.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Sums([[f32; ROWS]; ROWS]);

/// The panels of a thread.
#[derive(Default)]
struct Room {
    /// For each 16 tokens and each 32 columns a tile of each part.
    x: Vec<Tile>,
    /// For each 32 columns two tiles: row i of a tile has columns 2i and 2i + 1 of each weight row.
    w: Vec<[Tile; 2]>,
}

thread_local! {
    static ROOM: RefCell<Room> = RefCell::default();
}

/// What a thread has in hand.
pub(super) struct Part {
    tokens: Range<usize>,
    columns: Range<usize>,
}

/// What the values of tokens are.
pub(super) trait Source: Sized {
    /// Numbers in bf16 that a value is the sum of.
    const PARTS: usize;

    /// Splits tokens into tiles of their parts, with zeros for tokens and columns that a last tile lacks; false if a
    /// value is not finite.
    ///
    /// # Safety
    /// As [`panel`].
    unsafe fn split(o: &Operands<bf16, Self>, part: &Part, tiles: &mut Vec<Tile>) -> bool;
}

impl Source for f32 {
    const PARTS: usize = 3;

    unsafe fn split(o: &Operands<bf16, f32>, part: &Part, tiles: &mut Vec<Tile>) -> bool {
        // SAFETY: the caller's.
        unsafe { split(o, part, tiles) }
    }
}

impl Source for bf16 {
    const PARTS: usize = 1;

    unsafe fn split(o: &Operands<bf16, bf16>, part: &Part, tiles: &mut Vec<Tile>) -> bool {
        // SAFETY: the caller's.
        unsafe { copy(o, part, tiles) }
    }
}

/// All dot products of the operands; false, with `out` in an unspecified state, if one of the operands is not finite: a
/// zero part of a token would make an infinite weight NaN.
///
/// # Safety
/// As [`dot::rows`](super::dot::rows); the processor has AVX-512, and AMX as [`amx::Tiles`] need it.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn products<X: Source>(o: Operands<bf16, X>) -> bool {
    const CONFIG: Config = Config::new([(ROWS, ROW_BYTES); 8]);
    let mut room = ROOM.take();
    // SAFETY: AMX, by the caller.
    unsafe { amx::Tiles::configure(&CONFIG) };
    let finite = (0..o.m).step_by(TOKENS).all(|first| {
        let tokens = first..o.m.min(first + TOKENS);
        (0..o.k).step_by(DEPTH).all(|k| {
            let part = Part {
                tokens: tokens.clone(),
                columns: k..o.k.min(k + DEPTH),
            };
            // SAFETY: the caller's; tokens and columns lie within the operands, and the tiles are configured.
            unsafe { panel(&o, &part, &mut room) }
        })
    });
    // SAFETY: AMX, by the caller.
    unsafe { amx::Tiles::release() };
    ROOM.set(room);
    finite
}

/// The part of the products of some tokens that some columns have, which is added to that of the columns before; false
/// if an operand is not finite.
///
/// # Safety
/// As [`products`], of tokens and columns of `o`; the tiles are configured.
#[inline]
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn panel<X: Source>(o: &Operands<bf16, X>, part: &Part, room: &mut Room) -> bool {
    let Part { tokens, columns } = part;
    let token_tile = columns.len().div_ceil(STEP) * X::PARTS;
    // SAFETY: the caller's.
    if !unsafe { X::split(o, part, &mut room.x) } {
        return false;
    }
    let mut sums = [[Sums([[0.; ROWS]; ROWS]); 2]; 2];
    for row in (0..o.n).step_by(WEIGHTS) {
        let rows = row..o.n.min(row + WEIGHTS);
        // SAFETY: the caller's; the rows are there.
        if !unsafe { interleave(o, &rows, columns, &mut room.w) } {
            return false;
        }
        for (pair, x) in room.x.chunks(2 * token_tile).enumerate() {
            let first = tokens.start + pair * 2 * ROWS;
            // SAFETY: the tiles are configured, and `x` and `w` have the steps of one or two token tiles.
            unsafe { block::<amx::Tiles, X>(x, &room.w, &mut sums) };
            for (i, sums) in sums[..x.len() / token_tile].iter().enumerate() {
                for (j, sums) in sums.iter().enumerate() {
                    let (t, r) = (first + ROWS * i, rows.start + ROWS * j);
                    let count = tokens.end.saturating_sub(t).min(ROWS);
                    let width = rows.end.saturating_sub(r).min(ROWS);
                    // SAFETY: `count` tokens from t on and `width` rows from r on are there, and so are their results.
                    unsafe { add(o, sums, (t, count), (r, width), columns.start == 0) };
                }
            }
        }
    }
    true
}

/// Adds `count` rows of `width` sums to the results of tokens from `t` and weight rows from `r` on, or writes them if
/// they are the first.
///
/// # Safety
/// `out` has these results.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn add<X>(
    o: &Operands<bf16, X>,
    sums: &Sums,
    (t, count): (usize, usize),
    (r, width): (usize, usize),
    first: bool,
) {
    let mask = ((1u32 << width) - 1) as u16;
    for (i, sums) in sums.0[..count].iter().enumerate() {
        // SAFETY: the caller's; lanes beyond `width` are neither read nor written.
        unsafe {
            let out = o.out.add((t + i) * o.out_stride).wrapping_add(r);
            let mut sum = _mm512_load_ps(sums.as_ptr());
            if !first {
                sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, out));
            }
            _mm512_mask_storeu_ps(out, mask, sum);
        }
    }
}

/// One or two tiles of tokens times two tiles of weights, over all steps: a tile of tokens' steps lie one behind the
/// other.
///
/// # Safety
/// The tiles are configured, and `x` has the steps of `w` once or twice.
#[inline]
unsafe fn block<O: TileOps, X: Source>(x: &[Tile], w: &[[Tile; 2]], sums: &mut [[Sums; 2]; 2]) {
    let (first, second) = x.split_at(w.len() * X::PARTS);
    // SAFETY: the caller's; all operands are whole tiles.
    unsafe {
        O::zero::<0>();
        O::zero::<1>();
        O::zero::<2>();
        O::zero::<3>();
        for (step, w) in w.iter().enumerate() {
            O::load::<6>((&raw const w[0]).cast(), ROW_BYTES);
            O::load::<7>((&raw const w[1]).cast(), ROW_BYTES);
            for part in step * X::PARTS..(step + 1) * X::PARTS {
                O::load::<4>((&raw const first[part]).cast(), ROW_BYTES);
                O::dot_bf16::<0, 4, 6>();
                O::dot_bf16::<1, 4, 7>();
                if let Some(second) = second.get(part) {
                    O::load::<5>((&raw const *second).cast(), ROW_BYTES);
                    O::dot_bf16::<2, 5, 6>();
                    O::dot_bf16::<3, 5, 7>();
                }
            }
        }
        O::store::<0>((&raw mut sums[0][0]).cast(), ROW_BYTES);
        O::store::<1>((&raw mut sums[0][1]).cast(), ROW_BYTES);
        O::store::<2>((&raw mut sums[1][0]).cast(), ROW_BYTES);
        O::store::<3>((&raw mut sums[1][1]).cast(), ROW_BYTES);
    }
}

/// Room for `parts` tiles of each step of tokens, with zeros for tokens that the last tile lacks.
fn make_room(tokens: usize, steps: usize, parts: usize, tiles: &mut Vec<Tile>) {
    let zero = [Row([0; STEP]); ROWS];
    tiles.resize(tokens.div_ceil(ROWS) * steps * parts, zero);
    if !tokens.is_multiple_of(ROWS) {
        let last = tiles.len() - steps * parts;
        tiles[last..].fill(zero);
    }
}

/// [`Source::split`] of f32.
///
/// # Safety
/// As [`panel`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn split(o: &Operands<bf16>, part: &Part, tiles: &mut Vec<Tile>) -> bool {
    let Part { tokens, columns } = part;
    let parts = <f32 as Source>::PARTS;
    let steps = columns.len().div_ceil(STEP);
    make_room(tokens.len(), steps, parts, tiles);
    // Word 2i of the first half and 2i + 1 of the second go to places i and 16 + i.
    let apart: [u16; STEP] = std::array::from_fn(|i| (2 * (i % ROWS) + i / ROWS) as u16);
    // SAFETY: a vector of as many bytes.
    let apart = unsafe { _mm512_loadu_si512(apart.as_ptr().cast()) };
    let mut exponents = _mm512_setzero_si512();
    for (t, token) in tokens.clone().enumerate() {
        let own = &mut tiles[t / ROWS * steps * parts..][..steps * parts];
        for (step, tiles) in own.chunks_exact_mut(parts).enumerate() {
            let column = columns.start + step * STEP;
            let mask = mask((columns.end - column).min(STEP));
            // SAFETY: the mask leaves the values of the token that are there.
            let mut rest = unsafe {
                let x = o.x.add(token * o.k).wrapping_add(column);
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
            for tile in tiles.iter_mut() {
                // The upper 16 bits are the value truncated to bf16. What is left, value minus that, is exact in f32.
                let [low, high] = rest.map(|x| _mm512_castps_si512(x));
                let both = _mm512_mask_mov_epi16(_mm512_srli_epi32::<16>(low), 0xaaaa_aaaa, high);
                let row = (&raw mut tile[t % ROWS]).cast();
                // SAFETY: a row of a tile has 64 bytes.
                unsafe { _mm512_store_si512(row, _mm512_permutexvar_epi16(apart, both)) };
                rest = rest.map(|x| {
                    let upper =
                        _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(!0xffff));
                    _mm512_sub_ps(x, _mm512_castsi512_ps(upper))
                });
            }
        }
    }
    _mm512_cmpeq_epi32_mask(exponents, _mm512_set1_epi32(0x7f80_0000)) == 0
}

/// [`Source::split`] of bf16, which are their only part.
///
/// # Safety
/// As [`panel`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn copy(o: &Operands<bf16, bf16>, part: &Part, tiles: &mut Vec<Tile>) -> bool {
    let Part { tokens, columns } = part;
    let steps = columns.len().div_ceil(STEP);
    make_room(tokens.len(), steps, 1, tiles);
    let mut exponents = _mm512_setzero_si512();
    for (t, token) in tokens.clone().enumerate() {
        for (step, tile) in tiles[t / ROWS * steps..][..steps].iter_mut().enumerate() {
            let column = columns.start + step * STEP;
            let mask = mask((columns.end - column).min(STEP));
            let row = (&raw mut tile[t % ROWS]).cast();
            // SAFETY: the mask leaves the values of the token that are there, and a row of a tile has 64 bytes.
            let x = unsafe {
                let x = _mm512_maskz_loadu_epi16(mask, o.x.add(token * o.k + column).cast());
                _mm512_store_si512(row, x);
                x
            };
            let own = _mm512_and_si512(x, _mm512_set1_epi16(0x7f80));
            exponents = _mm512_max_epu16(exponents, own);
        }
    }
    _mm512_cmpeq_epi16_mask(exponents, _mm512_set1_epi16(0x7f80)) == 0
}

/// The lowest `count` bits.
fn mask(count: usize) -> u32 {
    (1u64 << count).wrapping_sub(1) as u32
}

/// Interleaves the columns of up to 32 weight rows by twos, with zeros for rows and columns that a last tile lacks; false
/// if a weight is not finite.
///
/// # Safety
/// As [`panel`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn interleave<X>(
    o: &Operands<bf16, X>,
    rows: &Range<usize>,
    columns: &Range<usize>,
    tiles: &mut Vec<[Tile; 2]>,
) -> bool {
    tiles.resize(columns.len().div_ceil(STEP), [[Row([0; STEP]); ROWS]; 2]);
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
                        let w = o.w.add(row * o.k + column);
                        _mm512_maskz_loadu_epi16(mask, w.cast())
                    };
                }
                let own = _mm512_and_si512(*words, _mm512_set1_epi16(0x7f80));
                exponents = _mm512_max_epu16(exponents, own);
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
    use crate::cpu::simd::{self, Level};
    use rand::{Rng, SeedableRng, rngs::StdRng};

    /// The products, between NaNs that have to stay; none if an operand is not finite.
    fn run<X: Source>(x: &[X], w: &[bf16], (m, n, k): (usize, usize, usize)) -> Option<Vec<f32>> {
        let out_stride = n + 3;
        let mut out = vec![f32::NAN; m * out_stride];
        let o = Operands {
            x: x.as_ptr(),
            m,
            k,
            w: w.as_ptr(),
            n,
            out: out.as_mut_ptr(),
            out_stride,
        };
        // SAFETY: the slices have these shapes; the callers have looked for AVX-512.
        let finite = unsafe { products(o) };
        assert!(!amx::Tiles::in_use(), "tiles are released");
        let gaps = out
            .chunks_exact(out_stride)
            .all(|row| row[n..].iter().all(|v| v.is_nan()));
        assert!(gaps, "{m} x {n} x {k}: written beyond a row");
        let rows = out.chunks_exact(out_stride).flat_map(|row| &row[..n]);
        finite.then(|| rows.copied().collect())
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
            (48, 1, 1),
            (49, 33, 31),
            (63, 17, 33),
            (80, 70, 545),
            (263, 40, 1030),
            (64, 64, 512),
        ];
        for (m, n, k) in shapes {
            let (x, w) = operands(m, n, k);
            let out = run(&x, &w, (m, n, k)).expect("finite");
            for (i, got) in out.into_iter().enumerate() {
                let (x, w) = (&x[i / n * k..][..k], &w[i % n * k..][..k]);
                let terms = x.iter().zip(w).map(|(x, w)| f64::from(*x) * w.to_f64());
                let (sum, size) = terms.fold((0., 0.), |(s, a), t| (s + t, a + t.abs()));
                let limit = f64::from(f32::EPSILON) * (k as f64).sqrt().max(2.) * size;
                let error = (f64::from(got) - sum).abs();
                assert!(error <= limit, "{m} x {n} x {k} at {i}: {got} for {sum}");
            }
            // The parts that tokens in bf16 do not have are zeros.
            let narrow: Vec<_> = x.iter().map(|x| bf16::from_f32(*x)).collect();
            let wide: Vec<_> = narrow.iter().map(|x| x.to_f32()).collect();
            let shape = (m, n, k);
            assert_eq!(run(&narrow, &w, shape), run(&wide, &w, shape), "{shape:?}");
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
                assert_eq!(run(&x, &w, shape), None);
                let mut x = x.clone();
                x[at] = bad;
                let (_, w) = operands(50, 20, 70);
                assert_eq!(run(&x, &w, shape), None);
                let x: Vec<_> = x.into_iter().map(bf16::from_f32).collect();
                assert_eq!(run(&x, &w, shape), None);
            }
        }
        assert!(run(&x, &w, shape).is_some());
    }
}
