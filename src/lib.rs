//! Fused operations for candle.
pub mod cpu;
pub mod ops;
pub mod quant;
pub mod trace;
