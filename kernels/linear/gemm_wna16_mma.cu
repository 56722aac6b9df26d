// The GEMM of gemm_wna16_mma.cuh for INT8 and ternary weights with a scale for each channel.
#include "linear/gemm_wna16_mma.cuh"

using namespace fused;

FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_int8, ByteStage<Int8Weights>, 3, 2048)
FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_ternary_rows, TernaryStage, 8, 512)
