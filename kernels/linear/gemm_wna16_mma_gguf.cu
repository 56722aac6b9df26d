// The GEMM of gemm_wna16_mma.cuh for weights in GGUF blocks.
#include "linear/gemm_wna16_mma.cuh"

using namespace fused;

FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_gguf_q4_0, GgufStage<Q4_0>, 4, 1152)
FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_gguf_q4_1, GgufStage<Q4_1>, 4, 1280)
FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_gguf_q5_0, GgufStage<Q5_0>, 4, 1408)
FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_gguf_q5_1, GgufStage<Q5_1>, 4, 1536)
FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_gguf_q8_0, GgufStage<Q8_0>, 3, 2176)
FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_gguf_q2_k, GgufStage<Q2_K>, 8, 704)
FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_gguf_q3_k, GgufStage<Q3_K>, 4, 960)
FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_gguf_q4_k, GgufStage<Q4_K>, 4, 1216)
FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_gguf_q5_k, GgufStage<Q5_K>, 4, 1472)
FUSED_GEMM_WNA16_MMA(gemm_wna16_mma_gguf_q6_k, GgufStage<Q6_K>, 3, 1728)
