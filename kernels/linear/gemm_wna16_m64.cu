// GEMM for up to 64 rows of bf16 x and packed INT8 or INT4 weights, of one format in a launch.
#include "linear/gemm_wna16_m64.cuh"

using namespace fused;

FUSED_GEMM_M64(gemm_wna16_m64_int8, Int8Weights)
FUSED_GEMM_M64(gemm_wna16_m64_int4_g128, Int4Weights<ONE_GROUP>)
FUSED_GEMM_M64(gemm_wna16_m64_int4, Int4Weights<SOME_GROUPS>)
