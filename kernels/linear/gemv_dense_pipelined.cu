// One row of x and many weights of its 16-bit type; `pair`: two matrices side by side, whose products are
// summed.
#include "linear/gemv_dense_pipelined.cuh"

using namespace fused;

#define STREAM(NAME, TYPE, PAIR)                                                                               \
  extern "C" __global__ void __launch_bounds__(GEMV_THREADS, 2) NAME(const __grid_constant__ StreamParams p) { \
    stream<TYPE, PAIR>(p.product, p.second, blockIdx.x, gridDim.x, false, p.fetch);                            \
  }

STREAM(linear_stream_f16, __half, false)
STREAM(linear_stream_bf16, __nv_bfloat16, false)
STREAM(linear_stream_pair_f16, __half, true)
STREAM(linear_stream_pair_bf16, __nv_bfloat16, true)
