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
  int dtype;    // of x and of the norm's weight and bias
  int vectors;  // whether k is a multiple of 8 and all addresses of 16
};

// Floats from one row in shared memory to the next.
__device__ __forceinline__ int staged_pitch(int k) { return (k + 3) / 4 * 4; }

// Runs `body(i)` for every W-th element i of a row that is this thread's.
template <int W, class Body> __device__ __forceinline__ void each_own(int k, Body body) {
#pragma unroll 2
  for (int i = threadIdx.x * W; i < k; i += blockDim.x * W) body(i);
}

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

template <int W>
__device__ __forceinline__ void stage_vector(const void* from, int dtype, int k, float* to) {
  each_own<W>(k, [&](int i) {
    float v[W];
    read_some<W>(from, dtype, i, v);
    put<W>(to + i, v);
  });
}

// Before the wait: the norm's weight and bias into the two rows behind the M of x, each element by
// the thread that will use it.
template <int M>
__device__ __forceinline__ void stage_norm(const Prologue& p, int k, float* xs) {
  if (p.norm == NORM_NONE) return;
  const int pitch = staged_pitch(k);
  float* weight = xs + M * pitch;
  if (p.vectors) {
    stage_vector<8>(p.weight, p.dtype, k, weight);
    if (p.bias) stage_vector<8>(p.bias, p.dtype, k, weight + pitch);
  } else {
    stage_vector<1>(p.weight, p.dtype, k, weight);
    if (p.bias) stage_vector<1>(p.bias, p.dtype, k, weight + pitch);
  }
}

// The sums of M values over the block, in every thread. `scratch` holds M floats for each warp and
// may be used again after the next barrier.
template <int M> __device__ __forceinline__ void block_sums(float (&v)[M], float* scratch) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
#pragma unroll
  for (int m = 0; m < M; ++m) v[m] = warp_sum(v[m]);
  if (lane == 0) {
#pragma unroll
    for (int m = 0; m < M; ++m) scratch[warp * M + m] = v[m];
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < M; ++m) v[m] = 0.f;
  for (int w = 0; w < warps; ++w) {
#pragma unroll
    for (int m = 0; m < M; ++m) v[m] += scratch[w * M + m];
  }
}

template <int M, int W>
__device__ __forceinline__ void stage_normed(const Prologue& p, int m, int k, float* xs,
                                             float* scratch) {
  const int pitch = staged_pitch(k);
  const float* weight = xs + M * pitch;
  const float* bias = weight + pitch;
  float mean[M], factor[M];
#pragma unroll
  for (int r = 0; r < M; ++r) mean[r] = factor[r] = 0.f;
  each_own<W>(k, [&](int i) {
#pragma unroll
    for (int r = 0; r < M; ++r) {
      float v[W] = {};
      if (r < m) read_some<W>(p.x, p.dtype, uint64_t(r) * k + i, v);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        mean[r] += v[j];
        factor[r] = fmaf(v[j], v[j], factor[r]);
      }
      put<W>(xs + r * pitch + i, v);
    }
  });
  if (p.norm == NORM_LAYER) {
    block_sums<M>(mean, scratch);
#pragma unroll
    for (int r = 0; r < M; ++r) mean[r] /= k, factor[r] = 0.f;
    each_own<W>(k, [&](int i) {
#pragma unroll
      for (int r = 0; r < M; ++r) {
        float v[W];
        get<W>(xs + r * pitch + i, v);
#pragma unroll
        for (int j = 0; j < W; ++j) factor[r] = fmaf(v[j] - mean[r], v[j] - mean[r], factor[r]);
      }
    });
    __syncthreads();  // the scratch of the first sum has been read
  }
  block_sums<M>(factor, scratch);
#pragma unroll
  for (int r = 0; r < M; ++r) factor[r] = rsqrtf(factor[r] / k + p.eps);
  each_own<W>(k, [&](int i) {
    float w[W], b[W] = {};
    get<W>(weight + i, w);
    if (p.bias) get<W>(bias + i, b);
#pragma unroll
    for (int r = 0; r < M; ++r) {
      if (r >= m) break;
      float v[W];
      get<W>(xs + r * pitch + i, v);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        if (p.norm == NORM_LAYER) {
          v[j] = rounded_to(p.dtype, fmaf((v[j] - mean[r]) * factor[r], w[j], b[j]));
        } else {
          // Rounded where Hugging Face's Llama rounds: before the weight, and after it.
          v[j] = rounded_to(p.dtype, rounded_to(p.dtype, v[j] * factor[r]) * w[j]);
        }
      }
      put<W>(xs + r * pitch + i, v);
    }
  });
}

// After the wait: rows 0..m of x into shared memory as f32, `staged_pitch(k)` floats apart, and
// zeros for the rest of the M rows. A barrier must follow.
template <int M>
__device__ __forceinline__ void stage_rows(const Prologue& p, int m, int k, float* xs,
                                           float* scratch) {
  if (p.norm != NORM_NONE) {
    if (p.vectors) {
      stage_normed<M, 8>(p, m, k, xs, scratch);
    } else {
      stage_normed<M, 1>(p, m, k, xs, scratch);
    }
    return;
  }
  const int pitch = staged_pitch(k);
  if (p.vectors) {
    stage_vector<8>(p.x, p.dtype, m * k, xs);
  } else {
    for (int r = 0; r < m; ++r) {
      each_own<1>(k, [&](int i) { xs[r * pitch + i] = read(p.x, p.dtype, uint64_t(r) * k + i); });
    }
  }
  for (int i = m * pitch + threadIdx.x; i < M * pitch; i += blockDim.x) xs[i] = 0.f;
}

}  // namespace fused
