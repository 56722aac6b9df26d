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

use super::pool;
use super::simd::Level;
use super::vector::{Element, Kernel, Vector, dispatch, narrow, widen};
use half::{bf16, f16};
use plan::{Plan, State, padded, state_len};
use std::cell::Cell;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Up to this many rows are dotted with each key; more are multiplied in tiles.
const FEW_ROWS: usize = 16;

/// A tensor of four dimensions in storage, checked to lie inside it.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, T> {
    data: &'a [T],
    offset: usize,
    strides: [usize; 4],
}

impl<'a, T: Copy> View<'a, T> {
    /// The view, or none if an element of it would lie outside `data`.
    pub fn new(
        data: &'a [T],
        offset: usize,
        dims: [usize; 4],
        strides: [usize; 4],
    ) -> Option<Self> {
        let mut last = offset;
        for (dim, stride) in dims.into_iter().zip(strides) {
            last = last.checked_add(dim.saturating_sub(1).checked_mul(stride)?)?;
        }
        (dims.contains(&0) || last < data.len()).then_some(Self {
            data,
            offset,
            strides,
        })
    }

    /// The first element of a row.
    ///
    /// # Safety
    /// The indices are below the view's dimensions.
    #[inline(always)]
    unsafe fn row(&self, i: usize, j: usize, k: usize) -> *const T {
        let at = self.offset + i * self.strides[0] + j * self.strides[1] + k * self.strides[2];
        // SAFETY: `new` has checked the highest index.
        unsafe { self.data.as_ptr().add(at) }
    }
}

/// A view of any of the float types.
#[derive(Clone, Copy, Debug)]
pub enum AnyView<'a> {
    /// 32 bits.
    F32(View<'a, f32>),
    /// 16 bits, IEEE.
    F16(View<'a, f16>),
    /// The upper 16 bits of an f32.
    Bf16(View<'a, bf16>),
}

/// Where the result goes: `[batch, queries, heads, dim]`, contiguous.
#[derive(Debug)]
pub enum Output<'a> {
    /// 32 bits.
    F32(&'a mut [MaybeUninit<f32>]),
    /// 16 bits, IEEE.
    F16(&'a mut [MaybeUninit<f16>]),
    /// The upper 16 bits of an f32.
    Bf16(&'a mut [MaybeUninit<bf16>]),
}

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
    /// Query `i` sees the keys up to `keys - queries + i`.
    pub causal: bool,
    /// Query `i` sees no key before `keys - queries + i + 1 - window`.
    pub window: Option<usize>,
    /// Scores become `softcap * tanh(score / softcap)`.
    pub softcap: Option<f32>,
    /// Added to the scores: `[batch, heads, queries, keys]`, stride 0 where it is broadcast.
    pub mask: Option<View<'a, f32>>,
}

/// One call.
struct Problem<'a, T> {
    sizes: Sizes,
    rule: Rule<'a>,
    q: AnyView<'a>,
    k: View<'a, T>,
    v: View<'a, T>,
    out: OutputPtr,
    plan: Plan,
    /// One part after the other: a task's state, where keys are split.
    parts: *mut f32,
    /// For each group of parts, how many have ended.
    ended: Vec<AtomicUsize>,
}

// SAFETY: tasks write disjoint rows of `out` and disjoint `parts`, and read another task's part
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
        let high = if rule.causal {
            self.to.min(reach)
        } else {
            self.to
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

    /// Copies the rows of keys or values `from .. from + n` to `dst` as f32, [`padded`] apart and
    /// zero past `dim`.
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

/// Attention of `q` over `k` and `v` (both `[batch, kv_heads, keys, dim]`), into `out`.
///
/// The views have to be made with the dimensions that `sizes` names; `out` has to have one element
/// for each of `[batch, queries, heads, dim]`, and every one is written.
///
/// # Panics
/// If `out` has another length, or the heads are no multiple of the key/value heads.
pub fn attend<'a, T: Element>(
    level: Level,
    sizes: Sizes,
    rule: Rule<'a>,
    q: AnyView<'a>,
    k: View<'a, T>,
    v: View<'a, T>,
    out: Output<'_>,
) {
    let s = &sizes;
    let (len, out) = match out {
        Output::F32(o) => (o.len(), OutputPtr::F32(o.as_mut_ptr().cast())),
        Output::F16(o) => (o.len(), OutputPtr::F16(o.as_mut_ptr().cast())),
        Output::Bf16(o) => (o.len(), OutputPtr::Bf16(o.as_mut_ptr().cast())),
    };
    assert_eq!(
        len,
        s.batch * s.queries * s.heads * s.dim,
        "attention: length of the output"
    );
    if len == 0 {
        return;
    }
    assert!(
        s.kv_heads > 0 && s.heads.is_multiple_of(s.kv_heads),
        "attention: heads"
    );
    let plan = Plan::new(s);
    let groups = s.batch * s.kv_heads * plan.tiles;
    let state = state_len(plan.rows(), s.dim);
    let parts = if plan.splits > 1 {
        groups * plan.splits * state
    } else {
        0
    };
    // Not cleared: every task clears its own part first.
    let mut parts: Vec<f32> = Vec::with_capacity(parts);
    let ended = if plan.splits > 1 { groups } else { 0 };
    let problem = Problem {
        sizes,
        rule,
        q,
        k,
        v,
        out,
        plan,
        parts: parts.as_mut_ptr(),
        ended: (0..ended).map(|_| AtomicUsize::new(0)).collect(),
    };
    let room = state
        + if plan.few {
            rows::scratch(&plan, s.dim)
        } else {
            tile::scratch(&plan, s.dim)
        };
    pool::run(groups * plan.splits, |i| {
        run_task(level, &problem, i, state, room)
    });
}

thread_local! {
    /// Kept from task to task, so that it is neither allocated nor cleared each time.
    static SCRATCH: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

fn run_task<T: Element>(level: Level, p: &Problem<'_, T>, i: usize, state: usize, room: usize) {
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
    // SAFETY: the scratch has room for a state and the core's own after aligning, the parts for a
    // state for each task, and indices are below the plan's.
    unsafe {
        let aligned = scratch
            .as_mut_ptr()
            .add(scratch.as_ptr().align_offset(64).min(16));
        let own = if p.plan.splits > 1 {
            p.parts.add(i * state)
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
            let first_part = p.parts.add(group * p.plan.splits * state);
            dispatch(
                level,
                merge::Merge {
                    task: &task,
                    parts: first_part,
                    len: state,
                },
            );
        }
    }
    SCRATCH.set(scratch);
}
