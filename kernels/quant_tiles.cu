// The linear family for some tens of rows of bf16 x and weights in INT8 or INT4 codes, of one format in a
// launch.
#include "code_tiles.cuh"

using namespace fused;

#define TILES(SUFFIX, FORMAT, DEPTH)                               \
  FUSED_CODE_TILES(quant_tiles_16_##SUFFIX, 16, FORMAT, DEPTH, 2)  \
  FUSED_CODE_TILES(quant_tiles_64_##SUFFIX, 8, FORMAT, 1, 8)

TILES(int8, Int8Rows, 1)
TILES(int4_g128, Int4Rows<ONE_GROUP>, 2)
TILES(int4, Int4Rows<SOME_GROUPS>, 2)
