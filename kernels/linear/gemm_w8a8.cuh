// What the W8A8 GEMMs share: y = act(s x_q (t W_q)^T + bias) + residuals with int8 x_q and W_q, s32 sums, a scale s
// per row of x and t per output channel; which outputs a tile has, and how its sums are scaled.
//
// A tile has two pieces of W's rows side by side: neighbours, or gates and what they gate, which so meet in one
// thread. In a thread's registers lie columns 2 t and 2 t + 1 of every 8, t its place in a quad.
#pragma once

#include "linear/epilogue.cuh"

namespace fused {

__device__ __forceinline__ bool gates(const W8A8Product& p) { return gates(p.epilogue); }

// A tile of outputs: N rows of W meet ROWS rows of x.
struct Place {
  uint32_t m_tile;
  uint32_t part[2], row[2];  // of the pieces: the weight, and the first row in it
  uint32_t column[2];        // the first output, but a gated piece's place in the bias
  uint32_t limit;            // rows of the first piece's weight that have outputs

  // The `index`-th: sections one after the other, in each all tiles of m for one of n, so that the
  // weights are read once and x stays in the L2 cache.
  template <int N> __device__ __forceinline__ static Place of(const W8A8Product& p, uint32_t index) {
    Place place;
    const uint32_t first = index / (p.section * p.n_tiles) * p.section;
    const uint32_t height = min(p.section, p.m_tiles - first);
    index -= first * p.n_tiles;
    place.m_tile = first + index % height;
    const uint32_t tile = index / height;
    const uint32_t part = (tile >= p.weights[1].tile) + (tile >= p.weights[2].tile);
    const W8A8Weights& w = p.weights[part];
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

// 16 bytes in one access, which the compiler would take apart.
__device__ __forceinline__ void store16(void* to, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// The scales of a tile's columns, and their bias, in shared memory.
template <int N> struct Columns {
  float scales[N], biases[N];

  struct One {
    float scale, bias;
  };

  // Read long before it is wanted.
  static __device__ __forceinline__ One read(const W8A8Product& p, const Place& place, uint32_t column) {
    return read(p, place, column, [](const W8A8Weights& w, uint32_t row) { return w.scales[row]; });
  }
  // The same with the scale that `scale_of` tells for a row of a matrix.
  template <class ScaleOf>
  static __device__ __forceinline__ One read(const W8A8Product& p, const Place& place, uint32_t column,
                                             ScaleOf scale_of) {
    const uint32_t piece = column / (N / 2), offset = column % (N / 2);
    One one = {0.f, 0.f};
    if (place.row[0] + (gates(p) ? offset : column) >= place.limit) return one;
    const uint32_t part = piece ? place.part[1] : place.part[0], row = piece ? place.row[1] : place.row[0];
    one.scale = scale_of(p.weights[part], row + offset);
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
  template <bool BIASED = true, typename Sum>
  __device__ __forceinline__ void scale2(uint32_t column, float x_scale, const Sum (&sums)[2], float (&y)[2]) const {
    const float2 s = *reinterpret_cast<const float2*>(scales + column);
    float2 b = {0.f, 0.f};
    if (BIASED) b = *reinterpret_cast<const float2*>(biases + column);
    y[0] = fmaf(float(sums[0]), x_scale * s.x, b.x), y[1] = fmaf(float(sums[1]), x_scale * s.y, b.y);
  }
  // Sums of 8 columns, scaled, with their bias.
  template <typename Sum>
  __device__ __forceinline__ void scale8(uint32_t column, float x_scale, const Sum (&sums)[8], float (&y)[8]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 s = *reinterpret_cast<const float4*>(scales + column + 4 * half);
      const float4 b = *reinterpret_cast<const float4*>(biases + column + 4 * half);
      const Sum* from = sums + 4 * half;
      float* to = y + 4 * half;
      to[0] = fmaf(float(from[0]), x_scale * s.x, b.x), to[1] = fmaf(float(from[1]), x_scale * s.y, b.y);
      to[2] = fmaf(float(from[2]), x_scale * s.z, b.z), to[3] = fmaf(float(from[3]), x_scale * s.w, b.w);
    }
  }
};

// What one of STEPS steps has of a thread's sums, by branches: unrolled, an epilogue is longer than the
// instruction caches, and fetching it takes longer than a small product.
template <int STEPS, int FIRST = 0, typename Sum, int N, class Index>
__device__ __forceinline__ void pick(int step, const Sum (&sums)[N], Sum (&picked)[2][4][2], Index index) {
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

}  // namespace fused
