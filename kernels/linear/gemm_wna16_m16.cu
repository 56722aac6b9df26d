// GEMM for up to 16 rows of bf16 x and packed INT8 or INT4 weights, of one format in a launch.
#include "linear/gemm_wna16_m16.cuh"

using namespace fused;

FUSED_GEMM_M16(gemm_wna16_m16_int8, Int8Weights)
FUSED_GEMM_M16(gemm_wna16_m16_int4_g128, Int4Weights<ONE_GROUP>)
FUSED_GEMM_M16(gemm_wna16_m16_int4, Int4Weights<SOME_GROUPS>)
