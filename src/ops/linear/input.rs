//! The rows of x as the products read them: widened and normalised, and quantized for packed weights.

use super::op::LinearOp;
use super::tile::Rows;
use super::{ActivationBits, Prologue, Weight};
use crate::cpu::packed::{Grain, PackedMatrix, Q8Activations};
use crate::cpu::simd::Level;
use crate::cpu::vector::{self, Element};
use crate::cpu::{dense, norm, pool};
use crate::ops::view::{Float, cpu_storage, elements};
use candle_core::{DType, Result};
use half::bf16;
use std::cell::Cell;

/// Rows of x up to which only outputs are divided between threads.
pub(super) const FEW_TOKENS: usize = 8;

/// Rows of x that are worth a task of their own.
const GRAIN: usize = 8;

/// What a thread keeps from one op to the next: prompts of some hundred tokens of all but the largest models.
const KEPT_BYTES: usize = 32 << 20;

thread_local! {
    /// Of few rows and of many. A step's few go through the memory of the step before, which is small and in the caches,
    /// whatever prompts left.
    static INPUTS: [Cell<Input>; 2] = Default::default();
}

/// The first `len` values of what is kept, which grows to the longest.
pub(super) fn grown<T: Clone + Default>(kept: &mut Vec<T>, len: usize) -> &mut [T] {
    if kept.len() < len {
        kept.resize(len, T::default());
    }
    &mut kept[..len]
}

/// The index in `INPUTS` of the memory for `m` rows.
fn cache_index(m: usize) -> usize {
    usize::from(m > FEW_TOKENS)
}

#[derive(Default)]
pub(super) struct Input {
    /// `[m, k]`, and whatever longer ones left behind them.
    rows: Vec<f32>,
    /// The same in bf16.
    narrow: Vec<bf16>,
    /// Those or x's own, and whether the products take them.
    tokens: dense::Bf16Tokens,
    in_bf16: bool,
    pub quantized: Q8Activations,
}

impl Input {
    /// The memory of an earlier op with about as many rows, which needs neither be cleared nor mapped again.
    pub fn take_cached(m: usize) -> Self {
        INPUTS.with(|inputs| inputs[cache_index(m)].take())
    }

    /// Keeps the memory for the next op of this thread.
    pub fn return_to_cache(self, m: usize) {
        let (rows, narrow) = (self.rows.capacity(), self.narrow.capacity());
        let bytes = size_of::<f32>() * rows + size_of::<bf16>() * narrow;
        if bytes + self.quantized.bytes() + self.tokens.bytes() <= KEPT_BYTES {
            INPUTS.with(|inputs| inputs[cache_index(m)].set(self));
        }
    }

    /// Makes what the op's weights are multiplied with.
    pub fn fill<T: Float>(
        &mut self,
        op: &LinearOp<'_>,
        level: Level,
        x: &[T],
        (m, k): (usize, usize),
    ) -> Result<()> {
        let (weight, bias) = match op.prologue {
            Prologue::None => (None, None),
            Prologue::RmsNorm { weight, .. } => (Some(weight), None),
            Prologue::LayerNorm { weight, bias, .. } => (Some(weight), bias),
        };
        let guards = [weight, bias].map(|t| t.map(|t| t.storage_and_layout()));
        let [weight, bias] = guards.each_ref().map(|guard| {
            let guard = guard.as_ref();
            let values = guard.map(|(s, layout)| elements::<T>(cpu_storage(s)?, layout));
            values.transpose()
        });
        let (weight, bias) = (weight?, bias?);
        let prologue = Normed {
            level,
            prologue: op.prologue,
            weight: weight.as_deref(),
            bias: bias.as_deref(),
        };
        let row = |t: usize, out: &mut [f32]| prologue.widened(&x[t * k..][..k], out);
        let is_packed = |w: &Weight| matches!(w, Weight::Packed(_));
        self.in_bf16 = stays_bf16::<T>(op, level, (m, k));
        if self.in_bf16 && !matches!(op.prologue, Prologue::None) {
            pool::for_rows(grown(&mut self.narrow, m * k), k, GRAIN, |first, rows| {
                for (i, out) in rows.chunks_exact_mut(k).enumerate() {
                    prologue.normed(&x[(first + i) * k..][..k], out);
                }
            });
        }
        if self.in_bf16 {
            let own = T::as_bf16(x).filter(|_| matches!(op.prologue, Prologue::None));
            let rows = own.unwrap_or_else(|| &self.narrow[..m * k]);
            self.tokens.fill(level, rows, m);
        }
        let own = unconverted_rows(op, x);
        let made = !self.in_bf16 && own.is_none() && op.weights.iter().any(|w| !is_packed(w));
        if made {
            pool::for_rows(grown(&mut self.rows, m * k), k, GRAIN, |first, rows| {
                for (i, out) in rows.chunks_exact_mut(k).enumerate() {
                    row(first + i, out);
                }
            });
        }
        if op.weights.iter().any(is_packed) {
            // What dense weights are multiplied with, if they have had rows made already.
            let own = own.or(made.then(|| &self.rows[..m * k]));
            quantize(&mut self.quantized, op, level, own, (m, k), row)?;
        }
        Ok(())
    }

    /// The rows `[m, k]` that dense weights are multiplied with.
    pub fn rows<'a, T: Float>(&'a self, op: &LinearOp<'_>, x: &'a [T]) -> Rows<'a> {
        match self.in_bf16 {
            true => Rows::Bf16(&self.tokens),
            false => Rows::F32(unconverted_rows(op, x).unwrap_or(&self.rows)),
        }
    }
}

/// Fills `quantized` with the rows in 8 or 16 bits and what the weights need beside them. Rows that have to be made
/// are `row`'s, which are quantized while they are in the cache.
fn quantize(
    quantized: &mut Q8Activations,
    op: &LinearOp<'_>,
    level: Level,
    own: Option<&[f32]>,
    (m, k): (usize, usize),
    row: impl Fn(usize, &mut [f32]) + Sync,
) -> Result<()> {
    let wide = k.next_multiple_of(32);
    let all = |holds: fn(&PackedMatrix) -> bool| {
        let holds = |w: &Weight| matches!(w, Weight::Packed(w) if holds(w));
        op.weights.iter().all(holds)
    };
    let grain = Grain {
        wide: all(PackedMatrix::takes_wide),
        whole: op.bits == ActivationBits::PerToken8,
        fine: op.bits.are_16(m, all(PackedMatrix::is_ternary)),
    };
    match own.filter(|_| k == wide) {
        Some(x) => quantized.refill_by(level, x, (m, k), grain)?,
        None => quantized.refill_from(level, (m, wide), grain, |t, out| {
            row(t, &mut out[..k]);
            out[k..].fill(0.);
        })?,
    }
    let looks_up = |w: &Weight| matches!(w, Weight::Packed(w) if w.looks_up(m));
    if op.weights.iter().any(looks_up) {
        quantized.prepare_look_ups(level);
    }
    Ok(())
}

/// x itself, where it is what the weights are multiplied with.
fn unconverted_rows<'a, T: Float>(op: &LinearOp<'_>, x: &'a [T]) -> Option<&'a [f32]> {
    T::as_f32(x).filter(|_| matches!(op.prologue, Prologue::None))
}

/// Whether rows of `T` are multiplied as they are, in bf16. A norm gives bf16 too.
fn stays_bf16<T: Float>(op: &LinearOp<'_>, level: Level, (m, k): (usize, usize)) -> bool {
    let is_bf16 = |w: &Weight| matches!(w, Weight::Dense(w) if w.dtype() == DType::BF16);
    k > 0
        && T::DTYPE == DType::BF16
        && op.weights.iter().all(is_bf16)
        && dense::takes_bf16(level, m)
}

/// What a row of x goes through before the products.
struct Normed<'a, T> {
    level: Level,
    prologue: Prologue<'a>,
    weight: Option<&'a [T]>,
    bias: Option<&'a [T]>,
}

impl<T: Float> Normed<'_, T> {
    fn widened(&self, x: &[T], out: &mut [f32]) {
        if self.weight.is_none() {
            vector::widen_all(self.level, x, out);
        }
        self.normed(x, out);
    }

    /// The norm of x, if there is one.
    fn normed<O: Element>(&self, x: &[T], out: &mut [O]) {
        let (level, Some(weight)) = (self.level, self.weight) else {
            return;
        };
        match self.prologue {
            Prologue::RmsNorm { eps, .. } => norm::rms_norm(level, x, weight, eps as f32, out),
            Prologue::LayerNorm { eps, .. } => {
                norm::layer_norm(level, x, weight, self.bias, eps as f32, out)
            }
            Prologue::None => {}
        }
    }
}
