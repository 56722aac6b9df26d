//! The fused operations: one room each, with its guards, its CPU and CUDA launch and its plain
//! `reference()`.

mod view;

pub mod flash_attention;
pub mod residual_add;

pub use flash_attention::{AttentionParams, flash_attention};
pub use view::Float;
