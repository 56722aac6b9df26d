// What happens to the rows of x before a product with few rows: they are widened into shared
// memory, normalised on the way if asked for. Every block does it for itself: the rows it needs
// are the ones it has to read anyway.
#pragma once

#include "dtype.cuh"

namespace fused {

constexpr int NORM_NONE = 0, NORM_RMS = 1, NORM_LAYER = 2;

struct Prologue {
  const void* x;       // [m, k]
  const void* weight;  // [k], null without a norm
  const void* bias;    // [k] or null; layer norm only
  float eps;
  int norm;
  int dtype;  // of x and of the norm's weight and bias
};

// Floats from one row in shared memory to the next.
__device__ __forceinline__ uint32_t staged_pitch(uint32_t k) { return (k + 3) / 4 * 4; }

// Who stages a row: the whole block if there is only one, a warp if there are several.
template <int M, int THREADS> struct Team {
  static constexpr int SIZE = M == 1 ? THREADS : WARP;
  static constexpr int TEAMS = THREADS / SIZE;
  static __device__ __forceinline__ uint32_t rank() { return threadIdx.x % SIZE; }
  static __device__ __forceinline__ uint32_t index() { return threadIdx.x / SIZE; }

  // The sum over the team, in all of its threads. `scratch` may be used again after the next
  // barrier.
  static __device__ __forceinline__ float sum(float v, float* scratch) {
    return block_sum<SIZE / WARP>(v, scratch);
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
    return static_cast<const uint4*>(p)[pack];
  }
  template <typename T> static __device__ __forceinline__ void widen(Raw raw, float (&v)[VALUES<T>]) {
    if constexpr (sizeof(T) == 4) {
      v[0] = __uint_as_float(raw.x), v[1] = __uint_as_float(raw.y);
      v[2] = __uint_as_float(raw.z), v[3] = __uint_as_float(raw.w);
    } else {
      unpack8<T>(raw, v);
    }
  }
  template <int N> static __device__ __forceinline__ void put(float* to, const float (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4)
      *reinterpret_cast<float4*>(to + i) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
  }
  template <int N> static __device__ __forceinline__ void get(const float* from, float (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 part = *reinterpret_cast<const float4*>(from + i);
      v[i] = part.x, v[i + 1] = part.y, v[i + 2] = part.z, v[i + 3] = part.w;
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

// Packs of x that a thread has on the way at once, and packs of the norm's weight that it asks for
// before the wait.
constexpr int BATCH = 4, AHEAD = 2;

template <int M, int THREADS, class Pack> struct Stage {
  using Ranks = Team<M, THREADS>;
  using Raw = typename Pack::Raw;

  const Prologue& p;
  uint32_t k, packs;
  float* rows;     // M rows of f32, `staged_pitch(k)` apart
  float* scratch;  // a float for each warp
  Raw weight[AHEAD];

  __device__ Stage(const Prologue& prologue, uint32_t k, float* rows, float* scratch)
      : p(prologue), k(k), packs(Pack::count(k, prologue.dtype)), rows(rows), scratch(scratch) {}

  template <int N>
  __device__ __forceinline__ void read(const void* from, uint32_t first, Raw (&raw)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const uint32_t pack = first + i * Ranks::SIZE;
      if (pack < packs) raw[i] = Pack::read(from, p.dtype, pack);
    }
  }

  // Before the wait: asks for the norm's weight.
  __device__ __forceinline__ void ask() {
    if (p.norm != NORM_NONE) read(p.weight, Ranks::rank(), weight);
  }

  // After the wait: rows 0..m of x, and zeros for the rest of the M rows. A barrier must follow.
  __device__ __forceinline__ void run(uint32_t m) const {
    if (p.dtype == BF16) {
      run_as<__nv_bfloat16>(m);
    } else if (p.dtype == F16) {
      run_as<__half>(m);
    } else {
      run_as<float>(m);
    }
  }

  template <typename T> __device__ __forceinline__ void run_as(uint32_t m) const {
#pragma unroll 1
    for (uint32_t r = Ranks::index(); r < M; r += Ranks::TEAMS) {
      float* row = rows + r * staged_pitch(k);
      if (M > 1 && r >= m) {
        for (uint32_t i = Ranks::rank(); i < k; i += Ranks::SIZE) row[i] = 0.f;
      } else {
        stage<T>(static_cast<const T*>(p.x) + uint64_t(r) * k, row);
      }
    }
  }

  template <typename T> __device__ __forceinline__ void stage(const T* x, float* row) const {
    constexpr int N = Pack::template VALUES<T>;
    float mean = 0.f, squares = 0.f;
#pragma unroll 1
    for (uint32_t first = Ranks::rank(); first < packs; first += BATCH * Ranks::SIZE) {
      Raw raw[BATCH];
      read(x, first, raw);
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const uint32_t pack = first + i * Ranks::SIZE;
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
      mean = Ranks::sum(mean, scratch) / k;
      squares = 0.f;
      for (uint32_t i = Ranks::rank(); i < packs; i += Ranks::SIZE) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const float v = row[i * N + j] - mean;
          squares = fmaf(v, v, squares);
        }
      }
      if (M == 1) __syncthreads();  // the scratch is used again
    }
    const float factor = rsqrtf(Ranks::sum(squares, scratch) / k + p.eps);
#pragma unroll 1
    for (uint32_t first = Ranks::rank(); first < packs; first += AHEAD * Ranks::SIZE) {
      Raw later[AHEAD];
      if (first >= AHEAD * Ranks::SIZE) read(p.weight, first, later);
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const uint32_t pack = first + i * Ranks::SIZE;
        if (pack >= packs) break;
        float w[N], v[N];
        Pack::template widen<T>(first < AHEAD * Ranks::SIZE ? weight[i] : later[i], w);
        Pack::get(row + pack * N, v);
        if (p.norm == NORM_LAYER) {
          float b[N] = {};
          if (p.bias) Pack::template widen<T>(Pack::read(p.bias, p.dtype, pack), b);
#pragma unroll
          for (int j = 0; j < N; ++j) v[j] = rounded<T>(fmaf((v[j] - mean) * factor, w[j], b[j]));
        } else {
          // Rounded where Hugging Face's Llama rounds: before the weight, and after it.
#pragma unroll
          for (int j = 0; j < N; ++j) v[j] = rounded<T>(rounded<T>(v[j] * factor) * w[j]);
        }
        Pack::put(row + pack * N, v);
      }
    }
  }
};

}  // namespace fused
