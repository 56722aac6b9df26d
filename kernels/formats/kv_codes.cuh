// Keys and values as they are stored: floats, or codes of 8 bits with a scale for each row (a head of a token). Codes
// become f16 in registers, which has each of their values.
#pragma once

#include <type_traits>

#include "common/dtype.cuh"

namespace fused {

// A code each.
struct CodeFp8 {
  uint8_t bits;
};
struct CodeInt8 {
  uint8_t bits;
};

// What tensor cores take a stored element for.
template <typename S> struct Stored {
  using Operand = S;
  static constexpr bool CODES = false;
};
template <> struct Stored<CodeFp8> {
  using Operand = __half;
  static constexpr bool CODES = true;
};
template <> struct Stored<CodeInt8> : Stored<CodeFp8> {};

// Two neighbouring codes of a word, the lower half's or the upper half's, as two f16.
template <typename S, bool UPPER> __device__ __forceinline__ uint32_t widen_codes(uint32_t word) {
  uint32_t pair;
  if constexpr (sizeof(S) != 1) {
    pair = word;
  } else if constexpr (std::is_same<S, CodeInt8>::value) {
    // The byte of c + 128 behind that of 0x64 is 1024 + 128 + c.
    constexpr uint32_t BIAS = 0x64806480;
    pair = __byte_perm(word ^ 0x80808080u, 0x64646464u, UPPER ? 0x4342 : 0x4140);
    const __half2 v = __hsub2(*reinterpret_cast<const __half2*>(&pair), *reinterpret_cast<const __half2*>(&BIAS));
    pair = *reinterpret_cast<const uint32_t*>(&v);
  } else {
#if __CUDA_ARCH__ >= 890
    if constexpr (UPPER)
      asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(pair) : "r"(word));
    else
      asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(pair) : "r"(word));
#else
    // The bits of e4m3 within those of f16, whose exponent counts from 2^-15 and not from 2^-7.
    constexpr uint32_t UP = 0x5c005c00;
    const uint32_t high = __byte_perm(word, 0, UPPER ? 0x3424 : 0x1404);
    pair = (high & 0x80008000u) | (high & 0x7f007f00u) >> 1;
    const __half2 v = __hmul2(*reinterpret_cast<const __half2*>(&pair), *reinterpret_cast<const __half2*>(&UP));
    pair = *reinterpret_cast<const uint32_t*>(&v);
#endif
  }
  return pair;
}

// What a code stands for before it is scaled.
__device__ __forceinline__ float code_value(uint32_t code, int format) {
  if (format == INT8) return float(int8_t(code));
  const uint32_t pair = widen_codes<CodeFp8, false>(code);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(pair)));
}

// The code nearest to a number, ties to even, as `KvFormat::code` has it.
__device__ __forceinline__ uint32_t code_of(float x, int format) {
  if (format == INT8) return int(fminf(fmaxf(rintf(x), -127.f), 127.f)) & 0xff;
  const uint32_t sign = __float_as_uint(x) >> 24 & 0x80;
  const float size = fminf(fabsf(x), 448.f);
  const uint32_t bits = __float_as_uint(size);
  if (size < 1.f / 64.f) return sign | uint32_t(rintf(size * 512.f));
  return sign | (((bits + 0x7ffff + (bits >> 20 & 1)) >> 20 & 0x7f) ^ 0x40);
}

// The sum over lanes of a warp, of which `mask` has a power of two.
__device__ __forceinline__ uint32_t sum_of_lanes(uint32_t v, uint32_t lanes, uint32_t mask) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_add_sync(mask, v);
#else
  for (uint32_t offset = lanes / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(mask, v, offset);
  return v;
#endif
}

// How a row whose largest magnitude is `most` is quantized, as `KvFormat::quantize` has it.
struct Quantizer {
  // Scales that a row of e4m3 may have.
  static constexpr int STEPS = 16;
  float by, scale;

  __device__ Quantizer(float most, int format) {
    constexpr float LEAST = 1e-30f;
    const float largest = format == INT8 ? 127.f : 448.f;
    by = 0.f;
    scale = most < LEAST ? 1.f : NAN;
    // Not so for what is no number.
    if (most >= LEAST && most < INFINITY) by = __fdiv_rn(largest, most), scale = __fdiv_rn(most, largest);
  }
  __device__ uint32_t code(float x, int format) const { return by == 0.f ? 0 : code_of(x * by, format); }

  // Adds the errors of an element with each scale: whole numbers, so that their sum is the same in any order.
  __device__ __forceinline__ void add_errors(float x, uint32_t (&errors)[STEPS]) const {
    constexpr float UNIT = 1.f / 32.f, ONES = 8388608.f;
    const float t = fabsf(__fmul_rn(x, by));
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const float up = 1.f + step / float(STEPS), down = 1.f / up;
      const uint32_t bits = __float_as_uint(__fmul_rn(t, down));
      const float nearest = __uint_as_float((bits + 0x7ffff + (bits >> 20 & 1)) & ~0xfffffu);
      const float weighed = __fmul_rn(t, __fsub_rn(t, __fmul_rn(nearest, up)));
      const float error = __fmul_rn(__fmul_rn(weighed, weighed), UNIT);
      errors[step] += __float_as_uint(__fadd_rn(error, ONES)) - 0x4b000000u;
    }
  }
  // Takes the scale with the least sum over the lanes of a row.
  __device__ __forceinline__ void take_best(const uint32_t (&errors)[STEPS], uint32_t lanes, uint32_t mask) {
    uint32_t least = UINT32_MAX;
    float up = 1.f, down = 1.f;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const uint32_t error = sum_of_lanes(errors[step], lanes, mask);
      const float own = 1.f + step / float(STEPS);
      if (error < least) least = error, up = own, down = 1.f / own;
    }
    by = __fmul_rn(by, down), scale = __fmul_rn(scale, up);
  }
};

// The larger magnitude, where NaN is larger than all numbers; by the order of the bits.
__device__ __forceinline__ float larger(float most, float x) {
  return __uint_as_float(max(__float_as_uint(most), __float_as_uint(x) & 0x7fffffffu));
}

// Whether an element type is that of codes.
__host__ __device__ constexpr bool is_coded(int type) { return type >= E4M3; }

__host__ __device__ constexpr uint32_t size_of(int type) { return type == F32 ? 4 : is_coded(type) ? 1 : 2; }

}  // namespace fused
