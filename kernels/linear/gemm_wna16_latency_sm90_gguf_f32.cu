// Products of small matrices in GGUF blocks with several rows of x in f32 (gemm_wna16_latency_sm90.cuh).
#include "linear/gemm_wna16_latency_sm90.cuh"

using namespace fused;

FUSED_GEMM_LATENCY_F32(gemm_wna16_latency_sm90_gguf_f32_q4_0, GemmGguf<Q4_0>)
FUSED_GEMM_LATENCY_F32(gemm_wna16_latency_sm90_gguf_f32_q4_1, GemmGguf<Q4_1>)
FUSED_GEMM_LATENCY_F32(gemm_wna16_latency_sm90_gguf_f32_q5_0, GemmGguf<Q5_0>)
FUSED_GEMM_LATENCY_F32(gemm_wna16_latency_sm90_gguf_f32_q5_1, GemmGguf<Q5_1>)
FUSED_GEMM_LATENCY_F32(gemm_wna16_latency_sm90_gguf_f32_q8_0, GemmGguf<Q8_0>)
FUSED_GEMM_LATENCY_F32(gemm_wna16_latency_sm90_gguf_f32_q2_k, GemmGguf<Q2_K>)
FUSED_GEMM_LATENCY_F32(gemm_wna16_latency_sm90_gguf_f32_q3_k, GemmGguf<Q3_K>)
FUSED_GEMM_LATENCY_F32(gemm_wna16_latency_sm90_gguf_f32_q4_k, GemmGguf<Q4_K>)
FUSED_GEMM_LATENCY_F32(gemm_wna16_latency_sm90_gguf_f32_q5_k, GemmGguf<Q5_K>)
FUSED_GEMM_LATENCY_F32(gemm_wna16_latency_sm90_gguf_f32_q6_k, GemmGguf<Q6_K>)
