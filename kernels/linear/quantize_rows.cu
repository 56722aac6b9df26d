// Dynamic int8 quantization of activations: q = round(v / scale), scale = max |v| / 127 for each row v = norm(x) of
// [rows, width], a scale per token (LLM.int8(), Dettmers et al. 2022), behind an RMS or layer norm or none, which
// round as pointwise/rms_norm.cu and pointwise/layer_norm.cu do.
//
// One warp or one block owns a row and keeps it in registers; bytes moved are x once and a byte for each value. A row
// with infinite or undefined values gets a scale that is one of these, so that it spreads to all outputs of the row;
// a row of zeros has scale 0.
//
// `quantize_rows_back` writes q scale, rounded to x's dtype, for products that take x as it is and layers that were
// trained with their input in 8 bits (BitNet b1.58, Ma et al. 2024).
#include "common/rows.cuh"
#include "formats/int8_rows.cuh"
#include "linear/prologue.cuh"

using namespace fused;

template <int N> __device__ __forceinline__ void store_codes(int8_t* to, const Codes<N>& codes) {
  if constexpr (N % 4 == 0) {
    store(reinterpret_cast<uint32_t*>(to), code_words(codes));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = int8_t(codes.v[i]);
  }
}

template <typename T, int N> __device__ __forceinline__ void store_values(T* to, const Codes<N>& codes, float scale) {
  Pack<T, N> values;
#pragma unroll
  for (int i = 0; i < N; ++i) values.v[i] = from_float<T>(static_cast<float>(static_cast<int8_t>(codes.v[i])) * scale);
  store(to, values);
}

// The largest over the row, in each of its threads. `scratch` as for RowGroup::sum.
__device__ __forceinline__ uint32_t row_max(const RowGroup& g, uint32_t v, uint32_t* scratch) {
  const auto over_warp = [](uint32_t v) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) v = max(v, __shfl_xor_sync(FULL, v, offset));
    return v;
  };
  v = over_warp(v);
  if (g.threads == WARP) return v;
  if (g.thread % WARP == 0) scratch[g.thread / WARP] = v;
  __syncthreads();
  const uint32_t lane = g.thread % WARP;
  return over_warp(lane < g.threads / WARP ? scratch[lane] : 0);
}

template <typename T, int N, bool BACK> __device__ __forceinline__ void quantize_row(const QuantizeRowsParams& p) {
  constexpr int K = KEPT<T, N>;
  __shared__ float scratch[3][MAX_WARPS];
  __shared__ uint32_t most_scratch[MAX_WARPS];
  const RowGroup g(p.warps);
  const uint32_t packs = p.width / N;
  const T* weight = static_cast<const T*>(p.prologue.weight);
  const T* bias = static_cast<const T*>(p.prologue.bias);
  const int norm = p.prologue.norm;
  pdl_wait();
  // Not before: the product loads weights without waiting.
  pdl_launch();
  if (g.row >= p.rows) return;
  const T* in = static_cast<const T*>(p.prologue.x) + g.row * p.width;
  int8_t* codes = p.codes + g.row * p.pitch * (BACK ? sizeof(T) : 1);
  Pack<T, N> x[K];

  // Calls `take` for all of the thread's packs; what it leaves in those that are kept stays.
  const auto each_pack = [&](auto take) {
#pragma unroll
    for (int i = 0; i < K; ++i) {
      const uint32_t at = g.thread + i * g.threads;
      if (at < packs) take(x[i], at, true);
    }
    for (uint32_t at = g.thread + K * g.threads; at < packs; at += g.threads) {
      auto v = load_stream<T, N>(in + at * N);
      take(v, at, false);
    }
  };
  const auto each_value = [&](auto take) {
    each_pack([&](const Pack<T, N>& v, uint32_t, bool) {
#pragma unroll
      for (int j = 0; j < N; ++j) take(to_float(v.v[j]));
    });
  };

#pragma unroll
  for (int i = 0; i < K; ++i) {
    const uint32_t at = g.thread + i * g.threads;
    if (at < packs) x[i] = load_stream<T, N>(in + at * N);
  }
  float mean = 0.f, factor = 1.f;
  if (norm == NORM_RMS) {
    float squares = 0.f;
    each_value([&](float v) { squares = fmaf(v, v, squares); });
    factor = 1.f / sqrtf(g.sum(squares, scratch[0]) / p.width + p.prologue.eps);
  } else if (norm == NORM_LAYER) {
    const auto centred = spread(g, p.width, p.prologue.eps, each_value, scratch);
    mean = centred.mean, factor = centred.factor;
  }
  const auto normalise = [&](Pack<T, N>& v, uint32_t at) {
    if (norm == NORM_NONE) return;
    const auto w = load<T, N>(weight + at * N);
    Pack<T, N> b = {};
    if (bias) b = load<T, N>(bias + at * N);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float value = to_float(v.v[j]), by = to_float(w.v[j]);
      v.v[j] = from_float<T>(norm == NORM_RMS ? rounded<T>(value * factor) * by
                                              : fmaf((value - mean) * factor, by, to_float(b.v[j])));
    }
  };
  MaxMagnitude<T, N> most;
  each_pack([&](Pack<T, N>& v, uint32_t at, bool) {
    normalise(v, at);
    most.take(v);
  });
  const Scale scale(__uint_as_float(row_max(g, most.widened(), most_scratch)));
  if (!BACK && g.thread == 0) p.scales[g.row] = scale.scale;
  each_pack([&](Pack<T, N>& v, uint32_t at, bool kept) {
    if (!kept) normalise(v, at);
    const auto rounded = codes_of(v, scale.inverse);
    if constexpr (BACK)
      store_values(reinterpret_cast<T*>(codes) + at * N, rounded, scale.scale);
    else
      store_codes(codes + at * N, rounded);
  });
  if constexpr (BACK) return;
  for (uint32_t at = p.width + g.thread; at < p.pitch; at += g.threads) codes[at] = 0;
}

template <typename T, bool BACK> __device__ __forceinline__ void quantize_by_width(const QuantizeRowsParams& p) {
  if (p.vectors)
    quantize_row<T, VEC<T>, BACK>(p);
  else
    quantize_row<T, 1, BACK>(p);
}

template <typename T> __device__ __forceinline__ void quantize(const QuantizeRowsParams& p) {
  quantize_by_width<T, false>(p);
}

template <typename T> __device__ __forceinline__ void back(const QuantizeRowsParams& p) {
  quantize_by_width<T, true>(p);
}

FUSED_ENTRIES(quantize_rows, MAX_WARPS * WARP, QuantizeRowsParams, quantize)
FUSED_ENTRIES(quantize_rows_back, MAX_WARPS * WARP, QuantizeRowsParams, back)
