//! Quantizing weights: what the kernels and `cpu::quantize` both go by.

use super::{Const, Count, Mut, Void};

abi! {
    /// Threads of a block that has a row, or a block of FP8.
    const QUANTIZE_THREADS: Count<i32> = 256;
    /// Warps of a block, each with a group, or with two of NF4 or NVFP4.
    const QUANTIZE_WARPS: Count<i32> = 4;
    /// Values of the largest group.
    const MAX_GROUP: Count<u32> = 128;

    /// Sums that the terms of a trial are spread over, value by value, before these are added up in order.
    const TRIAL_LANES: Count<u32> = 16;
    /// Ranges that are tried without zero points, and the step from one to the next.
    const CLIPS: Count<i32> = 16;
    const CLIP_STEP: f32 = 0.03125;
    /// Ranges tried at each end with zero points.
    const ENDS: Count<i32> = 7;
    /// Scales tried to both sides of the best, and the step from one to the next.
    const NEAR: Count<i32> = 4;
    const NEAR_STEP: f32 = 0.025;
    /// Rounds of codes and the line through them at the end.
    const ROUNDS: Count<i32> = 4;
    /// Added to a float below 2^22 and taken away again it leaves the nearest integer.
    const ROUND: f32 = 12582912.0;
    /// Below these a scale would be no number that an f32 can divide by: of the search, and of FP8.
    const SEARCH_TINY: f32 = 1e-35;
    const FP8_TINY: f32 = 1e-35;
    /// The largest numbers of e4m3 and e2m1.
    const E4M3_MAX: f32 = 448.0;
    const E2M1_MAX: f32 = 6.0;
    /// Of zero points, and the one that stands for 8.
    const ZERO_STEP: f32 = 0.0625;
    const ZERO_MIDDLE: Count<u32> = 128;

    struct QuantizeWeightsParams {
        /// `[rows, cols]`
        weights: Const<Void>,
        /// `[rows, cols]`
        codes: Mut<i8>,
        /// Of rows, groups or blocks; of NVFP4 null.
        scales: Mut<f32>,
        /// `[rows, cols / group]`: zero points, or the e4m3 scales of NVFP4; else null.
        zeros: Mut<u8>,
        /// Becomes 1 if a weight or a scale is no finite number, of which the host says where it is.
        refused: Mut<u32>,
        /// The bits of the largest magnitude, 0 before the launch. `quantize_weights_largest` alone writes it.
        largest: Mut<u32>,
        rows: u64,
        cols: u32,
        /// Values of a row that share a scale.
        group: u32,
        /// Rows that share a scale.
        height: u32,
        dtype: i32,
        /// Of NVFP4: what makes 448 times 6 of the matrix's largest magnitude; 0 if all weights are 0.
        global: f32,
    }
}
