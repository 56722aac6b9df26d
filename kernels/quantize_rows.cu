// codes = round(v / scale), scale = max |v| / 127 for each row v = norm(x) of [rows, width]: int8
// activations with a scale for each token (LLM.int8(), Dettmers et al. 2022), behind an RMS or layer
// norm or none, which round as rms_norm.cu and layer_norm.cu do.
//
// One warp or one block owns a row and keeps it in registers; bytes moved are x once and a byte and
// less for each code. A row with infinite or undefined values gets a scale that is one of these, so
// that it spreads to all outputs of the row; a row of zeros has scale 0.
#include "prologue.cuh"
#include "rows.cuh"

using namespace fused;

struct Params {
  Prologue prologue;
  int8_t* codes;  // [rows, pitch], with zeros past the width
  float* scales;  // [rows]
  uint32_t rows, width, pitch;
  uint32_t warps;  // of one row
  int vectors;     // whether all addresses and the width are multiples of 16 bytes
};

// What is smaller counts as zero: MOST over it would be infinite.
constexpr float MOST = 127.f, LEAST = 1e-36f;

// The largest of magnitudes as bits, whose order is theirs with the undefined above all. Of elements of
// 16 bits two at a time.
template <typename T, int N> struct Most {
  static constexpr bool PAIRS = sizeof(T) == 2 && N > 1;
  uint32_t bits = 0;

  __device__ __forceinline__ void take(const Pack<T, N>& v) {
    if constexpr (PAIRS) {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(v.v);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) bits = __vmaxu2(bits, words[i] & 0x7fff7fff);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) bits = max(bits, __float_as_uint(fabsf(to_float(v.v[i]))));
    }
  }
  // As those of a float.
  __device__ __forceinline__ uint32_t widened() const {
    if constexpr (PAIRS) {
      const uint16_t half = max(bits & 0xffff, bits >> 16);
      return __float_as_uint(to_float(*reinterpret_cast<const T*>(&half)));
    } else {
      return bits;
    }
  }
};

// v rounded to an integer of a byte, as the low bits: those of a sum whose last place is 1.
__device__ __forceinline__ uint32_t rounded_code(float v) { return __float_as_uint(__fadd_rn(v, 12582912.f)); }

template <int N> __device__ __forceinline__ void store_codes(int8_t* to, const uint32_t (&codes)[N]) {
  if constexpr (N % 4 == 0) {
    Pack<uint32_t, N / 4> words;
#pragma unroll
    for (int i = 0; i < N / 4; ++i)
      words.v[i] = __byte_perm(__byte_perm(codes[4 * i], codes[4 * i + 1], 0x0040),
                               __byte_perm(codes[4 * i + 2], codes[4 * i + 3], 0x0040), 0x5410);
    store(reinterpret_cast<uint32_t*>(to), words);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = int8_t(codes[i]);
  }
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

template <typename T, int N> __device__ __forceinline__ void quantize_row(const Params& p) {
  constexpr int K = KEPT<T, N>;
  __shared__ float scratch[3][MOST_WARPS];
  __shared__ uint32_t most_scratch[MOST_WARPS];
  const RowGroup g(p.warps);
  const uint32_t packs = p.width / N;
  const T* weight = static_cast<const T*>(p.prologue.weight);
  const T* bias = static_cast<const T*>(p.prologue.bias);
  const int norm = p.prologue.norm;
  wait_previous();
  // Not before: the product asks for weights without waiting.
  allow_next();
  if (g.row >= p.rows) return;
  const T* in = static_cast<const T*>(p.prologue.x) + g.row * p.width;
  int8_t* codes = p.codes + g.row * p.pitch;
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
  Most<T, N> most;
  each_pack([&](Pack<T, N>& v, uint32_t at, bool) {
    normalise(v, at);
    most.take(v);
  });
  const float largest = __uint_as_float(row_max(g, most.widened(), most_scratch));
  const bool zeros = largest < LEAST;
  const float inverse = zeros ? 0.f : MOST / largest;
  if (g.thread == 0) p.scales[g.row] = zeros ? 0.f : largest / MOST;
  each_pack([&](Pack<T, N>& v, uint32_t at, bool kept) {
    if (!kept) normalise(v, at);
    uint32_t out[N];
    // No further than MOST, past which only rounding gets.
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = rounded_code(__fmul_rn(to_float(v.v[j]), inverse));
    store_codes(codes + at * N, out);
  });
  for (uint32_t at = p.width + g.thread; at < p.pitch; at += g.threads) codes[at] = 0;
}

template <typename T> __device__ __forceinline__ void quantize(const Params& p) {
  if (p.vectors)
    quantize_row<T, VEC<T>>(p);
  else
    quantize_row<T, 1>(p);
}

FUSED_ENTRIES(quantize_rows, MOST_WARPS * WARP, quantize)
