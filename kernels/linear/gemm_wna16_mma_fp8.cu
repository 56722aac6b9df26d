// The GEMM of gemm_wna16_mma.cuh for FP8 weights with a scale for each channel, or for each block.
#include "linear/gemm_wna16_mma.cuh"

using namespace fused;

FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_fp8, ByteStage<Fp8Weights<FP8_ROWS>>, 3, 2048)
FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_fp8_block, ByteStage<Fp8Weights<FP8_BLOCKS>>, 3, 2112)
