// The GEMM of gemm_wna16_mma.cuh for INT4 in groups of 128, 64 and 32, without and with zero points.
#include "linear/gemm_wna16_mma.cuh"

using namespace fused;

template <int GROUPS> using InGroups = Int4Stage<Int4Weights<GROUPS>>;
template <int GROUPS> using InGroupsWithZeros = Int4Stage<Int4Weights<GROUPS, true>>;

FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_int4_g128, InGroups<ONE_GROUP>, 4, 1088)
FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_int4_g64, InGroups<TWO_GROUPS>, 4, 1088)
FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_int4_g32, InGroups<FOUR_GROUPS>, 4, 1152)
FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_int4_g128_z, InGroupsWithZeros<ONE_GROUP>, 4, 1152)
FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_int4_g64_z, InGroupsWithZeros<TWO_GROUPS>, 4, 1152)
FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_int4_g32_z, InGroupsWithZeros<FOUR_GROUPS>, 4, 1216)
