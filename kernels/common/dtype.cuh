// Element types that are known at run time only. What touches a row once (staging x, the epilogue) branches on them,
// so that kernels are compiled for the format of the weights alone.
#pragma once

#include "common/base.cuh"

namespace fused {

// An element as it is stored, to be widened later: a load that nothing waits for yet. It passes by
// the L1 cache, where what another kernel is about to write must not stay behind.
__device__ __forceinline__ uint32_t read_raw(const void* p, int dtype, uint64_t i) {
  if (dtype == F32) return __ldcg(static_cast<const uint32_t*>(p) + i);
  return __ldcg(static_cast<const uint16_t*>(p) + i);
}

template <typename T> __device__ __forceinline__ float widen_raw(uint32_t raw);
template <> __device__ __forceinline__ float widen_raw<float>(uint32_t raw) {
  return __uint_as_float(raw);
}
template <> __device__ __forceinline__ float widen_raw<__half>(uint32_t raw) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(raw)));
}
template <> __device__ __forceinline__ float widen_raw<__nv_bfloat16>(uint32_t raw) {
  return __uint_as_float(raw << 16);
}

__device__ __forceinline__ float widen_raw(uint32_t raw, int dtype) {
  if (dtype == BF16) return widen_raw<__nv_bfloat16>(raw);
  return dtype == F16 ? widen_raw<__half>(raw) : widen_raw<float>(raw);
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

// The two values of a word, the lower one first.
template <typename T> __device__ __forceinline__ float2 unpack2(uint32_t word);
template <> __device__ __forceinline__ float2 unpack2<__half>(uint32_t word) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}
template <> __device__ __forceinline__ float2 unpack2<__nv_bfloat16>(uint32_t word) {
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

// Two values as a word, the first in the low half.
template <typename T> __device__ __forceinline__ uint32_t pack2(float a, float b);
template <> __device__ __forceinline__ uint32_t pack2<__half>(float a, float b) {
  const __half2 pair = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <> __device__ __forceinline__ uint32_t pack2<__nv_bfloat16>(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Four neighbours, the first at a multiple of four.
__device__ __forceinline__ void write4(void* p, int dtype, uint64_t i, float4 v) {
  if (dtype == F32) {
    *reinterpret_cast<float4*>(static_cast<float*>(p) + i) = v;
    return;
  }
  const bool half = dtype == F16;
  const uint32_t first = half ? pack2<__half>(v.x, v.y) : pack2<__nv_bfloat16>(v.x, v.y);
  const uint32_t second = half ? pack2<__half>(v.z, v.w) : pack2<__nv_bfloat16>(v.z, v.w);
  *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p) + i) = make_uint2(first, second);
}

// The 8 values of 16 bytes.
template <typename T> __device__ __forceinline__ void unpack8(uint4 words, float (&v)[8]) {
  const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack2<T>(w[i]);
    v[2 * i] = pair.x;
    v[2 * i + 1] = pair.y;
  }
}

}  // namespace fused
