// Values of a row of x in registers, as they are stored, that are normed before they are quantized.
#pragma once

#include "linear/gemv_dense_latency.cuh"

namespace fused {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// The larger magnitudes of two words' values, NaN if one is.
template <typename T> __device__ __forceinline__ uint32_t largest_pairs(uint32_t a, uint32_t b) {
  using Pair = typename std::conditional<std::is_same_v<T, __half>, __half2, __nv_bfloat162>::type;
  const Pair most = __hmax2_nan(__habs2(*reinterpret_cast<const Pair*>(&a)), __habs2(*reinterpret_cast<const Pair*>(&b)));
  return *reinterpret_cast<const uint32_t*>(&most);
}

// 8 values of T as they are stored.
template <typename T> struct EightRaw {
  static constexpr int WORDS = 2 * sizeof(T);
  uint32_t words[WORDS];

  __device__ __forceinline__ void load(const void* row, uint32_t pack) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
      const uint4 v = __ldcg(static_cast<const uint4*>(row) + (pack * WORDS + i) / 4);
      words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
    }
  }
  __device__ __forceinline__ void widen(float (&v)[8]) const {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      if constexpr (sizeof(T) == 4) {
        v[i] = __uint_as_float(words[i]);
      } else {
        const float2 pair = unpack2<T>(words[i]);
        v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
      }
    }
  }
  __device__ __forceinline__ float squares() const {
    float v[8], sum = 0.f;
    widen(v);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(v[i], v[i], sum);
    return sum;
  }
  // Rounded where Hugging Face's Llama rounds: before the weight, and after it.
  __device__ __forceinline__ void norm(float factor, const EightRaw& gain) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      if constexpr (sizeof(T) == 4) {
        words[i] = __float_as_uint(__uint_as_float(words[i]) * factor * __uint_as_float(gain.words[i]));
      } else {
        words[i] = scaled<T>(words[i], factor, gain.words[i]);
      }
    }
  }
  // The bits of the largest magnitude as f32 has them, of which those of NaN are the largest.
  __device__ __forceinline__ uint32_t largest() const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      if constexpr (sizeof(T) == 4) {
        bits = max(bits, words[i] & 0x7fffffffu);
      } else {
        bits = largest_pairs<T>(bits, words[i]);
      }
    }
    if constexpr (sizeof(T) == 4) {
      return bits;
    } else {
      const float2 pair = unpack2<T>(bits);
      return max(__float_as_uint(pair.x), __float_as_uint(pair.y));
    }
  }
};

#endif

}  // namespace fused
