// GEMV with GGUF blocks: 1 to 4 rows of x in a launch, weights of one format.
#include "linear/gemv_gguf.cuh"

using namespace fused;

FUSED_GEMV_CORE(gemv_gguf_q4_0, 2, GgufCore<Q4_0, 2>)
FUSED_GEMV_CORE(gemv_gguf_q4_1, 2, GgufCore<Q4_1, 2>)
FUSED_GEMV_CORE(gemv_gguf_q5_0, 2, GgufCore<Q5_0, 2>)
FUSED_GEMV_CORE(gemv_gguf_q5_1, 2, GgufCore<Q5_1, 2>)
FUSED_GEMV_CORE(gemv_gguf_q8_0, 2, GgufCore<Q8_0, 1>)
FUSED_GEMV_CORE(gemv_gguf_q2_k, 2, GgufCore<Q2_K, 2>)
FUSED_GEMV_CORE(gemv_gguf_q3_k, 2, GgufCore<Q3_K, 2>)
FUSED_GEMV_CORE(gemv_gguf_q4_k, 2, GgufCore<Q4_K, 2>)
FUSED_GEMV_CORE(gemv_gguf_q5_k, 2, GgufCore<Q5_K, 2>)
FUSED_GEMV_CORE(gemv_gguf_q6_k, 2, GgufCore<Q6_K, 1>)
