// GEMV for ternary weights and one row of x, all weights in shared memory before x arrives: x in 8 bits, and in 16.
#include "linear/gemv_ternary_latency.cuh"

#define LATENCY(SUFFIX, TYPE)                                        \
  FUSED_GEMV_TERNARY_LATENCY(gemv_ternary_latency_8_##SUFFIX, TYPE, 1) \
  FUSED_GEMV_TERNARY_LATENCY(gemv_ternary_latency_16_##SUFFIX, TYPE, 2)
LATENCY(f32, float)
LATENCY(f16, __half)
LATENCY(bf16, __nv_bfloat16)
