// The GEMM of gemm_wna16_sm90.cuh for INT4 in groups of 128, 64 and 32, without and with zero points.
// Compiled for sm_90a alone: the host launches it on no other architecture.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "linear/gemm_wna16_sm90.cuh"

using namespace fused;

template <int GROUPS> using InGroups = GemmInt<Int4Weights<GROUPS>>;
template <int GROUPS> using InGroupsWithZeros = GemmInt<Int4Weights<GROUPS, true>>;

FUSED_GEMM_WNA16_SM90(gemm_wna16_sm90_int4_g128, InGroups<ONE_GROUP>)
FUSED_GEMM_WNA16_SM90(gemm_wna16_sm90_int4_g64, InGroups<TWO_GROUPS>)
FUSED_GEMM_WNA16_SM90(gemm_wna16_sm90_int4_g32, InGroups<FOUR_GROUPS>)
FUSED_GEMM_WNA16_SM90(gemm_wna16_sm90_int4_g128_z, InGroupsWithZeros<ONE_GROUP>)
FUSED_GEMM_WNA16_SM90(gemm_wna16_sm90_int4_g64_z, InGroupsWithZeros<TWO_GROUPS>)
FUSED_GEMM_WNA16_SM90(gemm_wna16_sm90_int4_g32_z, InGroupsWithZeros<FOUR_GROUPS>)

#endif
