//! How finely a product takes its input.

use candle_core::{Error, Result, bail};
use std::fmt;
use std::str::FromStr;

/// The bits of activations in products with quantized weights, given to a model in
/// [`Fusion`](crate::Fusion) when it is loaded.
///
/// On the CPU, x is quantized in blocks of 32 values (128 for ternary weights). 8 bits are off by at most half a
/// step of `max|x| / 127`, 16 bits by a 256th of that step, and cost 1.5 to 1.9 times as much where arithmetic
/// bounds the product (many rows), and little where reading the weights does (one row). With AMX, bf16
/// takes the place of 8 bits for many rows, and two numbers in bf16 that of 16, for x and weights alike
/// ([`PerToken8`](Self::PerToken8) excepted). On CUDA, every kernel takes at least the bits of bf16, except that one row
/// of x is quantized for 4-bit codes on Hopper, to 16-bit integers with a scale for each 256 values, that
/// [`Auto`](Self::Auto) and [`Bits8`](Self::Bits8) let INT8 weights meet x in int8 from 64 rows on
/// ([`quant_linear`](fn@crate::ops::quant_linear)), and that `Bits8` lets FP8 weights on Ada and Hopper meet x
/// in e4m3 floats from there on, with a scale for each 128 values of a row.
///
/// [`PerToken8`](Self::PerToken8) is no measure of precision but part of a model: layers that were trained with
/// their inputs rounded so (BitNet b1.58, Ma et al. 2024) compute what they were trained to compute, on every
/// device. Models of such checkpoints take it by themselves.
///
/// ```
/// use candle_fused::{ActivationBits, Fusion};
/// let fusion = Fusion { activations: "16".parse()?, ..Fusion::all() };
/// assert_eq!(fusion.activations, ActivationBits::Bits16);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ActivationBits {
    /// 16 up to 64 rows of x (a token, several sequences, a question), and 8 above, where a long prompt would feel
    /// the price; 8 where all weights are ternary, whose kernels for a row want it.
    #[default]
    Auto,
    /// 8.
    Bits8,
    /// 16.
    Bits16,
    /// 8 with one scale for each row of x: `round(x / s)` times `s = max|x| / 127`, to nearest even, whatever the
    /// kernel. Candle's operations, where they stand in for one, take `max|x|` for 1e-5 at least.
    PerToken8,
}

/// Rows of x up to which [`ActivationBits::Auto`] takes 16 bits on the CPU.
const FEW_ROWS: usize = 64;

impl ActivationBits {
    /// The names that [`ActivationBits::from_str`] takes.
    pub const NAMES: [&'static str; 4] = ["auto", "8", "16", "per-token-8"];

    /// Whether the CPU takes 16 bits of `m` rows.
    pub(crate) fn are_16(self, m: usize, ternary: bool) -> bool {
        match self {
            Self::Auto => !ternary && m <= FEW_ROWS,
            Self::Bits8 | Self::PerToken8 => false,
            Self::Bits16 => true,
        }
    }
}

impl FromStr for ActivationBits {
    type Err = Error;

    fn from_str(bits: &str) -> Result<Self> {
        match bits {
            "auto" => Ok(Self::Auto),
            "8" => Ok(Self::Bits8),
            "16" => Ok(Self::Bits16),
            "per-token-8" => Ok(Self::PerToken8),
            _ => bail!(
                "activations: `{bits}` is not one of {}",
                Self::NAMES.join(", ")
            ),
        }
    }
}

impl fmt::Display for ActivationBits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Bits8 => "8",
            Self::Bits16 => "16",
            Self::PerToken8 => "per-token-8",
        })
    }
}
