//! The exponential and the activations, over vectors of f32.
//!
//! The vector functions are shared by every core that needs them; the slice functions at the end
//! are what the ops call. All hold a relative error of about two units in the last place (the
//! Gaussian tail of gelu and the far tails of silu: a few more, from rounding the exponent's
//! argument), give the limits at both infinities, and keep NaN.
//!
//! ```
//! use candle_fused::cpu::math::*;
//! use candle_fused::cpu::simd;
//! use candle_fused::cpu::vector::{Kernel, Vector, dispatch};
//! let (mut x, level) = ([0f32; 16], simd::level());
//! // Zero stays zero, and e^0 is 1.
//! let functions: [fn(_, &mut [f32]); 6] = [silu, gelu_erf, gelu_tanh, relu, relu2, tanh];
//! functions.iter().for_each(|f| f(level, &mut x));
//! [swiglu, geglu, geglu_tanh, relu2_glu].map(|f: fn(_, &mut [f32], &[f32])| f(level, &mut x, &[1.; 16]));
//! assert_eq!(x, [0.; 16]);
//! exp_weight(level, &mut x);
//! assert_eq!(x, [1.; 16]);
//! exp(level, &mut x);
//! // The same over one vector.
//! struct Chain<'a>(&'a mut [f32; 16]);
//! impl Kernel for Chain<'_> {
//!     type Output = ();
//!     #[inline(always)]
//!     unsafe fn run<V: Vector>(self) {
//!         // SAFETY: no vector has more than 16 lanes.
//!         unsafe {
//!             let zero = relu2_v(relu_v(tanh_v(gelu_tanh_v(gelu_erf_v(silu_v(V::splat(0.)))))));
//!             exp_v(exp_weight_v(zero)).store(self.0.as_mut_ptr());
//!         }
//!     }
//! }
//! let mut lanes = [0.; 16];
//! // SAFETY: the kernel holds a slice.
//! unsafe { dispatch(level, Chain(&mut lanes)) };
//! assert!(lanes[..4] == x[..4] && (x[0] - std::f32::consts::E).abs() < 1e-6);
//! ```

mod gates;

pub use gates::{geglu, geglu_tanh, relu2_glu, swiglu};

use super::simd::Level;
use super::vector::{BIASED, Kernel, Vector, dispatch};

/// `e^x`: reduced to `|r| <= ln(2) / 2` by whole powers of two, then the polynomial of Cephes'
/// `expf` (Moshier). Subnormal results are right too.
#[inline(always)]
pub fn exp_v<V: Vector>(x: V) -> V {
    // Past these bounds the result is 0 or infinite. `x` comes second, so that NaN gets through.
    let x = x.fill(89.0).min(x.fill(-104.0).max(x));
    let n = x.mul(x.fill(std::f32::consts::LOG2_E)).round();
    exp_rest(x, n).scale(n)
}

/// `e^x` for `x <= 0`, as softmax takes it: what is below `e^-87` becomes 0.
#[inline(always)]
pub fn exp_weight_v<V: Vector>(x: V) -> V {
    // Rounds, and leaves the exponent where `power_of_two` wants it.
    let biased = x.mul_add(x.fill(std::f32::consts::LOG2_E), x.fill(BIASED));
    let p = exp_rest(x, biased.sub(x.fill(BIASED)));
    x.where_less(x.fill(-87.0), x.fill(0.0), p.mul(biased.power_of_two()))
}

/// `e^(x - n ln(2))`, for a remainder of at most about `ln(2) / 2`.
#[inline(always)]
fn exp_rest<V: Vector>(x: V, n: V) -> V {
    let r = n.mul_add(x.fill(-0.693_359_4), x);
    let r = n.mul_add(x.fill(2.121_944_4e-4), r);
    let p = x.fill(1.987_569_1e-4);
    let p = p.mul_add(r, x.fill(1.398_199_9e-3));
    let p = p.mul_add(r, x.fill(8.333_452e-3));
    let p = p.mul_add(r, x.fill(4.166_579_6e-2));
    let p = p.mul_add(r, x.fill(1.666_666_5e-1));
    let p = p.mul_add(r, x.fill(5e-1));
    p.mul_add(r.mul(r), r).add(x.fill(1.0))
}

/// `x / (1 + e^(-k x))` for `k > 0`, without overflow on either side.
#[inline(always)]
fn gated_v<V: Vector>(x: V, kx: V) -> V {
    let e = exp_v(x.fill(0.0).sub(kx.abs()));
    let sigmoid = kx
        .where_less(x.fill(0.0), e, x.fill(1.0))
        .div(e.add(x.fill(1.0)));
    // The factor is 0 far below this bound, where -inf * 0 would be NaN.
    x.fill(-1e9).max(x).mul(sigmoid)
}

/// `x / (1 + e^-x)`
#[inline(always)]
pub fn silu_v<V: Vector>(x: V) -> V {
    gated_v(x, x)
}

/// `x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`
#[inline(always)]
pub fn gelu_tanh_v<V: Vector>(x: V) -> V {
    // (1 + tanh(u)) / 2 = 1 / (1 + e^(-2u))
    let root = 2.0 * (2.0 / std::f32::consts::PI).sqrt();
    let inner = x.mul(x).mul_add(x.fill(root * 0.044_715), x.fill(root));
    gated_v(x, x.mul(inner))
}

/// `x / 2 (1 + erf(x / sqrt(2)))`, as `x / 2 erfc(-x / sqrt(2))`, which cancels nowhere.
///
/// `e^(z^2) erfc(z) / t` with `t = 1 / (1 + z / 2)` is a polynomial of degree 8 in `t`, fitted by
/// Remez' algorithm for the least relative error (4.4e-8) over `0 <= z <= 10.2`.
#[inline(always)]
pub fn gelu_erf_v<V: Vector>(x: V) -> V {
    let z = x.abs().mul(x.fill(std::f32::consts::FRAC_1_SQRT_2));
    let t = x.fill(1.0).div(z.mul_add(x.fill(0.5), x.fill(1.0)));
    let mut p = x.fill(ERFC[8]);
    for k in ERFC[..8].iter().rev() {
        p = p.mul_add(t, x.fill(*k));
    }
    let e = exp_v(x.fill(-0.5).mul(x.mul(x)));
    // Half of erfc(|x| / sqrt(2)): the area of the tail beyond |x|.
    let tail = x.fill(0.5).mul(t).mul(p).mul(e);
    let area = x.where_less(x.fill(0.0), tail, x.fill(1.0).sub(tail));
    // The area is 0 far below this bound, where -inf * 0 would be NaN.
    x.fill(-1e9).max(x).mul(area)
}

const ERFC: [f32; 9] = [
    0.282_086_04,
    0.282_381_93,
    0.243_055_78,
    0.202_876_03,
    -0.027_071_27,
    0.278_712_04,
    -0.487_762,
    0.284_845_75,
    -0.059_124_331,
];

/// `max(x, 0)`; what is no number stays none.
#[inline(always)]
pub fn relu_v<V: Vector>(x: V) -> V {
    x.where_less(x.fill(0.0), x.fill(0.0), x)
}

/// `max(x, 0)^2`
#[inline(always)]
pub fn relu2_v<V: Vector>(x: V) -> V {
    let x = relu_v(x);
    x.mul(x)
}

/// `tanh(x)`: Cephes' polynomial near zero, else through the exponential.
#[inline(always)]
pub fn tanh_v<V: Vector>(x: V) -> V {
    let z = x.mul(x);
    let p = x.fill(-5.704_988_7e-3);
    let p = p.mul_add(z, x.fill(2.063_909e-2));
    let p = p.mul_add(z, x.fill(-5.373_971_6e-2));
    let p = p.mul_add(z, x.fill(1.333_144_2e-1));
    let p = p.mul_add(z, x.fill(-3.333_328e-1));
    let near = p.mul(z).mul_add(x, x);
    let size = x.abs();
    let far = x
        .fill(1.0)
        .sub(x.fill(2.0).div(exp_v(size.add(size)).add(x.fill(1.0))));
    let far = x.where_less(x.fill(0.0), x.fill(0.0).sub(far), far);
    size.where_less(x.fill(0.625), near, far)
}

/// Applies `$f` to whole vectors of a slice, the rest through a padded one.
macro_rules! map {
    ($(#[$doc:meta])* $name:ident, $f:ident) => {
        $(#[$doc])*
        pub fn $name(level: Level, x: &mut [f32]) {
            struct Map<'a>(&'a mut [f32]);
            impl Kernel for Map<'_> {
                type Output = ();
                #[inline(always)]
                unsafe fn run<V: Vector>(self) {
                    let mut chunks = self.0.chunks_exact_mut(V::LANES);
                    for chunk in &mut chunks {
                        // SAFETY: the chunk has `LANES` elements.
                        unsafe { $f(V::load(chunk.as_ptr())).store(chunk.as_mut_ptr()) }
                    }
                    let rest = chunks.into_remainder();
                    if !rest.is_empty() {
                        let mut pad = [0.0f32; 16];
                        pad[..rest.len()].copy_from_slice(rest);
                        // SAFETY: no vector has more than 16 lanes.
                        unsafe { $f(V::load(pad.as_ptr())).store(pad.as_mut_ptr()) }
                        rest.copy_from_slice(&pad[..rest.len()]);
                    }
                }
            }
            // SAFETY: the kernel holds a slice.
            unsafe { dispatch(level, Map(x)) }
        }
    };
}

map!(
    /// `x[i] = e^x[i]`
    exp,
    exp_v
);
map!(
    /// `x[i] = e^x[i]` for `x[i] <= 0`, as softmax takes it: what is below `e^-87` becomes 0.
    exp_weight,
    exp_weight_v
);
map!(
    /// `x[i] = x[i] / (1 + e^-x[i])`
    silu,
    silu_v
);
map!(
    /// `x[i] = x[i] / 2 (1 + erf(x[i] / sqrt(2)))`
    gelu_erf,
    gelu_erf_v
);
map!(
    /// `x[i] = x[i] / 2 (1 + tanh(sqrt(2 / pi) (x[i] + 0.044715 x[i]^3)))`
    gelu_tanh,
    gelu_tanh_v
);
map!(
    /// `x[i] = max(x[i], 0)`
    relu,
    relu_v
);
map!(
    /// `x[i] = max(x[i], 0)^2`
    relu2,
    relu2_v
);
map!(
    /// `x[i] = tanh(x[i])`
    tanh,
    tanh_v
);

#[cfg(test)]
mod tests {
    use super::*;

    /// Every 1000-somethingth float of either sign, and the corners.
    fn sweep() -> Vec<f32> {
        let mut x: Vec<f32> = (0..=0x7f80_0000u32)
            .step_by(9973)
            .flat_map(|b| [f32::from_bits(b), -f32::from_bits(b)])
            .collect();
        x.extend((-120_000..120_000).map(|i| i as f32 * 1e-3));
        x.extend([
            0.0,
            -0.0,
            f32::MAX,
            f32::MIN,
            88.72,
            88.73,
            -87.4,
            -103.9,
            -104.1,
        ]);
        x
    }

    /// erfc(z) for z >= 0: the power series of erf, then Laplace's continued fraction.
    fn erfc(z: f64) -> f64 {
        if z < 2.0 {
            let (mut term, mut sum) = (z, z);
            for n in 1..60 {
                let n = n as f64;
                term *= -z * z / n;
                sum += term / (2.0 * n + 1.0);
            }
            return 1.0 - sum * std::f64::consts::FRAC_2_SQRT_PI;
        }
        let fraction = (1..200).rev().fold(z, |f, k| z + 0.5 * k as f64 / f);
        (-z * z).exp() / (fraction * std::f64::consts::PI.sqrt())
    }

    fn check(
        name: &str,
        f: impl Fn(Level, &mut [f32]),
        want: impl Fn(f64) -> f64,
        tolerance: impl Fn(f64) -> f64,
        unit: impl Fn(f64) -> f64,
    ) {
        for level in Level::available() {
            for len in [1, 3, 4, 7, 8, 15, 16, 17, 33] {
                let mut x: Vec<f32> = (0..len).map(|i| i as f32 - 4.5).collect();
                let all = x.clone();
                f(level, &mut x);
                for (a, y) in all.iter().zip(&x) {
                    let mut one = [*a];
                    f(level, &mut one);
                    assert_eq!(
                        one[0].to_bits(),
                        y.to_bits(),
                        "{name} {} at {a}",
                        level.name()
                    );
                }
            }
            let x = sweep();
            let mut y = x.clone();
            f(level, &mut y);
            for (x, y) in x.iter().zip(&y) {
                let want = want(f64::from(*x));
                let err = (f64::from(*y) - want).abs();
                let ok = if want.abs() > f64::from(f32::MAX) * (1.0 + 3e-8) {
                    *y == f32::INFINITY.copysign(want as f32)
                } else {
                    err <= tolerance(f64::from(*x)) * want.abs() + unit(f64::from(*x))
                };
                assert!(
                    ok,
                    "{name} {}: f({x:e}) = {y:e}, not {want:e}",
                    level.name()
                );
            }
            let mut ends = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
            f(level, &mut ends);
            assert!(
                ends[0].is_nan(),
                "{name} {}: NaN became {}",
                level.name(),
                ends[0]
            );
            assert_eq!(f64::from(ends[1]), want_at_infinity(name, 1.0));
            assert_eq!(f64::from(ends[2]), want_at_infinity(name, -1.0));
        }
    }

    /// The smallest subnormal, which is what an exponential may be off by, times what scales it.
    fn smallest(x: f64) -> f64 {
        1.5e-45 * x.abs().max(1.0)
    }

    fn want_at_infinity(name: &str, sign: f64) -> f64 {
        match (name, sign > 0.0) {
            ("tanh", _) => sign,
            (_, true) => f64::INFINITY,
            (_, false) => 0.0,
        }
    }

    #[test]
    fn exp_is_right_over_the_whole_range() {
        check("exp", exp, f64::exp, |_| 2e-7, |_| 1.5e-45);
    }

    #[test]
    fn softmax_weights_are_exponentials_or_zero() {
        for level in Level::available() {
            let mut x: Vec<f32> = (0..=90_000).map(|i| i as f32 * -1e-3).collect();
            x.extend([-1e4, f32::MIN, f32::NEG_INFINITY]);
            let mut y = x.clone();
            exp_weight(level, &mut y);
            for (x, y) in x.iter().zip(&y) {
                let want = if *x < -87.0 { 0.0 } else { f64::from(*x).exp() };
                assert!(
                    (f64::from(*y) - want).abs() <= 2e-7 * want,
                    "e^{x} = {y}, not {want}"
                );
            }
            let mut nan = [f32::NAN];
            exp_weight(level, &mut nan);
            assert!(nan[0].is_nan());
        }
    }

    #[test]
    fn tanh_is_right_over_the_whole_range() {
        check("tanh", tanh, f64::tanh, |_| 2.5e-7, |_| 1.5e-45);
    }

    #[test]
    fn silu_is_right_over_the_whole_range() {
        check("silu", silu, |x| x / (1.0 + (-x).exp()), |_| 4e-7, smallest);
    }

    #[test]
    fn gelu_erf_is_right_over_the_whole_range() {
        let want = |x: f64| {
            let tail = 0.5 * erfc(x.abs() / 2f64.sqrt());
            x * if x < 0.0 { tail } else { 1.0 - tail }
        };
        // In the tail the rounding of x^2 is multiplied by the exponent.
        let tolerance = |x: f64| 5e-7 + if x < -1.0 { 6e-8 * x * x } else { 0.0 };
        check("gelu_erf", gelu_erf, want, tolerance, smallest);
    }

    #[test]
    fn gelu_tanh_is_right_over_the_whole_range() {
        let twice = |x: f64| 2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
        let want = |x: f64| x / (1.0 + (-twice(x)).exp());
        // In the tail the rounding of the cubic is multiplied by the exponent.
        let tolerance = |x: f64| {
            4e-7 + if x < 0.0 {
                2e-7 * twice(x).abs().min(110.0)
            } else {
                0.0
            }
        };
        check("gelu_tanh", gelu_tanh, want, tolerance, smallest);
    }

    #[test]
    fn relus_are_exact_and_keep_nan() {
        for level in Level::available() {
            let x = sweep();
            let (mut one, mut two) = (x.clone(), x.clone());
            relu(level, &mut one);
            relu2(level, &mut two);
            for ((x, one), two) in x.iter().zip(one).zip(two) {
                if x.is_nan() {
                    assert!(one.is_nan() && two.is_nan());
                    continue;
                }
                let expected = x.max(0.);
                assert_eq!((one, two), (expected, expected * expected), "{level:?} {x}");
            }
        }
    }
}
