// The GEMM of gemm_wna16_mma.cuh for INT8 and ternary weights with a scale for each channel, and for INT4.
#include "linear/gemm_wna16_mma.cuh"

using namespace fused;

FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_int8, ByteStage<Int8Weights>, 3, 2048)
FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_ternary_rows, TernaryStage, 8, 512)
FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_int4_g128, Int4Stage<Int4Weights<ONE_GROUP>>, 4, 1088)
FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_int4, Int4Stage<Int4Weights<SOME_GROUPS>>, 4, 1216)
