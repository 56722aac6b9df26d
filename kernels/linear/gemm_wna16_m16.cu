// GEMM for up to 16 rows of bf16 x and INT4 weights in groups of 128, of one format in a launch.
#include "linear/gemm_wna16_m16.cuh"

using namespace fused;

FUSED_GEMM_M16(gemm_wna16_m16_int4_g128, Int4Weights<ONE_GROUP>)
