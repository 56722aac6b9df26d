//! How a call is cut into tasks, and what a task carries from key to key.

use super::Sizes;

/// Rows that a task of the tile core aims at.
const TILE_ROWS: usize = 96;
/// Tasks that the keys are split for, if there are not as many without: enough for the cores of a
/// large machine to share.
const TASKS: usize = 16;
/// No part of the keys is shorter than this, unless there are fewer.
const MIN_KEYS: usize = 128;

/// How a call is cut into tasks: by its sizes alone.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    /// Query heads that share a key/value head.
    pub group: usize,
    /// Whether a task has few rows.
    pub few: bool,
    /// Queries of a task.
    pub tile: usize,
    /// Number of query tiles.
    pub tiles: usize,
    /// Keys of a task.
    pub chunk: usize,
    /// Number of key ranges.
    pub splits: usize,
}

impl Plan {
    pub fn new(s: &Sizes) -> Self {
        let group = s.heads / s.kv_heads;
        let few = s.few_rows();
        let tile = if few {
            s.queries
        } else {
            (TILE_ROWS / group).clamp(1, s.queries)
        };
        let tiles = s.queries.div_ceil(tile);
        let unsplit = s.batch * s.kv_heads * tiles;
        let splits = TASKS
            .div_ceil(unsplit)
            .min(s.keys.div_ceil(MIN_KEYS))
            .max(1);
        let chunk = s
            .keys
            .div_ceil(splits)
            .next_multiple_of(MIN_KEYS)
            .max(MIN_KEYS);
        let splits = s.keys.div_ceil(chunk).max(1);
        Self {
            group,
            few,
            tile,
            tiles,
            chunk,
            splits,
        }
    }

    pub fn rows(&self) -> usize {
        self.tile * self.group
    }
}

/// Width of a row of f32 scratch: whole vectors at every level.
pub(super) fn padded(n: usize) -> usize {
    n.next_multiple_of(16)
}

/// Elements of a task's state: `rows` unscaled outputs, then their maxima, then their sums.
pub(super) fn state_len(rows: usize, dim: usize) -> usize {
    rows * padded(dim) + 2 * padded(rows)
}

/// A task's running result.
#[derive(Clone, Copy)]
pub(super) struct State {
    /// Sums of `e^(score - maximum) * value`, a row each, [`padded`] apart.
    pub out: *mut f32,
    /// The highest score so far, -inf if there is none.
    pub max: *mut f32,
    /// Sums of `e^(score - maximum)`.
    pub sum: *mut f32,
}

impl State {
    /// # Safety
    /// `at` is valid for [`state_len`] elements.
    pub unsafe fn at(at: *mut f32, rows: usize, dim: usize) -> Self {
        // SAFETY: all three lie within `state_len`.
        unsafe {
            let max = at.add(rows * padded(dim));
            Self {
                out: at,
                max,
                sum: max.add(padded(rows)),
            }
        }
    }

    /// # Safety
    /// As for [`State::at`].
    pub unsafe fn clear(&self, rows: usize, dim: usize) {
        // SAFETY: the three ranges are the state's own.
        unsafe {
            self.out.write_bytes(0, rows * padded(dim));
            self.sum.write_bytes(0, padded(rows));
            for r in 0..padded(rows) {
                *self.max.add(r) = f32::NEG_INFINITY;
            }
        }
    }
}
