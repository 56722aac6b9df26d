// The linear family for some tens of rows of bf16 x and weights in INT8 or INT4 codes, of one format in a
// launch.
#include "linear/gemm_wna16_m64.cuh"

using namespace fused;

FUSED_CODE_TILES(quant_tiles_int8, Int8Rows)
FUSED_CODE_TILES(quant_tiles_int4_g128, Int4Rows<ONE_GROUP>)
FUSED_CODE_TILES(quant_tiles_int4, Int4Rows<SOME_GROUPS>)
