//! What rules of one kernel in the table have in common.

use super::kernels::{
    gemm_dequantized, gemm_w8a8, gemm_w8a16, gemm_wna16_latency, gemm_wna16_mma, gemm_wna16_skinny,
    gemm_wna16_sm90, gemv_gguf, gemv_wna16_sm90,
};
use super::rows::{
    BF16, BLOCKS_LATENCY, F16, F32, GEMV_OF_EACH, ONE_ROW, W8A8, W8A16, WNA16_MMA,
    WNA16_MMA_128_ROWS, WNA16_SKINNY,
};
use super::rule::{Formats, Norms, RULE, Rule};

/// No upper limit of the compute capability.
pub(super) const NEWEST: u32 = u32::MAX;

pub(super) const WNA16_MMA_NOTE: &str = "weights are read once for every 32 rows of operand B; a row of f16, or of f32 up to M = 8, \
                              takes two rows (bf16 high and low part)";

pub(super) const MMA_SM90: Rule = Rule {
    kernel: gemm_wna16_mma::NAME,
    x: WNA16_MMA,
    arch: [90, 90],
    plan: gemm_wna16_mma::plan_on_hopper,
    note: WNA16_MMA_NOTE,
    ..RULE
};
pub(super) const MMA: Rule = Rule {
    x: WNA16_MMA_128_ROWS,
    arch: [80, NEWEST],
    plan: gemm_wna16_mma::plan,
    ..MMA_SM90
};
pub(super) const SM90: Rule = Rule {
    kernel: "gemm_wna16_sm90",
    arch: [90, 90],
    plan: gemm_wna16_sm90::plan,
    note: "a preceding kernel narrows x; f16, and f32 up to M = 8, in two parts",
    ..RULE
};

pub(super) const GEMV_SM90: Rule = Rule {
    kernel: "gemv_wna16_sm90",
    source: "linear/gemv_wna16_sm90.cu",
    formats: Formats::CODES_4_AND_8_BITS.or(Formats::TERNARY),
    x: ONE_ROW,
    arch: [90, NEWEST],
    rounds_up_to: 1,
    plan: gemv_wna16_sm90::plan,
    note: "for INT4 x is quantized to 16-bit integers; of ternary weights those with one scale for a row or the matrix",
    ..RULE
};
pub(super) const LATENCY_SM90: Rule = Rule {
    kernel: "gemm_wna16_latency_sm90",
    source: "linear/gemm_wna16_latency_sm90_gguf.cu",
    formats: Formats::GGUF,
    x: BLOCKS_LATENCY,
    max_k: gemm_wna16_latency::MAX_K,
    arch: [90, NEWEST],
    norms: Norms::Rms,
    plan: gemm_wna16_latency::plan,
    note: "small matrices: one block a multiprocessor at most, of 1 or 3 N tiles and 8 to 32 rows; weights are rounded to f16 or bf16 as x is; \
           x in f32 is two bf16 numbers, and so are weights in blocks of 8 rows of it",
    ..RULE
};
pub(super) const GEMV_GGUF: Rule = Rule {
    kernel: "gemv_gguf",
    source: "linear/gemv_gguf.cu",
    formats: Formats::GGUF,
    x: GEMV_OF_EACH,
    plan: gemv_gguf::plan,
    note: "four rows a launch",
    ..RULE
};
/// M is that of INT8 before Hopper: this kernel was measured on no Ada GPU, nor on a newer one.
pub(super) const FP8_MMA: Rule = Rule {
    kernel: "gemm_fp8_mma",
    source: "linear/gemm_fp8_mma.cu",
    formats: Formats::FP8,
    x: &[(F32, W8A8), (F16, W8A8), (BF16, W8A8)],
    arch: [89, NEWEST],
    bits8: true,
    plan: gemm_w8a8::fp8_mma,
    note: "where activations of 8 bits are asked for: a preceding kernel makes e4m3 of x, in groups of 128 values",
    ..RULE
};
pub(super) const HEAD_NOTE: &str = "40,000 output channels and more, K up to 1,024, Q4_0 to Q8_0";
pub(super) const SKINNY: Rule = Rule {
    kernel: "gemm_wna16_skinny_sm90",
    source: "linear/gemm_wna16_skinny_sm90.cu",
    formats: Formats::CODES_4_AND_8_BITS.or(Formats::TERNARY),
    x: WNA16_SKINNY,
    arch: [90, NEWEST],
    plan: gemm_wna16_skinny::plan_if_fastest,
    note: "as many rows of x as fit into shared memory; of ternary weights those with one scale for a row or the matrix",
    ..RULE
};
pub(super) const DEQUANTIZED: Rule = Rule {
    kernel: gemm_dequantized::NAME,
    source: "formats/dequantize.cu",
    formats: Formats::QUANTIZED,
    plan: gemm_dequantized::plan,
    note: "a preceding kernel applies an RMS norm and narrows x, a layer norm has a kernel of its own; activation and second residual in a following one",
    ..RULE
};
/// The rule that takes it wherever it is forced.
pub(super) const SKINNY_FORCED: Rule = Rule {
    plan: gemm_wna16_skinny::plan,
    note: "only if forced (CANDLE_FUSED_KERNEL)",
    ..SKINNY
};

pub(super) const W8A16_SM90: Rule = Rule {
    kernel: "gemm_w8a16_sm90",
    source: "linear/gemm_w8a16_sm90.cu",
    formats: Formats::INT8,
    x: W8A16,
    arch: [90, 90],
    plan: gemm_w8a16::plan_if_fastest,
    note: "from 25 million weights and 4,096 output channels on; a preceding kernel quantizes x to 16-bit integers",
    ..RULE
};
/// The rule that takes it wherever it is forced.
pub(super) const W8A16_FORCED: Rule = Rule {
    plan: gemm_w8a16::plan,
    note: "only if forced (CANDLE_FUSED_KERNEL)",
    ..W8A16_SM90
};
