// The dense linear family for few rows of x.
#include "dense.cuh"

using namespace fused;

#define LINEAR(SUFFIX, TYPE)                               \
  FUSED_GEMV(linear_m1_r1_##SUFFIX, Dense<TYPE>, 1, 1, 4)  \
  FUSED_GEMV(linear_m1_r2_##SUFFIX, Dense<TYPE>, 1, 2, 4)  \
  FUSED_GEMV(linear_m2_##SUFFIX, Dense<TYPE>, 2, 2, 4)     \
  FUSED_GEMV(linear_m4_##SUFFIX, Dense<TYPE>, 4, 4, 1)     \
  FUSED_GEMV(linear_m8_##SUFFIX, Dense<TYPE>, 8, 4, 1)

LINEAR(f32, float)
LINEAR(f16, __half)
LINEAR(bf16, __nv_bfloat16)
FUSED_GEMV(linear_m8_scalar, Scalar, 8, 4, 2)
