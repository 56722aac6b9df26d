//! The rotation of one head's row.

use super::vector::Element;
use crate::ops::RopeStyle;

/// Rotates the first `2 * cos.len()` values of `x` by the angles whose cosines and sines are given
/// and copies the rest: `(a, b) -> (a cos - b sin, b cos + a sin)` for each pair.
///
/// # Panics
/// If `x` and `out` differ in length or are shorter than the rotated part.
pub fn rotate<T: Element, O: Element>(
    style: RopeStyle,
    x: &[T],
    cos: &[f32],
    sin: &[f32],
    out: &mut [O],
) {
    assert_eq!(x.len(), out.len());
    let pairs = cos.len();
    let (x, rest) = x.split_at(2 * pairs);
    let (out, rest_out) = out.split_at_mut(2 * pairs);
    let turn = |a: T, b: T, i: usize| {
        let (a, b) = (a.to_f32(), b.to_f32());
        (
            O::from_f32(a * cos[i] - b * sin[i]),
            O::from_f32(b * cos[i] + a * sin[i]),
        )
    };
    match style {
        RopeStyle::HalfSplit => {
            let (first, second) = x.split_at(pairs);
            let (first_out, second_out) = out.split_at_mut(pairs);
            for i in 0..pairs {
                (first_out[i], second_out[i]) = turn(first[i], second[i], i);
            }
        }
        RopeStyle::Interleaved => {
            for (i, (x, y)) in x.chunks_exact(2).zip(out.chunks_exact_mut(2)).enumerate() {
                (y[0], y[1]) = turn(x[0], x[1], i);
            }
        }
    }
    copy(rest, rest_out);
}

/// Copies values of one type to another.
pub fn copy<T: Element, O: Element>(x: &[T], out: &mut [O]) {
    for (x, y) in x.iter().zip(out) {
        *y = O::from_f32(x.to_f32());
    }
}
