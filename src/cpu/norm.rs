//! Norms of one row: values in, statistics in f32, values out.

use super::simd::Level;
use super::vector::{Element, Kernel, Vector, dispatch, is_f32};

/// `out = x / sqrt(mean(x^2) + eps) * weight` for one row.
///
/// Rounded as Hugging Face's Llama does it: normalised in f32, rounded to `T`, multiplied by the
/// weight, rounded to `T` again. `out` takes the result as `T` or, exactly, as f32. Squares are
/// summed in f32, so a row with magnitudes above 1e19 gives zeros, as it does there.
///
/// # Panics
/// If the slices differ in length.
///
/// ```
/// use candle_fused::cpu::{norm, simd};
/// let mut out = [0f32; 2];
/// norm::rms_norm(simd::level(), &[5f32, -5.], &[1., 2.], 0., &mut out);
/// assert_eq!(out, [1., -2.]);
/// ```
pub fn rms_norm<T: Element, O: Element>(
    level: Level,
    x: &[T],
    weight: &[T],
    eps: f32,
    out: &mut [O],
) {
    assert!(x.len() == weight.len() && x.len() == out.len());
    // SAFETY: the kernel holds slices of one length.
    unsafe {
        dispatch(
            level,
            RmsNorm {
                x,
                weight,
                eps,
                out,
            },
        )
    }
}

/// `out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias` for one row.
///
/// Everything is computed in f32 and rounded to `T` once; `out` takes that as `T` or, exactly, as
/// f32. The mean is taken off in two parts, a rough one and what a second pass finds that it lacks, so
/// that a large common offset costs no precision.
///
/// # Panics
/// If the slices differ in length.
///
/// ```
/// use candle_fused::cpu::{norm, simd};
/// let mut out = [0f32; 2];
/// norm::layer_norm(simd::level(), &[7f32, 3.], &[1., 2.], Some(&[10., 10.]), 0., &mut out);
/// assert_eq!(out, [11., 8.]);
/// ```
pub fn layer_norm<T: Element, O: Element>(
    level: Level,
    x: &[T],
    weight: &[T],
    bias: Option<&[T]>,
    eps: f32,
    out: &mut [O],
) {
    assert!(x.len() == weight.len() && x.len() == out.len());
    assert!(bias.is_none_or(|b| b.len() == x.len()));
    // SAFETY: the kernel holds slices of one length.
    unsafe {
        dispatch(
            level,
            LayerNorm {
                x,
                weight,
                bias,
                eps,
                out,
            },
        )
    }
}

/// `out = (x + first) + second`, each sum rounded to `T`, as two additions in candle are.
///
/// # Panics
/// If the slices differ in length.
///
/// ```
/// use candle_fused::cpu::{norm, simd};
/// let mut out = [0f32; 2];
/// norm::add(simd::level(), &[1., 2.], &[10., 20.], Some(&[100., 200.]), &mut out);
/// assert_eq!(out, [111., 222.]);
/// ```
pub fn add<T: Element>(level: Level, x: &[T], first: &[T], second: Option<&[T]>, out: &mut [T]) {
    assert!(x.len() == first.len() && x.len() == out.len());
    assert!(second.is_none_or(|s| s.len() == x.len()));
    // SAFETY: the kernel holds slices of one length.
    unsafe {
        dispatch(
            level,
            Add {
                x,
                first,
                second,
                out,
            },
        )
    }
}

struct RmsNorm<'a, T, O> {
    x: &'a [T],
    weight: &'a [T],
    eps: f32,
    out: &'a mut [O],
}

impl<T: Element, O: Element> Kernel for RmsNorm<'_, T, O> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let n = self.x.len();
        // SAFETY: `dispatch` runs this where the processor has `V`'s instructions.
        let zero = unsafe { V::splat(0.) };
        let mut squares = zero;
        for i in (0..n).step_by(V::LANES) {
            // SAFETY: as above.
            let x: V = unsafe { load(self.x, i) };
            squares = x.mul_add(x, squares);
        }
        let factor = 1. / (squares.sum() / n as f32 + self.eps).sqrt();
        // SAFETY: as above.
        let factor = unsafe { V::splat(factor) };
        for i in (0..n).step_by(V::LANES) {
            // SAFETY: as above.
            unsafe {
                let x: V = load(self.x, i);
                let normed = round::<T, V>(x.mul(factor));
                let y = round::<T, V>(normed.mul(load(self.weight, i)));
                store(y, self.out, i);
            }
        }
    }
}

struct LayerNorm<'a, T, O> {
    x: &'a [T],
    weight: &'a [T],
    bias: Option<&'a [T]>,
    eps: f32,
    out: &'a mut [O],
}

impl<T: Element, O: Element> Kernel for LayerNorm<'_, T, O> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let n = self.x.len();
        // SAFETY: `dispatch` runs this where the processor has `V`'s instructions.
        let c = |x| unsafe { V::splat(x) };
        let mut sum = c(0.);
        for i in (0..n).step_by(V::LANES) {
            // SAFETY: as above.
            sum = sum.add(unsafe { load(self.x, i) });
        }
        let rough = c(sum.sum() / n as f32);
        let (mut rest, mut squares) = (0f32, 0f32);
        let whole = n / V::LANES * V::LANES;
        let (mut rests, mut many) = (c(0.), c(0.));
        for i in (0..whole).step_by(V::LANES) {
            // SAFETY: as above.
            let x: V = unsafe { load(self.x, i) };
            let d = x.sub(rough);
            rests = rests.add(d);
            many = d.mul_add(d, many);
        }
        // The last lanes one by one: padding would count as values.
        let start = rough.max_lane();
        for x in &self.x[whole..] {
            let d = x.to_f32() - start;
            rest += d;
            squares += d * d;
        }
        let shift = (rests.sum() + rest) / n as f32;
        let variance = ((many.sum() + squares) / n as f32 - shift * shift).max(0.);
        let shift = c(shift);
        let factor = c(1. / (variance + self.eps).sqrt());
        for i in (0..n).step_by(V::LANES) {
            // SAFETY: as above.
            unsafe {
                let x: V = load(self.x, i);
                let bias = self.bias.map_or(c(0.), |b| load(b, i));
                let centred = x.sub(rough).sub(shift);
                let y = centred.mul(factor).mul_add(load(self.weight, i), bias);
                store(round::<T, V>(y), self.out, i);
            }
        }
    }
}

struct Add<'a, T> {
    x: &'a [T],
    first: &'a [T],
    second: Option<&'a [T]>,
    out: &'a mut [T],
}

impl<T: Element> Kernel for Add<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        for i in (0..self.x.len()).step_by(V::LANES) {
            // SAFETY: `dispatch` runs this where the processor has `V`'s instructions.
            unsafe {
                let x: V = load(self.x, i);
                let mut y = x.add(load(self.first, i));
                if let Some(second) = self.second {
                    y = round::<T, V>(y).add(load(second, i));
                }
                store(y, self.out, i);
            }
        }
    }
}

/// The vector that starts at `i`, zeros behind the end.
///
/// # Safety
/// The processor has `V`'s instructions.
#[inline(always)]
unsafe fn load<T: Element, V: Vector>(x: &[T], i: usize) -> V {
    if i + V::LANES <= x.len() {
        // SAFETY: the slice has `LANES` elements from `i` on.
        return unsafe { T::load(x.as_ptr().add(i)) };
    }
    let mut pad = [T::from_f32(0.); 16];
    pad[..x.len() - i].copy_from_slice(&x[i..]);
    // SAFETY: no vector has more than 16 lanes.
    unsafe { T::load(pad.as_ptr()) }
}

/// Writes the vector at `i`, as far as the slice goes.
///
/// # Safety
/// The processor has `V`'s instructions.
#[inline(always)]
unsafe fn store<T: Element, V: Vector>(v: V, out: &mut [T], i: usize) {
    if i + V::LANES <= out.len() {
        // SAFETY: the slice has `LANES` elements from `i` on.
        return unsafe { T::store(v, out.as_mut_ptr().add(i)) };
    }
    let mut pad = [T::from_f32(0.); 16];
    // SAFETY: no vector has more than 16 lanes.
    unsafe { T::store(v, pad.as_mut_ptr()) };
    let rest = out.len() - i;
    out[i..].copy_from_slice(&pad[..rest]);
}

/// The vector rounded to `T`.
///
/// # Safety
/// The processor has `V`'s instructions.
#[inline(always)]
unsafe fn round<T: Element, V: Vector>(v: V) -> V {
    if is_f32::<T>() {
        return v;
    }
    let mut values = [T::from_f32(0.); 16];
    // SAFETY: no vector has more than 16 lanes.
    unsafe {
        T::store(v, values.as_mut_ptr());
        T::load(values.as_ptr())
    }
}
