//! e4m3 floats: the largest magnitude of what shares a scale becomes 448.

use super::floats::{encode, largest_magnitude};
use crate::pool;
use crate::quant::{Codes, FP8_BLOCK, Scheme, e4m3};

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
                    *scale = scale.max(largest_magnitude(weights));
                }
            }
            for scale in scales {
                *scale = if *scale < e4m3::TINY {
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
                encode(weights, *scale, codes, e4m3::from_f32);
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
