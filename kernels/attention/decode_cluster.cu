// The attention step of decoding in clusters of blocks (decode_cluster.cuh): over a cache of slots, and over pages.
#include "attention/decode_cluster.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

using namespace fused;

// Blocks of an SM that the compiler leaves registers for.
constexpr int blocks_of(int d) { return d == 64 ? 4 : 3; }

#define DECODING(NAME, X, C, D, PAGED)                                                                 \
  extern "C" __global__ void __launch_bounds__(DECODING_CLUSTER_WARPS* WARP, blocks_of(D))              \
      flash_decoding_cluster_##NAME(const __grid_constant__ fused::DecodingParams p) {                 \
    decode_in_cluster<X, C, D, PAGED>(p);                                                              \
  }

// Of the projection's type, and over the cache's.
#define DECODING_DIM(D)                                                   \
  DECODING(d##D##_f16, __half, __half, D, false)                          \
  DECODING(d##D##_bf16, __nv_bfloat16, __nv_bfloat16, D, false)           \
  DECODING(d##D##_f32_f16, float, __half, D, false)                       \
  DECODING(d##D##_f32_bf16, float, __nv_bfloat16, D, false)               \
  DECODING(paged_d##D##_f16, __half, __half, D, true)                     \
  DECODING(paged_d##D##_bf16, __nv_bfloat16, __nv_bfloat16, D, true)      \
  DECODING(paged_d##D##_f32_f16, float, __half, D, true)                  \
  DECODING(paged_d##D##_f32_bf16, float, __nv_bfloat16, D, true)

FUSED_DECODING_CLUSTER(DECODING_DIM)

#endif
