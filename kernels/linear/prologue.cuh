// The prologue of a GEMV: rows of x are staged in shared memory, as f32 or in their own type, behind an RMS or layer
// norm or none. Every block does so for itself: the rows that it needs are the ones it has to read anyway.
#pragma once

#include "abi/linear.cuh"
#include "common/dtype.cuh"

namespace fused {

// Elements from one staged row to the next.
template <typename S> __device__ __forceinline__ uint32_t staged_pitch(uint32_t k) {
  // 16-bit rows lie 64 bytes apart modulo 128, so that lanes which read 64 bytes of each of two
  // rows meet no bank twice.
  return sizeof(S) == 4 ? (k + 3) / 4 * 4 : (k + 63) / 64 * 64 + 32;
}

// The threads that stage a row: the whole block, or its first `threads`; or a warp if there are several rows.
struct ThreadGroup {
  bool block;
  uint32_t threads;

  explicit __device__ __forceinline__ ThreadGroup(bool block) : block(block), threads(blockDim.x) {}
  explicit __device__ __forceinline__ ThreadGroup(uint32_t threads) : block(true), threads(threads) {}

  __device__ __forceinline__ uint32_t rank() const { return block ? threadIdx.x : threadIdx.x % WARP; }
  __device__ __forceinline__ uint32_t size() const { return block ? threads : WARP; }
  // A barrier for the group of a block.
  __device__ __forceinline__ void sync() const {
    if (threads == blockDim.x) {
      __syncthreads();
    } else {
      sync_first(threads);
    }
  }
  __device__ __forceinline__ uint32_t index() const { return block ? 0 : threadIdx.x / WARP; }
  __device__ __forceinline__ uint32_t count() const { return block ? 1 : blockDim.x / WARP; }

  // The sum over the group, in all of its threads. `scratch` holds 8 floats, aligned to 16 bytes,
  // and may be used again after the next barrier.
  __device__ __forceinline__ float sum(float v, float* scratch) const {
    v = warp_sum(v);
    if (!block) return v;
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = v;
    sync();
    v = 0.f;
#pragma unroll
    for (int w = 0; w < 8; ++w) v += w * WARP < threads ? scratch[w] : 0.f;
    return v;
  }

  // Likewise the largest.
  __device__ __forceinline__ uint32_t max(uint32_t v, float* scratch) const {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) v = ::max(v, __shfl_xor_sync(FULL, v, offset));
    if (!block) return v;
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = __uint_as_float(v);
    sync();
#pragma unroll
    for (int w = 0; w < 8; ++w) v = ::max(v, w * WARP < threads ? __float_as_uint(scratch[w]) : 0);
    return v;
  }
};

// A pack is what a thread reads at once: 16 bytes as they are stored.
struct VectorPack {
  using Raw = uint4;
  template <typename T> static constexpr int VALUES = VEC<T>;

  static __device__ __forceinline__ uint32_t count(uint32_t k, int dtype) {
    return k / (dtype == F32 ? VEC<float> : VEC<__half>);
  }
  static __device__ __forceinline__ Raw read(const void* p, int dtype, uint32_t pack) {
    return __ldcg(static_cast<const uint4*>(p) + pack);
  }
  template <typename T> static __device__ __forceinline__ void widen(Raw raw, float (&v)[VALUES<T>]) {
    if constexpr (sizeof(T) == 4) {
      v[0] = __uint_as_float(raw.x), v[1] = __uint_as_float(raw.y);
      v[2] = __uint_as_float(raw.z), v[3] = __uint_as_float(raw.w);
    } else {
      unpack8<T>(raw, v);
    }
  }
  template <typename S, int N> static __device__ __forceinline__ void put(S* to, const float (&v)[N]) {
    if constexpr (sizeof(S) == 4) {
#pragma unroll
      for (int i = 0; i < N; i += 4)
        *reinterpret_cast<float4*>(to + i) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
    } else {
      Pack<S, N> pack;
#pragma unroll
      for (int i = 0; i < N; ++i) pack.v[i] = from_float<S>(v[i]);
      store(to, pack);
    }
  }
  template <typename S, int N> static __device__ __forceinline__ void get(const S* from, float (&v)[N]) {
    if constexpr (sizeof(S) == 4) {
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        const float4 part = *reinterpret_cast<const float4*>(from + i);
        v[i] = part.x, v[i + 1] = part.y, v[i + 2] = part.z, v[i + 3] = part.w;
      }
    } else {
      unpack8<S>(*reinterpret_cast<const uint4*>(from), v);
    }
  }
};

// Or one element, where rows do not divide or are not aligned.
struct ScalarPack {
  using Raw = uint32_t;
  template <typename T> static constexpr int VALUES = 1;

  static __device__ __forceinline__ uint32_t count(uint32_t k, int) { return k; }
  static __device__ __forceinline__ Raw read(const void* p, int dtype, uint32_t pack) {
    return read_raw(p, dtype, pack);
  }
  template <typename T> static __device__ __forceinline__ void widen(Raw raw, float (&v)[1]) {
    v[0] = widen_raw<T>(raw);
  }
  static __device__ __forceinline__ void put(float* to, const float (&v)[1]) { to[0] = v[0]; }
  static __device__ __forceinline__ void get(const float* from, float (&v)[1]) { v[0] = from[0]; }
};

// 8 values of 16 bits, normed as Stage below does it.
template <typename T> __device__ __forceinline__ uint4 normed(const Prologue& p, uint4 raw, float mean, float factor,
                                                              uint4 weight, uint4 bias) {
  float v[8], w[8], b[8];
  unpack8<T>(raw, v);
  unpack8<T>(weight, w);
  unpack8<T>(bias, b);
  Pack<T, 8> out;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    out.v[j] = p.norm == NORM_RMS ? from_float<T>(rounded<T>(v[j] * factor) * w[j])
                                  : from_float<T>(fmaf((v[j] - mean) * factor, w[j], b[j]));
  }
  return *reinterpret_cast<uint4*>(&out);
}

// Packs of x that a thread has on the way at once, and packs of the norm's weight that it loads
// before the PDL wait.
constexpr int BATCH = 2, AHEAD = 2;

// Stages rows as elements of S.
template <typename S, class Pack> struct Stage {
  using Raw = typename Pack::Raw;

  const Prologue& p;
  ThreadGroup group;
  uint32_t k, packs;
  S* rows;         // `staged_pitch<S>(k)` apart
  float* scratch;  // 8 floats
  Raw weight[AHEAD];

  __device__ Stage(const Prologue& prologue, bool block, uint32_t k, S* rows, float* scratch)
      : p(prologue), group(block), k(k), packs(Pack::count(k, prologue.dtype)), rows(rows), scratch(scratch) {}

  template <int N>
  __device__ __forceinline__ void read(const void* from, uint32_t first, Raw (&raw)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const uint32_t pack = first + i * group.size();
      if (pack < packs) raw[i] = Pack::read(from, p.dtype, pack);
    }
  }

  // Before the PDL wait: loads the norm's weight.
  __device__ __forceinline__ void prefetch() {
    if (p.norm != NORM_NONE) read(p.weight, group.rank(), weight);
  }

  // After the PDL wait: rows 0..m of x, whose elements are T. A barrier must follow.
  template <typename T> __device__ __forceinline__ void run(uint32_t m) const {
#pragma unroll 1
    for (uint32_t r = group.index(); r < m; r += group.count()) {
      stage<T>(static_cast<const T*>(p.x) + uint64_t(r) * k, rows + r * staged_pitch<S>(k));
    }
  }

  template <typename T> __device__ __forceinline__ void stage(const T* x, S* row) const {
    constexpr int N = Pack::template VALUES<T>;
    float mean = 0.f, squares = 0.f;
#pragma unroll 1
    for (uint32_t first = group.rank(); first < packs; first += BATCH * group.size()) {
      Raw raw[BATCH];
      read(x, first, raw);
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const uint32_t pack = first + i * group.size();
        if (pack >= packs) break;
        float v[N];
        Pack::template widen<T>(raw[i], v);
        Pack::put(row + pack * N, v);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          mean += v[j];
          squares = fmaf(v[j], v[j], squares);
        }
      }
    }
    if (p.norm == NORM_NONE) return;
    if (p.norm == NORM_LAYER) {
      mean = group.sum(mean, scratch) / k;
      squares = 0.f;
#pragma unroll 1
      for (uint32_t pack = group.rank(); pack < packs; pack += group.size()) {
        float v[N];
        Pack::get(row + pack * N, v);
#pragma unroll
        for (int j = 0; j < N; ++j) squares = fmaf(v[j] - mean, v[j] - mean, squares);
      }
      if (group.block) group.sync();  // the scratch is used again
    } else {
      mean = 0.f;
    }
    const float factor = rsqrtf(__fdividef(group.sum(squares, scratch), k) + p.eps);
#pragma unroll 1
    for (uint32_t first = group.rank(); first < packs; first += AHEAD * group.size()) {
      Raw later[AHEAD];
      if (first >= AHEAD * group.size()) read(p.weight, first, later);
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const uint32_t pack = first + i * group.size();
        if (pack >= packs) break;
        float v[N], w[N];
        Pack::get(row + pack * N, v);
        Pack::template widen<T>(first < AHEAD * group.size() ? weight[i] : later[i], w);
        if (p.norm == NORM_RMS) {
          // Rounded where Hugging Face's Llama rounds: before the weight, and after it.
#pragma unroll
          for (int j = 0; j < N; ++j) v[j] = rounded<T>(rounded<T>(v[j] * factor) * w[j]);
        } else {
          float b[N] = {};
          if (p.bias) Pack::template widen<T>(Pack::read(p.bias, p.dtype, pack), b);
#pragma unroll
          for (int j = 0; j < N; ++j) v[j] = rounded<T>(fmaf((v[j] - mean) * factor, w[j], b[j]));
        }
        Pack::put(row + pack * N, v);
      }
    }
  }
};

}  // namespace fused
