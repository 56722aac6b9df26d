// W8A8 GEMM on Hopper (gemm_w8a8_sm90.cuh) for INT8.
// Empty for other architectures, which never run it.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "linear/gemm_w8a8_sm90.cuh"

using namespace fused;

#define W8A8(N, CLUSTER, IN_FLIGHT)                                                     \
  static_assert(Tiles<N, CLUSTER, Int8Sums>::STAGES == IN_FLIGHT);                      \
  extern "C" __global__ void __launch_bounds__(Tiles<N, CLUSTER, Int8Sums>::THREADS, 1) \
      gemm_w8a8_sm90_##N##_##CLUSTER(const __grid_constant__ W8A8Sm90Params p) {        \
    w8a8<N, CLUSTER, Int8Sums>(p);                                                      \
  }

FUSED_W8A8_SM90(W8A8)

#endif
