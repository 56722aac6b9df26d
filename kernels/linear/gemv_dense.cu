// GEMV with dense weights: 1 to 8 rows of x; by multiply-adds, by tensor cores, and the latency form.
#include "linear/gemv_dense.cuh"
#include "linear/gemv_dense_latency.cuh"

using namespace fused;

// Small products, with weights of x's 16-bit type: k up to 768, 1024 or 1536; one N tile a block, or three; up to 8, 16 or
// 32 rows of x.
#define LATENCY(SIZES, ...)                                                              \
  FUSED_GEMV_LATENCY(gemv_dense_latency_##SIZES##_f16, 750, __half, __VA_ARGS__)         \
  FUSED_GEMV_LATENCY(gemv_dense_latency_##SIZES##_bf16, 800, __nv_bfloat16, __VA_ARGS__)

LATENCY(1024, 4, 1, 1)
LATENCY(1536, 6, 1, 1)
LATENCY(1024_n3, 4, 3, 1)
LATENCY(768_m16, 3, 1, 2)
LATENCY(1536_m16, 6, 1, 2)
LATENCY(768_n3_m16, 3, 3, 2)
LATENCY(768_m32, 3, 1, 4)
LATENCY(768_n3_m32, 3, 3, 4)

// Several rows of x, and weights of its 16-bit type.
FUSED_GEMV_CORE(gemv_dense_mma_f16, 2, MmaCore<__half, 8>)
FUSED_GEMV_CORE_FROM(800, gemv_dense_mma_bf16, 2, MmaCore<__nv_bfloat16, 8>)

// Any types. One row of x has a kernel for weights of which each warp reads a lot.
#define LINEAR(SUFFIX, TYPE)                                     \
  FUSED_GEMV(gemv_dense_m1_##SUFFIX, Dense<TYPE>, 1, 4, 1)       \
  FUSED_GEMV(gemv_dense_m1_large_##SUFFIX, Dense<TYPE>, 1, 2, 4) \
  FUSED_GEMV(gemv_dense_m8_##SUFFIX, Dense<TYPE>, 8, 2, 2)

LINEAR(f32, float)
LINEAR(f16, __half)
LINEAR(bf16, __nv_bfloat16)

// Any shape and alignment.
FUSED_GEMV(gemv_dense_m8_scalar, Scalar, 8, 2, 4)
