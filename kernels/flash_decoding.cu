// The attention step of decoding in one launch: flash_decoding.cuh for each head dimension.
#include "flash_decoding.cuh"

using namespace fused;

// From an architecture on.
#define DECODING(NAME, FROM, BLOCKS, ...)                                                  \
  extern "C" __global__ void __launch_bounds__(__VA_ARGS__::WARPS* WARP, BLOCKS)           \
      flash_decoding_##NAME(const __grid_constant__ fused::Decoding p) {                   \
    if constexpr (COMPILED_FOR >= FROM)                                                    \
      decode<__VA_ARGS__>(p, {blockIdx.x, blockIdx.y, blockIdx.z, gridDim.x, gridDim.y});  \
  }

#define DECODING_DIM(D, W, SUB, BLOCKS)                                      \
  DECODING(d##D##_f16, 750, BLOCKS, TensorCore<__half, D, W, SUB>)           \
  DECODING(d##D##_bf16, 800, BLOCKS, TensorCore<__nv_bfloat16, D, W, SUB>)

DECODING_DIM(64, 8, 2, 1)
DECODING_DIM(80, 8, 1, 2)
DECODING_DIM(96, 8, 1, 2)
DECODING_DIM(128, 8, 1, 1)
DECODING_DIM(256, 8, 1, 1)
DECODING(any64, 750, 1, LaneCore<8, 8>)
DECODING(any128, 750, 1, LaneCore<16, 8>)
DECODING(any256, 750, 1, LaneCore<32, 4>)
