// GEMM for up to 16 rows of bf16 x and INT4 weights in groups of 128, for few output channels and short K, on Hopper; a
// kernel for each number of CTAs in a cluster.
#include "linear/gemm_wna16_m16_cluster.cuh"

FUSED_GEMM_M16_CLUSTER(gemm_wna16_m16_cluster_int4_g128_1, 1)
FUSED_GEMM_M16_CLUSTER(gemm_wna16_m16_cluster_int4_g128_2, 2)
FUSED_GEMM_M16_CLUSTER(gemm_wna16_m16_cluster_int4_g128_3, 3)
FUSED_GEMM_M16_CLUSTER(gemm_wna16_m16_cluster_int4_g128_4, 4)
