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
//
// `quantize_rows_e4m3` writes 8-bit floats, a scale of max |v| / 448 for each 128 values (as in DeepSeek-V3, 2024), in
// the order of formats/packed.cuh: the width is a multiple of 128, all addresses are aligned. From sm_89 on.
//
// `quantize_rows_int16` writes 16-bit whole numbers in two int8 parts, with a power of two for each 128 values
// (formats/int16_blocks.cuh). The width is a multiple of 128, too.
#include "abi/w8a16.cuh"
#include "common/rows.cuh"
#include "formats/int16_blocks.cuh"
#include "formats/int8_rows.cuh"
#include "formats/packed.cuh"
#include "linear/stage_x_wna16.cuh"

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

// What a row becomes.
enum Form { TO_INT8, TO_INT8_AND_BACK, TO_E4M3, TO_INT16 };

constexpr float MAX_E4M3 = 448.f;

// Two e4m3 floats, the first in the low byte.
__device__ __forceinline__ uint32_t e4m3_pair(float a, float b) {
  uint16_t pair = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
#endif
  return pair;
}

// The bits of the largest magnitude of 128 values, of which a part of a warp has N each.
template <typename T, int N> __device__ __forceinline__ uint32_t largest_of_k_block(const Pack<T, N>& v) {
  constexpr int LANES = K_BLOCK / N;
  const uint32_t lanes = LANES == WARP ? FULL : ((1u << LANES) - 1) << (threadIdx.x % WARP / LANES * LANES);
  MaxMagnitude<T, N> most;
  most.take(v);
  uint32_t bits = most.widened();
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) bits = max(bits, __shfl_xor_sync(lanes, bits, offset));
  return bits;
}

// N values of a row, among 128 that a part of a warp has and that share a scale. Gives the scale.
template <typename T, int N> __device__ __forceinline__ float store_e4m3(int8_t* to, const Pack<T, N>& v) {
  const float largest = __uint_as_float(largest_of_k_block<T, N>(v));
  const bool zeros = largest < MIN_MAGNITUDE;
  const float inverse = zeros ? 0.f : MAX_E4M3 / largest;
  Pack<uint32_t, N / 4> words;
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    float by[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) by[Fp8<false>::place(c)] = to_float(v.v[4 * i + c]) * inverse;
    words.v[i] = e4m3_pair(by[0], by[1]) | e4m3_pair(by[2], by[3]) << 16;
  }
  store(reinterpret_cast<uint32_t*>(to), words);
  return zeros ? 0.f : largest / MAX_E4M3;
}

// The same of 16-bit whole numbers: upper parts, and lower ones `pitch` bytes behind.
template <typename T, int N>
__device__ __forceinline__ float store_int16(int8_t* to, uint32_t pitch, const Pack<T, N>& v) {
  const KBlockScale by(largest_of_k_block<T, N>(v));
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    Pack<uint32_t, N / 4> words;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      uint32_t whole[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) whole[c] = __float_as_uint(fmaf(to_float(v.v[4 * i + c]), by.inverse, 12582912.f));
      words.v[i] = bytes_of(whole, part);
    }
    store(reinterpret_cast<uint32_t*>(to + part * pitch), words);
  }
  return by.scale;
}

// Where the scale of a row lies among those of a K block.
__device__ __forceinline__ uint32_t int16_scale_place(uint32_t row) {
  const uint32_t in_unit = row % W8A16_UNIT;
  return row - in_unit + in_unit % 4 * (W8A16_UNIT / 4) + in_unit / 4;
}

// N values of a row in a form that has a scale for each 128. Gives the scale.
template <typename T, int N, Form FORM>
__device__ __forceinline__ float store_scaled(int8_t* to, uint32_t pitch, const Pack<T, N>& v) {
  if constexpr (FORM == TO_E4M3)
    return store_e4m3(to, v);
  else
    return store_int16(to, pitch, v);
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

// Values from `at * N` on of a row behind its norm.
template <typename T, int N>
__device__ __forceinline__ void normalise_pack(const Prologue& p, float mean, float factor, Pack<T, N>& v,
                                               uint32_t at) {
  if (p.norm == NORM_NONE) return;
  const auto w = load<T, N>(static_cast<const T*>(p.weight) + at * N);
  Pack<T, N> b = {};
  if (p.bias) b = load<T, N>(static_cast<const T*>(p.bias) + at * N);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float value = to_float(v.v[j]), by = to_float(w.v[j]);
    v.v[j] = from_float<T>(p.norm == NORM_RMS ? rounded<T>(value * factor) * by
                                              : fmaf((value - mean) * factor, by, to_float(b.v[j])));
  }
}

template <typename T, int N, Form FORM> __device__ __forceinline__ void quantize_row(const QuantizeRowsParams& p) {
  constexpr int K = KEPT<T, N>;
  constexpr bool BACK = FORM == TO_INT8_AND_BACK;
  __shared__ float scratch[3][MAX_WARPS];
  __shared__ uint32_t most_scratch[MAX_WARPS];
  const RowGroup g(p.warps);
  const uint32_t packs = p.width / N;
  const int norm = p.prologue.norm;
  pdl_wait();
  // Not before: the product loads weights without waiting.
  pdl_launch();
  if (g.row >= p.rows) return;
  const T* in = static_cast<const T*>(p.prologue.x) + g.row * p.width;
  int8_t* codes = p.codes + g.row * p.pitch * (BACK ? sizeof(T) : FORM == TO_INT16 ? 2 : 1);
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
  const auto normalise = [&](Pack<T, N>& v, uint32_t at) { normalise_pack(p.prologue, mean, factor, v, at); };
  if constexpr (FORM == TO_E4M3 || FORM == TO_INT16) {
    constexpr uint32_t LANES = K_BLOCK / N, UNIT = W8A16_UNIT;
    const uint32_t of_k_block = FORM == TO_E4M3 ? p.rows : (p.rows + UNIT - 1) / UNIT * UNIT;
    const uint32_t place = FORM == TO_E4M3 ? g.row : int16_scale_place(g.row);
    each_pack([&](Pack<T, N>& v, uint32_t at, bool) {
      normalise(v, at);
      const float scale = store_scaled<T, N, FORM>(codes + at * N, p.pitch, v);
      if (at % LANES == 0) p.scales[uint64_t(at / LANES) * of_k_block + place] = scale;
    });
    return;
  }
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

template <typename T, Form FORM> __device__ __forceinline__ void quantize_by_width(const QuantizeRowsParams& p) {
  if (p.vectors)
    quantize_row<T, VEC<T>, FORM>(p);
  else
    quantize_row<T, 1, FORM>(p);
}

template <typename T> __device__ __forceinline__ void quantize(const QuantizeRowsParams& p) {
  quantize_by_width<T, TO_INT8>(p);
}

template <typename T> __device__ __forceinline__ void back(const QuantizeRowsParams& p) {
  quantize_by_width<T, TO_INT8_AND_BACK>(p);
}

template <typename T> __device__ __forceinline__ void e4m3(const QuantizeRowsParams& p) {
  quantize_row<T, VEC<T>, TO_E4M3>(p);
}

template <typename T> __device__ __forceinline__ void int16(const QuantizeRowsParams& p) {
  quantize_row<T, VEC<T>, TO_INT16>(p);
}

FUSED_ENTRIES(quantize_rows, MAX_WARPS * WARP, QuantizeRowsParams, quantize)
FUSED_ENTRIES(quantize_rows_e4m3, MAX_WARPS * WARP, QuantizeRowsParams, e4m3)
FUSED_ENTRIES(quantize_rows_back, MAX_WARPS * WARP, QuantizeRowsParams, back)
FUSED_ENTRIES(quantize_rows_int16, MAX_WARPS * WARP, QuantizeRowsParams, int16)
