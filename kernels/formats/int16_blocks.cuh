// Activations in 16-bit whole numbers, which are 256 times one int8 and another, with a power of two for each K block.
#pragma once

#include "common/base.cuh"

namespace fused {

// The power of two by which values of a K block, or of two, are quantized: their largest magnitude becomes 14 bits and a sign
// at least, and at most 127.5 times 256, so that the upper byte has a sign, too. Values of bf16 down to 1/64 of the largest stay exact.
struct KBlockScale {
  // Added to the bits of an f32, it carries into the exponent from a mantissa of 1.9921 on: x times 2^14 over the power of
  // two is rounded to at most 32639, which is 127 * 256 + 127.
  static constexpr uint32_t PAST_127 = 0x10200;
  float scale, inverse;

  // `largest`: bits of f32. K blocks of less than 2^-111 are zero.
  __device__ __forceinline__ explicit KBlockScale(uint32_t largest) {
    const uint32_t exponent = (largest + PAST_127) >> 23;
    const bool zero = exponent < 16;
    inverse = zero ? 0.f : __uint_as_float((127 + 14 + 127 - exponent) << 23);
    scale = zero ? 0.f : __uint_as_float((exponent - 14) << 23);
    if (largest >= 0x7f800000) scale = __uint_as_float(0x7fffffff);
  }
};

}  // namespace fused
