// GEMM for up to 16 rows of x on Hopper: INT4 in groups of 128, ternary weights with a scale per row, FP8,
// NVFP4 and NF4.
#include "linear/gemm_wna16_skinny_sm90.cuh"

using namespace fused;

FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_int4_g128, SkinnyInt4)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_ternary_rows, SkinnyTernary)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_fp8, SkinnyFp8<FP8_ROWS>)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_fp8_block, SkinnyFp8<FP8_BLOCKS>)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_nvfp4, SkinnyNvfp4)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_nf4, SkinnyNf4)
