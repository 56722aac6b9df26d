// The products for queries, keys and values, and the attention step of decoding behind them, in one launch
// (decode_with_qkv.cuh).
#include "attention/decode_with_qkv.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

using namespace fused;

namespace {

// Values of K that the warps of a block have in one K block each.
constexpr int K_BLOCK = 32 * DECODING_CLUSTER_WARPS;

}  // namespace

#define WITH_QKV(NAME, T, D, GROUP, K, PAGED)                                              \
  extern "C" __global__ void __launch_bounds__(DECODING_CLUSTER_WARPS* WARP, 2)            \
      flash_decoding_with_qkv_##NAME(const __grid_constant__ fused::DecodeWithQkvParams p) { \
    decode_with_qkv<T, D, GROUP, K / K_BLOCK, PAGED>(p);                                   \
  }

#define WITH_QKV_FORM(D, GROUP, K)                                                     \
  WITH_QKV(d##D##_##GROUP##_##K##_f16, __half, D, GROUP, K, false)                     \
  WITH_QKV(d##D##_##GROUP##_##K##_bf16, __nv_bfloat16, D, GROUP, K, false)             \
  WITH_QKV(paged_d##D##_##GROUP##_##K##_f16, __half, D, GROUP, K, true)                \
  WITH_QKV(paged_d##D##_##GROUP##_##K##_bf16, __nv_bfloat16, D, GROUP, K, true)

FUSED_DECODE_WITH_QKV(WITH_QKV_FORM)

#endif
