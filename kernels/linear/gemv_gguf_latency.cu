// GEMV for small matrices in GGUF blocks: 8 output channels of a block and K up to 2048, or 24 and up to 1024.
#include "linear/gemv_gguf_latency.cuh"

using namespace fused;

#define SMALL(SUFFIX, FORMAT)                                        \
  FUSED_GEMV_GGUF_LATENCY(gemv_gguf_latency_##SUFFIX, FORMAT, 1, 16) \
  FUSED_GEMV_GGUF_LATENCY(gemv_gguf_latency_wide_##SUFFIX, FORMAT, 3, 8)

SMALL(q4_0, Q4_0)
SMALL(q4_1, Q4_1)
SMALL(q5_0, Q5_0)
SMALL(q5_1, Q5_1)
SMALL(q8_0, Q8_0)
SMALL(q4_k, Q4_K)
SMALL(q5_k, Q5_K)
SMALL(q6_k, Q6_K)
