//! Keys and values of 8 bits: a code for each element, and a scale for each row.

use super::e4m3;
use candle_core::{DType, Error, Result, bail};
use half::f16;
use std::fmt;
use std::str::FromStr;

/// How the codes of quantized keys and values are read. A row, which is one head of one token, is
/// `scale * value(code)`.
///
/// Sources: FP8 Formats for Deep Learning (Micikevicius et al. 2022) for e4m3; KIVI (Liu et al. 2024) and KVQuant
/// (Hooper et al. 2024) on quantized caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvFormat {
    /// e4m3: a sign, four bits of exponent, three of mantissa; up to 448, without infinities. The codes that stand for
    /// NaN are not used.
    Fp8,
    /// Whole numbers from -127 to 127, in two's complement.
    Int8,
}

/// Rows of nothing larger are stored as zeros.
const LEAST: f32 = 1e-30;

/// Scales that a row of [`KvFormat::Fp8`] may have: `(1 + step / 16) max|x| / 448`.
const STEPS: u32 = 16;

/// Of the scales for a row of e4m3 the one with the least sum of `x^2 (x - x')^2`. `by` makes the row's largest magnitude
/// [`e4m3::MAX`].
fn best_step(row: &[f32], by: f32) -> u32 {
    // The first of equals.
    (0..STEPS)
        .min_by_key(|step| error_of(row, by, *step))
        .unwrap_or(0)
}

/// The sum of errors with a scale. Each is rounded to a whole number, so that the sum is the same in any order, on the
/// GPU too; and no number is taken for a subnormal one.
fn error_of(row: &[f32], by: f32, step: u32) -> u32 {
    /// What keeps the error of any element below 2^23.
    const UNIT: f32 = 1. / 32.;
    /// The place of ones among the bits of an f32.
    const ONES: f32 = 8_388_608.;
    let up = 1. + step as f32 / STEPS as f32;
    let down = 1. / up;
    let error = |x: &f32| {
        let t = (x * by).abs();
        let bits = (t * down).to_bits();
        let nearest = f32::from_bits((bits + 0x7_ffff + (bits >> 20 & 1)) & !0xf_ffff);
        let weighed = t * (t - nearest * up);
        (weighed * weighed * UNIT + ONES).to_bits() - ONES.to_bits()
    };
    row.iter().map(error).fold(0, u32::wrapping_add)
}

impl KvFormat {
    /// The value of the largest code.
    ///
    /// ```
    /// use candle_fused::quant::KvFormat;
    /// assert_eq!([KvFormat::Fp8, KvFormat::Int8].map(KvFormat::largest), [448., 127.]);
    /// assert_eq!(KvFormat::Fp8.largest(), KvFormat::Fp8.value(0x7e));
    /// ```
    pub const fn largest(self) -> f32 {
        match self {
            Self::Fp8 => e4m3::MAX,
            Self::Int8 => 127.,
        }
    }

    /// What a code stands for, before it is scaled.
    ///
    /// ```
    /// use candle_fused::quant::KvFormat;
    /// assert_eq!((KvFormat::Fp8.value(0x7e), KvFormat::Fp8.value(0x81)), (448., -1. / 512.));
    /// assert_eq!(KvFormat::Int8.value(0xff), -1.);
    /// ```
    #[inline(always)]
    pub fn value(self, code: u8) -> f32 {
        match self {
            // The bits of e4m3 within those of f16, whose exponent counts from 2^-15 and not from 2^-7.
            Self::Fp8 => {
                let code = u16::from(code);
                256. * f16::from_bits((code & 0x80) << 8 | (code & 0x7f) << 7).to_f32()
            }
            Self::Int8 => f32::from(code.cast_signed()),
        }
    }

    /// The code nearest to a number, ties to even; what is past the largest code becomes that.
    ///
    /// ```
    /// use candle_fused::quant::KvFormat;
    /// assert_eq!((KvFormat::Int8.code(2.5), KvFormat::Int8.code(-500.)), (2, 0x81));
    /// assert_eq!(KvFormat::Fp8.value(KvFormat::Fp8.code(-17.1)), -18.);
    /// ```
    #[inline(always)]
    pub fn code(self, x: f32) -> u8 {
        match self {
            // NaN as the largest.
            Self::Fp8 => e4m3::from_f32(x.abs().min(e4m3::MAX).copysign(x)),
            Self::Int8 => (x.round_ties_even().clamp(-127., 127.) as i8).cast_unsigned(),
        }
    }

    /// Writes the codes of a row and gives its scale. That of [`Self::Int8`] is `max|x| / 127`. That of [`Self::Fp8`],
    /// whose steps grow with a number, is the one of `(1 + i / 16) max|x| / 448`, i in 0..16, with the least sum of
    /// `x^2 (x - x')^2`, x' being what x is stored as. A row of zeros, or of nothing above 1e-30, which counts as zeros,
    /// has the scale 1. A row with an infinity or a NaN has codes of zeros and the scale NaN.
    ///
    /// # Panics
    /// If there are not as many codes as elements.
    ///
    /// ```
    /// use candle_fused::quant::KvFormat;
    /// let mut codes = [0; 3];
    /// let scale = KvFormat::Int8.quantize(&[254., -2., 3.], &mut codes);
    /// assert_eq!((scale, codes), (2., [127, 0xff, 2]));
    /// assert_eq!(KvFormat::Fp8.quantize(&[0., 0., 0.], &mut codes), 1.);
    /// ```
    pub fn quantize(self, row: &[f32], codes: &mut [u8]) -> f32 {
        assert_eq!(row.len(), codes.len(), "a code for each element");
        // Of what has no sign, the order of bits is that of numbers, and NaN is the largest.
        let bits = row.iter().map(|x| x.to_bits() & 0x7fff_ffff);
        let most = f32::from_bits(bits.max().unwrap_or(0));
        if !(LEAST..=f32::MAX).contains(&most) {
            codes.fill(0);
            return if most < LEAST { 1. } else { f32::NAN };
        }
        let (mut by, mut scale) = (self.largest() / most, most / self.largest());
        if self == Self::Fp8 {
            let up = 1. + best_step(row, by) as f32 / STEPS as f32;
            (by, scale) = (by * (1. / up), scale * up);
        }
        let both = row.iter().zip(codes);
        both.for_each(|(x, code)| *code = self.code(x * by));
        scale
    }

    /// What kernels are chosen by: a dtype that stands for codes of this format.
    #[cfg(feature = "cuda")]
    pub(crate) fn stored(self) -> DType {
        match self {
            Self::Fp8 => DType::F8E4M3,
            Self::Int8 => DType::U8,
        }
    }
}

/// As in `fp8`.
impl fmt::Display for KvFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fp8 => "fp8",
            Self::Int8 => "int8",
        })
    }
}

/// What a cache keeps keys and values in.
///
/// ```
/// use candle_fused::quant::{KvCacheType, KvFormat};
/// assert_eq!("int8".parse::<KvCacheType>()?, KvCacheType::Quantized(KvFormat::Int8));
/// assert_eq!(KvCacheType::default().to_string(), "auto");
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvCacheType {
    /// As the model has them: in its own dtype, or in 16 bits where its weights are GGUF blocks on the CPU.
    #[default]
    Auto,
    /// bf16, whatever the model computes in.
    Bf16,
    /// 8 bits, with an f32 scale for each token and key/value head.
    Quantized(KvFormat),
}

impl KvCacheType {
    /// The names that [`KvCacheType::from_str`] takes.
    pub const NAMES: [&'static str; 4] = ["auto", "bf16", "fp8", "int8"];

    /// The format of the codes, if there are codes.
    ///
    /// ```
    /// use candle_fused::quant::{KvCacheType, KvFormat};
    /// assert_eq!("fp8".parse::<KvCacheType>()?.format(), Some(KvFormat::Fp8));
    /// assert_eq!(KvCacheType::Bf16.format(), None);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn format(self) -> Option<KvFormat> {
        match self {
            Self::Quantized(format) => Some(format),
            Self::Auto | Self::Bf16 => None,
        }
    }

    /// The dtype without codes, where a model's own is `model`.
    pub(crate) fn dtype(self, model: DType) -> DType {
        match self {
            Self::Bf16 => DType::BF16,
            Self::Auto | Self::Quantized(_) => model,
        }
    }

    /// Bytes of a head of a token, keys or values, with its scale.
    pub(crate) fn row_bytes(self, dim: usize, model: DType) -> usize {
        match self.format() {
            Some(_) => dim + size_of::<f32>(),
            None => dim * self.dtype(model).size_in_bytes(),
        }
    }
}

impl FromStr for KvCacheType {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "auto" => Ok(Self::Auto),
            "bf16" => Ok(Self::Bf16),
            "fp8" => Ok(Self::Quantized(KvFormat::Fp8)),
            "int8" => Ok(Self::Quantized(KvFormat::Int8)),
            _ => bail!(
                "kv_cache: `{name}` is not one of {}",
                Self::NAMES.join(", ")
            ),
        }
    }
}

/// As [`KvCacheType::from_str`] takes it.
impl fmt::Display for KvCacheType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Bf16 => f.write_str("bf16"),
            Self::Quantized(format) => format.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::KvFormat::{self, Fp8, Int8};

    /// Every code that is used, by what it stands for.
    fn sorted(format: KvFormat) -> Vec<(f32, u8)> {
        let used = |code: &u8| match format {
            Fp8 => code & 0x7f != 0x7f,
            Int8 => *code != 0x80,
        };
        let codes = (0..=u8::MAX).filter(used).filter(|code| *code != 0x80);
        let mut all: Vec<_> = codes.map(|code| (format.value(code), code)).collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        all
    }

    #[test]
    fn codes_are_the_nearest_with_ties_to_even() {
        for format in [Fp8, Int8] {
            let all = sorted(format);
            assert_eq!(all.len(), if format == Fp8 { 253 } else { 255 });
            for pair in all.windows(2) {
                let [(a, low), (b, high)] = [pair[0], pair[1]];
                let middle = (a + b) / 2.;
                let even = if low % 2 == 0 { low } else { high };
                let of = |x: f32| match format.code(x) {
                    0x80 => 0,
                    code => code,
                };
                assert_eq!((of(a), of(b), of(middle)), (low, high, even), "{a} {b}");
                assert_eq!(of(a + 0.49 * (b - a)), low, "above {a}");
                assert_eq!(of(a + 0.51 * (b - a)), high, "below {b}");
            }
            assert_eq!(format.value(format.code(1e9)), format.largest());
            assert_eq!(format.value(format.code(-1e9)), -format.largest());
        }
    }

    /// The values of e4m3 by their definition.
    #[test]
    fn e4m3_is_sign_exponent_and_mantissa() {
        for code in 0..0x7fu8 {
            let (exponent, mantissa) = (i32::from(code >> 3), f32::from(code & 7) / 8.);
            let value = match exponent {
                0 => mantissa * 2f32.powi(-6),
                _ => (1. + mantissa) * 2f32.powi(exponent - 7),
            };
            assert_eq!(Fp8.value(code), value);
            assert_eq!(Fp8.value(code | 0x80), -value);
        }
    }

    #[test]
    fn rows_come_back_within_half_a_step() {
        for format in [Fp8, Int8] {
            for size in [1e-29, 1e-5, 1., 3e4, 1e38] {
                let row: Vec<f32> = (0..97).map(|i| size * (i as f32 * 0.7).sin()).collect();
                let mut codes = vec![0; row.len()];
                let scale = format.quantize(&row, &mut codes);
                for (x, code) in row.iter().zip(codes) {
                    let got = scale * format.value(code);
                    let step = match format {
                        Fp8 => (x.abs() / 16.).max(scale / 1024.),
                        Int8 => scale / 2.,
                    };
                    assert!((got - x).abs() <= 1.0001 * step, "{format} {x:e}: {got:e}");
                }
            }
        }
    }

    /// No other scale of the sixteen has a smaller error, by the values of the codes.
    #[test]
    fn fp8_takes_the_best_scale_of_a_row() {
        for seed in 1..50 {
            let row: Vec<f32> = (0..64)
                .map(|i| (i as f32 * 0.37 * seed as f32).sin().powi(3) * 5.)
                .collect();
            let most = row.iter().fold(0f32, |most, x| most.max(x.abs()));
            let mut codes = vec![0; row.len()];
            let error = |scale: f32, codes: &[u8]| -> f64 {
                let of = |(x, code): (&f32, &u8)| {
                    let stored = f64::from(scale) * f64::from(Fp8.value(*code));
                    (f64::from(*x) * (f64::from(*x) - stored)).powi(2)
                };
                row.iter().zip(codes).map(of).sum()
            };
            let scale = Fp8.quantize(&row, &mut codes);
            let chosen = error(scale, &codes);
            let steps = (0..16).map(|i| most / 448. * (1. + i as f32 / 16.));
            let least = steps
                .map(|scale| {
                    let codes: Vec<u8> = row.iter().map(|x| Fp8.code(x / scale)).collect();
                    error(scale, &codes)
                })
                .fold(f64::INFINITY, f64::min);
            // What rounding each error to a whole number may hide.
            let slack = 32. * 64. * f64::from(most / 448.).powi(4);
            assert!(chosen <= 1.001 * least + slack, "{seed}: {chosen} {least}");
        }
    }

    #[test]
    fn what_is_no_number_stays_so() {
        let mut codes = [7; 2];
        for row in [[1., f32::NAN], [f32::NEG_INFINITY, 0.]] {
            assert!(Int8.quantize(&row, &mut codes).is_nan());
            assert_eq!(codes, [0; 2]);
        }
        assert_eq!(Fp8.quantize(&[1e-31, -1e-35], &mut codes), 1.);
        assert_eq!(Fp8.quantize(&[], &mut []), 1.);
    }
}
