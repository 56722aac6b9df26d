// GEMM for up to 16 rows of bf16 x and INT4 weights in groups of 128.
#include "linear/gemm_wna16_m16.cuh"

using namespace fused;

// With registers for two blocks on an SM.
extern "C" __global__ void __launch_bounds__(GemmM16::THREADS, 2)
    gemm_wna16_m16_int4_g128(const __grid_constant__ GemmM16Params p) {
  gemm_m16(p);
}
