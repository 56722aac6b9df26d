// The attention step of decoding and a GEMV that does not depend on it in one launch: where residuals are parallel,
// the first half of the MLP. The GEMV's weights keep the memory busy while attention, which has too few blocks, takes
// its time.
#include "attention/decode.cuh"
#include "linear/gemv_dense_pipelined.cuh"

using namespace fused;

template <class Core, typename T> __device__ __forceinline__ void decode_with_gemv(const DecodeWithGemvParams& p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  const uint32_t x = p.blocks[0], y = p.blocks[1], product = gridDim.x - x * y * p.blocks[2];
  if (blockIdx.x < product) {
    gemv_dense_pipelined<T, false>(p.product, Second{}, blockIdx.x, product, p.ready, Fetch{});
  } else {
    const uint32_t block = blockIdx.x - product;
    decode<Core>(p.attention, {block % x, block / x % y, block / (x * y), x, y});
  }
#endif
}

// Two blocks on an SM: one of each kind.
#define WITH_GEMV(D, SUFFIX, TYPE)                                                               \
  extern "C" __global__ void __launch_bounds__(GEMV_THREADS, 2)                                  \
      flash_decoding_with_gemv_d##D##_##SUFFIX(const __grid_constant__ DecodeWithGemvParams p) { \
    decode_with_gemv<TensorCore<TYPE, D, GEMV_WARPS, DECODE_WITH_GEMV_KEYS / 16>, TYPE>(p);      \
  }
#define WITH_GEMV_DIM(D)    \
  WITH_GEMV(D, f16, __half) \
  WITH_GEMV(D, bf16, __nv_bfloat16)

FUSED_DECODE_WITH_GEMV(WITH_GEMV_DIM)
