// GEMV for ternary weights and one row of x, or a few, all weights in shared memory before x arrives: x in 8 bits, and in 16.
#include "linear/gemv_ternary_latency.cuh"

#define LATENCY(SUFFIX, TYPE)                                                      \
  FUSED_GEMV_TERNARY_LATENCY(gemv_ternary_latency_8_##SUFFIX, TYPE, 1, false)      \
  FUSED_GEMV_TERNARY_LATENCY(gemv_ternary_latency_16_##SUFFIX, TYPE, 2, false)     \
  FUSED_GEMV_TERNARY_LATENCY(gemv_ternary_latency_rows_8_##SUFFIX, TYPE, 1, true)  \
  FUSED_GEMV_TERNARY_LATENCY(gemv_ternary_latency_rows_16_##SUFFIX, TYPE, 2, true)
LATENCY(f32, float)
LATENCY(f16, __half)
LATENCY(bf16, __nv_bfloat16)
