//! Kernels of the table of `linear` on one product.

use super::limits::Work;
use crate::stats::Times;
use serde::{Deserialize, Serialize};

/// The kernels of the table of `linear` on CUDA, on one product.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Tuned {
    pub name: String,
    pub model: String,
    pub part: String,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub format: String,
    /// The dtype of x.
    pub x: String,
    pub work: Work,
    /// The kernel that the table chooses.
    pub chosen: String,
    /// Seconds of the host to queue a call of that.
    pub host: Option<f64>,
    pub kernels: Vec<KernelRun>,
}

/// A kernel of that table: its times, or why it does not take the product.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct KernelRun {
    pub name: String,
    /// Entry, grid and parameters.
    pub plan: Option<String>,
    /// Seconds of a call.
    pub times: Option<Times>,
    /// Seconds of a call in a CUDA graph.
    pub graph: Option<Times>,
    pub refusal: Option<String>,
}
