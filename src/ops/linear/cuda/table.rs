//! Which kernel takes a product: one table, first match wins.

use super::common_rules::{
    DEQUANTIZED, FP8_MMA, GEMV_GGUF, GEMV_SM90, HEAD_NOTE, LATENCY_SM90, MMA, MMA_SM90, NEWEST,
    SKINNY, SKINNY_FORCED, SM90, W8A16_FORCED, W8A16_SM90,
};
use super::kernels::{
    gemm_dense, gemm_dense_normed_sm90, gemm_dense_sm90, gemm_dequantized, gemm_w8a8,
    gemm_w8a8_cluster, gemm_wna16_m16, gemm_wna16_sm90, gemv_dense, gemv_dense_latency,
    gemv_dense_pipelined, gemv_gguf, gemv_ternary_latency, gemv_wna16,
};
use super::rows::{
    BF16, DENSE_NORMED_SM90, DENSE_SM90, F16, F32, GEMV_OF_EACH, LATENCY_16_BIT, MAX, SEVERAL,
    TERNARY_LATENCY, W8A8, WNA16_LATENCY, WNA16_M16, WNA16_MMA, WNA16_SM90, WNA16_SM90_BLOCKS,
};
use super::rule::{Formats, Norms, RULE, Rule};
use crate::cuda::abi::N_TILE_MAX_M;

/// The table. First match wins; a kernel may have several rules.
pub(super) static RULES: &[Rule] = &[
    Rule {
        kernel: "gemv_dense_latency",
        source: "linear/gemv_dense_latency.cu",
        formats: Formats::DENSE_16_BIT,
        x: LATENCY_16_BIT,
        max_k: gemv_dense_latency::MAX_K,
        norms: Norms::Rms,
        plan: gemv_dense_latency::plan,
        note: "small matrices: one block a multiprocessor at most, of 1 to 6 N tiles and 8 to 32 rows",
        ..RULE
    },
    Rule {
        kernel: gemv_dense_pipelined::NAME,
        source: "linear/gemv_dense_pipelined.cu",
        formats: Formats::DENSE_16_BIT,
        x: &[(F16, [1, 1]), (BF16, [1, 1])],
        arch: [80, NEWEST],
        pairs: true,
        plan: gemv_dense_pipelined::plan,
        note: "with a layer norm as the prologue, from 8 MB of weights on, and two matrices along K",
        ..RULE
    },
    Rule {
        kernel: "gemm_dense_normed_sm90",
        source: "linear/gemm_dense_normed_sm90.cu",
        formats: Formats::DENSE_16_BIT,
        x: &[(BF16, DENSE_NORMED_SM90)],
        max_k: gemm_dense_normed_sm90::MAX_K,
        arch: [90, 90],
        norms: Norms::Rms,
        plan: gemm_dense_normed_sm90::plan,
        note: "x is operand A in registers, where the norm multiplies it",
        ..RULE
    },
    Rule {
        kernel: "gemm_dense_sm90",
        source: "linear/gemm_dense_sm90.cu",
        formats: Formats::DENSE_16_BIT,
        x: &[(F16, DENSE_SM90), (BF16, DENSE_SM90)],
        arch: [90, 90],
        plan: gemm_dense_sm90::plan,
        note: "the norm in a preceding kernel, while the first weights come",
        ..RULE
    },
    Rule {
        kernel: "gemv_dense_mma",
        source: "linear/gemv_dense.cu",
        formats: Formats::DENSE_16_BIT,
        x: &[(F16, SEVERAL), (BF16, SEVERAL)],
        max_k: gemv_dense::MAX_MMA_K,
        plan: gemv_dense::mma,
        note: "rows of x that fit into shared memory together; bf16 from 8.0 on",
        ..RULE
    },
    Rule {
        kernel: "gemv_dense_m8",
        source: "linear/gemv_dense.cu",
        x: &[(F32, SEVERAL), (F16, SEVERAL), (BF16, SEVERAL)],
        plan: gemv_dense::m8,
        note: "multiply-adds in f32",
        ..RULE
    },
    Rule {
        kernel: "gemv_dense",
        source: "linear/gemv_dense.cu",
        x: &[(F32, [1, 1]), (F16, [1, 1]), (BF16, [1, 1])],
        plan: gemv_dense::m1,
        note: "multiply-adds in f32",
        ..RULE
    },
    Rule {
        kernel: "gemv_dense_scalar",
        source: "linear/gemv_dense.cu",
        x: GEMV_OF_EACH,
        plan: gemv_dense::scalar,
        note: "rows not aligned to 16 bytes",
        ..RULE
    },
    Rule {
        kernel: "gemm_dense_cublaslt",
        source: "linear/gemm_dense.cu",
        formats: Formats::DENSE.or(Formats::MIXED_DENSE),
        plan: gemm_dense::plan,
        note: "the norm in a preceding kernel, activation and second residual in a following one",
        ..RULE
    },
    LATENCY_SM90,
    Rule {
        source: "linear/gemm_wna16_latency_sm90.cu",
        formats: Formats::INT4.or(Formats::INT8),
        x: WNA16_LATENCY,
        note: "likewise; one row of up to 2.4 million weights",
        ..LATENCY_SM90
    },
    Rule {
        kernel: "gemv_gguf_latency",
        source: "linear/gemv_gguf_latency.cu",
        formats: Formats::GGUF,
        x: &[(F32, [1, 4]), (F16, [1, 4]), (BF16, [1, 4])],
        arch: [80, NEWEST],
        norms: Norms::Rms,
        plan: gemv_gguf::latency,
        note: "few output channels: one block a multiprocessor at most, of one N tile or three",
        ..RULE
    },
    Rule {
        kernel: "gemv_ternary_latency",
        source: "linear/gemv_ternary_latency.cu",
        formats: Formats::TERNARY,
        x: TERNARY_LATENCY,
        arch: [90, NEWEST],
        norms: Norms::Rms,
        max_k: gemv_ternary_latency::MAX_K,
        rounds_up_to: gemv_ternary_latency::MAX_M,
        plan: gemv_ternary_latency::plan,
        note: "all weights in shared memory, those with one scale for a row or the matrix",
        ..RULE
    },
    GEMV_SM90,
    Rule {
        source: "linear/gemv_wna16_sm90_gguf.cu",
        formats: Formats::GGUF,
        note: "for Q4_0, Q4_1 and Q4_K x is quantized to 16-bit integers",
        ..GEMV_SM90
    },
    Rule {
        kernel: "gemm_w8a8_cluster",
        source: "linear/gemm_w8a8_cluster.cu",
        formats: Formats::INT8,
        x: &[(F16, W8A8), (BF16, W8A8)],
        arch: [90, 90],
        norms: Norms::None,
        int8_x: true,
        rounds_up_to: MAX,
        plan: gemm_w8a8_cluster::plan,
        note: "small products: the same launch quantizes x",
        ..RULE
    },
    Rule {
        kernel: "gemm_w8a8_sm90",
        source: "linear/gemm_w8a8_sm90.cu",
        formats: Formats::INT8,
        x: &[(F32, W8A8), (F16, W8A8), (BF16, W8A8)],
        arch: [90, 90],
        int8_x: true,
        rounds_up_to: MAX,
        plan: gemm_w8a8::sm90,
        note: "a preceding kernel quantizes x",
        ..RULE
    },
    Rule {
        kernel: "gemm_w8a8_mma",
        source: "linear/gemm_w8a8.cu",
        formats: Formats::INT8,
        x: &[(F32, W8A8), (F16, W8A8), (BF16, W8A8)],
        int8_x: true,
        rounds_up_to: MAX,
        plan: gemm_w8a8::mma,
        note: "likewise",
        ..RULE
    },
    Rule {
        kernel: "gemm_fp8_sm90",
        source: "linear/gemm_fp8_sm90.cu",
        arch: [90, 90],
        plan: gemm_w8a8::fp8_sm90,
        ..FP8_MMA
    },
    FP8_MMA,
    Rule {
        x: &[(F32, [2, 4]), (BF16, [2, 4])],
        arch: [90, 90],
        plan: gemv_gguf::plan_head,
        note: HEAD_NOTE,
        ..GEMV_GGUF
    },
    Rule {
        source: "linear/gemm_wna16_sm90_gguf.cu",
        formats: Formats::GGUF,
        x: &[(F32, [5, 16]), (BF16, [5, 16])],
        plan: gemm_wna16_sm90::plan_head,
        note: HEAD_NOTE,
        ..SM90
    },
    SKINNY,
    Rule {
        source: "linear/gemm_wna16_skinny_sm90_gguf.cu",
        formats: Formats::GGUF,
        note: "as many rows of x as fit into shared memory",
        ..SKINNY
    },
    W8A16_SM90,
    Rule {
        kernel: "gemm_wna16_m16_cluster",
        source: "linear/gemm_wna16_m16_cluster.cu",
        formats: Formats::INT4_G128,
        x: WNA16_M16,
        arch: [90, NEWEST],
        gates: false,
        plan: gemm_wna16_m16::cluster,
        note: "few output channels and K up to 2,048; 16 rows a launch",
        ..RULE
    },
    Rule {
        kernel: "gemm_wna16_m16_tma",
        source: "linear/gemm_wna16_m16_tma.cu",
        formats: Formats::INT4_G128,
        x: WNA16_M16,
        arch: [90, NEWEST],
        plan: gemm_wna16_m16::tma,
        note: "K past 4,096; 16 rows a launch",
        ..RULE
    },
    Rule {
        kernel: "gemm_wna16_m16",
        source: "linear/gemm_wna16_m16.cu",
        formats: Formats::INT4_G128,
        x: WNA16_M16,
        arch: [80, NEWEST],
        plan: gemm_wna16_m16::plan,
        note: "16 rows a launch",
        ..RULE
    },
    Rule {
        kernel: "gemm_wna16_sm90",
        source: "linear/gemm_wna16_sm90_gguf.cu",
        formats: Formats::GGUF,
        x: &[(BF16, [2, 16])],
        arch: [90, 90],
        plan: gemm_wna16_sm90::plan_few_rows_group16,
        note: "Q2_K, Q3_K and Q6_K with many output channels: their scales, one for each 16 values, cost gemm_wna16_mma more",
        ..RULE
    },
    Rule {
        source: "linear/gemm_wna16_mma_gguf.cu",
        formats: Formats::GGUF,
        ..MMA_SM90
    },
    Rule {
        source: "linear/gemm_wna16_mma.cu",
        formats: Formats::INT8.or(Formats::TERNARY),
        ..MMA_SM90
    },
    Rule {
        source: "linear/gemm_wna16_mma_int4.cu",
        formats: Formats::INT4,
        ..MMA_SM90
    },
    Rule {
        source: "linear/gemm_wna16_mma_fp8.cu",
        formats: Formats::FP8,
        ..MMA_SM90
    },
    Rule {
        source: "linear/gemm_wna16_mma_nvfp4.cu",
        formats: Formats::NVFP4,
        ..MMA_SM90
    },
    Rule {
        source: "linear/gemm_wna16_mma_nf4.cu",
        formats: Formats::NF4,
        ..MMA_SM90
    },
    Rule {
        formats: Formats::GGUF.or(Formats::INT4),
        arch: [90, 90],
        plan: gemm_dequantized::plan_if_fastest,
        note: "up to 8 million weights from 65 rows on in a CUDA graph, from 512 on outside; more weights from weights / 32,768 rows on, unless one half gates the other; f16 counts twice, and x in 16 bits without a layer norm is multiplied by `gemv_dense_latency` or `gemm_dense_normed_sm90` where they take it",
        ..DEQUANTIZED
    },
    Rule {
        source: "linear/gemm_wna16_sm90_gguf.cu",
        formats: Formats::GGUF,
        x: WNA16_SM90_BLOCKS,
        ..SM90
    },
    Rule {
        source: "linear/gemm_wna16_sm90.cu",
        formats: Formats::INT8,
        x: WNA16_SM90_BLOCKS,
        ..SM90
    },
    Rule {
        source: "linear/gemm_wna16_sm90.cu",
        formats: Formats::TERNARY,
        x: WNA16_SM90,
        ..SM90
    },
    Rule {
        source: "linear/gemm_wna16_sm90_int4.cu",
        formats: Formats::INT4,
        x: WNA16_SM90,
        ..SM90
    },
    Rule {
        source: "linear/gemm_wna16_sm90_fp8.cu",
        formats: Formats::FP8,
        x: WNA16_SM90,
        ..SM90
    },
    Rule {
        source: "linear/gemm_wna16_sm90_nvfp4.cu",
        formats: Formats::NVFP4,
        x: WNA16_SM90,
        ..SM90
    },
    Rule {
        source: "linear/gemm_wna16_sm90_nf4.cu",
        formats: Formats::NF4,
        x: WNA16_SM90,
        ..SM90
    },
    Rule {
        source: "linear/gemm_wna16_mma_gguf.cu",
        formats: Formats::GGUF,
        x: WNA16_MMA,
        ..MMA
    },
    Rule {
        source: "linear/gemm_wna16_mma.cu",
        formats: Formats::INT8,
        ..MMA
    },
    Rule {
        source: "linear/gemm_wna16_mma_int4.cu",
        formats: Formats::INT4,
        ..MMA
    },
    Rule {
        source: "linear/gemm_wna16_mma_fp8.cu",
        formats: Formats::FP8,
        ..MMA
    },
    Rule {
        source: "linear/gemm_wna16_mma_nvfp4.cu",
        formats: Formats::NVFP4,
        ..MMA
    },
    Rule {
        source: "linear/gemm_wna16_mma_nf4.cu",
        formats: Formats::NF4,
        ..MMA
    },
    Rule {
        source: "linear/gemm_wna16_mma.cu",
        formats: Formats::TERNARY,
        x: WNA16_MMA,
        ..MMA
    },
    GEMV_GGUF,
    Rule {
        kernel: "gemv_ternary",
        source: "linear/gemv_wna16.cu",
        formats: Formats::TERNARY,
        x: &[(F32, [1, 64]), (F16, [1, 64]), (BF16, [1, 64])],
        rounds_up_to: N_TILE_MAX_M,
        plan: gemv_wna16::plan,
        note: "four rows a launch",
        ..RULE
    },
    Rule {
        kernel: "gemv_wna16",
        source: "linear/gemv_wna16.cu",
        formats: Formats::CODES_4_AND_8_BITS,
        x: GEMV_OF_EACH,
        plan: gemv_wna16::plan,
        note: "16 bits of f32 and f16 rows in two parts; four rows a launch",
        ..RULE
    },
    SKINNY_FORCED,
    Rule {
        source: "linear/gemm_wna16_skinny_sm90_gguf.cu",
        formats: Formats::GGUF,
        ..SKINNY_FORCED
    },
    W8A16_FORCED,
    Rule {
        formats: Formats::QUANTIZED.or(Formats::MIXED),
        ..DEQUANTIZED
    },
];
