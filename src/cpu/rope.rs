//! The rotation of one head's row.

use super::vector::Element;

/// Which dimensions of a head form the pairs that are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// `i` and `i + R / 2`: Hugging Face's weights (GPT-NeoX's form).
    HalfSplit,
    /// `2i` and `2i + 1`: GGUF files of the llama architecture (RoFormer's form).
    Interleaved,
}

/// Rotates the first `2 * cos.len()` values of `x` by the angles whose cosines and sines are given
/// and copies the rest: `(a, b) -> (a cos - b sin, b cos + a sin)` for each pair.
///
/// # Panics
/// If `x` and `out` or the angles differ in length, or `x` is shorter than the rotated part.
///
/// ```
/// use candle_fused::cpu::rope::{RopeStyle, rotate};
/// // A quarter turn of the only pair; the third value is no part of one.
/// let mut out = [0f32; 3];
/// rotate(RopeStyle::HalfSplit, &[1f32, 2., 3.], &[0.], &[1.], &mut out);
/// assert_eq!(out, [-2., 1., 3.]);
/// ```
pub fn rotate<T: Element, O: Element>(
    style: RopeStyle,
    x: &[T],
    cos: &[f32],
    sin: &[f32],
    out: &mut [O],
) {
    assert_eq!(x.len(), out.len());
    assert_eq!(cos.len(), sin.len());
    let pairs = cos.len();
    let (x, rest) = x.split_at(2 * pairs);
    let (out, rest_out) = out.split_at_mut(2 * pairs);
    let turn = |a: T, b: T, cos: f32, sin: f32| {
        let (a, b) = (a.to_f32(), b.to_f32());
        (
            O::from_f32(a * cos - b * sin),
            O::from_f32(b * cos + a * sin),
        )
    };
    let angles = cos.iter().zip(sin);
    match style {
        RopeStyle::HalfSplit => {
            let (first, second) = x.split_at(pairs);
            let (first_out, second_out) = out.split_at_mut(pairs);
            let x = first.iter().zip(second);
            let out = first_out.iter_mut().zip(second_out);
            for (((a, b), (a_out, b_out)), (cos, sin)) in x.zip(out).zip(angles) {
                (*a_out, *b_out) = turn(*a, *b, *cos, *sin);
            }
        }
        RopeStyle::Interleaved => {
            let (x, _) = x.as_chunks::<2>();
            let (out, _) = out.as_chunks_mut::<2>();
            for (([a, b], [a_out, b_out]), (cos, sin)) in x.iter().zip(out).zip(angles) {
                (*a_out, *b_out) = turn(*a, *b, *cos, *sin);
            }
        }
    }
    copy(rest, rest_out);
}

/// Copies values of one type to another.
///
/// ```
/// let mut out = [half::f16::ZERO; 2];
/// candle_fused::cpu::rope::copy(&[1f32, 2.], &mut out);
/// assert_eq!(out.map(f32::from), [1., 2.]);
/// ```
pub fn copy<T: Element, O: Element>(x: &[T], out: &mut [O]) {
    for (x, y) in x.iter().zip(out) {
        *y = O::from_f32(x.to_f32());
    }
}
