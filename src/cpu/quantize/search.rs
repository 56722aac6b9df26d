//! The scale, and zero point, of a row or group, by search.
//!
//! INT8 and INT4 try a grid of ranges, from the one that reaches the largest value down to about half of
//! it, and with zero points both ends of the range on their own. Each try rounds the weights to codes q
//! and takes what gives these codes the least squared error, the scale `sum(w q) / sum(q^2)` or the
//! straight line through the weights over their codes; the best try wins. Clipping a few outliers often
//! costs less than the coarse steps that they would force on all others (OCTAV, Sakr et al. 2022).
//! Ternary is the absmean of BitNet b1.58 (Ma et al. 2024): scale = mean |w|, round, clip.

use super::floats::largest_magnitude;
use crate::cpu::simd::Level;
use crate::quant::search::{CLIP_STEP, CLIPS, ENDS, NEAR, NEAR_STEP, ROUND, ROUNDS, TINY};
use crate::quant::{MIDDLE, Scheme, TernaryScale, ZERO_STEP};
use half::f16;

/// What a row or group came to.
#[derive(Clone, Copy, Default)]
pub(super) struct Found {
    pub scale: f32,
    /// In sixteenths.
    pub zero: u8,
}

/// The mean of |w|, summed in f64.
pub(super) fn mean_magnitude(weights: &[f32]) -> f32 {
    (sum_of_magnitudes(weights) / weights.len().max(1) as f64) as f32
}

/// The sum of |w|.
pub(crate) fn sum_of_magnitudes(weights: &[f32]) -> f64 {
    weights.iter().map(|w| f64::from(w.abs())).sum()
}

/// A row or group.
#[derive(Clone, Copy)]
pub(super) struct Unit<'a> {
    pub weights: &'a [f32],
    /// How much the squared error of each counts; else all alike.
    pub counts: Option<&'a [f32]>,
    /// The scale of a matrix that has one only.
    pub whole: Option<f32>,
}

/// The codes of a row or group, and what they mean. A scale that f16 does not hold is infinite.
pub(super) fn search(level: Level, scheme: Scheme, unit: Unit<'_>, codes: &mut [i8]) -> Found {
    #[cfg(target_arch = "x86_64")]
    if level.supported() >= Level::Avx2 {
        // SAFETY: the processor has the level, and with it AVX2.
        return unsafe { search_avx2(scheme, unit, codes) };
    }
    let _ = level;
    search_plain(scheme, unit, codes)
}

/// [`search_plain`] compiled for AVX2.
///
/// # Safety
/// The processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn search_avx2(scheme: Scheme, unit: Unit<'_>, codes: &mut [i8]) -> Found {
    search_plain(scheme, unit, codes)
}

/// Plain code that vectorizes and rounds alike at every level.
#[inline(always)]
fn search_plain(scheme: Scheme, unit: Unit<'_>, codes: &mut [i8]) -> Found {
    match scheme {
        // Those of floats and of a table are not searched for.
        Scheme::Int8 | Scheme::Fp8 | Scheme::Fp8Block128 | Scheme::Nvfp4 | Scheme::Nf4 => {
            symmetric(unit, codes, (-127., 127.), 0, |scale| scale)
        }
        Scheme::Int4 {
            zero_point: false, ..
        } => symmetric(unit, codes, (0., 15.), MIDDLE, rounded),
        Scheme::Int4 { .. } => with_zero_point(unit, codes),
        Scheme::Ternary { scale } => {
            let mean = unit.whole.unwrap_or_else(|| mean_magnitude(unit.weights));
            let scale = match scale {
                TernaryScale::Group(_) => rounded(mean),
                TernaryScale::Tensor | TernaryScale::Row => mean,
            };
            ternary(unit.weights, codes, scale)
        }
    }
}

/// What f16 stores of a scale.
fn rounded(scale: f32) -> f32 {
    f16::from_f32(scale).to_f32()
}

/// From weights to codes: `clamp(round(w * inverse + zero), low, high)`.
#[derive(Clone, Copy)]
pub(crate) struct Rounding {
    inverse: f32,
    zero: f32,
    low: f32,
    high: f32,
}

impl Rounding {
    /// To codes of INT8 or INT4 whose scale and zero point, in sixteenths, are known.
    pub(crate) fn new(scheme: Scheme, scale: f32, zero: u8) -> Self {
        let (low, high) = match scheme {
            Scheme::Int4 { .. } => (0., 15.),
            _ => (-127., 127.),
        };
        Self {
            inverse: if scale == 0. { 0. } else { 1. / scale },
            zero: f32::from(zero) * ZERO_STEP,
            low,
            high,
        }
    }

    /// The code of a weight, as a number.
    #[inline(always)]
    pub(crate) fn code(&self, w: f32) -> f32 {
        // Within 2^22, so that adding ROUND rounds; far values are clipped anyway.
        ((w * self.inverse + self.zero).clamp(self.low, self.high) + ROUND) - ROUND
    }
}

/// How codes v (less the zero point) miss the weights, in units of their scale: r = w / scale - v.
struct Trial {
    scale: f32,
    zero: f32,
    /// How many there are, or the sum of how much each counts.
    count: f32,
    /// Sums of r, v, r^2, r v and v^2.
    r: f32,
    v: f32,
    rr: f32,
    rv: f32,
    vv: f32,
}

impl Trial {
    #[inline(always)]
    fn of(weights: &[f32], counts: Option<&[f32]>, by: Rounding) -> Self {
        let mut sums = [[0f32; 16]; 5];
        let mut add = |lane: usize, w: f32, count: f32| {
            let v = by.code(w) - by.zero;
            let r = w * by.inverse - v;
            for (sum, term) in sums.iter_mut().zip([r, v, r * r, r * v, v * v]) {
                sum[lane] += count * term;
            }
        };
        let (whole, rest) = weights.as_chunks::<16>();
        match counts {
            None => {
                for weights in whole {
                    for (lane, w) in weights.iter().enumerate() {
                        add(lane, *w, 1.);
                    }
                }
                for (lane, w) in rest.iter().enumerate() {
                    add(lane, *w, 1.);
                }
            }
            Some(counts) => {
                let (some, last) = counts.as_chunks::<16>();
                for (weights, counts) in whole.iter().zip(some) {
                    for (lane, (w, count)) in weights.iter().zip(counts).enumerate() {
                        add(lane, *w, *count);
                    }
                }
                for (lane, (w, count)) in rest.iter().zip(last).enumerate() {
                    add(lane, *w, *count);
                }
            }
        }
        let [r, v, rr, rv, vv] = sums.map(|sum| sum.iter().sum());
        let all = weights.len() as f32;
        Self {
            scale: 1. / by.inverse,
            zero: by.zero,
            count: counts.map_or(all, |counts| counts.iter().sum()),
            r,
            v,
            rr,
            rv,
            vv,
        }
    }

    /// The scale with the least squared error for these codes if their zero point moves by `shift`, so
    /// that v becomes v - shift.
    fn best_scale(&self, shift: f32) -> f32 {
        let moved = shift * shift * self.count;
        let with = self.rv + shift * (self.v - self.r) - moved;
        self.scale * (1. + with / (self.vv - 2. * shift * self.v + moved))
    }

    /// The zero point that goes with the best of all lines through the weights over these codes.
    fn best_zero(&self) -> f32 {
        let Self { count, r, v, .. } = *self;
        let spread = count * self.vv - v * v;
        if spread <= 0. {
            // All codes are the same.
            return self.zero;
        }
        let slope = (count * self.rv - r * v) / spread;
        self.zero - (r - slope * v) / (count * (1. + slope))
    }

    /// The squared error for these codes with `scale` and the zero point moved by `shift`.
    fn error(&self, scale: f32, shift: f32) -> f32 {
        let d = scale / self.scale - 1.;
        let e = -(1. + d) * shift;
        let lines = d * d * self.vv + e * (e * self.count + 2. * (d * self.v - self.r));
        self.scale * self.scale * (self.rr - 2. * d * self.rv + lines)
    }
}

/// The best of the trials so far.
#[derive(Clone, Copy)]
struct Best {
    found: Found,
    error: f32,
}

impl Best {
    /// Nothing tried: all weights are zero.
    fn none(zero: u8) -> Self {
        Self {
            found: Found { scale: 0., zero },
            error: f32::INFINITY,
        }
    }

    /// Takes `trial`, whose scale becomes what `store` makes of it and whose zero point goes to `zero`,
    /// in sixteenths, if it is better.
    fn consider(&mut self, trial: &Trial, zero: u8, store: impl Fn(f32) -> f32) {
        let shift = f32::from(zero) * ZERO_STEP - trial.zero;
        if trial.vv == 0. || !trial.scale.is_finite() {
            return;
        }
        let scale = store(trial.best_scale(shift));
        let error = trial.error(scale, shift);
        if error < self.error || scale.is_infinite() {
            let found = Found { scale, zero };
            *self = Self { found, error };
        }
    }
}

/// The best scale of codes `low`..=`high` with a zero point, in sixteenths, that is given. Where more
/// codes lie below it than above, a negative scale may be best.
#[inline(always)]
fn symmetric(
    unit: Unit<'_>,
    codes: &mut [i8],
    (low, high): (f32, f32),
    zero: u8,
    store: impl Fn(f32) -> f32,
) -> Found {
    let Unit {
        weights, counts, ..
    } = unit;
    let amax = largest_magnitude(weights);
    let middle = f32::from(zero) * ZERO_STEP;
    let (below, above) = (middle - low, high - middle);
    let signs: &[f32] = if below > above { &[1., -1.] } else { &[1.] };
    let by = |inverse| Rounding {
        inverse,
        zero: middle,
        low,
        high,
    };
    let mut best = Best::none(zero);
    if amax >= TINY {
        for sign in signs {
            for clip in 0..CLIPS {
                let inverse = sign * below / (amax * (1. - clip as f32 * CLIP_STEP));
                best.consider(&Trial::of(weights, counts, by(inverse)), zero, &store);
            }
        }
    }
    write(weights, codes, by(1. / best.found.scale));
    best.found
}

/// Codes by what is stored.
#[inline(always)]
fn write(weights: &[f32], codes: &mut [i8], by: Rounding) {
    if !by.inverse.is_finite() {
        codes.fill(by.zero as i8);
        return;
    }
    for (q, w) in codes.iter_mut().zip(weights) {
        *q = by.code(*w) as i8;
    }
}

/// The best scale and zero point of codes 0..=15.
#[inline(always)]
fn with_zero_point(unit: Unit<'_>, codes: &mut [i8]) -> Found {
    let Unit {
        weights, counts, ..
    } = unit;
    let (bottom, top) = weights
        .iter()
        .fold((0f32, 0f32), |(b, t), w| (b.min(*w), t.max(*w)));
    let by = |inverse: f32, zero: f32| Rounding {
        inverse,
        zero,
        low: 0.,
        high: 15.,
    };
    let stored = |by: f32| (by / ZERO_STEP).round_ties_even().clamp(0., 255.) as u8;
    let mut best = Best::none(MIDDLE);
    // A line through the codes that a rounding gives, with its zero point as it is stored.
    let mut attempt = |by: Rounding| {
        let trial = Trial::of(weights, counts, by);
        best.consider(&trial, stored(trial.best_zero()), rounded);
        best.found
    };
    if top - bottom >= TINY {
        let mut found = Found::default();
        for clips in 0..ENDS * ENDS {
            let clip = |i: usize| 1. - i as f32 * 2. * CLIP_STEP;
            let (bottom, top) = (bottom * clip(clips / ENDS), top * clip(clips % ENDS));
            let inverse = 15. / (top - bottom);
            found = attempt(by(inverse, -bottom * inverse));
        }
        // The grid is coarse; look around its best, then let codes and line settle.
        let Found { scale, zero } = found;
        for step in -NEAR..=NEAR {
            let inverse = 1. / (scale * (1. + step as f32 * NEAR_STEP));
            found = attempt(by(inverse, f32::from(zero) * ZERO_STEP));
        }
        for _ in 0..ROUNDS {
            found = attempt(by(1. / found.scale, f32::from(found.zero) * ZERO_STEP));
        }
    }
    let Found { scale, zero } = best.found;
    write(weights, codes, by(1. / scale, f32::from(zero) * ZERO_STEP));
    best.found
}

/// Ternary codes for a scale.
#[inline(always)]
fn ternary(weights: &[f32], codes: &mut [i8], scale: f32) -> Found {
    let by = Rounding {
        inverse: 1. / scale,
        zero: 0.,
        low: -1.,
        high: 1.,
    };
    write(weights, codes, by);
    Found { scale, zero: 0 }
}
