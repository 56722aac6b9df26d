// The attention step of decoding over codes in pages (decode.cuh): a kernel for each head dimension and format.
#include "attention/decode.cuh"

using namespace fused;

#define DECODING(NAME, BLOCKS, ...)                                                       \
  extern "C" __global__ void __launch_bounds__(__VA_ARGS__::WARPS* WARP, BLOCKS)          \
      flash_decoding_paged_##NAME(const __grid_constant__ fused::DecodingParams p) {      \
    decode<__VA_ARGS__>(p, {blockIdx.x, blockIdx.y, blockIdx.z, gridDim.x, gridDim.y});   \
  }

// Blocks of an SM by head dimension.
constexpr int blocks_of(int d) { return d <= 128 ? 4 : 2; }

constexpr int SUB = DECODING_PAGED_KEYS / 16;

#define DECODING_DIM(D, KEYS)                                                                       \
  DECODING(d##D##_fp8, blocks_of(D), TensorCore<CodeFp8, D, DECODING_PAGED_WARPS, SUB, true>)       \
  DECODING(d##D##_int8, blocks_of(D), TensorCore<CodeInt8, D, DECODING_PAGED_WARPS, SUB, true>)

FUSED_DECODING_MMA(DECODING_DIM)
