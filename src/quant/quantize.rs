//! From weights to codes: scales by search.
//!
//! INT8 and INT4 try a grid of scales for each row or group, from the one that reaches the largest
//! value down to about half of it, and with zero points a grid of both ends of the range. Each try
//! rounds the weights to codes q (less the zero point) and takes the scale with the least squared error
//! for these codes, `sum(w q) / sum(q^2)`; the best try wins. Clipping a few outliers
//! often costs less than the coarse steps that they would force on all others (OCTAV, Sakr et al.
//! 2022). Ternary is the absmean of BitNet b1.58 (Ma et al. 2024): scale = mean |w|, round, clip.

use super::{Codes, Scheme, TernaryScale};
use crate::cpu::pool;
use candle_core::{Result, bail};
use half::f16;
use std::ops::Range;
use std::sync::Mutex;

/// Adding it to a float below 2^22 and taking it away again leaves the nearest integer, ties to even;
/// unlike `round_ties_even` it vectorizes on every x86 processor.
const ROUND: f32 = 12_582_912.0;

/// Clipped ranges that are tried, in steps of the full range.
const CLIPS: usize = 16;

/// The step: the last range tried is 1 - 15 / 32 of the full one.
const CLIP_STEP: f32 = 1.0 / 32.0;

/// Ranges tried at each end with zero points.
const ENDS: usize = 7;

/// Scales tried to both sides of the best so far, in steps of this part of it.
const NEAR: i32 = 4;
const NEAR_STEP: f32 = 0.025;

/// Values below which a scale would be no number that an f32 can divide by.
const TINY: f32 = 1e-35;

/// Quantizes `weights`, row-major `rows` x `cols`, over the thread pool.
///
/// Rows of zeros get the scale 0 and codes that mean zero.
///
/// ```
/// use candle_fused::quant::{Scheme, quantize};
/// let weights: Vec<f32> = (0..64).map(|i| (i as f32 * 0.7).sin()).collect();
/// let codes = quantize(&weights, 2, 32, Scheme::Int8)?;
/// for (w, v) in weights.iter().zip(codes.dequantize()) {
///     assert!((w - v).abs() < 0.5 / 127.);
/// }
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If `weights` does not have `rows * cols` values, the scheme cannot be had for rows of this width
/// (see [`Scheme::check`]), a weight is NaN or infinite (by its place), or so large that the scale of
/// its group would not be an f16.
pub fn quantize(weights: &[f32], rows: usize, cols: usize, scheme: Scheme) -> Result<Codes> {
    check(weights, &(0..rows), cols, scheme)?;
    if let Scheme::Ternary {
        scale: TernaryScale::Tensor,
    } = scheme
    {
        let scale = mean_magnitude(weights);
        return quantize_with(weights, rows, cols, scheme, Some(scale));
    }
    quantize_with(weights, rows, cols, scheme, None)
}

/// [`quantize`] of some rows of a matrix, `whole` being the scale of a matrix that has one only.
pub(crate) fn quantize_part(
    weights: &[f32],
    part: &Range<usize>,
    cols: usize,
    scheme: Scheme,
    whole: Option<f32>,
) -> Result<Codes> {
    check(weights, part, cols, scheme)?;
    quantize_with(weights, part.len(), cols, scheme, whole)
}

/// The mean of |w|, summed in f64.
fn mean_magnitude(weights: &[f32]) -> f32 {
    (sum_of_magnitudes(weights) / weights.len().max(1) as f64) as f32
}

/// The sum of |w|.
pub(crate) fn sum_of_magnitudes(weights: &[f32]) -> f64 {
    weights.iter().map(|w| f64::from(w.abs())).sum()
}

fn check(weights: &[f32], rows: &Range<usize>, cols: usize, scheme: Scheme) -> Result<()> {
    let count = rows.len();
    if count.checked_mul(cols) != Some(weights.len()) {
        bail!(
            "weights: {} values given for {count} x {cols}",
            weights.len()
        );
    }
    scheme.check(cols)?;
    if let Some(at) = weights.iter().position(|w| !w.is_finite()) {
        bail!(
            "weights: {} at row {}, column {}, expected a finite number",
            weights[at],
            rows.start + at / cols,
            at % cols
        );
    }
    Ok(())
}

fn quantize_with(
    weights: &[f32],
    rows: usize,
    cols: usize,
    scheme: Scheme,
    whole: Option<f32>,
) -> Result<Codes> {
    let unit = scheme.group().unwrap_or(cols);
    let units = rows * (cols / unit);
    let mut codes = vec![0i8; weights.len()];
    let mut found = vec![Found::default(); units];
    let failed = Mutex::new(None);
    // Codes and scales of a row are written together, and rows are spread over the pool.
    let in_row = cols / unit;
    let scales = Rows(found.as_mut_ptr());
    pool::for_rows(&mut codes, cols, 1, |first, part| {
        for (i, codes) in part.chunks_exact_mut(unit).enumerate() {
            let index = first * in_row + i;
            let weights = &weights[index * unit..][..unit];
            let result = match scheme {
                Scheme::Int8 => Ok(symmetric(weights, codes, 127., 127., 0, false)),
                Scheme::Int4 {
                    zero_point: false, ..
                } => half(symmetric(weights, codes, 7., 8., 8, true)),
                Scheme::Int4 { .. } => half(with_zero_point(weights, codes)),
                Scheme::Ternary { scale } => {
                    let mean = whole.unwrap_or_else(|| mean_magnitude(weights));
                    match scale {
                        TernaryScale::Group(_) => half(ternary(weights, codes, rounded(mean))),
                        _ => Ok(ternary(weights, codes, mean)),
                    }
                }
            };
            match result {
                // SAFETY: this task has the rows of `part` alone, and there is a unit for each.
                Ok(one) => unsafe { scales.set(index, one) },
                Err(e) => *failed.lock().unwrap_or_else(|e| e.into_inner()) = Some((index, e)),
            }
        }
    });
    if let Some((index, e)) = failed.into_inner().unwrap_or_else(|e| e.into_inner()) {
        bail!("weights: row {}: {e}", index / in_row);
    }
    let scales = match whole {
        Some(scale) => vec![scale],
        None => found.iter().map(|f| f.scale).collect(),
    };
    let zeros = match scheme.has_zeros() {
        true => found.iter().map(|f| f.zero).collect(),
        false => Vec::new(),
    };
    Ok(Codes {
        scheme,
        rows,
        cols,
        codes,
        scales,
        zeros,
    })
}

/// What a row or group came to.
#[derive(Clone, Copy, Default)]
struct Found {
    scale: f32,
    zero: u8,
}

impl From<Best> for Found {
    fn from(best: Best) -> Self {
        Self {
            scale: best.scale,
            zero: best.zero,
        }
    }
}

/// Results that several tasks write, each its own.
struct Rows(*mut Found);

// SAFETY: it stands for a `&mut [Found]`, whose parts the callers of `set` keep apart.
unsafe impl Sync for Rows {}

impl Rows {
    /// # Safety
    /// There is an element `index`, and no other thread accesses it.
    unsafe fn set(&self, index: usize, found: Found) {
        // SAFETY: the caller's.
        unsafe { self.0.add(index).write(found) };
    }
}

fn rounded(scale: f32) -> f32 {
    f16::from_f32(scale).to_f32()
}

/// Fails if the scale has become infinite as an f16.
fn half(found: Found) -> Result<Found> {
    if !found.scale.is_finite() {
        bail!("the weights are so large that their scale is no f16; take int8");
    }
    Ok(found)
}

/// How the codes that a scale gives miss the weights, in units of that scale: r = w / scale - q.
struct Trial {
    scale: f32,
    /// sum of r^2
    rr: f32,
    /// sum of r q
    rq: f32,
    /// sum of q^2
    qq: f32,
}

impl Trial {
    /// Of the codes `clamp(round(w * inverse), low, high)`.
    fn of(weights: &[f32], inverse: f32, low: f32, high: f32) -> Self {
        let (mut rr, mut rq, mut qq) = ([0f32; 16], [0f32; 16], [0f32; 16]);
        let mut add = |lane: usize, w: f32| {
            let q = code(w, inverse, low, high);
            let r = w * inverse - q;
            rr[lane] += r * r;
            rq[lane] += r * q;
            qq[lane] += q * q;
        };
        let (whole, rest) = weights.as_chunks::<16>();
        for weights in whole {
            for (lane, w) in weights.iter().enumerate() {
                add(lane, *w);
            }
        }
        for (lane, w) in rest.iter().enumerate() {
            add(lane, *w);
        }
        Self {
            scale: 1. / inverse,
            rr: rr.iter().sum(),
            rq: rq.iter().sum(),
            qq: qq.iter().sum(),
        }
    }

    /// The scale with the least squared error for these codes.
    fn best_scale(&self) -> f32 {
        self.scale * (1. + self.rq / self.qq)
    }

    /// The squared error with `scale` for these codes.
    fn error(&self, scale: f32) -> f32 {
        let d = scale / self.scale - 1.;
        self.scale * self.scale * (self.rr - 2. * d * self.rq + d * d * self.qq)
    }
}

/// The best of the trials so far.
#[derive(Clone, Copy)]
struct Best {
    scale: f32,
    zero: u8,
    error: f32,
}

impl Best {
    /// Nothing tried: all weights are zero.
    fn none(zero: u8) -> Self {
        Self {
            scale: 0.,
            zero,
            error: f32::INFINITY,
        }
    }

    /// Takes `trial`, whose scale becomes what `store` makes of it, if it is better.
    fn consider(&mut self, trial: &Trial, zero: u8, store: impl Fn(f32) -> f32) {
        if trial.qq == 0. || !trial.scale.is_finite() {
            return;
        }
        let scale = store(trial.best_scale());
        let error = trial.error(scale);
        if error < self.error || scale.is_infinite() {
            *self = Self { scale, zero, error };
        }
    }
}

#[inline(always)]
fn code(w: f32, inverse: f32, low: f32, high: f32) -> f32 {
    // Within 2^22, so that adding ROUND rounds; far values are clipped anyway.
    ((w * inverse).clamp(low, high) + ROUND) - ROUND
}

/// The best scale without a zero point: codes are `low`..`high` plus `offset`, where `-low` may be more
/// than `high`; then a negative scale may be best.
fn symmetric(
    weights: &[f32],
    codes: &mut [i8],
    high: f32,
    low: f32,
    offset: i8,
    as_half: bool,
) -> Found {
    let store = |scale: f32| if as_half { rounded(scale) } else { scale };
    let amax = weights.iter().fold(0f32, |m, w| m.max(w.abs()));
    let signs: &[f32] = if low > high { &[1., -1.] } else { &[1.] };
    let mut best = Best::none(offset as u8);
    if amax >= TINY {
        for sign in signs {
            for clip in 0..CLIPS {
                let inverse = sign * low / (amax * (1. - clip as f32 * CLIP_STEP));
                let trial = Trial::of(weights, inverse, -low, high);
                best.consider(&trial, offset as u8, store);
            }
        }
    }
    write(weights, codes, best.scale, -low, high, offset);
    best.into()
}

/// Codes by the scale that is stored.
fn write(weights: &[f32], codes: &mut [i8], scale: f32, low: f32, high: f32, offset: i8) {
    let inverse = 1. / scale;
    if scale == 0. || !inverse.is_finite() {
        codes.fill(offset);
        return;
    }
    for (q, w) in codes.iter_mut().zip(weights) {
        *q = code(*w, inverse, low, high) as i8 + offset;
    }
}

/// The best scale and zero point of codes 0..=15.
fn with_zero_point(weights: &[f32], codes: &mut [i8]) -> Found {
    let (bottom, top) = weights
        .iter()
        .fold((0f32, 0f32), |(b, t), w| (b.min(*w), t.max(*w)));
    let mut best = Best::none(8);
    if top - bottom >= TINY {
        for clips in 0..ENDS * ENDS {
            let clip = |i: usize| 1. - i as f32 * 2. * CLIP_STEP;
            let (bottom, top) = (bottom * clip(clips / ENDS), top * clip(clips % ENDS));
            let inverse = 15. / (top - bottom);
            let zero = code(-bottom, inverse, 0., 15.);
            let trial = Trial::of(weights, inverse, -zero, 15. - zero);
            best.consider(&trial, zero as u8, rounded);
        }
        // The grid is coarse; look around its best.
        let Best { scale, zero, .. } = best;
        for zero in zero.saturating_sub(1)..=(zero + 1).min(15) {
            for step in -NEAR..=NEAR {
                let inverse = 1. / (scale * (1. + step as f32 * NEAR_STEP));
                let low = -f32::from(zero);
                let trial = Trial::of(weights, inverse, low, low + 15.);
                best.consider(&trial, zero, rounded);
            }
        }
    }
    let low = -f32::from(best.zero);
    write(weights, codes, best.scale, low, low + 15., best.zero as i8);
    best.into()
}

/// Ternary codes for a scale.
fn ternary(weights: &[f32], codes: &mut [i8], scale: f32) -> Found {
    write(weights, codes, scale, -1., 1., 0);
    Found { scale, zero: 0 }
}
