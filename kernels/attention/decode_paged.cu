// The attention step of decoding over keys and values in pages (decode.cuh): a kernel for each head dimension.
#include "attention/decode.cuh"

using namespace fused;

// From an architecture on.
#define DECODING(NAME, FROM, BLOCKS, ...)                                                 \
  extern "C" __global__ void __launch_bounds__(__VA_ARGS__::WARPS* WARP, BLOCKS)          \
      flash_decoding_paged_##NAME(const __grid_constant__ fused::DecodingParams p) {      \
    if constexpr (COMPILED_FOR >= FROM)                                                   \
      decode<__VA_ARGS__>(p, {blockIdx.x, blockIdx.y, blockIdx.z, gridDim.x, gridDim.y}); \
  }

// Blocks of an SM by head dimension.
constexpr int blocks_of(int d) { return d <= 80 ? 4 : d <= 128 ? 3 : 2; }

constexpr int SUB = DECODING_PAGED_KEYS / 16;

#define DECODING_DIM(D, KEYS)                                                                      \
  DECODING(d##D##_f16, 750, blocks_of(D), TensorCore<__half, D, DECODING_PAGED_WARPS, SUB, true>)  \
  DECODING(d##D##_bf16, 800, blocks_of(D), TensorCore<__nv_bfloat16, D, DECODING_PAGED_WARPS, SUB, true>)
#define DECODING_ANY(D, HEADS, WARPS)                                   \
  static_assert(LaneCore<D / 8, WARPS, true>::MAX_CORE_HEADS == HEADS); \
  DECODING(any##D, 750, 1, LaneCore<D / 8, WARPS, true>)

FUSED_DECODING_MMA(DECODING_DIM)
FUSED_DECODING_LANES(DECODING_ANY)
