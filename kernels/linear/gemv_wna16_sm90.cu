// GEMV for one row of x on Hopper: INT4 in groups of 128, ternary weights with a scale per row, FP8, NVFP4 and NF4.
#include "linear/gemv_wna16_sm90.cuh"

using namespace fused;

FUSED_GEMV_SM90(gemv_wna16_sm90_int4_g128, Int4Sm90)
FUSED_GEMV_SM90(gemv_wna16_sm90_ternary_rows, TernarySm90)
FUSED_GEMV_SM90(gemv_wna16_sm90_fp8, Fp8Sm90<FP8_ROWS>)
FUSED_GEMV_SM90(gemv_wna16_sm90_fp8_block, Fp8Sm90<FP8_BLOCKS>)
FUSED_GEMV_SM90(gemv_wna16_sm90_nvfp4, Nvfp4Sm90)
FUSED_GEMV_SM90(gemv_wna16_sm90_nf4, Nf4Sm90)
