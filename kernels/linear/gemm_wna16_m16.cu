// The linear family for up to 16 rows of bf16 x and weights in INT8 or INT4 codes, of one format in a launch.
#include "linear/gemm_wna16_m16_cluster.cuh"
#include "linear/gemm_wna16_m16_tma.cuh"

using namespace fused;

FUSED_CODE_SLICES(quant_slices_int8, Int8Rows)
FUSED_CODE_SLICES(quant_slices_int4_g128, Int4Rows<ONE_GROUP>)
FUSED_CODE_SLICES(quant_slices_int4, Int4Rows<SOME_GROUPS>)
FUSED_CODE_LONG(quant_slices_int4_g128_long)
FUSED_CODE_SHORT(quant_slices_int4_g128_short_1, 1)
FUSED_CODE_SHORT(quant_slices_int4_g128_short_2, 2)
FUSED_CODE_SHORT(quant_slices_int4_g128_short_3, 3)
FUSED_CODE_SHORT(quant_slices_int4_g128_short_4, 4)
