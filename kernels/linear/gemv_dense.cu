// The dense linear family for few rows of x.
#include "linear/gemv_dense.cuh"
#include "linear/gemv_dense_latency.cuh"

using namespace fused;

// Small products, with weights of x's 16-bit type and k up to 1024 or 1536.
FUSED_SMALL(linear_small_1024_f16, 750, __half, 4)
FUSED_SMALL(linear_small_1024_bf16, 800, __nv_bfloat16, 4)
FUSED_SMALL(linear_small_1536_f16, 750, __half, 6)
FUSED_SMALL(linear_small_1536_bf16, 800, __nv_bfloat16, 6)

// Several rows of x, and weights of its 16-bit type.
FUSED_FEW_ROWS(linear_tensor_f16, 2, Tensor<__half, 8>)
FUSED_FEW_ROWS_FROM(800, linear_tensor_bf16, 2, Tensor<__nv_bfloat16, 8>)

// Any types. One row of x has a kernel for weights of which each warp reads a lot.
#define LINEAR(SUFFIX, TYPE)                                  \
  FUSED_GEMV(linear_m1_##SUFFIX, Dense<TYPE>, 1, 4, 1)        \
  FUSED_GEMV(linear_m1_large_##SUFFIX, Dense<TYPE>, 1, 2, 4)  \
  FUSED_GEMV(linear_m8_##SUFFIX, Dense<TYPE>, 8, 2, 2)

LINEAR(f32, float)
LINEAR(f16, __half)
LINEAR(bf16, __nv_bfloat16)

// Any shape and alignment.
FUSED_GEMV(linear_m8_scalar, Scalar, 8, 2, 4)
