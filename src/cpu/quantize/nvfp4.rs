//! NVFP4: e2m1 floats under an e4m3 scale of each 16, as compressed-tensors makes them.
//!
//! The largest magnitude of a matrix becomes 448 times 6, both formats' largest numbers, by a global scale g; that of each
//! 16 values w is as near to 6 as the e4m3 scale b = max |w| g / 6 has it, and codes are those nearest to w g / b.

use super::floats::{encode, largest_magnitude};
use crate::pool;
use crate::quant::{Codes, NVFP4_GROUP, Scheme, e2m1, e4m3};

/// Quantizes finite weights of a matrix whose largest magnitude is known.
pub(super) fn quantize(weights: &[f32], rows: usize, cols: usize, largest: f32) -> Codes {
    let mut codes = vec![0i8; weights.len()];
    let mut group_scales = vec![0u8; weights.len() / NVFP4_GROUP];
    let (global, scale) = e2m1::global_scale(largest);
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
            // A matrix of zeros has a global scale of 0.
            let scale = if global == 0. {
                0.
            } else {
                e4m3::to_f32(*b) / global
            };
            encode(group, scale, codes, e2m1::from_f32);
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
