// GEMM for up to 16 rows of x on Hopper: GGUF blocks.
#include "linear/gemm_wna16_skinny_sm90.cuh"

using namespace fused;

FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_gguf_q4_0, StreamedGguf<Q4_0>)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_gguf_q4_1, StreamedGguf<Q4_1>)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_gguf_q5_0, StreamedGguf<Q5_0>)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_gguf_q5_1, StreamedGguf<Q5_1>)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_gguf_q8_0, StreamedGguf<Q8_0>)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_gguf_q2_k, StreamedGguf<Q2_K>)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_gguf_q3_k, StreamedGguf<Q3_K>)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_gguf_q4_k, StreamedGguf<Q4_K>)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_gguf_q5_k, StreamedGguf<Q5_K>)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_gguf_q6_k, StreamedGguf<Q6_K>)
