//! The tensor-core GEMMs for quantized weights, and what each is tried with.

use super::{SCHEMES, gpus, on, random};
use crate::linear::ACTIVATIONS;
use crate::quant_linear::blocks_on;
use crate::support::architecture;
use candle_core::{DType, Device, Result};
use candle_fused::ops::{Activation, Weight};
use candle_fused::quant::BlockFormat;
use std::ops::RangeInclusive;

/// A kernel, and what it is tried with.
pub struct Subject {
    pub kernel: &'static str,
    /// The GPUs that have it.
    pub architectures: RangeInclusive<i32>,
    /// Rows of a tile of each size, of two of them, and of one that is not full.
    pub rows: &'static [usize],
    /// The same beside prologues and epilogues, for all dtypes of x, and output channels by K.
    pub few: &'static [usize],
    pub shapes: [(usize, usize); 3],
    pub takes: fn(&str) -> bool,
    /// Of x, behind prologues and epilogues.
    pub dtypes: &'static [DType],
    /// Of no norm, RMS norms and layer norms, how many of these.
    pub prologues: fn(DType) -> usize,
    pub activations: &'static [Activation],
    /// Rows of a format that it takes at most; half as many of f16.
    pub most: fn(&str) -> usize,
}

/// Output channels that fill no tile.
const ANY_SHAPES: [(usize, usize); 3] = [(100, 256), (77, 512), (264, 768)];
/// Those that fill no tile of 16, in matrices that begin at whole 8 of them.
const WHOLE_EIGHTS: [(usize, usize); 3] = [(104, 256), (72, 2128), (264, 768)];

const ALL_DTYPES: &[DType] = &[DType::F32, DType::F16, DType::BF16];

pub const SUBJECTS: [Subject; 6] = [
    Subject {
        kernel: "gemm_wna16_sm90",
        architectures: 90..=90,
        rows: &[2, 8, 9, 16, 31, 64, 100, 128, 300, 700],
        few: &[2, 5, 12, 20, 50, 100, 130],
        shapes: ANY_SHAPES,
        takes: |_| true,
        dtypes: ALL_DTYPES,
        prologues: |_| 3,
        activations: &ACTIVATIONS,
        most: |_| usize::MAX,
    },
    Subject {
        kernel: "gemm_wna16_mma",
        architectures: 80..=i32::MAX,
        rows: &[2, 8, 9, 16, 31, 64],
        few: &[2, 5, 12, 20, 32],
        shapes: ANY_SHAPES,
        // Ternary weights in groups have kernels of their own.
        takes: |format| !format.starts_with("ternary-g"),
        dtypes: ALL_DTYPES,
        prologues: |_| 3,
        activations: &ACTIVATIONS,
        most: |format| if format == "int8" { 16 } else { 64 },
    },
    Subject {
        kernel: "gemm_wna16_skinny_sm90",
        architectures: 90..=i32::MAX,
        rows: &[2, 7, 8, 9, 16, 17, 20],
        few: &[2, 4, 5, 8, 9, 12, 16, 20, 32],
        shapes: WHOLE_EIGHTS,
        takes: |format| !format.starts_with("ternary-g"),
        dtypes: ALL_DTYPES,
        prologues: |_| 3,
        activations: &ACTIVATIONS,
        most: |_| 32,
    },
    Subject {
        kernel: "gemv_wna16_sm90",
        architectures: 90..=i32::MAX,
        rows: &[1],
        few: &[1],
        shapes: WHOLE_EIGHTS,
        takes: |format| !format.starts_with("ternary-g"),
        dtypes: ALL_DTYPES,
        prologues: |_| 3,
        activations: &ACTIVATIONS,
        // One of f16 is two parts.
        most: |_| 2,
    },
    Subject {
        kernel: "gemv_ternary_latency",
        architectures: 90..=i32::MAX,
        rows: &[1, 2, 3, 4],
        // Each once for each prologue, with other activations.
        few: &[1, 1, 1, 2, 2, 3, 3, 4, 4],
        shapes: WHOLE_EIGHTS,
        takes: |format| matches!(format, "ternary-row" | "ternary-tensor"),
        dtypes: ALL_DTYPES,
        prologues: |_| 2,
        activations: &ACTIVATIONS,
        // Four of f16, which count twice.
        most: |_| 8,
    },
    Subject {
        kernel: "gemm_wna16_latency_sm90",
        architectures: 90..=i32::MAX,
        rows: &[2, 7, 8, 9, 16, 17, 32, 50, 64],
        few: &[5, 8, 9, 12, 20, 32, 33, 64],
        shapes: [(100, 256), (77, 576), (264, 1504)],
        takes: |format| format.starts_with('Q') || format.starts_with("int"),
        dtypes: ALL_DTYPES,
        prologues: |_| 2,
        // Four beside three dtypes, so that each meets each.
        activations: &[
            Activation::None,
            Activation::SwiGlu,
            Activation::None,
            Activation::SwiGlu,
        ],
        // Not counted twice in f16.
        most: |_| 128,
    },
];

impl Subject {
    /// GPUs that have the kernel.
    pub fn gpus(&self) -> Result<Vec<Device>> {
        let mut found = Vec::new();
        for device in gpus() {
            if self.architectures.contains(&architecture(&device)?) {
                found.push(device);
            }
        }
        Ok(found)
    }

    /// A pair of matrices `[n, k]` of each format that it takes and that `k` is whole groups of, with its name.
    pub fn pairs(&self, n: usize, k: usize, device: &Device) -> Result<Vec<(String, [Weight; 2])>> {
        let mut all = Vec::new();
        for dtype in BlockFormat::DTYPES {
            let name = format!("{dtype:?}");
            if (self.takes)(&name) && k.is_multiple_of(dtype.block_size()) {
                let matrix = || blocks_on(n, k, dtype, device);
                all.push((name, [matrix()?, matrix()?]));
            }
        }
        for scheme in SCHEMES {
            let name = scheme.to_string();
            if (self.takes)(&name) && scheme.check(k).is_ok() {
                let matrix = || on(&random(scheme, n, k), device);
                all.push((name, [matrix()?, matrix()?]));
            }
        }
        assert!(!all.is_empty());
        Ok(all)
    }
}
