// GEMV for small matrices in GGUF blocks: 8 output channels of a block and K up to 2048, or 24 and up to 1024.
#include "linear/gemv_gguf_latency.cuh"

using namespace fused;

#define SMALL(TYPE_SUFFIX, TYPE, SUFFIX, FORMAT)                                                     \
  FUSED_GEMV_GGUF_LATENCY(gemv_gguf_latency_##TYPE_SUFFIX##_##SUFFIX, TYPE, FORMAT, 1, 16)           \
  FUSED_GEMV_GGUF_LATENCY(gemv_gguf_latency_wide_##TYPE_SUFFIX##_##SUFFIX, TYPE, FORMAT, 3, 8)
#define SMALL_OF_EACH(SUFFIX, FORMAT)          \
  SMALL(f32, float, SUFFIX, FORMAT)            \
  SMALL(f16, __half, SUFFIX, FORMAT)           \
  SMALL(bf16, __nv_bfloat16, SUFFIX, FORMAT)

SMALL_OF_EACH(q4_0, Q4_0)
SMALL_OF_EACH(q4_1, Q4_1)
SMALL_OF_EACH(q5_0, Q5_0)
SMALL_OF_EACH(q5_1, Q5_1)
SMALL_OF_EACH(q8_0, Q8_0)
SMALL_OF_EACH(q2_k, Q2_K)
SMALL_OF_EACH(q3_k, Q3_K)
SMALL_OF_EACH(q4_k, Q4_K)
SMALL_OF_EACH(q5_k, Q5_K)
SMALL_OF_EACH(q6_k, Q6_K)
