// What kernels over rows of logits share: a logit of any dtype, and the best of a block's.
#pragma once
#include "abi/pointwise.cuh"
#include "common/base.cuh"

namespace fused {

// Warps of a block of SAMPLE_THREADS.
constexpr int WARPS = SAMPLE_THREADS / WARP;

__device__ __forceinline__ float logit(const void* logits, int dtype, uint64_t i) {
  switch (dtype) {
    case 0: return static_cast<const float*>(logits)[i];
    case 1: return to_float(static_cast<const __half*>(logits)[i]);
    default: return to_float(static_cast<const __nv_bfloat16*>(logits)[i]);
  }
}

struct Best {
  float score;
  uint32_t token;
};

// The higher score; of equal ones the lower token. What is no number never wins.
__device__ __forceinline__ Best better(Best a, Best b) {
  const bool second = b.score > a.score || (b.score == a.score && b.token < a.token);
  return second ? b : a;
}

__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
  for (int offset = WARP / 2; offset > 0; offset /= 2) {
    best = better(best, {__shfl_xor_sync(FULL, best.score, offset), __shfl_xor_sync(FULL, best.token, offset)});
  }
  return best;
}

// The best of a block, in all threads of its first warp.
__device__ __forceinline__ Best block_best(Best best, Best* scratch) {
  static_assert(WARPS == WARP, "a lane for each warp");
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  best = warp_best(best);
  if (lane == 0) scratch[warp] = best;
  __syncthreads();
  return warp == 0 ? warp_best(scratch[lane]) : best;
}

}  // namespace fused
