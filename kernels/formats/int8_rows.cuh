// Dynamic quantization of a row to int8: q = round(v / scale), scale = max |v| / 127.
#pragma once

#include <type_traits>

#include "common/base.cuh"

namespace fused {

// What is smaller counts as zero: MAX_CODE over it would be infinite.
constexpr float MAX_CODE = 127.f, MIN_MAGNITUDE = 1e-36f;

// Of two pairs, element by element, the larger of the first's magnitude and the second, undefined if one is.
template <typename T> __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 800
  uint32_t most;
  if constexpr (std::is_same<T, __half>::value)
    asm("{.reg .b32 m; abs.f16x2 m, %1; max.NaN.f16x2 %0, m, %2;}" : "=r"(most) : "r"(a), "r"(b));
  else
    asm("{.reg .b32 m; abs.bf16x2 m, %1; max.NaN.bf16x2 %0, m, %2;}" : "=r"(most) : "r"(a), "r"(b));
  return most;
#else
  return __vmaxu2(a & 0x7fff7fff, b);
#endif
}

// The largest of magnitudes as bits, whose order is theirs with the undefined above all. Of elements of
// 16 bits two at a time.
template <typename T, int N> struct MaxMagnitude {
  static constexpr bool PAIRS = sizeof(T) == 2 && N > 1;
  uint32_t bits = 0;

  __device__ __forceinline__ void take(const Pack<T, N>& v) {
    if constexpr (PAIRS) {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(v.v);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) bits = larger<T>(words[i], bits);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) bits = max(bits, __float_as_uint(fabsf(to_float(v.v[i]))));
    }
  }
  // As those of a float.
  __device__ __forceinline__ uint32_t widened() const {
    if constexpr (PAIRS) {
      const uint16_t half = max(bits & 0xffff, bits >> 16);
      return __float_as_uint(to_float(*reinterpret_cast<const T*>(&half)));
    } else {
      return bits;
    }
  }
};

// Of each value the code as the low bits.
template <int N> struct Codes {
  uint32_t v[N];
};

// A row's, by the largest of its magnitudes.
struct Scale {
  float scale, inverse;

  explicit __device__ __forceinline__ Scale(float largest) {
    const bool zeros = largest < MIN_MAGNITUDE;
    inverse = zeros ? 0.f : MAX_CODE / largest;
    scale = zeros ? 0.f : largest / MAX_CODE;
  }
};

// v rounded, once, to multiples of the scale whose inverse this is: the low bits of a sum whose last place is 1.
// No further than MAX_CODE, past which only rounding gets.
template <typename T, int N> __device__ __forceinline__ Codes<N> codes_of(const Pack<T, N>& v, float inverse) {
  Codes<N> codes;
#pragma unroll
  for (int i = 0; i < N; ++i)
    codes.v[i] = __float_as_uint(__fmaf_rn(to_float(v.v[i]), inverse, 12582912.f));
  return codes;
}

// Four to a word.
template <int N> __device__ __forceinline__ Pack<uint32_t, N / 4> code_words(const Codes<N>& codes) {
  Pack<uint32_t, N / 4> words;
#pragma unroll
  for (int i = 0; i < N / 4; ++i)
    words.v[i] = __byte_perm(__byte_perm(codes.v[4 * i], codes.v[4 * i + 1], 0x0040),
                             __byte_perm(codes.v[4 * i + 2], codes.v[4 * i + 3], 0x0040), 0x5410);
  return words;
}

}  // namespace fused
