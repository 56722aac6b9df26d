// y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over rows [rows, width]; with a residual,
// sum = x + residual is written too and is what is normalised.
//
// Computed in f32; the sum and the result are rounded to the element type. One warp or one block owns a
// row and keeps it in registers, over which mean and variance take two passes. Bytes moved are x, y and
// with a residual that and the sum once, weight and bias once per block from L2.
#include "common/rows.cuh"

using namespace fused;

template <typename T, int N> __device__ __forceinline__ void norm_row(const LayerNormParams& p) {
  constexpr int K = KEPT<T, N>;
  __shared__ float scratch[3][MAX_WARPS];
  const RowGroup g(p.warps);
  const uint32_t packs = p.width / N;
  const T* weight = static_cast<const T*>(p.weight);
  const T* bias = static_cast<const T*>(p.bias);
  pdl_launch();
  pdl_wait();
  if (g.row >= p.rows) return;
  const uint64_t start = g.row * p.width;
  const T* in = static_cast<const T*>(p.x) + start;
  const T* residual = static_cast<const T*>(p.residual) + start;
  T* sum = static_cast<T*>(p.sum) + start;
  T* y = static_cast<T*>(p.y) + start;
  const bool add = p.residual != nullptr;
  // What does not fit into the registers: each thread reads back what it has itself written.
  const T* again = add ? sum : in;
  Pack<T, N> x[K];

  auto each_value = [&](auto take) {
#pragma unroll
    for (int i = 0; i < K; ++i) {
      if (g.thread + i * g.threads < packs) {
#pragma unroll
        for (int j = 0; j < N; ++j) take(to_float(x[i].v[j]));
      }
    }
    for (uint32_t at = g.thread + K * g.threads; at < packs; at += g.threads) {
      const auto v = load<T, N>(again + at * N);
#pragma unroll
      for (int j = 0; j < N; ++j) take(to_float(v.v[j]));
    }
  };

#pragma unroll
  for (int i = 0; i < K; ++i) {
    const uint32_t at = g.thread + i * g.threads;
    if (at < packs) x[i] = load_stream<T, N>(in + at * N);
  }
  if (add) {
    auto with_residual = [&](Pack<T, N>& v, uint32_t at) {
      const auto r = load_stream<T, N>(residual + at * N);
#pragma unroll
      for (int j = 0; j < N; ++j) v.v[j] = from_float<T>(to_float(v.v[j]) + to_float(r.v[j]));
      store(sum + at * N, v);
    };
#pragma unroll
    for (int i = 0; i < K; ++i) {
      const uint32_t at = g.thread + i * g.threads;
      if (at < packs) with_residual(x[i], at);
    }
    for (uint32_t at = g.thread + K * g.threads; at < packs; at += g.threads) {
      auto v = load<T, N>(in + at * N);
      with_residual(v, at);
    }
  }
  const auto centred = spread(g, p.width, p.eps, each_value, scratch);
  const float mean = centred.mean, factor = centred.factor;

  auto normalize = [&](const Pack<T, N>& v, uint32_t at) {
    const auto w = load<T, N>(weight + at * N);
    Pack<T, N> b = {}, out;
    if (bias) b = load<T, N>(bias + at * N);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float b_j = bias ? to_float(b.v[j]) : 0.f;
      out.v[j] =
          from_float<T>(fmaf((to_float(v.v[j]) - mean) * factor, to_float(w.v[j]), b_j));
    }
    store(y + at * N, out);
  };
#pragma unroll
  for (int i = 0; i < K; ++i) {
    const uint32_t at = g.thread + i * g.threads;
    if (at < packs) normalize(x[i], at);
  }
  for (uint32_t at = g.thread + K * g.threads; at < packs; at += g.threads)
    normalize(load<T, N>(again + at * N), at);
}

template <typename T> __device__ __forceinline__ void layer_norm(const LayerNormParams& p) {
  if (p.vectors)
    norm_row<T, VEC<T>>(p);
  else
    norm_row<T, 1>(p);
}

FUSED_ENTRIES(layer_norm, MAX_WARPS * WARP, LayerNormParams, layer_norm)
