//! An op on one shape, with the sides that it is timed beside.

use super::limits::{Bound, Limits, Work};
use crate::stats::Times;
use serde::{Deserialize, Serialize};

/// The op's own side of a case.
pub const FUSED: &str = "fused";

/// candle's own operations.
pub const CANDLE: &str = "candle";

/// The product alone by candle's matmul, which is cuBLAS there, in the dtype of the activations.
pub const GEMM: &str = "cublas";

/// Attention of sequences of one length, by the op that takes no others.
pub const DENSE: &str = "dense";

/// An op on one shape.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OpRun {
    pub name: String,
    pub op: String,
    pub model: String,
    pub part: String,
    pub rows: usize,
    pub context: usize,
    pub format: String,
    pub work: Work,
    pub sides: Vec<SideRun>,
    /// The least seconds that the machine could take, and why.
    pub floor: f64,
    pub bound: Bound,
}

/// One contender of an op.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SideRun {
    pub name: String,
    /// Seconds of a call.
    pub times: Times,
    /// Seconds of the host to queue a call, on a GPU.
    pub host: Option<f64>,
    /// Seconds of a call in a CUDA graph.
    #[serde(default)]
    pub graph: Option<Times>,
    /// Bytes that a call holds beyond its inputs, the result included.
    pub memory: u64,
}

impl OpRun {
    pub fn side(&self, name: &str) -> Option<&SideRun> {
        self.sides.iter().find(|side| side.name == name)
    }

    /// The op's own time.
    pub fn fused(&self) -> f64 {
        let fused = self.side(FUSED);
        fused.map_or(f64::NAN, |side| side.times.median)
    }

    /// How many times faster the op is than a contender.
    pub fn speedup_over(&self, name: &str) -> Option<f64> {
        Some(self.side(name)?.times.median / self.fused())
    }

    /// The same with both in graphs of their own, as a model decodes.
    pub fn speedup_in_graph_over(&self, name: &str) -> Option<f64> {
        let fused = self.side(FUSED)?.graph?;
        Some(self.side(name)?.graph?.median / fused.median)
    }

    /// Seconds of a contender as a model decodes: in a graph where there is one.
    pub fn seconds(&self, name: &str) -> Option<f64> {
        let side = self.side(name)?;
        Some(side.graph.unwrap_or(side.times).median)
    }

    /// How many times faster the op is than what it replaces.
    pub fn speedup(&self) -> Option<f64> {
        self.speedup_over(CANDLE)
    }
}

/// Counts floors from limits that have become known since.
pub fn count_floors(runs: &mut [OpRun], limits: &Limits) {
    for run in runs {
        (run.floor, run.bound) = limits.floor(run.work);
    }
}

/// What was left out, and why.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Skipped {
    pub name: String,
    pub why: String,
}
