//! e4m3: 8-bit floats of a sign, four bits of exponent and three of mantissa.
//!
//! | code | value |
//! |---|---|
//! | s 0000 mmm | ± m / 512 |
//! | s eeee mmm | ± (8 + m) 2^(eeee - 10), up to 448 |
//! | s 1111 111 | NaN |
//!
//! There are no infinities (FP8 Formats for Deep Learning, Micikevicius et al. 2022; `torch.float8_e4m3fn`).

/// The largest number.
pub(crate) const MAX: f32 = 448.;

/// A largest magnitude below which a scale would be no number that an f32 can divide by.
pub(crate) const TINY: f32 = 1e-35;

/// The code of NaN, without its sign.
pub(crate) const NAN: u8 = 0x7f;

/// What the bits of a code, moved to their places in an f32, have to be multiplied by: 2^(127 - 7).
pub(crate) const UNBIAS: f32 = f32::from_bits((127 + 120) << 23);

/// Whether a code is NaN.
pub(crate) fn is_nan(code: u8) -> bool {
    code & NAN == NAN
}

/// The value of a code.
pub(crate) fn to_f32(code: u8) -> f32 {
    if is_nan(code) {
        return f32::NAN;
    }
    let (sign, magnitude) = (u32::from(code) >> 7, u32::from(code & NAN));
    f32::from_bits(sign << 31 | magnitude << 20) * UNBIAS
}

/// The code nearest to a number, ties to even; what is larger than [`MAX`] becomes that.
#[inline(always)]
pub(crate) fn from_f32(value: f32) -> u8 {
    /// Its last place is a 512th, that of the smallest numbers.
    const SMALL: f32 = 16_384.;
    let bits = value.to_bits();
    let (sign, magnitude) = ((bits >> 24) as u8 & 0x80, bits & 0x7fff_ffff);
    let small = (f32::from_bits(magnitude).min(1.) + SMALL).to_bits() - SMALL.to_bits();
    // Half of what is dropped, less one where that makes the nearest even.
    let rounded = magnitude.min(MAX.to_bits()) + 0x7_ffff + (magnitude >> 20 & 1);
    let normal = (rounded >> 20).wrapping_sub(120 << 3);
    let least_normal = (127 - 6) << 23;
    let code = if magnitude < least_normal {
        small
    } else {
        normal
    };
    let code = if magnitude > f32::INFINITY.to_bits() {
        NAN
    } else {
        code as u8
    };
    sign | code
}

#[cfg(test)]
mod tests {
    use super::{MAX, NAN, from_f32, is_nan, to_f32};

    /// By the definition.
    fn defined(code: u8) -> f32 {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
        let magnitude = match exponent {
            0 => mantissa / 512.,
            _ => (8. + mantissa) * 2f32.powi(exponent - 10),
        };
        if code < 0x80 { magnitude } else { -magnitude }
    }

    #[test]
    fn every_code_is_its_value_and_back() {
        for code in 0..=255 {
            let value = to_f32(code);
            assert_eq!(value.is_nan(), is_nan(code), "{code:#x}");
            if is_nan(code) {
                assert_eq!(from_f32(value) & NAN, NAN);
                continue;
            }
            assert_eq!(value.to_bits(), defined(code).to_bits(), "{code:#x}");
            assert_eq!(from_f32(value), code, "{value}");
        }
        assert_eq!(to_f32(NAN - 1), MAX);
    }

    #[test]
    fn numbers_become_the_nearest_code_and_ties_the_even_one() {
        for code in 0..NAN - 1 {
            let (low, high) = (to_f32(code), to_f32(code + 1));
            let middle = (low + high) / 2.;
            let next = |v: f32, by: i32| f32::from_bits((v.to_bits() as i32 + by) as u32);
            assert_eq!(from_f32(middle), code + code % 2, "{middle}");
            assert_eq!(from_f32(next(middle, -1)), code, "below {middle}");
            assert_eq!(from_f32(next(middle, 1)), code + 1, "above {middle}");
            assert_eq!(from_f32(-next(middle, 1)), 0x80 | (code + 1));
        }
        for large in [449., 464., 480., 1e30, f32::INFINITY] {
            assert_eq!(from_f32(large), NAN - 1);
            assert_eq!(from_f32(-large), 0x80 | (NAN - 1));
        }
        assert_eq!((from_f32(0.), from_f32(-0.)), (0, 0x80));
        assert_eq!(from_f32(1e-30), 0);
    }
}
