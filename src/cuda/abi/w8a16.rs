//! Products of INT8 weights and x in 16-bit whole numbers.

use super::{Const, Count, Gemv, MAX_WEIGHTS, TensorMap};

abi! {
    /// Tokens of a block of the GEMM for INT8 weights and x in 16-bit whole numbers, and stages.
    table W8A16 of W8A16Form (tokens: usize, stages: usize) = [(32, 4), (64, 3)];
    const W8A16_CHANNELS: Count<i32> = 128;
    const W8A16_THREADS: Count<i32> = 384;
    /// Tokens whose scales lie together: `[4][8]`, token 4 j + t in place 8 t + j.
    const W8A16_UNIT: Count<i32> = 32;

    /// INT8 weights, and up to 64 rows of x in two int8 parts each.
    struct GemmW8A16Params {
        /// `[2 T][k]`, the parts of a token side by side.
        x: TensorMap,
        /// `[rows][k]` of each matrix.
        weights: [TensorMap; MAX_WEIGHTS],
        /// Without prologue. k is a multiple of 128.
        product: Gemv,
        /// `[k / 128][T]`, in the order of `W8A16_UNIT`.
        x_scales: Const<f32>,
        /// Blocks of a cluster, which share K.
        split_k: u32,
        /// Whether 16-byte accesses fit bias, residuals and outputs.
        vectors: i32,
    }
}
