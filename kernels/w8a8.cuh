// y = act(s x_q (t W_q)^T + bias) + residuals with x_q and W_q in int8, sums in s32, a scale s for each
// row of x and a scale t for each row of W: what the kernels for many rows share, where a tile of
// outputs lies and how sums become outputs.
//
// A tile has two pieces of W's rows side by side: neighbours, or gates and what they gate, which so
// meet in one thread. In a thread's registers lie columns 2 t and 2 t + 1 of every 8, t its place in
// a quad; the quad first trades them so that each has 8 in a row, which are 16 or 32 bytes.
#pragma once

#include <type_traits>

#include "epilogue.cuh"

namespace fused {

// One of up to three weights of the same k, side by side in the output.
struct Weights {
  const int8_t* codes;  // [rows, k], as Int8 of codes.cuh lays them out
  const float* scales;  // [rows]
  uint32_t rows;
  uint32_t column;      // its first among the outputs
  uint32_t tile;        // its first; past them for a weight that is not there
};

// Rows of all weights, and the epilogue's rows, are multiples of 8 and begin at 16 bytes.
struct Product {
  const int8_t* x;        // [m, k]
  const float* x_scales;  // [m]
  Weights weights[3];
  Epilogue epilogue;
  uint32_t m;
  uint32_t k;             // a multiple of 16: zeros have been added
  uint32_t width;         // outputs
  uint32_t m_tiles, n_tiles;
  uint32_t section;       // tiles of m that are taken together
  uint32_t gated_part;    // where gates multiply: whose rows those are, and the first of them
  uint32_t gated_row;
};

__device__ __forceinline__ bool gates(const Product& p) { return p.epilogue.activation == ACT_SWIGLU; }

// A tile of outputs: N rows of W meet ROWS rows of x.
struct Place {
  uint32_t m_tile;
  uint32_t part[2], row[2];  // of the pieces: the weight, and the first row in it
  uint32_t column[2];        // the first output, but a gated piece's place in the bias
  uint32_t limit;            // rows of the first piece's weight that have outputs

  // The `index`-th: sections one after the other, in each all tiles of m for one of n, so that the
  // weights are read once and x stays in the L2 cache.
  template <int N> __device__ __forceinline__ static Place of(const Product& p, uint32_t index) {
    Place place;
    const uint32_t first = index / (p.section * p.n_tiles) * p.section;
    const uint32_t height = min(p.section, p.m_tiles - first);
    index -= first * p.n_tiles;
    place.m_tile = first + index % height;
    const uint32_t tile = index / height;
    const uint32_t part = (tile >= p.weights[1].tile) + (tile >= p.weights[2].tile);
    const Weights& w = p.weights[part];
    const uint32_t row = (tile - w.tile) * (gates(p) ? N / 2 : N);
    place.part[0] = part, place.row[0] = row, place.column[0] = w.column + row;
    if (gates(p)) {
      place.part[1] = p.gated_part, place.row[1] = p.gated_row + row;
      place.column[1] = p.width + row, place.limit = p.width;
    } else {
      place.part[1] = part, place.row[1] = row + N / 2;
      place.column[1] = place.column[0] + N / 2, place.limit = w.rows;
    }
    return place;
  }
};

// Four numbers of 8 columns each, of which lane t of a quad has columns 2 t and 2 t + 1: it gets all
// of number t.
__device__ __forceinline__ void trade(const int (&from)[4][2], int (&to)[8]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  int x[4][2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int even_one = from[2 * i][j], odd_one = from[2 * i + 1][j];
      const int other = __shfl_xor_sync(FULL, odd ? even_one : odd_one, 1);
      x[2 * i][j] = odd ? other : even_one;
      x[2 * i + 1][j] = odd ? odd_one : other;
    }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int other = __shfl_xor_sync(FULL, upper ? x[i][j] : x[2 + i][j], 2);
      to[2 * i + j] = upper ? other : x[i][j];
      to[4 + 2 * i + j] = upper ? x[2 + i][j] : other;
    }
}

// 8 values in a row. They pass by the L1 cache as in dtype.cuh.
__device__ __forceinline__ void read8(const void* p, int dtype, uint64_t at, float (&v)[8]) {
  if (dtype == F32) {
    const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(p) + at);
    const float4 a = __ldcg(from), b = __ldcg(from + 1);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  } else {
    const uint4 words = __ldcg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p) + at));
    if (dtype == BF16)
      unpack8<__nv_bfloat16>(words, v);
    else
      unpack8<__half>(words, v);
  }
}

// Two values as one word of 16-bit elements, the first in the low half.
template <typename T> __device__ __forceinline__ uint32_t pack2(float a, float b) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

template <typename T> __device__ __forceinline__ uint4 pack8(const float (&v)[8]) {
  return make_uint4(pack2<T>(v[0], v[1]), pack2<T>(v[2], v[3]), pack2<T>(v[4], v[5]), pack2<T>(v[6], v[7]));
}

// 16 bytes in one access, which the compiler would take apart.
__device__ __forceinline__ void store16(void* to, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void write8(void* p, int dtype, uint64_t at, const float (&v)[8]) {
  if (dtype == F32) {
    const auto bits = [&](int i) { return __float_as_uint(v[i]); };
    float* to = static_cast<float*>(p) + at;
    store16(to, make_uint4(bits(0), bits(1), bits(2), bits(3)));
    store16(to + 4, make_uint4(bits(4), bits(5), bits(6), bits(7)));
  } else {
    store16(static_cast<uint16_t*>(p) + at, dtype == BF16 ? pack8<__nv_bfloat16>(v) : pack8<__half>(v));
  }
}

// The scales of a tile's columns, and their bias, in shared memory.
template <int N> struct Columns {
  float scales[N], biases[N];

  struct One {
    float scale, bias;
  };

  // Read long before it is wanted.
  static __device__ __forceinline__ One read(const Product& p, const Place& place, uint32_t column) {
    const uint32_t piece = column / (N / 2), offset = column % (N / 2);
    One one = {0.f, 0.f};
    if (place.row[0] + (gates(p) ? offset : column) >= place.limit) return one;
    const uint32_t part = piece ? place.part[1] : place.part[0], row = piece ? place.row[1] : place.row[0];
    one.scale = p.weights[part].scales[row + offset];
    if (p.epilogue.bias) {
      const uint32_t first = piece ? place.column[1] : place.column[0];
      one.bias = widen_raw(read_raw(p.epilogue.bias, p.epilogue.dtype, first + offset), p.epilogue.dtype);
    }
    return one;
  }
  __device__ __forceinline__ void put(uint32_t column, One one) {
    scales[column] = one.scale, biases[column] = one.bias;
  }

  // Sums of 2 columns, scaled, with their bias.
  __device__ __forceinline__ void scale2(uint32_t column, float x_scale, const int (&sums)[2], float (&y)[2]) const {
    const float2 s = *reinterpret_cast<const float2*>(scales + column);
    const float2 b = *reinterpret_cast<const float2*>(biases + column);
    y[0] = fmaf(float(sums[0]), x_scale * s.x, b.x), y[1] = fmaf(float(sums[1]), x_scale * s.y, b.y);
  }
  // Sums of 8 columns, scaled, with their bias.
  __device__ __forceinline__ void scale8(uint32_t column, float x_scale, const int (&sums)[8], float (&y)[8]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 s = *reinterpret_cast<const float4*>(scales + column + 4 * half);
      const float4 b = *reinterpret_cast<const float4*>(biases + column + 4 * half);
      const int* from = sums + 4 * half;
      float* to = y + 4 * half;
      to[0] = fmaf(float(from[0]), x_scale * s.x, b.x), to[1] = fmaf(float(from[1]), x_scale * s.y, b.y);
      to[2] = fmaf(float(from[2]), x_scale * s.z, b.z), to[3] = fmaf(float(from[3]), x_scale * s.w, b.w);
    }
  }
};

// What one of STEPS steps has of a thread's sums, by branches: unrolled, an epilogue is longer than the
// instruction caches, and fetching it takes longer than a small product.
template <int STEPS, int FIRST = 0, int N, class Index>
__device__ __forceinline__ void pick(int step, const int (&sums)[N], int (&picked)[2][4][2], Index index) {
  if constexpr (STEPS > 1) {
    constexpr int HALF = STEPS / 2;
    if (step < FIRST + HALF)
      pick<HALF, FIRST>(step, sums, picked, index);
    else
      pick<STEPS - HALF, FIRST + HALF>(step, sums, picked, index);
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) picked[i][n][j] = sums[index(FIRST, i, n, j)];
  }
}

// Of both pieces, two times 2 columns 8 apart, each in rows m and m + 8: [piece][2 columns + row][2].
using Pairs = float[2][4][2];

template <class Apply> __device__ __forceinline__ void each(Pairs& y, Apply apply) {
#pragma unroll
  for (int i = 0; i < 16; ++i) y[i / 8][i / 2 % 4][i % 2] = apply(y[i / 8][i / 2 % 4][i % 2]);
}

__device__ __forceinline__ void activate_pairs(const Product& p, Pairs& y) {
  switch (p.epilogue.activation) {
    case ACT_SWIGLU:
#pragma unroll
      for (int i = 0; i < 8; ++i) y[0][i / 2][i % 2] = silu(y[0][i / 2][i % 2]) * y[1][i / 2][i % 2];
      break;
    case ACT_SILU:
      each(y, [](float v) { return activate(ACT_SILU, v); });
      break;
    case ACT_GELU:
      each(y, [](float v) { return activate(ACT_GELU, v); });
      break;
    case ACT_GELU_TANH:
      each(y, [](float v) { return activate(ACT_GELU_TANH, v); });
      break;
  }
}

// Calls `take` with the number of each pair that is outputs, and with its element as it lies in outputs
// and residuals; the first is in row m and in this column of its piece.
template <int N, class Take>
__device__ __forceinline__ void each_pair(const Product& p, const Place& place, uint32_t m, uint32_t column,
                                          Take take) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t row = m + i % 2 * 8, c = column + i / 4 * (N / 2) + i / 2 % 2 * 8;
    if ((i < 4 || !gates(p)) && row < p.m && place.row[0] + c < place.limit)
      take(i, row * p.epilogue.stride + place.column[0] + c);
  }
}

template <int N>
__device__ __forceinline__ void add_residuals(const Product& p, const Place& place, uint32_t m, uint32_t column,
                                              Pairs& y) {
  const Epilogue& e = p.epilogue;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!e.residuals[r]) continue;
    float2 of[8] = {};
    if (e.dtype == F32) {
      each_pair<N>(p, place, m, column, [&](int i, uint64_t at) {
        of[i] = __ldcg(reinterpret_cast<const float2*>(static_cast<const float*>(e.residuals[r]) + at));
      });
    } else {
      uint32_t words[8] = {};
      each_pair<N>(p, place, m, column, [&](int i, uint64_t at) {
        words[i] = __ldcg(reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(e.residuals[r]) + at));
      });
#pragma unroll
      for (int i = 0; i < 8; ++i)
        of[i] = e.dtype == BF16 ? unpack2<__nv_bfloat16>(words[i]) : unpack2<__half>(words[i]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i / 4][i % 4][0] += of[i].x, y[i / 4][i % 4][1] += of[i].y;
  }
}

// Outputs of row m in 32 columns from `offset` on in both pieces; a quad has a row.
template <int N>
__device__ __forceinline__ void finish(const Product& p, const Place& place, const Columns<N>& columns, uint32_t m,
                                       float x_scale, uint32_t offset, const int (&picked)[2][4][2]) {
  const Epilogue& e = p.epilogue;
  int first[8], second[8];
  trade(picked[0], first);
  trade(picked[1], second);
  if (m >= p.m) return;
  offset += threadIdx.x % 4 * 8;
  // Both pieces by the same code: unrolled it would be twice as long.
#pragma unroll 1
  for (int i = 0; i < (gates(p) ? 1 : 2); ++i) {
    const uint32_t column = i * (N / 2) + offset;
    if (place.row[0] + column >= place.limit) return;
    const uint64_t at = m * e.stride + place.column[0] + column;
    float residuals[2][8];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (e.residuals[r]) read8(e.residuals[r], e.dtype, at, residuals[r]);
    int sums[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[j] = i ? second[j] : first[j];
    float y[8];
    columns.scale8(column, x_scale, sums, y);
    if (gates(p)) {
      float up[8];
      columns.scale8(N / 2 + offset, x_scale, second, up);
#pragma unroll
      for (int j = 0; j < 8; ++j) y[j] = silu(y[j]) * up[j];
    } else if (e.activation != ACT_NONE) {
#pragma unroll
      for (int j = 0; j < 8; ++j) y[j] = activate(e.activation, y[j]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!e.residuals[r]) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j) y[j] += residuals[r][j];
    }
    write8(e.out, e.out_dtype, at, y);
  }
}

}  // namespace fused
