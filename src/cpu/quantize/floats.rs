//! What quantizing to small floats of any format, and to those of a table, shares.

#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{Level, level};

/// The largest magnitude of finite weights.
#[inline(always)]
pub(crate) fn largest_magnitude(weights: &[f32]) -> f32 {
    weights.iter().fold(0f32, |most, w| most.max(w.abs()))
}

/// The codes of weights over their scale, by `nearest`; that of 0 where the scale is 0.
pub(super) fn encode(weights: &[f32], scale: f32, codes: &mut [i8], nearest: impl Fn(f32) -> u8) {
    if scale == 0. {
        return codes.fill(nearest(0.) as i8);
    }
    #[cfg(target_arch = "x86_64")]
    if level() >= Level::Avx2 {
        // SAFETY: the processor has the level, and with it AVX2.
        return unsafe { encode_avx2(weights, scale, codes, nearest) };
    }
    encode_plain(weights, scale, codes, nearest);
}

/// # Safety
/// The processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn encode_avx2(weights: &[f32], scale: f32, codes: &mut [i8], nearest: impl Fn(f32) -> u8) {
    encode_plain(weights, scale, codes, nearest);
}

#[inline(always)]
fn encode_plain(weights: &[f32], scale: f32, codes: &mut [i8], nearest: impl Fn(f32) -> u8) {
    for (code, w) in codes.iter_mut().zip(weights) {
        *code = nearest(w / scale) as i8;
    }
}
