//! The fused operations: one room each, with its guards, its launch and its plain `reference()`.

#[cfg(feature = "cuda")]
pub(crate) mod embedding;
pub(crate) mod view;

pub mod flash_attention;
pub mod flash_decoding;
pub mod layer_norm;
pub mod layer_norm_linear;
pub mod linear;
pub mod quant_linear;
pub mod residual_add;
pub mod rms_norm;
pub mod rms_norm_linear;
pub mod rope;
pub mod sample;

pub use flash_attention::{AttentionParams, flash_attention};
pub use flash_decoding::{FlashDecoding, flash_decoding};
pub use layer_norm::layer_norm;
pub use layer_norm_linear::layer_norm_linear;
pub use linear::{Activation, Epilogue, Prologue, Weight, linear};
pub use quant_linear::quant_linear;
pub use residual_add::residual_add;
pub use rms_norm::{rms_norm, rms_norm_residual};
pub use rms_norm_linear::rms_norm_linear;
pub use rope::{HeadNorms, RopeAppend, RopeStyle, Rotation, rope, rope_append};
pub use sample::{SamplingParams, sample};
pub use view::Float;
