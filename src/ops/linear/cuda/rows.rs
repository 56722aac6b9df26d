//! The numbers of rows of x (M) that rules of the table take, by the dtype of x.

use super::kernels::{gemm_w8a16, gemm_wna16_latency, gemv_dense_latency, gemv_ternary_latency};
use super::rule::Rows;
use candle_core::DType;

pub(super) const F32: DType = DType::F32;
pub(super) const F16: DType = DType::F16;
pub(super) const BF16: DType = DType::BF16;

pub(super) const MAX: usize = usize::MAX;

/// M of all GEMV kernels but for ternary weights.
pub(super) const GEMV: [usize; 2] = [1, 8];
pub(super) const SEVERAL: [usize; 2] = [2, GEMV[1]];

/// M of the tensor-core kernels for INT4 in groups of 128, which multiply in bf16. Few f32 rows keep 16 bits as two
/// parts elsewhere; more are rounded to bf16, as for the library.
pub(super) const WNA16_M16: &[Rows] = &[(BF16, [2, 16]), (F32, [GEMV[1] + 1, 16])];

/// M of the kernel for small quantized matrices. One row of GGUF blocks has its own.
pub(super) const WNA16_LATENCY: &[Rows] = &[
    (F32, [1, gemm_wna16_latency::MAX_M]),
    (F16, [1, gemm_wna16_latency::MAX_M]),
    (BF16, [1, gemm_wna16_latency::MAX_M_BF16]),
];
pub(super) const BLOCKS_LATENCY: &[Rows] = &[
    (F32, [2, gemm_wna16_latency::MAX_M]),
    (F16, [2, gemm_wna16_latency::MAX_M]),
    (BF16, [2, gemm_wna16_latency::MAX_M_BF16]),
];

/// M of the kernel that has all rows of x in shared memory: f16, and f32 up to M = 8, in two parts. Its plan says for which
/// products.
pub(super) const WNA16_SKINNY: &[Rows] = &[(BF16, [2, 32]), (F32, [2, 32]), (F16, [2, 16])];

/// M from which on x is quantized for INT8 weights, as measured on an H100.
pub(super) const W8A8: [usize; 2] = [64, MAX];

/// M of the kernel for INT8 weights and x in 16-bit whole numbers.
pub(super) const W8A16: &[Rows] = &[
    (F32, [17, gemm_w8a16::MAX_M]),
    (F16, [17, gemm_w8a16::MAX_M]),
    (BF16, [17, gemm_w8a16::MAX_M]),
];

/// M of the kernel for some tens of rows, which reads weights anew for every 32. On Hopper its plan says for which products.
pub(super) const WNA16_MMA: &[Rows] = &[(BF16, [2, 64]), (F32, [2, 64]), (F16, [2, 32])];
/// INT8, FP8, NVFP4, NF4 and INT4 up to 128 rows; more are dequantized for cuBLASLt.
pub(super) const WNA16_MMA_128_ROWS: &[Rows] = &[(BF16, [2, 128]), (F32, [2, 128]), (F16, [2, 32])];

/// M for which, on Hopper, dequantizing in tensor cores' registers may beat dequantizing for the library:
/// `gemm_dequantized::plan_if_fastest` says for which products it does not. Twice as many rows of operand B keep the bits of
/// f16; weights are rounded to bf16 from 33 rows of operand B on, whatever x is.
pub(super) const WNA16_SM90_BLOCKS: &[Rows] =
    &[(BF16, [2, 1536]), (F32, [2, 1536]), (F16, [2, 192])];
pub(super) const WNA16_SM90: &[Rows] = &[(BF16, [2, MAX]), (F32, [2, MAX]), (F16, [2, 512])];

/// M of dense weights for which `gemm_dense_sm90` may be the fastest kernel; its plan says for which products.
pub(super) const DENSE_SM90: [usize; 2] = [2, 256];

/// M of dense weights for the kernel that norms x in registers.
pub(super) const DENSE_NORMED_SM90: [usize; 2] = [65, 4096];

pub(super) const GEMV_OF_EACH: &[Rows] = &[(F32, GEMV), (F16, GEMV), (BF16, GEMV)];

pub(super) const ONE_ROW: &[Rows] = &[(F32, [1, 1]), (F16, [1, 1]), (BF16, [1, 1])];

/// M of the kernel that has all ternary weights in shared memory; its plan says for which products.
pub(super) const TERNARY_LATENCY: &[Rows] = &[
    (F32, [1, gemv_ternary_latency::MAX_M]),
    (F16, [1, gemv_ternary_latency::MAX_M]),
    (BF16, [1, gemv_ternary_latency::MAX_M]),
];

/// Weights of 16 bits: M up to which each block, of 8, 16 or 32 rows, has a multiprocessor of its own.
pub(super) const LATENCY_16_BIT: &[Rows] = &[
    (F16, [1, gemv_dense_latency::MAX_M]),
    (BF16, [1, gemv_dense_latency::MAX_M]),
];
