// A head's way through the rotary embedding: an RMSNorm before it if there is one, the rotation of its pairs, and where
// it is stored. A few lanes own a head.
#pragma once

#include "abi/pointwise.cuh"
#include "common/base.cuh"

namespace fused {

// N neighbours, in pieces of 16 bytes at most.
template <typename T, int N> __device__ __forceinline__ void widen(const void* table, uint64_t at, float (&out)[N]) {
  constexpr int PIECE = N < VEC<T> ? N : VEC<T>;
#pragma unroll
  for (int j = 0; j < N; j += PIECE) {
    const auto v = load<T, PIECE>(static_cast<const T*>(table) + at + j);
#pragma unroll
    for (int i = 0; i < PIECE; ++i) out[j + i] = to_float(v.v[i]);
  }
}

template <int N>
__device__ __forceinline__ void load_angles(const void* table, int type, uint64_t at, float (&out)[N]) {
  if (type == 0)
    widen<float>(table, at, out);
  else if (type == 1)
    widen<__half>(table, at, out);
  else
    widen<__nv_bfloat16>(table, at, out);
}

// One head: where it is, what normalises it, and who works on it.
template <typename T> struct Head {
  const T* x;
  const T* weight;  // null without a norm
  float factor;
  uint32_t lane, lanes;

  // Heads of one warp differ in what is done with them, so each exchanges values among its own lanes.
  __device__ __forceinline__ unsigned own_lanes() const {
    return (FULL >> (WARP - lanes)) << (threadIdx.x % WARP / lanes * lanes);
  }

  template <int N> __device__ __forceinline__ void read(uint32_t at, float (&out)[N]) const {
    const auto v = load<T, N>(x + at);
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = to_float(v.v[j]);
    if (weight) {
      const auto w = load<T, N>(weight + at);
#pragma unroll
      for (int j = 0; j < N; ++j) out[j] = rounded<T>(rounded<T>(out[j] * factor) * to_float(w.v[j]));
    }
  }

  template <int N> __device__ __forceinline__ void normalise(uint32_t dim, float eps) {
    float squares = 0.f;
    for (uint32_t at = lane * N; at < dim; at += lanes * N) {
      const auto v = load<T, N>(x + at);
#pragma unroll
      for (int j = 0; j < N; ++j) squares = fmaf(to_float(v.v[j]), to_float(v.v[j]), squares);
    }
    for (uint32_t offset = lanes / 2; offset > 0; offset /= 2)
      squares += __shfl_xor_sync(own_lanes(), squares, offset);
    factor = 1.f / sqrtf(squares / dim + eps);
  }
};

template <typename O, int N> __device__ __forceinline__ void write(O* y, const float (&v)[N]) {
  Pack<O, N> out;
#pragma unroll
  for (int j = 0; j < N; ++j) out.v[j] = from_float<O>(v[j]);
  store(y, out);
}

// Turns the first `pairs` pairs of the head and copies the rest: hands out N neighbours at a time, from an element on.
template <int N, typename P, typename T, typename F>
__device__ __forceinline__ void each_turned(const P& p, const Head<T>& head, uint32_t position, uint32_t pairs, F out) {
  const uint32_t turns = pairs / N, all = turns + (p.dim - 2 * pairs) / N;
  for (uint32_t u = head.lane; u < all; u += head.lanes) {
    float a[N], b[N];
    if (u >= turns) {
      const uint32_t at = 2 * pairs + (u - turns) * N;
      head.template read<N>(at, a);
      out(at, a);
      continue;
    }
    const uint32_t first = p.interleaved ? 2 * u * N : u * N;
    const uint32_t second = p.interleaved ? first + N : first + pairs;
    float c[N], s[N];
    load_angles<N>(p.cos, p.table, uint64_t(position) * pairs + u * N, c);
    load_angles<N>(p.sin, p.table, uint64_t(position) * pairs + u * N, s);
    head.template read<N>(first, a);
    head.template read<N>(second, b);
    if (N > 1 && p.interleaved) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float& even = 2 * j < N ? a[2 * j % N] : b[2 * j % N];
        float& odd = 2 * j < N ? a[(2 * j + 1) % N] : b[(2 * j + 1) % N];
        const float e = even, o = odd;
        even = fmaf(e, c[j], -(o * s[j]));
        odd = fmaf(o, c[j], e * s[j]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float e = a[j], o = b[j];
        a[j] = fmaf(e, c[j], -(o * s[j]));
        b[j] = fmaf(o, c[j], e * s[j]);
      }
    }
    out(first, a);
    out(second, b);
  }
}

template <int N, typename P, typename T, typename O>
__device__ __forceinline__ void apply_rope(const P& p, const Head<T>& head, uint32_t position, uint32_t pairs, O* y) {
  each_turned<N>(p, head, position, pairs, [&](uint32_t at, const float (&v)[N]) { write(y + at, v); });
}

// Keys or values of one head into their place, in the type of the cache.
template <bool VECTORS, typename C, typename P, typename T>
__device__ __forceinline__ void append_as(const P& p, Head<T>& head, uint32_t position, uint32_t pairs, uint64_t at,
                                          void* cache) {
  constexpr int N = !VECTORS ? 1 : VEC<T> < VEC<C> ? VEC<T> : VEC<C>;
  if (head.weight) head.template normalise<N>(p.dim, p.eps);
  apply_rope<N>(p, head, position, pairs, static_cast<C*>(cache) + at);
}

template <bool VECTORS, typename P, typename T>
__device__ __forceinline__ void append(const P& p, Head<T> head, uint32_t position, uint32_t pairs, uint64_t at,
                                       void* cache, int dtype) {
  if (dtype == F32)
    append_as<VECTORS, float>(p, head, position, pairs, at, cache);
  else if (dtype == F16)
    append_as<VECTORS, __half>(p, head, position, pairs, at, cache);
  else
    append_as<VECTORS, __nv_bfloat16>(p, head, position, pairs, at, cache);
}

}  // namespace fused
