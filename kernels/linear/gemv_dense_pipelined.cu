// GEMV for one row of x and large dense weights; `pair`: two matrices side by side along K, whose products are
// summed.
#include "linear/gemv_dense_pipelined.cuh"

using namespace fused;

#define PIPELINED(NAME, TYPE, PAIR)                                                                                   \
  extern "C" __global__ void __launch_bounds__(GEMV_THREADS, 2) NAME(const __grid_constant__ GemvPipelinedParams p) { \
    gemv_dense_pipelined<TYPE, PAIR>(p.product, p.second, blockIdx.x, gridDim.x, false, p.fetch);                     \
  }

PIPELINED(gemv_dense_pipelined_f16, __half, false)
PIPELINED(gemv_dense_pipelined_bf16, __nv_bfloat16, false)
PIPELINED(gemv_dense_pipelined_pair_f16, __half, true)
PIPELINED(gemv_dense_pipelined_pair_bf16, __nv_bfloat16, true)
