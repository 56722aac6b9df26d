//! Products of tokens in tiles with weights that become tiles where they are needed.
//!
//! Loops from the outside: a run of steps of k, 32 weight rows, which become tiles, 32 tokens, whose tiles stay in the
//! second-level cache: four tiles of sums.

use super::tokens::{DEPTH, TokenTiles};
use super::{ROWS, Tile, ZEROS};
use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

/// Weight rows that are multiplied with tokens at a time, in two tiles side by side.
pub(in crate::cpu) const WEIGHTS: usize = 2 * ROWS;

/// Where the tiles of weights come from.
pub(in crate::cpu) trait Weights {
    /// Numbers in bf16 that a weight is the sum of. Part i of a token is multiplied with part j of a weight where i + j
    /// is less than the number of the token's parts. The products left out are about as large as the rounding of the last
    /// parts.
    const PARTS: usize;

    /// Makes the two tiles of each part of each of these steps, the parts of a step one behind the other: row i of a tile
    /// has columns 2i and 2i + 1 of each of 16 rows. What stands in the place of rows beyond the last one is not looked
    /// at. False if the product must not be made of tiles.
    ///
    /// # Safety
    /// The processor has what the implementation needs, and there are such rows, at most [`WEIGHTS`], and steps.
    unsafe fn tiles(
        &self,
        rows: &Range<usize>,
        steps: &Range<usize>,
        out: &mut [[Tile; 2]],
    ) -> bool;

    /// Prefetches the weights of rows that come next; the range may be empty.
    fn prefetch(&self, rows: &Range<usize>, steps: &Range<usize>);
}

/// What multiplies tiles.
pub(in crate::cpu) trait Multiply {
    /// What a thread has to get back.
    type Before;

    /// Prepares this thread.
    ///
    /// # Safety
    /// The processor has what the implementation needs.
    unsafe fn begin() -> Self::Before;

    /// Releases what [`Self::begin`] has taken, which has returned `before`.
    ///
    /// # Safety
    /// As [`Self::begin`], which this thread has called.
    unsafe fn end(before: Self::Before);

    /// The first `count` tokens of two tiles times two tiles of weights, over all steps and parts. A token tile has
    /// `parts` tiles for each step; the second one may be empty. Sums of other tokens are unspecified.
    ///
    /// # Safety
    /// As [`Self::end`].
    unsafe fn block<W: Weights>(
        tokens: [&[Tile]; 2],
        count: usize,
        parts: usize,
        weights: &[[Tile; 2]],
        sums: &mut [[Sums; 2]; 2],
    );
}

/// The results of some weight rows with some tokens.
pub(in crate::cpu) struct Results {
    pub rows: Range<usize>,
    pub tokens: Range<usize>,
    /// Where the first row's result of the first token goes.
    pub out: *mut f32,
    /// How far the next token's is.
    pub stride: usize,
}

thread_local! {
    /// The weights in hand: two tiles for each step and part.
    static IN_HAND: RefCell<Vec<[Tile; 2]>> = const { RefCell::new(Vec::new()) };
}

/// Computes results; false, with these unspecified, if the weights say so.
///
/// # Safety
/// The processor has AVX-512 and what `M` and the weights need; there are such rows and tokens, and their results'
/// places are writable.
#[target_feature(enable = "avx512f")]
pub(in crate::cpu) unsafe fn products<M: Multiply, W: Weights>(
    w: &W,
    x: &TokenTiles,
    to: &Results,
) -> bool {
    let mut in_hand = IN_HAND.take();
    in_hand.resize(W::PARTS * DEPTH, [ZEROS; 2]);
    // SAFETY: the caller's.
    let before = unsafe { M::begin() };
    let done = x.depths().all(|steps| {
        let tiles = &mut in_hand[..W::PARTS * steps.len()];
        to.rows.clone().step_by(WEIGHTS).all(|row| {
            let end = |row: usize| to.rows.end.min(row + WEIGHTS);
            let rows = row..end(row);
            w.prefetch(&(rows.end..end(rows.end)), &steps);
            // SAFETY: the caller's; there are such rows and steps, and the thread is prepared.
            unsafe {
                let usable = w.tiles(&rows, &steps, tiles);
                if usable {
                    with_all_tokens::<M, W>(x, to, &rows, &steps, tiles);
                }
                usable
            }
        })
    });
    // SAFETY: the caller's.
    unsafe { M::end(before) };
    IN_HAND.set(in_hand);
    done
}

/// Multiplies some rows' tiles of weights with all tokens and adds the products to the results.
///
/// # Safety
/// As [`products`], of rows and steps that there are; the thread is prepared.
#[target_feature(enable = "avx512f")]
unsafe fn with_all_tokens<M: Multiply, W: Weights>(
    x: &TokenTiles,
    to: &Results,
    rows: &Range<usize>,
    steps: &Range<usize>,
    weights: &[[Tile; 2]],
) {
    let mut sums = [[Sums::ZEROS; 2]; 2];
    let tiles = to.tokens.start / ROWS..to.tokens.end.div_ceil(ROWS);
    for tile in tiles.clone().step_by(2) {
        let tokens = [tile, tile + 1].map(|tile| match tiles.contains(&tile) {
            true => x.of(tile, steps),
            false => &[],
        });
        let count = to.tokens.end - tile * ROWS;
        // SAFETY: the caller's.
        unsafe { M::block::<W>(tokens, count, x.parts(), weights, &mut sums) };
        for (i, sums) in sums.iter().enumerate() {
            let first = (tile + i) * ROWS;
            let tokens = to.tokens.start.max(first)..to.tokens.end.min(first + ROWS);
            if tokens.is_empty() {
                continue;
            }
            for (sums, row) in sums.iter().zip(rows.clone().step_by(ROWS)) {
                let at = (tokens.start - to.tokens.start) * to.stride + (row - to.rows.start);
                let of_tile = tokens.start - first..tokens.end - first;
                let width = (rows.end - row).min(ROWS);
                // SAFETY: these tokens' results of `width` rows from `row` on are there.
                unsafe {
                    let out = (to.out.add(at), to.stride);
                    add(sums, of_tile, width, out, steps.start == 0);
                }
            }
        }
    }
}

/// Sums of a token tile and a weight tile, a row for each token.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::cpu) struct Sums(pub [[f32; ROWS]; ROWS]);

impl Sums {
    const ZEROS: Self = Self([[0.; ROWS]; ROWS]);
}

/// Adds the first `width` sums of tokens `tokens` of a tile to results at `out`, whose rows are `stride` apart, or
/// writes them if they are the first.
///
/// # Safety
/// `out` has `width` places for each of these tokens.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn add(
    sums: &Sums,
    tokens: Range<usize>,
    width: usize,
    (out, stride): (*mut f32, usize),
    first: bool,
) {
    let mask = ((1u32 << width) - 1) as u16;
    for (i, sums) in sums.0[tokens].iter().enumerate() {
        // SAFETY: the caller's; lanes beyond `width` are neither read nor written.
        unsafe {
            let out = out.add(i * stride);
            let mut sum = _mm512_load_ps(sums.as_ptr());
            if !first {
                sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, out));
            }
            _mm512_mask_storeu_ps(out, mask, sum);
        }
    }
}
