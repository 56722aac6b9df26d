//! The CPU back end: thread pool, instruction-set detection and the cores that the ops call.
//!
//! Nothing here knows about tensors: cores take slices, and the ops in [`crate::ops`] check shapes
//! and layouts before they hand them over.

pub(crate) mod attention;
pub mod dense;
pub(crate) mod grid;
pub mod math;
pub mod norm;
pub mod packed;
pub(crate) mod quantize;
pub mod rope;
pub mod simd;
#[cfg(target_arch = "x86_64")]
mod tiles;
pub mod vector;

/// The threads on which everything here runs. They spin for a short while after each job before they sleep, so that the short
/// steps of a model follow one another without a wake-up.
pub mod pool {
    pub use crate::pool::{for_ranges, for_row_pairs, for_rows, run, set_threads, threads};
}
