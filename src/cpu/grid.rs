//! How a product is cut into cells, one for each task of the pool.

use std::ops::Range;

/// The most tasks that a thread is meant to take of a product: more would only be handed over more often.
const ROUNDS: usize = 12;

/// How a product of `m` tokens with `n` weight rows is cut into cells, one for each task.
///
/// A cell is a range of tokens and a range of weight rows, as [`matmul`](super::dense::matmul) takes them: `x` from the
/// first token on, `w` from the first row on, and `out` from their result on.
///
/// ```
/// let grid = candle_fused::cpu::dense::task_grid(512, 4096, 4096, 16);
/// let sizes = (0..grid.cells()).map(|i| grid.cell(i)).map(|(tokens, rows)| (tokens.len(), rows.len()));
/// let (tokens, rows) = grid.largest();
/// assert!(sizes.clone().all(|size| size.0 <= tokens && size.1 <= rows));
/// assert_eq!(sizes.map(|size| size.0 * size.1).sum::<usize>(), 512 * 4096);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskGrid {
    tokens: Cut,
    rows: Cut,
}

impl TaskGrid {
    /// How many cells there are; none if the product is empty.
    pub fn cells(&self) -> usize {
        self.tokens.parts * self.rows.parts
    }

    /// The tokens and the weight rows of the cell `index < cells()`.
    pub fn cell(&self, index: usize) -> (Range<usize>, Range<usize>) {
        let across = self.rows.parts;
        (
            self.tokens.part(index / across),
            self.rows.part(index % across),
        )
    }

    /// The most tokens and weight rows that a cell has.
    pub fn largest(&self) -> (usize, usize) {
        (self.tokens.largest(), self.rows.largest())
    }

    /// All `m` tokens with runs of about `rows` of the `n` weight rows, in multiples of `unit`.
    pub(super) fn by_rows(m: usize, n: usize, rows: usize, unit: usize) -> Self {
        Self {
            tokens: Cut::new(m, 1, m.max(1)),
            rows: Cut::new(n, n.div_ceil(rows.max(1)), unit),
        }
    }

    /// The cut by tokens and rows for which the slowest of `threads` threads should end first.
    ///
    /// Threads take cells one after the other, so that the last ones to end are a cell apart at most: many small cells
    /// even out, and cost more in all. One thread waits for nobody and has the largest cells.
    pub(crate) fn balanced(
        costs: &Costs,
        (m, n, k): (usize, usize, usize),
        threads: usize,
    ) -> Self {
        let threads = threads.max(1);
        let cut = |token_parts, row_parts| Self {
            tokens: Cut::new(m, token_parts, costs.unit.0),
            rows: Cut::new(n, row_parts, costs.unit.1),
        };
        // The fewest parts that there may be.
        let (of_tokens, of_rows) = (m.div_ceil(costs.most.0).max(1), n.div_ceil(costs.most.1));
        let largest = cut(of_tokens, of_rows);
        if threads == 1 {
            return largest;
        }
        let mut best = (u64::MAX, largest);
        for token_parts in [1, 2, 3, 4, 6, 8, 12, 16].map(|times| times * of_tokens) {
            if token_parts > of_tokens && m / token_parts < costs.least {
                break;
            }
            for rounds in 1..=ROUNDS {
                let grid = cut(token_parts, (rounds * threads / token_parts).max(of_rows));
                let time = grid.time(costs, k, threads);
                if time < best.0 {
                    best = (time, grid);
                }
            }
        }
        best.1
    }

    /// What the thread with most cells takes, and three quarters of a cell for threads that are held up, as was measured
    /// with two threads on a core; all of that four times.
    fn time(&self, costs: &Costs, k: usize, threads: usize) -> u64 {
        let (tokens, rows) = self.largest();
        let cell = tokens * (rows + costs.token) + rows * costs.row + costs.task / k.max(1);
        (4 * self.cells().div_ceil(threads) as u64 + 3) * cell as u64
    }
}

/// What a cell costs beside its multiplications, and what sizes it may have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Costs {
    /// What preparing a token takes, in weight rows that it could be multiplied with meanwhile.
    pub token: usize,
    /// What preparing a weight row takes, in tokens.
    pub row: usize,
    /// What handing a task over takes, in multiplications.
    pub task: usize,
    /// What cells have multiples of, tokens and rows; only the last may have fewer.
    pub unit: (usize, usize),
    /// The fewest tokens, if there are as many.
    pub least: usize,
    /// About the most tokens and rows.
    pub most: (usize, usize),
}

/// `len` cut into runs of whole units, as even as can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    len: usize,
    unit: usize,
    parts: usize,
}

impl Cut {
    fn new(len: usize, parts: usize, unit: usize) -> Self {
        let parts = parts.clamp(1, len.div_ceil(unit).max(1));
        Self {
            len,
            unit,
            parts: if len == 0 { 0 } else { parts },
        }
    }

    fn units(&self) -> usize {
        self.len.div_ceil(self.unit)
    }

    fn part(&self, index: usize) -> Range<usize> {
        let start = |index: usize| index * self.units() / self.parts * self.unit;
        start(index)..start(index + 1).min(self.len)
    }

    fn largest(&self) -> usize {
        let units = self.units().div_ceil(self.parts.max(1));
        (units * self.unit).min(self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COSTS: Costs = Costs {
        token: 12,
        row: 6,
        task: 64 * 1024,
        unit: (8, 16),
        least: 32,
        most: (256, 128),
    };

    #[test]
    fn balanced_cells_cover_the_product_once() {
        for (m, n) in [(0, 5), (5, 0), (9, 33), (512, 960), (513, 7), (2049, 100)] {
            for threads in [0, 1, 2, 3, 16, 64] {
                let grid = TaskGrid::balanced(&COSTS, (m, n, 576), threads);
                let mut hits = vec![0u8; m * n];
                for c in 0..grid.cells() {
                    let (tokens, rows) = grid.cell(c);
                    assert!(tokens.len() <= grid.largest().0 && rows.len() <= grid.largest().1);
                    assert!(tokens.start % 8 == 0 && rows.start % 16 == 0);
                    for i in tokens {
                        rows.clone().for_each(|j| hits[i * n + j] += 1);
                    }
                }
                assert!(hits.iter().all(|h| *h == 1), "{m} x {n}, {threads} threads");
            }
        }
    }

    #[test]
    fn threads_get_even_shares_of_a_small_model() {
        for threads in [2, 4, 6, 8, 12, 16, 32] {
            for (n, k) in [(576, 576), (960, 576), (1536, 576), (576, 1536)] {
                let grid = TaskGrid::balanced(&COSTS, (512, n, k), threads);
                let (tokens, rows) = grid.largest();
                assert!(tokens <= 256 && rows <= 128);
                let most = grid.cells().div_ceil(threads) * tokens * rows;
                let even = 512 * n / threads;
                assert!(
                    most * 4 <= even * 5,
                    "{n} x {k}, {threads} threads: {most}, {even} if even"
                );
            }
        }
    }
}
