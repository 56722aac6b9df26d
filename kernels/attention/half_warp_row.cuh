// A row of the fused projection in half a warp: fetched, normed and rotated within its lanes, and packed into 16-bit
// elements for tensor cores and the cache.
#pragma once

#include "abi/attention.cuh"
#include "attention/row_operands.cuh"
#include "common/mma.cuh"

namespace fused {

// Two runs of a row's elements in a lane of half a warp, which rotation takes together: pairs are (x[i], y[i]), or
// neighbours in the interleaved style. Weights of the norm and angles are those of the same elements. The row is of X.
template <typename X, int D> struct HalfWarpRow {
  static constexpr int RUN = D / 32, WORDS = RUN * int(sizeof(X)) / 4;
  uint32_t a[WORDS], b[WORDS], norm_a[WORDS], norm_b[WORDS];  // as they come from memory
  float cos[RUN], sin[RUN];
  float x[RUN], y[RUN];

  __device__ static int place_x(const DecodingParams& p) {
    return int(threadIdx.x % 16) * RUN * (p.interleaved ? 2 : 1);
  }
  __device__ static int place_y(const DecodingParams& p) { return place_x(p) + (p.interleaved ? RUN : D / 2); }

  __device__ void fetch_norm(const DecodingParams& p, const void* weights) {
    const X* w = static_cast<const X*>(weights);
    fetch<4 * WORDS>(norm_a, w + place_x(p), w != nullptr);
    fetch<4 * WORDS>(norm_b, w + place_y(p), w != nullptr);
  }

  __device__ void fetch_row(const DecodingParams& p, const X* row, bool there) {
    fetch<4 * WORDS>(a, row + place_x(p), there);
    fetch<4 * WORDS>(b, row + place_y(p), there);
  }

  // The same from shared memory.
  __device__ void load_row(const DecodingParams& p, uint32_t row) {
    load_words(a, row + place_x(p) * sizeof(X));
    load_words(b, row + place_y(p) * sizeof(X));
  }

  __device__ static void load_words(uint32_t (&to)[WORDS], uint32_t at) {
    static_assert(WORDS <= 2);
    if constexpr (WORDS == 1) {
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to[0]) : "r"(at));
    } else {
      const float2 words = load_shared_float2(at);
      to[0] = __float_as_uint(words.x), to[1] = __float_as_uint(words.y);
    }
  }

  __device__ void fetch_angles(const DecodingParams& p, uint32_t position) {
    const uint64_t at = uint64_t(position) * p.pairs + threadIdx.x % 16 * RUN;
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
      cos[i] = p.pairs ? __ldg(p.cos + at + i) : 1.f;
      sin[i] = p.pairs ? __ldg(p.sin + at + i) : 0.f;
    }
  }

  __device__ static float element(const uint32_t (&r)[WORDS], int i) {
    if constexpr (sizeof(X) == 4) return __uint_as_float(r[i]);
    else return i % 2 ? unpack2<X>(r[i / 2]).y : unpack2<X>(r[i / 2]).x;
  }

  __device__ static void rotate(float& x, float& y, float cos, float sin) {
    const float first = x * cos - y * sin;
    y = y * cos + x * sin;
    x = first;
  }

  // The norm and the rotation, where there are any.
  __device__ void apply_rope(const DecodingParams& p) {
#pragma unroll
    for (int i = 0; i < RUN; ++i) x[i] = element(a, i), y[i] = element(b, i);
    if (p.q_norm) {
      float squares = 0.f;
#pragma unroll
      for (int i = 0; i < RUN; ++i) squares += x[i] * x[i] + y[i] * y[i];
#pragma unroll
      for (int offset = 8; offset > 0; offset /= 2) squares += __shfl_xor_sync(FULL, squares, offset);
      const float factor = rsqrtf(squares / D + p.eps);
#pragma unroll
      for (int i = 0; i < RUN; ++i) {
        x[i] = rounded<X>(rounded<X>(x[i] * factor) * element(norm_a, i));
        y[i] = rounded<X>(rounded<X>(y[i] * factor) * element(norm_b, i));
      }
    }
    if (p.interleaved) {
#pragma unroll
      for (int i = 0; i < RUN / 2; ++i) {
        rotate(x[2 * i], x[2 * i + 1], cos[i], sin[i]);
        rotate(y[2 * i], y[2 * i + 1], cos[RUN / 2 + i], sin[RUN / 2 + i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < RUN; ++i) rotate(x[i], y[i], cos[i], sin[i]);
    }
  }
};

// A run of elements as C: to shared memory, or to the cache.
template <typename C, int RUN> struct PackedRun {
  uint32_t words[RUN / 2];

  __device__ explicit PackedRun(const float (&x)[RUN]) {
#pragma unroll
    for (int i = 0; i < RUN / 2; ++i) words[i] = pack2<C>(x[2 * i], x[2 * i + 1]);
  }
  // What is left of the elements after rounding.
  __device__ PackedRun rest(const float (&x)[RUN]) const {
    float left[RUN];
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
      const float2 kept = unpack2<C>(words[i / 2]);
      left[i] = x[i] - (i % 2 ? kept.y : kept.x);
    }
    return PackedRun(left);
  }
  __device__ void store(uint32_t to) const {
    if constexpr (RUN == 2) store_shared(to, words[0]);
    else store_shared(to, words[0], words[1]);
  }
  __device__ void store(C* to) const {
    if constexpr (RUN == 2) *reinterpret_cast<uint32_t*>(to) = words[0];
    else *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  }
};

}  // namespace fused
