// The attention step of decoding for many sequences over keys and values in pages (decode_pipelined.cuh): a kernel for
// each head dimension.
#include "attention/decode_pipelined.cuh"

using namespace fused;

#define DECODING(NAME, TYPE, D, KEYS, STAGES, WARPS)                                                        \
  extern "C" __global__ void __launch_bounds__(WARPS * WARP)                                                \
      flash_decoding_pipelined_##NAME(const __grid_constant__ fused::DecodingParams p) {                    \
    if constexpr (COMPILED_FOR >= 800) {                                                                    \
      extern __shared__ uint4 memory[];                                                                     \
      pdl_launch();                                                                                         \
      char* bytes = reinterpret_cast<char*>(memory);                                                        \
      PipelinedDecoding<TYPE, D, KEYS / 16, STAGES, WARPS>(                                                 \
          p, {blockIdx.z, blockIdx.x, blockIdx.y, gridDim.z, gridDim.x}, bytes).decode(bytes);              \
    }                                                                                                       \
  }

#define DECODING_DIM(D, KEYS, STAGES, WARPS)                     \
  DECODING(d##D##_f16, __half, D, KEYS, STAGES, WARPS)           \
  DECODING(d##D##_bf16, __nv_bfloat16, D, KEYS, STAGES, WARPS)

FUSED_DECODING_PIPELINED(DECODING_DIM)
