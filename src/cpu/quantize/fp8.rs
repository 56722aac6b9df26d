//! e4m3 floats: the largest magnitude of what shares a scale becomes 448.

use crate::cpu::pool;
use crate::cpu::simd::{Level, level};
use crate::quant::{Codes, FP8_BLOCK, Scheme, e4m3};

/// Below this a scale would be no number that an f32 can divide by.
const TINY: f32 = 1e-35;

/// Quantizes finite weights by one of FP8's schemes.
pub(super) fn quantize(weights: &[f32], rows: usize, cols: usize, scheme: Scheme) -> Codes {
    let (height, width) = match scheme {
        Scheme::Fp8Block128 => (FP8_BLOCK, FP8_BLOCK),
        _ => (1, cols),
    };
    let across = cols.div_ceil(width);
    let mut scales = vec![0f32; scheme.scale_count(rows, cols)];
    pool::for_rows(&mut scales, across, 1, |first, part| {
        for (i, scales) in part.chunks_exact_mut(across).enumerate() {
            let begin = (first + i) * height;
            let end = rows.min(begin + height);
            for row in weights[begin * cols..end * cols].chunks_exact(cols) {
                for (scale, weights) in scales.iter_mut().zip(row.chunks(width)) {
                    *scale = weights.iter().fold(*scale, |most, w| most.max(w.abs()));
                }
            }
            for scale in scales {
                *scale = if *scale < TINY {
                    0.
                } else {
                    *scale / e4m3::MAX
                };
            }
        }
    });
    let mut codes = vec![0i8; weights.len()];
    pool::for_rows(&mut codes, cols, 1, |first, part| {
        for (i, codes) in part.chunks_exact_mut(cols).enumerate() {
            let row = first + i;
            let scales = &scales[row / height * across..][..across];
            let weights = weights[row * cols..][..cols].chunks(width);
            for ((codes, weights), scale) in codes.chunks_mut(width).zip(weights).zip(scales) {
                encode(level(), weights, *scale, codes);
            }
        }
    });
    Codes {
        scheme,
        rows,
        cols,
        codes,
        scales,
        zeros: Vec::new(),
        group_scales: Vec::new(),
    }
}

/// The codes nearest to weights over their scale.
fn encode(level: Level, weights: &[f32], scale: f32, codes: &mut [i8]) {
    if scale == 0. {
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
        *code = e4m3::from_f32(w / scale) as i8;
    }
}
