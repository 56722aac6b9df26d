// GEMV with packed INT8, FP8, NVFP4, NF4, INT4 or ternary weights: 1 to 4 rows of x in a launch, weights of one format.
#include "linear/gemv_wna16.cuh"

using namespace fused;

FUSED_GEMV_CORE(gemv_wna16_int8, 2, PackedCore<Int8Weights>)
FUSED_GEMV_CORE(gemv_wna16_fp8, 2, PackedCore<Fp8Weights<FP8_ROWS>>)
FUSED_GEMV_CORE(gemv_wna16_fp8_block, 2, PackedCore<Fp8Weights<FP8_BLOCKS>>)
FUSED_GEMV_CORE(gemv_wna16_nvfp4, 2, PackedCore<Nvfp4Weights>)
FUSED_GEMV_CORE(gemv_wna16_nf4, 2, PackedCore<Nf4Weights>)
FUSED_GEMV_CORE(gemv_wna16_int4_g128, 2, PackedCore<Int4Weights<ONE_GROUP>>)
FUSED_GEMV_CORE(gemv_wna16_int4_g64, 2, PackedCore<Int4Weights<TWO_GROUPS>>)
FUSED_GEMV_CORE(gemv_wna16_int4_g32, 2, PackedCore<Int4Weights<FOUR_GROUPS>>)
FUSED_GEMV_CORE(gemv_wna16_int4_g128_z, 2, PackedCore<Int4Weights<ONE_GROUP, true>>)
FUSED_GEMV_CORE(gemv_wna16_int4_g64_z, 2, PackedCore<Int4Weights<TWO_GROUPS, true>>)
FUSED_GEMV_CORE(gemv_wna16_int4_g32_z, 2, PackedCore<Int4Weights<FOUR_GROUPS, true>>)
FUSED_GEMV_CORE(gemv_wna16_ternary_rows, 2, PackedCore<TernaryWeights<ROW_SCALES>>)
FUSED_GEMV_CORE(gemv_wna16_ternary_g128, 2, PackedCore<TernaryWeights<ONE_GROUP>>)
FUSED_GEMV_CORE(gemv_wna16_ternary, 2, PackedCore<TernaryWeights<SOME_GROUPS>>)
