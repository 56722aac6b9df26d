// GEMM for up to 16 rows of bf16 x and INT4 weights in groups of 128, for long K, on Hopper.
#include "linear/gemm_wna16_m16_tma.cuh"

FUSED_GEMM_M16_TMA(gemm_wna16_m16_tma_int4_g128)
