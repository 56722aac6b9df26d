//! Tokens in tiles.

use super::{ROWS, Row, STEP, Tile, ZEROS};
use crate::pool;
use std::ops::Range;

/// Most steps, of [`STEP`] columns each, that are multiplied before sums leave their tiles. More would leave no room in
/// the second-level cache for 512 tokens; fewer cost more for adding sums up than tiles of weights in the first-level
/// cache save (with 16, an Intel Xeon took 10 to 15 % longer).
pub(in crate::cpu) const DEPTH: usize = 32;

// Runs of half as many steps begin and end with a super-block of GGUF, 8 steps.
const _: () = assert!((DEPTH / 2).is_multiple_of(8));

/// All tokens of a product in bf16, in one or several parts whose sum a value is.
///
/// A run of steps of all tokens lies together, so that it has different places in the second-level cache: of 16 tokens a
/// tile for each step and part, then those of the next 16. (With tokens one behind the other, 512 took twice as long.)
#[derive(Clone, Debug, Default)]
pub(in crate::cpu) struct TokenTiles {
    tiles: Vec<Tile>,
    /// Tiles of 16 tokens that a step and part has.
    across: usize,
    steps: usize,
    parts: usize,
}

impl TokenTiles {
    /// Makes room for `m` tokens of `k` columns in `parts` parts, whose rows are to be written: those that a last tile
    /// has beyond them are zeros.
    pub fn prepare(&mut self, (m, k, parts): (usize, usize, usize)) -> TokenRows<'_> {
        *self = Self {
            tiles: std::mem::take(&mut self.tiles),
            across: m.div_ceil(ROWS),
            steps: k.div_ceil(STEP),
            parts,
        };
        let len = self.across * self.steps * parts;
        // What more tokens have left stays, so that it need not be cleared again.
        if self.tiles.len() < len {
            self.tiles.resize(len, ZEROS);
        }
        if !m.is_multiple_of(ROWS) {
            for steps in self.depths() {
                let place = self.place(self.across - 1, &steps);
                self.tiles[place].fill(ZEROS);
            }
        }
        TokenRows {
            first: self.tiles.as_mut_ptr(),
            of: self,
        }
    }

    /// As [`Self::prepare`], and has `write` write all tokens, at least `grain` in a task.
    pub fn fill(
        &mut self,
        shape: (usize, usize, usize),
        grain: usize,
        write: impl Fn(usize, &TokenRows<'_>) + Sync,
    ) {
        let rows = self.prepare(shape);
        pool::for_ranges(shape.0, grain, |tokens| {
            tokens.for_each(|token| write(token, &rows));
        });
    }

    /// All steps, in runs of up to [`DEPTH`], or half as many of several parts.
    pub fn depths(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let depth = self.depth();
        let steps = self.steps;
        (0..steps)
            .step_by(depth)
            .map(move |start| start..steps.min(start + depth))
    }

    /// The tiles of tokens `16 * tile..` for steps of [`Self::depths`].
    pub fn of(&self, tile: usize, steps: &Range<usize>) -> &[Tile] {
        &self.tiles[self.place(tile, steps)]
    }

    /// Parts of each value.
    pub fn parts(&self) -> usize {
        self.parts
    }

    /// Bytes of its memory.
    pub fn bytes(&self) -> usize {
        size_of::<Tile>() * self.tiles.capacity()
    }

    fn depth(&self) -> usize {
        if self.parts == 1 { DEPTH } else { DEPTH / 2 }
    }

    fn place(&self, tile: usize, steps: &Range<usize>) -> Range<usize> {
        let len = self.parts * steps.len();
        let first = self.parts * steps.start * self.across + tile * len;
        first..first + len
    }
}

/// Rows of tiles that are to be written, from several threads.
pub(in crate::cpu) struct TokenRows<'a> {
    first: *mut Tile,
    of: &'a TokenTiles,
}

// SAFETY: it stands for a `&mut [Tile]`, whose rows the callers of `row` keep apart; of `of` it reads no tiles.
unsafe impl Sync for TokenRows<'_> {}

impl TokenRows<'_> {
    /// The row that a token has in the tile of a step and part.
    ///
    /// # Safety
    /// `token`, `step` and `part` exist, and no other reference to their row is alive.
    #[expect(clippy::mut_from_ref, reason = "callers keep the rows apart")]
    pub unsafe fn row(&self, token: usize, step: usize, part: usize) -> &mut Row {
        let depth = self.of.depth();
        let start = step / depth * depth;
        let steps = start..self.of.steps.min(start + depth);
        let place = self.of.place(token / ROWS, &steps);
        let tile = place.start + (step - start) * self.of.parts + part;
        // SAFETY: the caller's.
        unsafe { &mut (*self.first.add(tile))[token % ROWS] }
    }
}
