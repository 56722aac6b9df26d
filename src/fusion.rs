//! Which ops a model fuses.

use candle_core::{Error, Result, bail};
use std::fmt;
use std::str::FromStr;

/// One switch per fusion, given to a model when it is loaded.
///
/// A switch that is off means that the model runs candle's own operations at that place, so that
/// fused and plain forms can be compared inside one model, and an op can be ruled out when hunting
/// a bug. `rms_norm_linear` and `swiglu` are parts of a fused product, so they show only together
/// with `linear` (dense weights) or `quant_linear` (GGUF). [`Fusion::default`] is everything on.
///
/// ```
/// use candle_fused::Fusion;
/// let only: Fusion = "rope,flash_attention".parse()?;
/// assert!(only.rope && !only.linear);
/// assert_eq!(only.to_string(), "rope,flash_attention");
/// assert_eq!("all".parse::<Fusion>()?, Fusion::all());
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fusion {
    /// The residual is added in the epilogue of the matrix product before it (or by
    /// [`residual_add`](fn@crate::ops::residual_add) where that product is not fused).
    pub residual_add: bool,
    /// Norms that stand alone run as [`rms_norm`](fn@crate::ops::rms_norm).
    pub rms_norm: bool,
    /// Norms run as the prologue of the matrix product behind them.
    pub rms_norm_linear: bool,
    /// Dense matrix products run as [`crate::ops::linear`](fn@crate::ops::linear).
    pub linear: bool,
    /// GGUF matrix products run as [`crate::ops::quant_linear`](fn@crate::ops::quant_linear).
    pub quant_linear: bool,
    /// `silu(gate) * up` runs in the epilogue of the gate and up projection.
    pub swiglu: bool,
    /// Rotary embedding of q and k and the cache append are one op.
    pub rope: bool,
    /// Attention runs as [`crate::ops::flash_attention`](fn@crate::ops::flash_attention).
    pub flash_attention: bool,
}

impl Fusion {
    /// The names that [`Fusion::from_str`] takes, besides `all` and `none`.
    pub const NAMES: [&'static str; 8] = [
        "residual_add",
        "rms_norm",
        "rms_norm_linear",
        "linear",
        "quant_linear",
        "swiglu",
        "rope",
        "flash_attention",
    ];

    /// Everything fused.
    pub fn all() -> Self {
        Self::from_flags([true; 8])
    }

    /// Plain candle operations only.
    pub fn none() -> Self {
        Self::from_flags([false; 8])
    }

    fn from_flags(flags: [bool; 8]) -> Self {
        let [
            residual_add,
            rms_norm,
            rms_norm_linear,
            linear,
            quant_linear,
            swiglu,
            rope,
            flash_attention,
        ] = flags;
        Self {
            residual_add,
            rms_norm,
            rms_norm_linear,
            linear,
            quant_linear,
            swiglu,
            rope,
            flash_attention,
        }
    }

    fn flags(&self) -> [bool; 8] {
        [
            self.residual_add,
            self.rms_norm,
            self.rms_norm_linear,
            self.linear,
            self.quant_linear,
            self.swiglu,
            self.rope,
            self.flash_attention,
        ]
    }
}

impl Default for Fusion {
    fn default() -> Self {
        Self::all()
    }
}

impl FromStr for Fusion {
    type Err = Error;

    /// Reads `all`, `none`, or a comma-separated list of [`Fusion::NAMES`].
    fn from_str(list: &str) -> Result<Self> {
        match list.trim() {
            "all" => return Ok(Self::all()),
            "none" => return Ok(Self::none()),
            _ => {}
        }
        let mut flags = [false; 8];
        for name in list.split(',').map(str::trim) {
            match Self::NAMES.iter().position(|n| *n == name) {
                Some(i) => flags[i] = true,
                None => bail!(
                    "fusion: `{name}` is not one of all, none, {}",
                    Self::NAMES.join(", ")
                ),
            }
        }
        Ok(Self::from_flags(flags))
    }
}

impl fmt::Display for Fusion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::all() {
            return f.write_str("all");
        }
        let on: Vec<_> = Self::NAMES
            .iter()
            .zip(self.flags())
            .filter(|(_, on)| *on)
            .map(|(n, _)| *n)
            .collect();
        f.write_str(
            if on.is_empty() {
                "none".to_owned()
            } else {
                on.join(",")
            }
            .as_str(),
        )
    }
}
