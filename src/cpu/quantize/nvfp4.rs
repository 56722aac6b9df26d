//! NVFP4: e2m1 floats under an e4m3 scale of each 16, as compressed-tensors makes them.
//!
//! The largest magnitude of a matrix becomes 448 times 6, both formats' largest numbers, by a global scale g; that of each
//! 16 values w is as near to 6 as the e4m3 scale b = max |w| g / 6 has it, and codes are those nearest to w g / b.

use crate::cpu::pool;
use crate::cpu::simd::{Level, level};
use crate::quant::{Codes, NVFP4_GROUP, Scheme, e2m1, e4m3};

/// Below this a global scale would be no number of f32.
const TINY: f32 = 1e-34;

/// The largest magnitude of finite weights.
pub(crate) fn largest_magnitude(weights: &[f32]) -> f32 {
    weights.iter().fold(0f32, |most, w| most.max(w.abs()))
}

/// Quantizes finite weights of a matrix whose largest magnitude is known.
pub(super) fn quantize(weights: &[f32], rows: usize, cols: usize, largest: f32) -> Codes {
    let mut codes = vec![0i8; weights.len()];
    let mut group_scales = vec![0u8; weights.len() / NVFP4_GROUP];
    let (global, scale) = if largest < TINY {
        (0., 0.)
    } else {
        let global = e4m3::MAX * e2m1::MAX / largest;
        (global, 1. / global)
    };
    let across = cols / NVFP4_GROUP;
    pool::for_rows(&mut group_scales, across, 1, |first, part| {
        let groups = weights[first * cols..].chunks_exact(NVFP4_GROUP);
        for (b, group) in part.iter_mut().zip(groups) {
            *b = e4m3::from_f32(largest_magnitude(group) * global / e2m1::MAX);
        }
    });
    pool::for_rows(&mut codes, cols, 1, |first, part| {
        let groups = weights[first * cols..].chunks_exact(NVFP4_GROUP);
        let scales = &group_scales[first * across..];
        for ((codes, group), b) in part.chunks_exact_mut(NVFP4_GROUP).zip(groups).zip(scales) {
            encode(level(), group, e4m3::to_f32(*b) / global, codes);
        }
    });
    Codes {
        scheme: Scheme::Nvfp4,
        rows,
        cols,
        codes,
        scales: vec![scale; rows],
        zeros: Vec::new(),
        group_scales,
    }
}

/// The codes nearest to weights over their scale; 0 where that is 0, or no number.
fn encode(level: Level, weights: &[f32], scale: f32, codes: &mut [i8]) {
    if scale.is_nan() || scale == 0. {
        return codes.fill(0);
    }
    #[cfg(target_arch = "x86_64")]
    if level >= Level::Avx2 {
        // SAFETY: the processor has the level, and with it AVX2.
        return unsafe { encode_avx2(weights, scale, codes) };
    }
    let _ = level;
    encode_plain(weights, scale, codes);
}

/// # Safety
/// The processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn encode_avx2(weights: &[f32], scale: f32, codes: &mut [i8]) {
    encode_plain(weights, scale, codes);
}

#[inline(always)]
fn encode_plain(weights: &[f32], scale: f32, codes: &mut [i8]) {
    for (code, w) in codes.iter_mut().zip(weights) {
        *code = e2m1::from_f32(w / scale) as i8;
    }
}
