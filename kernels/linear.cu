// The dense linear family for few rows of x.
#include "dense.cuh"
#include "tensor.cuh"

using namespace fused;

// x and weights of one 16-bit type. Small products rehearse; large ones have more on the way.
FUSED_FEW_ROWS(linear_small_f16, 2, Tensor<__half, 4, true>)
FUSED_FEW_ROWS(linear_small_bf16, 2, Tensor<__nv_bfloat16, 4, true>)
FUSED_FEW_ROWS(linear_large_f16, 2, Tensor<__half, 8, false>)
FUSED_FEW_ROWS(linear_large_bf16, 2, Tensor<__nv_bfloat16, 8, false>)

// Any types.
#define LINEAR(SUFFIX, TYPE)                              \
  FUSED_GEMV(linear_m1_##SUFFIX, Dense<TYPE>, 1, 4, 1)    \
  FUSED_GEMV(linear_m4_##SUFFIX, Dense<TYPE>, 4, 2, 2)    \
  FUSED_GEMV(linear_m8_##SUFFIX, Dense<TYPE>, 8, 2, 2)

LINEAR(f32, float)
LINEAR(f16, __half)
LINEAR(bf16, __nv_bfloat16)

// Any shape and alignment.
FUSED_GEMV(linear_m8_scalar, Scalar, 8, 2, 4)
