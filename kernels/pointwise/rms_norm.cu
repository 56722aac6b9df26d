// y = x / sqrt(mean(x^2) + eps) * weight over rows [rows, width]; with a residual, sum = x + residual
// is written too and is what is normalised.
//
// Rounded as Hugging Face's Llama: the sum, the normalised value and the product each to the
// element type. One warp or one block owns a row and keeps it in registers (after Liger-Kernel's and
// QuACK's one-pass forms): bytes moved are x and y once, and the weight once per block from L2.
#include "common/rows.cuh"

using namespace fused;

template <typename T, int N> __device__ __forceinline__ void norm_row(const RmsNormParams& p) {
  constexpr int K = KEPT<T, N>;
  __shared__ float scratch[MAX_WARPS];
  const RowGroup g(p.warps);
  const uint32_t packs = p.width / N;
  const T* weight = static_cast<const T*>(p.weight);
  Pack<T, N> x[K];
  pdl_launch();
  pdl_wait();
  if (g.row >= p.rows) return;
  const uint64_t start = g.row * p.width;
  const T* in = static_cast<const T*>(p.x) + start;
  const T* residual = static_cast<const T*>(p.residual) + start;
  T* sum = static_cast<T*>(p.sum) + start;
  T* y = static_cast<T*>(p.y) + start;
  const bool add = p.residual != nullptr;

#pragma unroll
  for (int i = 0; i < K; ++i) {
    const uint32_t at = g.thread + i * g.threads;
    if (at < packs) x[i] = load_stream<T, N>(in + at * N);
  }
  auto with_residual = [&](Pack<T, N>& v, uint32_t at) {
    const auto r = load_stream<T, N>(residual + at * N);
#pragma unroll
    for (int j = 0; j < N; ++j) v.v[j] = from_float<T>(to_float(v.v[j]) + to_float(r.v[j]));
    store(sum + at * N, v);
  };
  float squares = 0.f;
  auto count = [&](const Pack<T, N>& v) {
#pragma unroll
    for (int j = 0; j < N; ++j) squares = fmaf(to_float(v.v[j]), to_float(v.v[j]), squares);
  };
#pragma unroll
  for (int i = 0; i < K; ++i) {
    const uint32_t at = g.thread + i * g.threads;
    if (at < packs) {
      if (add) with_residual(x[i], at);
      count(x[i]);
    }
  }
  for (uint32_t at = g.thread + K * g.threads; at < packs; at += g.threads) {
    auto v = load<T, N>(in + at * N);
    if (add) with_residual(v, at);
    count(v);
  }

  const float factor = 1.f / sqrtf(g.sum(squares, scratch) / p.width + p.eps);
  auto normalize = [&](const Pack<T, N>& v, uint32_t at) {
    const auto w = load<T, N>(weight + at * N);
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j)
      out.v[j] = from_float<T>(rounded<T>(to_float(v.v[j]) * factor) * to_float(w.v[j]));
    store(y + at * N, out);
  };
#pragma unroll
  for (int i = 0; i < K; ++i) {
    const uint32_t at = g.thread + i * g.threads;
    if (at < packs) normalize(x[i], at);
  }
  // Each thread reads back what it has itself written.
  const T* again = add ? sum : in;
  for (uint32_t at = g.thread + K * g.threads; at < packs; at += g.threads)
    normalize(load<T, N>(again + at * N), at);
}

template <typename T> __device__ __forceinline__ void rms_norm(const RmsNormParams& p) {
  if (p.vectors)
    norm_row<T, VEC<T>>(p);
  else
    norm_row<T, 1>(p);
}

FUSED_ENTRIES(rms_norm, MAX_WARPS * WARP, RmsNormParams, rms_norm)
