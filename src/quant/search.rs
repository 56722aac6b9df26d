//! The numbers of the search for scales, which the CPU and the GPU go by; `cpu::quantize::search` says what for.

/// Adding it to a float below 2^22 and taking it away again leaves the nearest integer, ties to even;
/// unlike `round_ties_even` it vectorizes on every x86 processor.
pub(crate) const ROUND: f32 = 12_582_912.0;

/// Clipped ranges that are tried, in steps of the full range.
pub(crate) const CLIPS: usize = 16;

/// The step: the last range tried is 1 - 15 / 32 of the full one.
pub(crate) const CLIP_STEP: f32 = 1.0 / 32.0;

/// Ranges tried at each end with zero points.
pub(crate) const ENDS: usize = 7;

/// Scales tried to both sides of the best so far, in steps of this part of it.
pub(crate) const NEAR: i32 = 4;
pub(crate) const NEAR_STEP: f32 = 0.025;

/// Rounds of codes and the line through them at the end.
pub(crate) const ROUNDS: usize = 4;

/// Values below which a scale would be no number that an f32 can divide by.
pub(crate) const TINY: f32 = 1e-35;
