//! Schemes of our own: INT8 and FP8 per output channel, FP8 in blocks, NVFP4, NF4, INT4 in groups, ternary.

use candle_core::{Error, Result, bail};
use std::fmt;
use std::str::FromStr;

/// Values that share one scale of [`Scheme::Ternary`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TernaryScale {
    /// The whole matrix.
    Tensor,
    /// A row: an output channel.
    Row,
    /// This many consecutive values of a row: 32, 64 or 128.
    Group(usize),
}

/// How the weights of a linear layer are quantized.
///
/// | scheme | value | bits of a weight |
/// |---|---|---|
/// | [`Scheme::Int8`] | s q, q in -128..=127, f32 s for each row | 8 |
/// | [`Scheme::Fp8`] | s w, w an e4m3 float, f32 s for each row | 8 |
/// | [`Scheme::Fp8Block128`] | s w, f32 s for each 128 x 128 values | 8 |
/// | [`Scheme::Nvfp4`] | s b w, w an e2m1 float, e4m3 b for each 16 values, f32 s for each row | 4.5 |
/// | [`Scheme::Nf4`] | s t, t one of a table of 16 values, f32 s for each 64 values | 4.5 |
/// | [`Scheme::Int4`] | s (q - 8), q in 0..=15, f16 s for each group | 4 + 16 / group |
/// | with zero points | s (q - z / 16), u8 z for each group | 4 + 24 / group |
/// | [`Scheme::Ternary`] | s q, q in -1..=1, f32 s for the matrix or each row, or f16 s for each group | 2, or 2 + 16 / group |
///
/// As text `int8`, `fp8`, `fp8-block128`, `nvfp4`, `nf4`, `int4-g64` or `int4-g64-z` (with zero points),
/// `ternary-tensor`, `ternary-row` or `ternary-g64`; `int4` stands for `int4-g128`, and `ternary` for `ternary-row`.
///
/// ```
/// use candle_fused::quant::Scheme;
/// let scheme: Scheme = "int4-g32-z".parse()?;
/// assert_eq!(scheme, Scheme::Int4 { group: 32, zero_point: true });
/// assert_eq!("int4".parse::<Scheme>()?.to_string(), "int4-g128");
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// ```
/// use candle_fused::quant::Scheme;
/// let scheme: Scheme = "int4-g64-z".parse()?;
/// assert_eq!((scheme.bits(), scheme.group(), scheme.has_zeros()), (4, Some(64), true));
/// assert!(scheme.check(128).is_ok() && scheme.check(100).is_err());
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scheme {
    /// `s[n] * q`: symmetric, a scale for each output channel. Weights that are quantized here have q in
    /// -127..=127; checkpoints of others have -128 too.
    Int8,
    /// `s[n] * w`: w an 8-bit float of four bits of exponent and three of mantissa (e4m3, up to 448, `0x7f` being NaN;
    /// FP8 Formats for Deep Learning, Micikevicius et al. 2022), a scale for each output channel. Weights that are
    /// quantized here have s = max |w| / 448.
    Fp8,
    /// `s[n / 128, k / 128] * w`: the same with a scale for each block of 128 output channels by 128 inputs, of which
    /// the last may have fewer (as in DeepSeek-V3, 2024).
    Fp8Block128,
    /// `s[n] * b[n, k / 16] * w`: w a 4-bit float of two bits of exponent and one of mantissa (e2m1: 0, 0.5, 1, 1.5, 2,
    /// 3, 4, 6 and their negatives; OCP Microscaling Formats, 2023), b an e4m3 float for each 16 consecutive values of a
    /// row, and s for each output channel (NVIDIA's NVFP4, 2025, whose s are one over the global scale of a matrix).
    /// Weights that are quantized here have s = max |W| / 2688 of the whole matrix, and b = max |w| / (6 s).
    Nvfp4,
    /// `s[n, k / 64] * table[q]`, q in 0..=15: 4-bit NormalFloat, whose table has the quantiles of a normal distribution
    /// from -1 to 1 (QLoRA, Dettmers et al. 2023; bitsandbytes' values), with a scale for each 64 consecutive values of a
    /// row. Weights that are quantized here have s = max |w|.
    Nf4,
    /// `s[n, g] * (q - z[n, g])`, q in 0..=15: a scale for each `group` consecutive values of a row.
    Int4 {
        /// 32, 64 or 128.
        group: usize,
        /// Whether z is stored for each group, in sixteenths (0 to 15 15/16); otherwise it is 8.
        zero_point: bool,
    },
    /// `s * q`, q in -1..=1 (BitNet b1.58, Ma et al. 2024).
    Ternary {
        /// What shares a scale.
        scale: TernaryScale,
    },
}

/// Rows and columns of a block of [`Scheme::Fp8Block128`].
pub(crate) const FP8_BLOCK: usize = 128;

/// Consecutive values of a row that share an e4m3 scale of [`Scheme::Nvfp4`].
pub(crate) const NVFP4_GROUP: usize = 16;

/// Consecutive values of a row that share a scale of [`Scheme::Nf4`].
pub(crate) const NF4_GROUP: usize = 64;

/// The groups that there are kernels for.
const GROUPS: [usize; 3] = [32, 64, 128];

impl Scheme {
    /// Bits of a code.
    pub fn bits(&self) -> u32 {
        match self {
            Scheme::Int8 | Scheme::Fp8 | Scheme::Fp8Block128 => 8,
            Scheme::Nvfp4 | Scheme::Nf4 | Scheme::Int4 { .. } => 4,
            Scheme::Ternary { .. } => 2,
        }
    }

    /// The least code and the greatest, of floats by their bits.
    pub(crate) fn code_range(&self) -> (i8, i8) {
        match self {
            Scheme::Int8 | Scheme::Fp8 | Scheme::Fp8Block128 => (-128, 127),
            Scheme::Nvfp4 | Scheme::Nf4 | Scheme::Int4 { .. } => (0, 15),
            Scheme::Ternary { .. } => (-1, 1),
        }
    }

    /// Consecutive values of a row that share a scale, if that is not the whole row.
    pub fn group(&self) -> Option<usize> {
        match self {
            Scheme::Int4 { group, .. } => Some(*group),
            Scheme::Fp8Block128 => Some(FP8_BLOCK),
            Scheme::Nvfp4 => Some(NVFP4_GROUP),
            Scheme::Nf4 => Some(NF4_GROUP),
            Scheme::Ternary {
                scale: TernaryScale::Group(group),
            } => Some(*group),
            _ => None,
        }
    }

    /// Whether codes are e4m3 floats.
    pub(crate) fn is_fp8(&self) -> bool {
        matches!(self, Scheme::Fp8 | Scheme::Fp8Block128)
    }

    /// Whether products on the CPU multiply codes as f32, and not as whole numbers.
    pub(crate) fn multiplies_in_f32(&self) -> bool {
        self.is_fp8() || *self == Scheme::Nf4
    }

    /// Whether scales are f16; else f32.
    pub(crate) fn has_f16_scales(&self) -> bool {
        match self {
            Scheme::Int4 { .. } => true,
            Scheme::Ternary { scale } => matches!(scale, TernaryScale::Group(_)),
            _ => false,
        }
    }

    /// Whether zero points are stored.
    pub fn has_zeros(&self) -> bool {
        matches!(
            self,
            Scheme::Int4 {
                zero_point: true,
                ..
            }
        )
    }

    /// Scales of a matrix of `rows` rows of `cols` values.
    pub(crate) fn scale_count(&self, rows: usize, cols: usize) -> usize {
        match (self, self.group()) {
            (Scheme::Fp8Block128, _) => rows.div_ceil(FP8_BLOCK) * cols.div_ceil(FP8_BLOCK),
            (Scheme::Nvfp4, _) => rows,
            (_, Some(group)) => rows * (cols / group),
            (
                Scheme::Ternary {
                    scale: TernaryScale::Tensor,
                },
                _,
            ) => 1,
            _ => rows,
        }
    }

    /// e4m3 scales of a matrix of `rows` rows of `cols` values.
    pub(crate) fn group_scale_count(&self, rows: usize, cols: usize) -> usize {
        match self {
            Scheme::Nvfp4 => rows * (cols / NVFP4_GROUP),
            _ => 0,
        }
    }

    /// Checks that rows of `cols` values can be quantized so.
    ///
    /// # Errors
    /// If the group of INT4 or of ternary weights is not 32, 64 or 128, or `cols` is not a positive multiple of the group.
    pub fn check(&self, cols: usize) -> Result<()> {
        if self.has_f16_scales()
            && let Some(group) = self.group()
            && !GROUPS.contains(&group)
        {
            bail!("group: {group} is not one of 32, 64 and 128");
        }
        // The last of FP8's blocks may be smaller.
        let unit = self.group().filter(|_| !self.is_fp8()).unwrap_or(1);
        if cols == 0 || !cols.is_multiple_of(unit) {
            let smaller: Vec<_> = GROUPS
                .iter()
                .filter(|g| self.has_f16_scales() && cols > 0 && cols.is_multiple_of(**g))
                .map(|g| self.in_groups_of(*g).to_string())
                .collect();
            let hint = match smaller.as_slice() {
                [] if cols == 0 => String::new(),
                [] => "; int8 divides by any".to_owned(),
                groups => format!("; write {}", groups.join(" or ")),
            };
            bail!("cols: rows of {cols} values do not divide by the {unit} of {self}{hint}");
        }
        Ok(())
    }
}

impl Scheme {
    /// The same with another group.
    fn in_groups_of(self, group: usize) -> Self {
        match self {
            Scheme::Int8 | Scheme::Fp8 | Scheme::Fp8Block128 | Scheme::Nvfp4 | Scheme::Nf4 => self,
            Scheme::Int4 { zero_point, .. } => Scheme::Int4 { group, zero_point },
            Scheme::Ternary { .. } => Scheme::Ternary {
                scale: TernaryScale::Group(group),
            },
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scheme::Int8 => f.write_str("int8"),
            Scheme::Fp8 => f.write_str("fp8"),
            Scheme::Fp8Block128 => f.write_str("fp8-block128"),
            Scheme::Nvfp4 => f.write_str("nvfp4"),
            Scheme::Nf4 => f.write_str("nf4"),
            Scheme::Int4 { group, zero_point } => {
                write!(f, "int4-g{group}{}", if *zero_point { "-z" } else { "" })
            }
            Scheme::Ternary { scale } => match scale {
                TernaryScale::Tensor => f.write_str("ternary-tensor"),
                TernaryScale::Row => f.write_str("ternary-row"),
                TernaryScale::Group(group) => write!(f, "ternary-g{group}"),
            },
        }
    }
}

impl FromStr for Scheme {
    type Err = Error;

    /// Letters count in either case, and `_` as `-`.
    fn from_str(given: &str) -> Result<Self> {
        let text = given.to_ascii_lowercase().replace('_', "-");
        let text = text.as_str();
        let ternary = |scale| Ok(Scheme::Ternary { scale });
        match text {
            "int8" => return Ok(Scheme::Int8),
            "fp8" => return Ok(Scheme::Fp8),
            "fp8-block128" => return Ok(Scheme::Fp8Block128),
            "nvfp4" => return Ok(Scheme::Nvfp4),
            "nf4" => return Ok(Scheme::Nf4),
            "ternary-tensor" => return ternary(TernaryScale::Tensor),
            "ternary" | "ternary-row" => return ternary(TernaryScale::Row),
            _ => {}
        }
        let group = |text: &str| {
            let group = text.strip_prefix("-g")?.parse().ok()?;
            GROUPS.contains(&group).then_some(group)
        };
        if let Some(rest) = text.strip_prefix("int4") {
            let (rest, zero_point) = match rest.strip_suffix("-z") {
                Some(rest) => (rest, true),
                None => (rest, false),
            };
            let group = if rest.is_empty() {
                Some(128)
            } else {
                group(rest)
            };
            if let Some(group) = group {
                return Ok(Scheme::Int4 { group, zero_point });
            }
        } else if let Some(group) = text.strip_prefix("ternary").and_then(group) {
            return ternary(TernaryScale::Group(group));
        }
        bail!(
            "scheme: `{given}` is not one of int8, fp8, fp8-block128, nvfp4, nf4, int4, int4-g32, int4-g64, int4-g128 (each with \
             -z for zero points), ternary-tensor, ternary-row, ternary-g32, ternary-g64 and ternary-g128"
        )
    }
}
