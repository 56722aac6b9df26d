//! NF4: the largest magnitude of each 64 values becomes 1, and the others the nearest of a table, as bitsandbytes does.

use super::floats::{encode, largest_magnitude};
use crate::pool;
use crate::quant::{Codes, NF4_GROUP, Scheme, nf4};

/// Quantizes finite weights.
pub(super) fn quantize(weights: &[f32], rows: usize, cols: usize) -> Codes {
    let across = cols / NF4_GROUP;
    let mut scales = vec![0f32; rows * across];
    pool::for_rows(&mut scales, across, 1, |first, part| {
        let groups = weights[first * cols..].chunks_exact(NF4_GROUP);
        for (scale, group) in part.iter_mut().zip(groups) {
            *scale = largest_magnitude(group);
        }
    });
    let mut codes = vec![0i8; weights.len()];
    pool::for_rows(&mut codes, cols, 1, |first, part| {
        let groups = weights[first * cols..].chunks_exact(NF4_GROUP);
        let scales = &scales[first * across..];
        let codes = part.chunks_exact_mut(NF4_GROUP);
        for ((codes, group), scale) in codes.zip(groups).zip(scales) {
            encode(group, *scale, codes, nf4::from_f32);
        }
    });
    Codes {
        scheme: Scheme::Nf4,
        rows,
        cols,
        codes,
        scales,
        zeros: Vec::new(),
        group_scales: Vec::new(),
    }
}
