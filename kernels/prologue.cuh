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
__device__ __forceinline__ int staged_pitch(int k) { return (k + 3) / 4 * 4; }

// Who stages a row: the whole block if there is only one, a warp if there are several, W elements a
// thread at a time.
template <int M> struct Team {
  static __device__ __forceinline__ uint32_t rank() { return M == 1 ? threadIdx.x : threadIdx.x % WARP; }
  static __device__ __forceinline__ uint32_t size() { return M == 1 ? blockDim.x : WARP; }
  static __device__ __forceinline__ uint32_t team() { return M == 1 ? 0 : threadIdx.x / WARP; }
  static __device__ __forceinline__ uint32_t teams() { return M == 1 ? 1 : blockDim.x / WARP; }

  template <int W, class Body> static __device__ __forceinline__ void each(uint32_t k, Body body) {
#pragma unroll 4
    for (uint32_t i = rank() * W; i < k; i += size() * W) body(i);
  }

  // The sum over the team, in all of its threads. `scratch` holds a float for each warp of the
  // block, and may be used again after the next barrier.
  static __device__ __forceinline__ float sum(float v, float* scratch) {
    v = warp_sum(v);
    if constexpr (M == 1) {
      if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = v;
      __syncthreads();
      v = 0.f;
      for (uint32_t w = 0; w < blockDim.x / WARP; ++w) v += scratch[w];
    }
    return v;
  }
};

template <int W> __device__ __forceinline__ void put(float* to, const float (&v)[W]) {
  if constexpr (W == 1) {
    to[0] = v[0];
  } else {
    reinterpret_cast<float4*>(to)[0] = make_float4(v[0], v[1], v[2], v[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(v[4], v[5], v[6], v[7]);
  }
}

template <int W> __device__ __forceinline__ void get(const float* from, float (&v)[W]) {
  if constexpr (W == 1) {
    v[0] = from[0];
  } else {
    const float4 a = reinterpret_cast<const float4*>(from)[0];
    const float4 b = reinterpret_cast<const float4*>(from)[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  }
}

// Before the wait: the norm's weight and bias into the two rows behind the M of x.
template <int M, int W>
__device__ __forceinline__ void stage_norm(const Prologue& p, uint32_t k, float* xs) {
  if (p.norm == NORM_NONE) return;
  float* weight = xs + M * staged_pitch(k);
  float* bias = weight + staged_pitch(k);
  Team<1>::each<W>(k, [&](uint32_t i) {
    float v[W];
    read_some<W>(p.weight, p.dtype, i, v);
    put<W>(weight + i, v);
  });
  if (!p.bias) return;
  Team<1>::each<W>(k, [&](uint32_t i) {
    float v[W];
    read_some<W>(p.bias, p.dtype, i, v);
    put<W>(bias + i, v);
  });
}

// Normalises a staged row in place, whose sum and sum of squares this thread has its part of. The
// norm's weight and bias are staged.
template <int M, int W>
__device__ __forceinline__ void normalise(const Prologue& p, uint32_t k, float* row, const float* weight,
                                          float sum, float squares, float* scratch) {
  float mean = 0.f;
  if (p.norm == NORM_LAYER) {
    mean = Team<M>::sum(sum, scratch) / k;
    squares = 0.f;
    Team<M>::template each<W>(k, [&](uint32_t i) {
      float v[W];
      get<W>(row + i, v);
#pragma unroll
      for (int j = 0; j < W; ++j) squares = fmaf(v[j] - mean, v[j] - mean, squares);
    });
    if (M == 1) __syncthreads();  // the scratch of the first sum has been read
  }
  const float factor = rsqrtf(Team<M>::sum(squares, scratch) / k + p.eps);
  const float* bias = weight + staged_pitch(k);
  Team<M>::template each<W>(k, [&](uint32_t i) {
    float v[W], w[W], b[W] = {};
    get<W>(row + i, v);
    get<W>(weight + i, w);
    if (p.bias) get<W>(bias + i, b);
#pragma unroll
    for (int j = 0; j < W; ++j) {
      if (p.norm == NORM_LAYER) {
        v[j] = rounded_to(p.dtype, fmaf((v[j] - mean) * factor, w[j], b[j]));
      } else {
        // Rounded where Hugging Face's Llama rounds: before the weight, and after it.
        v[j] = rounded_to(p.dtype, rounded_to(p.dtype, v[j] * factor) * w[j]);
      }
    }
    put<W>(row + i, v);
  });
}

// After the wait: rows 0..m of x into shared memory as f32, `staged_pitch(k)` floats apart, and
// zeros for the rest of the M rows. A barrier must follow.
template <int M, int W>
__device__ __forceinline__ void stage_rows(const Prologue& p, uint32_t m, uint32_t k, float* xs,
                                           float* scratch) {
  const int pitch = staged_pitch(k);
  // Warps read what others staged of the norm; a block's threads read their own.
  if (M > 1 && p.norm != NORM_NONE) __syncthreads();
  for (uint32_t r = Team<M>::team(); r < M; r += Team<M>::teams()) {
    float* row = xs + r * pitch;
    float sum = 0.f, squares = 0.f;
    Team<M>::template each<W>(k, [&](uint32_t i) {
      float v[W] = {};
      if (r < m) read_some<W>(p.x, p.dtype, uint64_t(r) * k + i, v);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        sum += v[j];
        squares = fmaf(v[j], v[j], squares);
      }
      put<W>(row + i, v);
    });
    if (p.norm != NORM_NONE && r < m) {
      normalise<M, W>(p, k, row, xs + M * pitch, sum, squares, scratch);
    }
  }
}

}  // namespace fused
