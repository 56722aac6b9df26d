//! The fused operations: one room each, with its guards, its CPU and CUDA launch and its plain
//! `reference()`.

mod view;

pub mod residual_add;

pub use view::Float;
