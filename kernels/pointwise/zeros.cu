// Zeros for the counters of a kernel in a recording: a graph cannot hold a memset of memory that is already freed when
// the graph is instantiated.
#include "abi/pointwise.cuh"
#include "common/base.cuh"

using namespace fused;

extern "C" __global__ void __launch_bounds__(ZEROS_THREADS) zeros(const __grid_constant__ ZerosParams p) {
  const uint32_t i = blockIdx.x * ZEROS_THREADS + threadIdx.x;
  pdl_launch();
  pdl_wait();
  if (i < p.count) p.at[i] = 0;
}
