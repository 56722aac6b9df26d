//! What the machine can do at best, and what follows for an op.

use candle_core::DType;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What an op has to move and to compute at least.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Work {
    /// Each input read once and each output written once.
    pub bytes: f64,
    /// Additions and multiplications.
    pub flops: f64,
}

impl Work {
    /// Of tensors that are read or written once, in elements of `dtype`.
    pub fn moving(elements: usize, dtype: DType) -> Self {
        Self {
            bytes: (elements * dtype.size_in_bytes()) as f64,
            flops: 0.,
        }
    }

    /// A product `[m, k]` by `[n, k]` whose weights are `bytes` large.
    pub fn product((m, n, k): (usize, usize, usize), bytes: usize, around: usize) -> Self {
        Self {
            bytes: (bytes + around) as f64,
            flops: 2. * (m * n) as f64 * k as f64,
        }
    }
}

/// The limits that floors are counted from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes per second read and written by a copy.
    pub copy: f64,
    /// Bytes per second that are only read; on a GPU that of a copy.
    pub read: f64,
    /// Floating-point operations per second of the library's product of large square matrices, by
    /// dtype.
    pub gemm: BTreeMap<String, f64>,
    /// Seconds of an op on a row of 32 values: what a call costs that has nothing to do.
    pub dispatch: f64,
}

/// What a case is bounded by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    Memory,
    Compute,
    /// The call itself.
    Dispatch,
}

impl Limits {
    /// The better of two measurements of the same: whatever disturbed one only made it worse.
    pub fn better(mut self, other: &Self) -> Self {
        for (dtype, flops) in &other.gemm {
            let best = self.gemm.entry(dtype.clone()).or_insert(*flops);
            *best = best.max(*flops);
        }
        Self {
            copy: self.copy.max(other.copy),
            read: self.read.max(other.read),
            gemm: self.gemm,
            dispatch: self.dispatch.min(other.dispatch),
        }
    }

    /// The most operations per second, of any dtype.
    pub fn peak(&self) -> f64 {
        self.gemm.values().copied().fold(f64::NAN, f64::max)
    }

    /// The least seconds that `work` can take as a call of its own, and why. int8 instructions may pass the peak of
    /// floating-point products.
    pub fn floor(&self, work: Work) -> (f64, Bound) {
        let (seconds, bound) = self.roof(work);
        match seconds < self.dispatch {
            true => (self.dispatch, Bound::Dispatch),
            false => (seconds, bound),
        }
    }

    /// The same of a part of a step, which need not be a call.
    pub fn roof(&self, work: Work) -> (f64, Bound) {
        let memory = work.bytes / self.read.max(self.copy);
        let compute = work.flops / self.peak();
        if compute > memory {
            (compute, Bound::Compute)
        } else {
            (memory, Bound::Memory)
        }
    }
}
