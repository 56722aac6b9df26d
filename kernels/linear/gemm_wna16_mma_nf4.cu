// The GEMM of gemm_wna16_mma.cuh for NF4 weights.
#include "linear/gemm_wna16_mma.cuh"

using namespace fused;

FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_nf4, Nf4Stage, 4, 1152)
