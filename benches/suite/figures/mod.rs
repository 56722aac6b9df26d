//! What is measured, as the tables show it and an export holds it: data alone, which measuring, plots
//! and goals all use.

mod curve;
mod kernel;
mod layer;
mod limits;
mod model;
mod op;
mod serving;
mod threads;

pub use curve::{Curve, Over};
#[cfg(feature = "cuda")]
pub use kernel::KernelRun;
pub use kernel::Tuned;
pub use layer::{Chain, Group, Layer, Step};
pub use limits::{Bound, Limits, Work};
pub use model::{Last, ModelRun};
pub use op::{CANDLE, DENSE, FUSED, GEMM, OpRun, SideRun, Skipped, count_floors};
pub use serving::{Arrivals, PartBound, PrefixRun, ServingRun, StepBound, count_bounds};
pub use threads::ThreadRun;
