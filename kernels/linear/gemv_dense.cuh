// Dense weights as a format of gemv.cuh's `LanesCore`: f32, f16 or bf16, row-major.
#pragma once

#include "linear/gemv.cuh"

namespace fused {

// The part of x that meets a chunk of VALUES weights, as f32.
template <int VALUES> struct Inputs {
  float v[VALUES];
};

template <int VALUES> __device__ __forceinline__ float dot(const float (&w)[VALUES], const Inputs<VALUES>& x) {
  if constexpr (VALUES == 1) {
    return w[0] * x.v[0];
  } else {
    // Two chains: half the latency of one.
    float even = w[0] * x.v[0], odd = w[1] * x.v[1];
#pragma unroll
    for (int i = 2; i < VALUES; i += 2) {
      even = fmaf(w[i], x.v[i], even);
      odd = fmaf(w[i + 1], x.v[i + 1], odd);
    }
    return even + odd;
  }
}

// 16 bytes at a time: k a multiple of VALUES, addresses of 16.
template <typename T> struct Dense {
  static constexpr int VALUES = VEC<T>;
  static constexpr bool PREPARES = false;
  struct Row {
    const T* values;
  };
  using Chunk = uint4;
  struct Values {
    float v[VALUES];
  };
  using Input = Inputs<VALUES>;

  static __device__ __forceinline__ Row row(const Gemv& p, const Matrix& matrix, uint32_t row) {
    return {static_cast<const T*>(matrix.data) + uint64_t(row) * p.k};
  }
  static __device__ __forceinline__ Chunk load(const Row& row, uint32_t chunk) {
    return load_once(row.values + chunk * VALUES);
  }
  static __device__ __forceinline__ Values values(const Chunk& chunk) {
    Values w;
    if constexpr (sizeof(T) == 4) {
      w.v[0] = __uint_as_float(chunk.x), w.v[1] = __uint_as_float(chunk.y);
      w.v[2] = __uint_as_float(chunk.z), w.v[3] = __uint_as_float(chunk.w);
    } else {
      unpack8<T>(chunk, w.v);
    }
    return w;
  }
  static __device__ __forceinline__ Input input(const Gemv& p, const float* xs, int m, uint32_t chunk) {
    const float4* from = reinterpret_cast<const float4*>(xs + m * staged_pitch<float>(p.k) + chunk * VALUES);
    Input x;
#pragma unroll
    for (int i = 0; i < VALUES / 4; ++i) {
      const float4 part = from[i];
      x.v[4 * i] = part.x, x.v[4 * i + 1] = part.y, x.v[4 * i + 2] = part.z, x.v[4 * i + 3] = part.w;
    }
    return x;
  }
  static __device__ __forceinline__ float dot(const Values& w, const Input& x) { return fused::dot(w.v, x); }
};

// Any of the three, one value at a time: what does not divide or is not aligned.
struct Scalar {
  static constexpr int VALUES = 1;
  static constexpr bool PREPARES = false;
  struct Row {
    const void* values;
    int dtype;
  };
  struct Chunk {
    uint32_t raw;
    int dtype;
  };
  using Values = float;
  using Input = float;

  static __device__ __forceinline__ Row row(const Gemv& p, const Matrix& matrix, uint32_t row) {
    const uint64_t bytes = uint64_t(row) * p.k * (p.weight_dtype == F32 ? 4 : 2);
    return {static_cast<const char*>(matrix.data) + bytes, p.weight_dtype};
  }
  static __device__ __forceinline__ Chunk load(const Row& row, uint32_t chunk) {
    return {read_raw(row.values, row.dtype, chunk), row.dtype};
  }
  static __device__ __forceinline__ Values values(Chunk chunk) {
    return widen_raw(chunk.raw, chunk.dtype);
  }
  static __device__ __forceinline__ Input input(const Gemv& p, const float* xs, int m, uint32_t chunk) {
    return xs[m * staged_pitch<float>(p.k) + chunk];
  }
  static __device__ __forceinline__ float dot(Values w, Input x) { return w * x; }
};

}  // namespace fused
