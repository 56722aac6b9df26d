// GEMV with dense weights: 1 to 8 rows of x; by multiply-adds, and by tensor cores.
#include "linear/gemv_dense.cuh"
#include "linear/gemv_dense_mma.cuh"

using namespace fused;

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
