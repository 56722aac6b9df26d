//! Which ops a model fuses.

use crate::quant::ActivationBits;
use candle_core::{Device, Error, Result, bail};
use std::cell::Cell;
use std::fmt;
use std::str::FromStr;

/// The struct of switches and what goes over all of them, from one list.
macro_rules! switches {
    ($(#[$doc:meta])* pub struct Fusion { $($(#[$field_doc:meta])* $name:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct Fusion {
            $($(#[$field_doc])* pub $name: bool,)*
            /// Bits of activations in fused products with quantized weights.
            pub activations: ActivationBits,
        }

        impl Fusion {
            /// The names that [`Fusion::from_str`] takes, besides `all` and `none`.
            pub const NAMES: [&'static str; [$(stringify!($name)),*].len()] =
                [$(stringify!($name)),*];

            /// Everything fused.
            pub fn all() -> Self {
                Self { $($name: true,)* activations: ActivationBits::Auto }
            }

            /// Plain candle operations only.
            pub fn none() -> Self {
                Self { $($name: false,)* activations: ActivationBits::Auto }
            }

            /// The switches in the order of their names.
            fn flags(&self) -> [bool; Self::NAMES.len()] {
                [$(self.$name),*]
            }

            fn flags_mut(&mut self) -> [&mut bool; Self::NAMES.len()] {
                [$(&mut self.$name),*]
            }
        }
    };
}

switches! {
    /// One switch per fusion, given to a model when it is loaded, and the bits of activations.
    ///
    /// A switch that is off means that the model runs candle's own operations at that place, so that
    /// fused and plain forms can be compared inside one model, and an op can be ruled out when hunting
    /// a bug. `rms_norm_linear`, `layer_norm_linear`, `swiglu` and `gelu` are parts of a fused product, so
    /// they show only together with `linear` (dense weights) or `quant_linear` (GGUF).
    /// [`Fusion::default`] is everything on.
    ///
    /// ```
    /// use candle_fused::Fusion;
    /// let only: Fusion = "rope,flash_attention".parse()?;
    /// assert!(only.rope && !only.linear);
    /// assert_eq!(only.to_string(), "rope,flash_attention");
    /// assert_eq!("all".parse::<Fusion>()?, Fusion::all());
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub struct Fusion {
        /// The residual is added in the epilogue of the matrix product before it (or by
        /// [`residual_add`](fn@crate::ops::residual_add) where that product is not fused).
        residual_add,
        /// RMS norms that stand alone run as [`rms_norm`](fn@crate::ops::rms_norm).
        rms_norm,
        /// RMS norms run as the prologue of the matrix product after them.
        rms_norm_linear,
        /// Layer norms that stand alone run as [`layer_norm`](fn@crate::ops::layer_norm).
        layer_norm,
        /// Layer norms run as the prologue of the matrix product after them.
        layer_norm_linear,
        /// Dense matrix products run as [`crate::ops::linear`](fn@crate::ops::linear).
        linear,
        /// Matrix products with quantized weights run as [`crate::ops::quant_linear`](fn@crate::ops::quant_linear).
        quant_linear,
        /// `act(gate) * up` (SwiGLU, GeGLU) runs in the epilogue of the gate and up projection.
        swiglu,
        /// The activation of an MLP without a gate runs in the epilogue of its first projection.
        gelu,
        /// Rotary embedding of q and k, their norms where a model has them, and the cache append are one
        /// op.
        rope,
        /// Attention runs as [`crate::ops::flash_attention`](fn@crate::ops::flash_attention).
        flash_attention,
    }
}

thread_local! {
    static FALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f` as on a device that this crate has no kernels for: models that are loaded in it, and layers that
/// run in it, take candle's own operations on this thread, and the [trace](crate::trace) says so.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// let layer = candle_fused::nn::Linear::new(Tensor::ones((3, 2), DType::F32, &Device::Cpu)?, None);
/// let x = Tensor::ones((1, 2), DType::F32, &Device::Cpu)?;
/// let (y, calls) = candle_fused::trace::capture(|| candle_fused::with_fallback(|| layer.forward(&x)));
/// assert_eq!(y?.to_vec2::<f32>()?, [[2., 2., 2.]]);
/// assert!(calls.to_string().contains("candle: the fallback is forced"));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn with_fallback<T>(f: impl FnOnce() -> T) -> T {
    /// Puts back what was there, even if `f` panics.
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            FALLBACK.set(self.0);
        }
    }
    let _before = Before(FALLBACK.replace(true));
    f()
}

/// Why there are no fused ops on a device, if there are none.
pub(crate) fn fallback(device: &Device) -> Option<&'static str> {
    match (FALLBACK.get(), device.is_cpu() || device.is_cuda()) {
        (true, _) => Some("the fallback is forced"),
        (false, false) => Some("the device is neither a CPU nor a CUDA device"),
        (false, true) => None,
    }
}

impl Fusion {
    /// Whether every switch is off.
    ///
    /// ```
    /// use candle_fused::Fusion;
    /// assert!(Fusion::none().is_none() && !Fusion::all().is_none());
    /// ```
    pub fn is_none(&self) -> bool {
        !self.flags().iter().any(|on| *on)
    }

    /// What of it there is on a device.
    pub(crate) fn on(self, device: &Device) -> Self {
        match fallback(device) {
            Some(_) => Self {
                activations: self.activations,
                ..Self::none()
            },
            None => self,
        }
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
        let mut fusion = Self::none();
        for name in list.split(',').map(str::trim) {
            match Self::NAMES.iter().position(|n| *n == name) {
                Some(i) => *fusion.flags_mut()[i] = true,
                None => bail!(
                    "fusion: `{name}` is not one of all, none, {}",
                    Self::NAMES.join(", ")
                ),
            }
        }
        Ok(fusion)
    }
}

impl fmt::Display for Fusion {
    /// The switches, without the bits of activations.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.flags().iter().all(|on| *on) {
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
