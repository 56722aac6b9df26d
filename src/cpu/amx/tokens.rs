//! Tokens in tiles.

use super::{ROWS, STEP, Tile, ZEROS};
use crate::cpu::pool;
use std::ops::Range;

/// Most steps, of [`STEP`] columns each, that are multiplied before sums leave their tiles. More would leave no room in
/// the second-level cache for 512 tokens; fewer cost more for adding sums up than tiles of weights in the first-level
/// cache save (with 16, an Intel Xeon took 10 to 15 % longer).
pub(in crate::cpu) const DEPTH: usize = 32;

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
    /// Makes room for `m` tokens of `k` columns, and has `write` write all rows: given the token and some of its steps,
    /// the row that it has in the tiles of these, `parts` for each step. Rows that no token has are zeros.
    ///
    /// One task writes at least `tokens` tokens.
    pub fn fill(
        &mut self,
        (m, k, parts): (usize, usize, usize),
        tokens: usize,
        write: impl Fn(usize, &Range<usize>, usize, &mut [Tile]) + Sync,
    ) {
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
        let (all, this) = (Tiles(self.tiles.as_mut_ptr()), &*self);
        pool::for_ranges(this.across, tokens.div_ceil(ROWS), |some| {
            for tile in some {
                let tokens = tile * ROWS..m.min((tile + 1) * ROWS);
                for steps in this.depths() {
                    // SAFETY: these tiles are there, no other task has them, and nobody reads them meanwhile.
                    let tiles = unsafe { all.some(this.place(tile, &steps)) };
                    if tokens.len() < ROWS {
                        tiles.fill(ZEROS);
                    }
                    for (row, token) in tokens.clone().enumerate() {
                        write(token, &steps, row, tiles);
                    }
                }
            }
        });
    }

    /// All steps, in runs of up to [`DEPTH`], or half as many of several parts.
    pub fn depths(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let depth = if self.parts == 1 { DEPTH } else { DEPTH / 2 };
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

    fn place(&self, tile: usize, steps: &Range<usize>) -> Range<usize> {
        let len = self.parts * steps.len();
        let first = self.parts * steps.start * self.across + tile * len;
        first..first + len
    }
}

/// Tiles that several tasks write, each its own.
struct Tiles(*mut Tile);

// SAFETY: it stands for a `&mut [Tile]`, whose parts the callers of `some` keep apart.
unsafe impl Sync for Tiles {}

impl Tiles {
    /// # Safety
    /// The tiles exist, and nobody else has them while the result lives.
    #[expect(clippy::mut_from_ref, reason = "callers keep the tiles apart")]
    unsafe fn some(&self, range: Range<usize>) -> &mut [Tile] {
        // SAFETY: the caller's.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(range.start), range.len()) }
    }
}
