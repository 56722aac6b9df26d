// Products of small matrices in INT4 and INT8 with several rows of x in f32 (gemm_wna16_latency_sm90.cuh).
#include "linear/gemm_wna16_latency_sm90.cuh"

using namespace fused;

template <int GROUPS> using InGroups = GemmInt<Int4Weights<GROUPS>>;
template <int GROUPS> using InGroupsWithZeros = GemmInt<Int4Weights<GROUPS, true>>;

FUSED_GEMM_LATENCY_F32(gemm_wna16_latency_sm90_f32_int4_g128, InGroups<ONE_GROUP>)
FUSED_GEMM_LATENCY_F32(gemm_wna16_latency_sm90_f32_int4_g64, InGroups<TWO_GROUPS>)
FUSED_GEMM_LATENCY_F32(gemm_wna16_latency_sm90_f32_int4_g32, InGroups<FOUR_GROUPS>)
FUSED_GEMM_LATENCY_F32(gemm_wna16_latency_sm90_f32_int4_g128_z, InGroupsWithZeros<ONE_GROUP>)
FUSED_GEMM_LATENCY_F32(gemm_wna16_latency_sm90_f32_int4_g64_z, InGroupsWithZeros<TWO_GROUPS>)
FUSED_GEMM_LATENCY_F32(gemm_wna16_latency_sm90_f32_int4_g32_z, InGroupsWithZeros<FOUR_GROUPS>)
FUSED_GEMM_LATENCY_F32(gemm_wna16_latency_sm90_f32_int8, GemmInt<Int8Weights>)
