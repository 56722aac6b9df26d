// The GEMM of gemm_w8a16_sm90.cuh for up to 32 and 64 rows of x.
// Compiled for sm_90a alone: the host launches it on no other architecture.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "linear/gemm_w8a16_sm90.cuh"

using namespace fused;

#define W8A16(TOKENS, STAGES)                                                                              \
  extern "C" __global__ void __launch_bounds__(W8A16_THREADS, 2)                                           \
      gemm_w8a16_sm90_##TOKENS(const __grid_constant__ fused::GemmW8A16Params p) {                         \
    fused::gemm_w8a16<fused::W8A16Shape<TOKENS, STAGES>>(p);                                               \
  }

FUSED_W8A16(W8A16)

#endif
