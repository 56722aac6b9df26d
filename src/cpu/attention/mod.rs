//! Attention with an online softmax: no score matrix, no repeated heads, keys and values read where
//! they lie.
//!
//! The work is cut into tasks of one key/value head, some queries and some keys. All query heads of
//! the group that shares the key/value head are rows of the same task, so each key and value is
//! read once for all of them. A task with few rows (a decode step) takes dot products of the rows
//! with each key (`rows`); one with many (a prompt) multiplies register tiles (`tile`). Where
//! there are few heads and queries, the keys are split too, and the last task of a head to end
//! merges its parts in their order (`merge`), so the result does not depend on timing or on the
//! number of threads.
//!
//! Sources: FlashAttention-2 (Dao, 2023), Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023).

mod block;
mod merge;
mod plan;
mod rows;
mod tile;
mod view;

use super::pool;
use super::simd::Level;
use super::vector::{Element, Kernel, Vector, dispatch, narrow, widen};
use half::{bf16, f16};
use plan::{Plan, State, padded, state_len};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
pub use view::{AnyView, Output, Pages, Scales, View};

/// Up to this many rows are dotted with each key; more are multiplied in tiles.
const FEW_ROWS: usize = 16;

/// Sizes, shared by all arguments.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Sequences.
    pub batch: usize,
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Queries per sequence.
    pub queries: usize,
    /// Keys per sequence.
    pub keys: usize,
    /// Width of a head.
    pub dim: usize,
}

impl Sizes {
    /// Query heads that read one key/value head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Rows of one key/value head: every query of every head that reads it.
    pub fn rows(&self) -> usize {
        self.queries * self.group()
    }

    /// Whether a task takes the core for few rows, as in a decode step.
    pub fn few_rows(&self) -> bool {
        self.rows() <= FEW_ROWS
    }
}

/// What may attend to what, and how scores are formed.
#[derive(Clone, Copy, Debug)]
pub struct Rule<'a> {
    /// Factor on the scores.
    pub scale: f32,
    /// Query `i` sees the keys up to `keys - queries + i + right`: 0 is causal.
    pub right: Option<usize>,
    /// Query `i` sees no key before `keys - queries + i + 1 - window`.
    pub window: Option<usize>,
    /// Scores become `softcap * tanh(score / softcap)`.
    pub softcap: Option<f32>,
    /// Added to the scores: `[batch, heads, queries, keys]`, stride 0 where it is broadcast.
    pub mask: Option<View<'a, f32>>,
    /// For each head, what is taken off a score for each position between query and key.
    pub slopes: Option<&'a [f32]>,
}

/// Sequences of one length: a call, or one sequence of a ragged batch.
#[derive(Clone, Copy, Debug)]
pub struct Sequences<'a, T> {
    /// Those that the views were made with.
    pub sizes: Sizes,
    /// Queries.
    pub q: AnyView<'a>,
    /// Keys.
    pub k: View<'a, T>,
    /// Values.
    pub v: View<'a, T>,
    /// Where its result begins in the output.
    pub first: usize,
}

/// One part of a call.
struct Problem<'a, T> {
    sizes: Sizes,
    rule: Rule<'a>,
    q: AnyView<'a>,
    k: View<'a, T>,
    v: View<'a, T>,
    out: OutputPtr,
    plan: Plan,
    /// One after the other, where keys are split: a task's state.
    states: *mut f32,
    /// The memory of these.
    _room: Vec<f32>,
    /// Elements of a state, and with it of the scratch of a task.
    state: usize,
    scratch: usize,
    /// For each group of states, how many are complete.
    ended: Vec<AtomicUsize>,
}

// SAFETY: tasks write disjoint rows of `out` and disjoint `states`, and read another task's state
// only after its release through `ended`.
unsafe impl<T: Element> Sync for Problem<'_, T> {}

#[derive(Clone, Copy)]
enum OutputPtr {
    F32(*mut f32),
    F16(*mut f16),
    Bf16(*mut bf16),
}

/// One task: a key/value head, queries `first .. first + count`, keys `from .. to`.
struct Task<'a, T> {
    problem: &'a Problem<'a, T>,
    batch: usize,
    kv_head: usize,
    first: usize,
    count: usize,
    from: usize,
    to: usize,
    state: State,
    scratch: *mut f32,
}

impl<T: Element> Task<'_, T> {
    fn rows(&self) -> usize {
        self.count * self.problem.plan.group
    }

    /// The keys that query `first + t` sees among the task's, relative to key 0.
    #[inline(always)]
    fn visible(&self, t: usize) -> (usize, usize) {
        let (s, rule) = (&self.problem.sizes, &self.problem.rule);
        // Keys up to and including the query's own position.
        let reach = (s.keys + self.first + t + 1).saturating_sub(s.queries);
        let high = match rule.right {
            Some(right) => {
                let ahead = (s.keys + self.first + t + 1).saturating_add(right);
                self.to.min(ahead.saturating_sub(s.queries))
            }
            None => self.to,
        };
        let low = rule
            .window
            .map_or(0, |w| reach.saturating_sub(w))
            .clamp(self.from, self.to);
        (low, high.max(low))
    }

    /// The first key that any of the task's queries sees, and the end of the last one's.
    fn reach(&self) -> (usize, usize) {
        (self.visible(0).0, self.visible(self.count - 1).1)
    }

    /// Where row `r` is among heads and queries.
    #[inline(always)]
    fn place(&self, r: usize) -> (usize, usize) {
        let group = self.problem.plan.group;
        (self.kv_head * group + r % group, self.first + r / group)
    }

    /// Writes row `r` of q, times the scale, to `dst`.
    ///
    /// # Safety
    /// The processor has `V`'s instructions; `dst` may be written for [`padded`] `dim` elements.
    #[inline(always)]
    unsafe fn load_query<V: Vector>(&self, r: usize, dst: *mut f32) {
        let dim = self.problem.sizes.dim;
        let (head, query) = self.place(r);
        // SAFETY: `place` stays within q's sizes.
        unsafe {
            match self.problem.q {
                AnyView::F32(q) => {
                    widen::<V, _>(q.row(self.batch, head, query), q.strides[3], dst, dim)
                }
                AnyView::F16(q) => {
                    widen::<V, _>(q.row(self.batch, head, query), q.strides[3], dst, dim)
                }
                AnyView::Bf16(q) => {
                    widen::<V, _>(q.row(self.batch, head, query), q.strides[3], dst, dim)
                }
            }
            for i in 0..dim {
                *dst.add(i) *= self.problem.rule.scale;
            }
            for i in dim..padded(dim) {
                *dst.add(i) = 0.0;
            }
        }
    }

    /// Copies the rows of keys or values `from .. from + n` to `dst` as f32, multiplied with their scales where there are
    /// some, [`padded`] apart and zero past `dim`.
    ///
    /// # Safety
    /// The processor has `V`'s instructions; the keys exist; `dst` may be written for `n` rows.
    #[inline(always)]
    unsafe fn copy_rows<V: Vector>(&self, x: &View<'_, T>, from: usize, n: usize, dst: *mut f32) {
        let dim = self.problem.sizes.dim;
        let width = padded(dim);
        for i in 0..n {
            // SAFETY: the caller names keys that exist and room for `n` rows.
            unsafe {
                let row = dst.add(i * width);
                widen::<V, T>(
                    x.row(self.batch, self.kv_head, from + i),
                    x.strides[3],
                    row,
                    dim,
                );
                if let Some(scale) = x.scale(self.kv_head, from + i) {
                    for j in 0..dim {
                        *row.add(j) *= scale;
                    }
                }
                for j in dim..width {
                    *row.add(j) = 0.0;
                }
            }
        }
    }

    /// The mask's values for row `r` from key `key` on, and their stride.
    ///
    /// # Safety
    /// The key exists.
    #[inline(always)]
    unsafe fn mask(&self, mask: &View<'_, f32>, r: usize, key: usize) -> (*const f32, usize) {
        let (head, query) = self.place(r);
        // SAFETY: the indices are within `[batch, heads, queries, keys]`.
        unsafe {
            (
                mask.row(self.batch, head, query).add(key * mask.strides[3]),
                mask.strides[3],
            )
        }
    }

    /// What is taken off the score of row `r` for each position between it and a key, and its own position.
    #[inline(always)]
    fn slope(&self, slopes: &[f32], r: usize) -> (f32, i64) {
        let (s, (head, query)) = (&self.problem.sizes, self.place(r));
        (slopes[head], (s.keys + query) as i64 - s.queries as i64)
    }

    /// Rounds `row` to the output's type and writes it as row `r`.
    ///
    /// # Safety
    /// The processor has `V`'s instructions; `row` has `dim` elements.
    #[inline(always)]
    unsafe fn store_output<V: Vector>(&self, r: usize, row: *const f32) {
        let s = &self.problem.sizes;
        let (head, query) = self.place(r);
        let at = ((self.batch * s.queries + query) * s.heads + head) * s.dim;
        // SAFETY: the output has `[batch, queries, heads, dim]` elements.
        unsafe {
            match self.problem.out {
                OutputPtr::F32(out) => narrow::<V, _>(row, out.add(at), s.dim),
                OutputPtr::F16(out) => narrow::<V, _>(row, out.add(at), s.dim),
                OutputPtr::Bf16(out) => narrow::<V, _>(row, out.add(at), s.dim),
            }
        }
    }
}

impl<T: Element> Kernel for &Task<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: state and scratch have the room that `attend` computed for this plan.
        unsafe {
            self.state.clear(self.rows(), self.problem.sizes.dim);
            if self.problem.plan.few {
                rows::run::<V, T>(self);
            } else {
                tile::run::<V, T>(self);
            }
            merge::finish::<V, T>(self);
        }
    }
}

impl OutputPtr {
    /// # Safety
    /// The output has more than `first` elements.
    unsafe fn at(self, first: usize) -> Self {
        // SAFETY: the caller's.
        unsafe {
            match self {
                OutputPtr::F32(out) => OutputPtr::F32(out.add(first)),
                OutputPtr::F16(out) => OutputPtr::F16(out.add(first)),
                OutputPtr::Bf16(out) => OutputPtr::Bf16(out.add(first)),
            }
        }
    }
}

impl<'a, T: Element> Problem<'a, T> {
    /// # Safety
    /// `out` is the part's own, of one element for each of `[batch, queries, heads, dim]`, more than none.
    unsafe fn new(rule: Rule<'a>, part: &Sequences<'a, T>, out: OutputPtr) -> Self {
        let sizes = part.sizes;
        assert!(
            sizes.kv_heads > 0 && sizes.heads.is_multiple_of(sizes.kv_heads),
            "attention: heads"
        );
        let plan = Plan::new(&sizes);
        let state = state_len(plan.rows(), sizes.dim);
        let groups = sizes.batch * sizes.kv_heads * plan.tiles;
        let split = plan.splits > 1;
        // Not cleared: every task clears its own state first.
        let states = if split {
            groups * plan.splits * state
        } else {
            0
        };
        let mut room: Vec<f32> = Vec::with_capacity(states);
        let ended = if split { groups } else { 0 };
        let scratch = if plan.few {
            rows::scratch(&plan, sizes.dim)
        } else {
            tile::scratch(&plan, sizes.dim)
        };
        Self {
            sizes,
            rule,
            q: part.q,
            k: part.k,
            v: part.v,
            out,
            plan,
            states: room.as_mut_ptr(),
            _room: room,
            state,
            scratch: state + scratch,
            ended: (0..ended).map(|_| AtomicUsize::new(0)).collect(),
        }
    }

    fn tasks(&self) -> usize {
        self.sizes.batch * self.sizes.kv_heads * self.plan.tiles * self.plan.splits
    }
}

/// Attention of each part's `q` over its `k` and `v` (both `[batch, kv_heads, keys, dim]`), into `out`.
///
/// The views have to be made with the dimensions that `sizes` names, or lie within one that was; every
/// element of `out` that is a part's is written.
///
/// # Panics
/// If the parts do not lie one behind the other in `out`, or the heads are no multiple of the key/value heads.
pub fn attend<'a, T: Element>(
    level: Level,
    rule: Rule<'a>,
    parts: &[Sequences<'a, T>],
    out: Output<'_>,
) {
    let (len, out) = match out {
        Output::F32(o) => (o.len(), OutputPtr::F32(o.as_mut_ptr().cast())),
        Output::F16(o) => (o.len(), OutputPtr::F16(o.as_mut_ptr().cast())),
        Output::Bf16(o) => (o.len(), OutputPtr::Bf16(o.as_mut_ptr().cast())),
    };
    let (mut end, mut tasks) = (0, 0);
    let (mut problems, mut starts) = (Vec::new(), Vec::new());
    for part in parts {
        let s = &part.sizes;
        let own = s.batch * s.queries * s.heads * s.dim;
        assert!(
            end <= part.first && part.first + own <= len,
            "attention: place in the output"
        );
        end = part.first + own;
        if own == 0 {
            continue;
        }
        // SAFETY: the part's place is within the output and behind those of the parts before.
        let problem = unsafe { Problem::new(rule, part, out.at(part.first)) };
        starts.push(tasks);
        tasks += problem.tasks();
        problems.push(problem);
    }
    pool::run(tasks, |i| {
        let place = starts.partition_point(|start| *start <= i) - 1;
        run_task(level, &problems[place], i - starts[place]);
    });
}

thread_local! {
    /// Kept from task to task, so that it is neither allocated nor cleared each time.
    static SCRATCH: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

fn run_task<T: Element>(level: Level, p: &Problem<'_, T>, i: usize) {
    let (state, room) = (p.state, p.scratch);
    let (group, split) = (i / p.plan.splits, i % p.plan.splits);
    let heads = p.sizes.batch * p.sizes.kv_heads;
    // Causal tiles grow with their position: the longest first, so that the ends even out.
    let (tile, head) = (p.plan.tiles - 1 - group / heads, group % heads);
    let mut scratch = SCRATCH.take();
    if scratch.len() < room + 16 {
        scratch = vec![0.0; room + 16];
    }
    let first = tile * p.plan.tile;
    let from = split * p.plan.chunk;
    // SAFETY: the scratch has room for a state and the core's own after aligning, the states are one
    // for each task, and indices are below the plan's.
    unsafe {
        let aligned = scratch
            .as_mut_ptr()
            .add(scratch.as_ptr().align_offset(64).min(16));
        let own = if p.plan.splits > 1 {
            p.states.add(i * state)
        } else {
            aligned
        };
        let rows = p.plan.rows();
        let task = Task {
            problem: p,
            batch: head / p.sizes.kv_heads,
            kv_head: head % p.sizes.kv_heads,
            first,
            count: p.plan.tile.min(p.sizes.queries - first),
            from,
            to: (from + p.plan.chunk).min(p.sizes.keys),
            state: State::at(own, rows, p.sizes.dim),
            scratch: aligned.add(state),
        };
        dispatch(level, &task);
        if p.plan.splits > 1 && p.ended[group].fetch_add(1, Ordering::AcqRel) + 1 == p.plan.splits {
            let first = p.states.add(group * p.plan.splits * state);
            dispatch(
                level,
                merge::Merge {
                    task: &task,
                    parts: first,
                    len: state,
                },
            );
        }
    }
    SCRATCH.set(scratch);
}
