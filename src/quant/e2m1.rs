//! e2m1: 4-bit floats of a sign, two bits of exponent and one of mantissa (OCP Microscaling Formats, 2023).
//!
//! | code | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
//! |---|---|---|---|---|---|---|---|---|
//! | value | 0 | 0.5 | 1 | 1.5 | 2 | 3 | 4 | 6 |
//!
//! With bit 3 set they are negative. There are neither infinities nor NaN.

use super::e4m3;

/// The largest number.
pub(crate) const MAX: f32 = 6.;

/// Twice the value of each magnitude.
const DOUBLES: [i8; 8] = [0, 1, 2, 3, 4, 6, 8, 12];

/// Twice the value of a code, a whole number.
pub(crate) const fn doubled(code: u8) -> i8 {
    let magnitude = DOUBLES[(code & 7) as usize];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// The value of a code.
pub(crate) fn to_f32(code: u8) -> f32 {
    let magnitude = f32::from(DOUBLES[usize::from(code & 7)]) / 2.;
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// The code nearest to a number, ties to even; what is larger than [`MAX`] becomes that.
#[inline(always)]
pub(crate) fn from_f32(value: f32) -> u8 {
    let magnitude = value.abs();
    // The middle of each two neighbours, which goes to that with an even code.
    let past = [
        magnitude > 0.25,
        magnitude >= 0.75,
        magnitude > 1.25,
        magnitude >= 1.75,
        magnitude > 2.5,
        magnitude >= 3.5,
        magnitude > 5.,
    ];
    let code: u8 = past.map(u8::from).iter().sum();
    code | u8::from(value.is_sign_negative()) << 3
}

/// The global scale of a matrix in NVFP4 with this largest magnitude, and one over it; zeros for a matrix of zeros.
pub(crate) fn global_scale(largest: f32) -> (f32, f32) {
    /// Below this a global scale would be no number of f32.
    const TINY: f32 = 1e-34;
    if largest < TINY {
        return (0., 0.);
    }
    let global = e4m3::MAX * MAX / largest;
    (global, 1. / global)
}

#[cfg(test)]
mod tests {
    use super::{MAX, doubled, from_f32, to_f32};

    #[test]
    fn every_code_is_its_value_and_back() {
        for code in 0..16 {
            let (exponent, mantissa) = (i32::from(code >> 1 & 3), f32::from(code & 1));
            let magnitude = match exponent {
                0 => mantissa / 2.,
                _ => (1. + mantissa / 2.) * 2f32.powi(exponent - 1),
            };
            let value = if code < 8 { magnitude } else { -magnitude };
            assert_eq!(to_f32(code).to_bits(), value.to_bits(), "{code}");
            assert_eq!(f32::from(doubled(code)), 2. * value);
            assert_eq!(from_f32(value), code, "{value}");
        }
        assert_eq!(to_f32(7), MAX);
    }

    #[test]
    fn numbers_become_the_nearest_code_and_ties_the_even_one() {
        for code in 0..7 {
            let middle = (to_f32(code) + to_f32(code + 1)) / 2.;
            let next = |v: f32, by: i32| f32::from_bits((v.to_bits() as i32 + by) as u32);
            assert_eq!(from_f32(middle), code + code % 2, "{middle}");
            assert_eq!(from_f32(next(middle, -1)), code, "below {middle}");
            assert_eq!(from_f32(-next(middle, 1)), 8 | (code + 1), "above {middle}");
        }
        assert_eq!((from_f32(1e30), from_f32(f32::NEG_INFINITY)), (7, 15));
    }
}
