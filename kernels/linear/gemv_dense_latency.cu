// Products of small matrices with weights of x's 16-bit type (gemv_dense_latency.cuh).
#include "linear/gemv_dense_latency.cuh"

using namespace fused;

namespace {

// Blocks of an SM that the compiler leaves registers for. Where a block holds many weights, or many rows of x, one has
// them all.
constexpr int blocks_of(int k_blocks, int n_tiles, int m_tiles) {
  return m_tiles == 1 && k_blocks <= 8 && k_blocks * n_tiles <= 12 ? 2 : 1;
}

// Values of K that the warps of a block have in one K block each.
constexpr int K_BLOCK = 32 * GEMV_WARPS;

}  // namespace

// From an architecture on.
#define LATENCY(SUFFIX, FROM, TYPE, K, N_TILES, ROWS)                                                              \
  extern "C" __global__ void __launch_bounds__(GEMV_THREADS, blocks_of(K / K_BLOCK, N_TILES, ROWS / 8))            \
      gemv_dense_latency_##K##_##N_TILES##_##ROWS##_##SUFFIX(const __grid_constant__ Gemv p) {                     \
    if constexpr (COMPILED_FOR >= FROM) gemv_latency<TYPE, K / K_BLOCK, N_TILES, ROWS / 8>(p);                     \
  }
#define LATENCY_F16(...) LATENCY(f16, 750, __half, __VA_ARGS__)
#define LATENCY_BF16(...) LATENCY(bf16, 800, __nv_bfloat16, __VA_ARGS__)
FUSED_GEMV_DENSE_LATENCY(LATENCY_F16)
FUSED_GEMV_DENSE_LATENCY(LATENCY_BF16)
