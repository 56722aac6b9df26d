// Rows that one warp or one block holds in registers: what the norms and the quantization of rows share.
//
// A row is read once and written once, by 16-byte accesses where its width and the addresses allow them. What does
// not fit into the registers (rows above 64 KB, or above 8192 elements one by one) is read again, most likely from
// the L2 cache.
#pragma once

#include "abi/pointwise.cuh"
#include "common/base.cuh"

namespace fused {

// Packs of N elements that a thread keeps: 64 bytes in 16-byte packs, fewer one by one.
template <typename T, int N> constexpr int KEPT = N > 1 ? KEPT_PACKS : KEPT_ELEMENTS;

// The threads of one row.
struct RowGroup {
  uint64_t row;
  uint32_t thread, threads;

  __device__ __forceinline__ explicit RowGroup(uint32_t warps) {
    const bool single = warps == 1;
    row = single ? blockIdx.x * uint64_t(ROWS_OF_BLOCK) + threadIdx.x / WARP : blockIdx.x;
    thread = single ? threadIdx.x % WARP : threadIdx.x;
    threads = warps * WARP;
  }

  // The sum over the row, in each of its threads. `scratch` has MAX_WARPS floats that no other
  // sum of the kernel uses.
  __device__ __forceinline__ float sum(float v, float* scratch) const {
    v = warp_sum(v);
    if (threads == WARP) return v;
    if (thread % WARP == 0) scratch[thread / WARP] = v;
    __syncthreads();
    const uint32_t lane = thread % WARP;
    return warp_sum(lane < threads / WARP ? scratch[lane] : 0.f);
  }
};

// Mean and 1 / sqrt(variance + eps) of a row.
struct Spread {
  float mean, factor;
};

// Of the row whose values `each_value` calls its argument with. The mean is corrected and the variance
// taken in a second pass, so that a large common offset costs no precision.
template <class Each>
__device__ __forceinline__ Spread spread(const RowGroup& g, uint32_t width, float eps, Each each_value,
                                         float (&scratch)[3][MAX_WARPS]) {
  float sum = 0.f;
  each_value([&](float v) { sum += v; });
  const float rough = g.sum(sum, scratch[0]) / width;
  float rest = 0.f, squares = 0.f;
  each_value([&](float v) {
    const float d = v - rough;
    rest += d;
    squares = fmaf(d, d, squares);
  });
  const float shift = g.sum(rest, scratch[1]) / width;
  const float variance = fmaxf(g.sum(squares, scratch[2]) / width - shift * shift, 0.f);
  return {rough + shift, 1.f / sqrtf(variance + eps)};
}

// Activations that are read once. Unlike the path for weights this one sees what preceding kernels
// of a dependent launch wrote.
template <typename T, int N> __device__ __forceinline__ Pack<T, N> load_stream(const T* p) {
  if constexpr (sizeof(T) * N == 16) {
    Pack<T, N> v;
    uint4& bits = reinterpret_cast<uint4&>(v);
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(p)
                 : "memory");
    return v;
  } else {
    return load<T, N>(p);
  }
}

}  // namespace fused
