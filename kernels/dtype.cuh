// Element types that are known when a kernel runs: what touches a row once (staging it, finishing
// an output) branches on them, so that kernels multiply by the format of the weights alone.
#pragma once

#include "common.cuh"

namespace fused {

// As candle's `DType` is numbered by `dtype_index`.
constexpr int F32 = 0, F16 = 1, BF16 = 2;

// The value as it is after being stored as `dtype`.
__device__ __forceinline__ float rounded_to(int dtype, float v) {
  if (dtype == BF16) return rounded<__nv_bfloat16>(v);
  return dtype == F16 ? rounded<__half>(v) : v;
}

__device__ __forceinline__ float read(const void* p, int dtype, uint64_t i) {
  if (dtype == BF16) return to_float(static_cast<const __nv_bfloat16*>(p)[i]);
  if (dtype == F16) return to_float(static_cast<const __half*>(p)[i]);
  return static_cast<const float*>(p)[i];
}

__device__ __forceinline__ void write(void* p, int dtype, uint64_t i, float v) {
  if (dtype == BF16) {
    static_cast<__nv_bfloat16*>(p)[i] = from_float<__nv_bfloat16>(v);
  } else if (dtype == F16) {
    static_cast<__half*>(p)[i] = from_float<__half>(v);
  } else {
    static_cast<float*>(p)[i] = v;
  }
}

// Two 16-bit values of a word, the lower one first.
template <typename T> __device__ __forceinline__ float2 halves(uint32_t word);
template <> __device__ __forceinline__ float2 halves<__half>(uint32_t word) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}
template <> __device__ __forceinline__ float2 halves<__nv_bfloat16>(uint32_t word) {
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

template <typename T> __device__ __forceinline__ void unpack8(uint4 words, float (&v)[8]) {
  const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = halves<T>(w[i]);
    v[2 * i] = pair.x;
    v[2 * i + 1] = pair.y;
  }
}

// W consecutive values from element i on: 8 of them from a multiple of 16 bytes, or 1.
template <int W>
__device__ __forceinline__ void read_some(const void* p, int dtype, uint64_t i, float (&v)[W]) {
  if constexpr (W == 1) {
    v[0] = read(p, dtype, i);
  } else {
    static_assert(W == 8);
    if (dtype == F32) {
      const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(p) + i);
      const float4 a = from[0], b = from[1];
      v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
      v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
      const uint4 words = *reinterpret_cast<const uint4*>(static_cast<const __half*>(p) + i);
      if (dtype == BF16) {
        unpack8<__nv_bfloat16>(words, v);
      } else {
        unpack8<__half>(words, v);
      }
    }
  }
}

}  // namespace fused
