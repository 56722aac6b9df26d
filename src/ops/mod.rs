//! The fused operations: one room each, with its guards, its CPU and CUDA launch and its plain
//! `reference()`.

mod view;

pub mod flash_attention;
pub mod linear;
pub mod quant_linear;
pub mod rms_norm_linear;
pub mod rope;
mod stub;
pub use stub::*;

pub use flash_attention::{AttentionParams, flash_attention};
pub use linear::{Activation, Epilogue, Prologue, Weight, linear};
pub use quant_linear::quant_linear;
pub use rms_norm_linear::rms_norm_linear;
pub use rope::RopeStyle;
pub use view::Float;
