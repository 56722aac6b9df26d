// Products of small matrices, with x and weights of one 16-bit type, up to 128 rows of x, K up to 3072 and few output
// channels: the decode step of a small model. Weights are in registers before x arrives, so the latency from x to
// the output is all that counts; an SM has hardly more than one warp at a time to hide it with. Hence fully unrolled
// code, types known at compile time, and all addresses computed before the PDL wait.
//
// A block computes one N tile of 8 output channels, or several where there are more tiles than multiprocessors, for
// up to 8 x M_TILES rows of x; more rows take more blocks. Its 8 warps split K. Lane 4 g + t of a warp holds 16 bytes
// of row g of the weights and of x for each K block, and of rows g + 8, g + 16 and g + 24 of x where there are M
// tiles for them: operands of gemv_dense_mma.cuh's `mma` as they are, so that x is normed in registers and does not
// pass through shared memory.
#pragma once

#include "linear/gemv_dense_mma.cuh"

namespace fused {

// The products of two words' values, each rounded to T.
template <typename T> __device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  using Pair = typename std::conditional<std::is_same_v<T, __half>, __half2, __nv_bfloat162>::type;
  const Pair product = __hmul2(*reinterpret_cast<const Pair*>(&a), *reinterpret_cast<const Pair*>(&b));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// The sum of the squares of the 8 values of 16 bytes.
template <typename T> __device__ __forceinline__ float squares_of(uint4 pack) {
  float v[8];
  unpack8<T>(pack, v);
  float even = v[0] * v[0], odd = v[1] * v[1];
#pragma unroll
  for (int i = 2; i < 8; i += 2) {
    even = fmaf(v[i], v[i], even);
    odd = fmaf(v[i + 1], v[i + 1], odd);
  }
  return even + odd;
}

// round(round(v * factor) * weight) for the two values of a word.
template <typename T> __device__ __forceinline__ uint32_t scaled(uint32_t word, float factor, uint32_t weight) {
  const float2 v = unpack2<T>(word);
  return multiply_pairs<T>(pack2<T>(v.x * factor, v.y * factor), weight);
}

// The two outputs that a lane writes: columns of places 2t and 2t + 1 of row g of x, or the one column of which it has
// the gate and what is gated. `column` and `row` give a place's column and its row of the weights. SWIGLU_ONLY: without code
// for other activations.
template <typename T, bool SWIGLU_ONLY = false> struct LatencyEpilogue {
  static constexpr int VALUES = 2;
  // 16-bit types are read alike.
  static constexpr int DTYPE = sizeof(T) == 4 ? F32 : BF16;
  bool valid[VALUES];
  uint64_t at[VALUES];
  uint32_t bias[VALUES], residuals[VALUES][2];

  template <class Column, class Row>
  __device__ __forceinline__ void prepare(const Gemv& p, uint32_t g, uint32_t t, Column column, Row row) {
    const Epilogue& e = p.epilogue;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      const uint32_t c = column(2 * t + i);
      valid[i] = g < p.m && c < p.width && !(gates(p) && i == 1);
      at[i] = g * e.stride + c;
      bias[i] = e.bias ? read_raw(e.bias, DTYPE, row(2 * t + i)) : 0;
    }
  }
  __device__ __forceinline__ void prefetch(const Epilogue& e) {
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (valid[i] && e.residuals[r]) residuals[i][r] = read_raw(e.residuals[r], DTYPE, at[i]);
      }
    }
  }
  __device__ __forceinline__ void epilogue(const Gemv& p, float (&y)[VALUES]) const {
    const Epilogue& e = p.epilogue;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) y[i] += widen_raw<T>(bias[i]);
    if (gates(p)) {
      y[0] = (SWIGLU_ONLY ? silu(y[0]) : gate(e.activation, y[0])) * y[1];
    } else if (!SWIGLU_ONLY && e.activation != ACT_NONE) {
#pragma unroll
      for (int i = 0; i < VALUES; ++i) y[i] = activate(e.activation, y[i]);
    }
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      if (!valid[i]) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (e.residuals[r]) y[i] += widen_raw<T>(residuals[i][r]);
      }
      if (e.out_dtype == F32) {
        static_cast<float*>(e.out)[at[i]] = y[i];
      } else {
        static_cast<T*>(e.out)[at[i]] = from_float<T>(y[i]);
      }
    }
  }
};

// A row of k elements, 16 bytes at a time.
template <typename T> __device__ __forceinline__ const uint4* packs_of(const void* rows, uint32_t row, uint32_t k) {
  return reinterpret_cast<const uint4*>(static_cast<const T*>(rows) + uint64_t(row) * k);
}

// A lane's chunks of 8 values of k: every fourth from `first` up to the end of its warp's share.
struct LatencyChunks {
  uint32_t first, end;
  __device__ __forceinline__ bool has(int s) const { return first + 4 * s < end; }
};

// The chunks of a row, zeros where the warp's share has ended.
template <int K_BLOCKS, class Load>
__device__ __forceinline__ void load_chunks(const LatencyChunks& chunks, uint4 (&to)[K_BLOCKS], Load load) {
#pragma unroll
  for (int s = 0; s < K_BLOCKS; ++s) {
    to[s] = make_uint4(0, 0, 0, 0);
    if (chunks.has(s)) to[s] = load(4 * s);
  }
}

// RMSNorm of the rows of x, of which each warp has a part; `squares` is the block's.
template <typename T, int K_BLOCKS, int M_TILES>
__device__ __forceinline__ void norm_rows(const Gemv& p, uint4 (&x)[M_TILES][K_BLOCKS], const uint4 (&norm)[K_BLOCKS],
                                          float (&squares)[8 * M_TILES][GEMV_WARPS]) {
  const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4;
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
    float sum = 0.f;
#pragma unroll
    for (int s = 0; s < K_BLOCKS; ++s) sum += squares_of<T>(x[m][s]);
    sum += __shfl_xor_sync(FULL, sum, 1);
    sum += __shfl_xor_sync(FULL, sum, 2);
    if (lane % 4 == 0) squares[g + 8 * m][warp] = sum;
  }
  __syncthreads();
  static_assert(GEMV_WARPS == 8);
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
    const float4 a = *reinterpret_cast<const float4*>(&squares[g + 8 * m][0]);
    const float4 b = *reinterpret_cast<const float4*>(&squares[g + 8 * m][4]);
    const float total = ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
    const float factor = rsqrtf(__fdividef(total, p.k) + p.prologue.eps);
#pragma unroll
    for (int s = 0; s < K_BLOCKS; ++s) {
      uint4& v = x[m][s];
      v = make_uint4(scaled<T>(v.x, factor, norm[s].x), scaled<T>(v.y, factor, norm[s].y),
                     scaled<T>(v.z, factor, norm[s].z), scaled<T>(v.w, factor, norm[s].w));
    }
  }
}

// The warp's split-K partial sums of an N tile, one M tile after the other: `put` stores the two of its lane.
template <typename T, int K_BLOCKS, int M_TILES, class Put>
__device__ __forceinline__ void multiply_tile(const uint4 (&x)[M_TILES][K_BLOCKS], const uint4 (&w)[K_BLOCKS], Put put) {
  // Two M tiles are one operand.
#pragma unroll
  for (int m = 0; m < M_TILES; m += 2) {
    Accumulator parts[4] = {};
#pragma unroll
    for (int s = 0; s < K_BLOCKS; ++s) {
      const uint4 above = x[m][s], v = w[s];
      const uint4 below = m + 1 < M_TILES ? x[m + 1 < M_TILES ? m + 1 : m][s] : make_uint4(0, 0, 0, 0);
      mma<T>(parts[s % 2], above.x, above.y, v.x, v.y, below.x, below.y);
      mma<T>(parts[2 + s % 2], above.z, above.w, v.z, v.w, below.z, below.w);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (m + half >= M_TILES) continue;
      float y[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 2 * half + i;
        y[i] = (parts[0].v[at] + parts[1].v[at]) + (parts[2].v[at] + parts[3].v[at]);
      }
      put(m + half, make_float2(y[0], y[1]));
    }
  }
}

// The warps' partial sums of a lane's two outputs, added up.
__device__ __forceinline__ float2 sum_of_warps(const float (&sums)[GEMV_WARPS][WARP][2], uint32_t lane) {
  float2 y = *reinterpret_cast<const float2*>(sums[0][lane]);
#pragma unroll
  for (int warp = 1; warp < GEMV_WARPS; ++warp) {
    const float2 part = *reinterpret_cast<const float2*>(sums[warp][lane]);
    y.x += part.x, y.y += part.y;
  }
  return y;
}

// k is a multiple of 8 and at most 32 x GEMV_WARPS x K_BLOCKS. blockIdx.x counts groups of 8 x N_TILES output channels,
// blockIdx.y groups of 8 x M_TILES rows of x.
template <typename T, int K_BLOCKS, int N_TILES, int M_TILES> __device__ __forceinline__ void gemv_latency(const Gemv& p) {
  // Output tiles of 8 x 8, whose split-K sums the warps reduce and write, a tile a warp at a time.
  constexpr int OUTPUT_TILES = N_TILES * M_TILES, TURNS = (OUTPUT_TILES + GEMV_WARPS - 1) / GEMV_WARPS;
  __shared__ alignas(16) float squares[8 * M_TILES][GEMV_WARPS];
  extern __shared__ __align__(16) char shared[];
  auto& sums = *reinterpret_cast<float (*)[OUTPUT_TILES][GEMV_WARPS][WARP][2]>(shared);
  pdl_launch();
  const uint32_t first_row = blockIdx.y * (8 * M_TILES);
  const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const uint32_t warp_k_blocks = ((p.k + 31) / 32 + GEMV_WARPS - 1) / GEMV_WARPS;
  const LatencyChunks chunks{4 * warp * warp_k_blocks + t, min(p.k / 8, 4 * (warp + 1) * warp_k_blocks)};
  // Of row r of the block's tile `tile`.
  auto column = [&](uint32_t tile, uint32_t r) {
    const uint32_t n = N_TILES * blockIdx.x + tile;
    return gates(p) ? 4 * n + r / 2 : 8 * n + r;
  };
  // Past the last column the last is computed again and not written.
  auto weight_row = [&](uint32_t tile, uint32_t r) {
    return min(column(tile, r), p.width - 1) + (gates(p) && r % 2 ? p.width : 0);
  };

  uint4 w[N_TILES][K_BLOCKS], x[M_TILES][K_BLOCKS], norm[K_BLOCKS] = {};
#pragma unroll
  for (int tile = 0; tile < N_TILES; ++tile) {
    uint32_t row = weight_row(tile, g);
    const Matrix& matrix = matrix_of(p, row);
    const uint4* weights = packs_of<T>(matrix.data, row, p.k) + chunks.first;
    load_chunks(chunks, w[tile], [&](int at) { return load_once(weights + at); });
  }
  constexpr bool NORMS = K_BLOCKS * (N_TILES + M_TILES) <= GEMV_DENSE_LATENCY_NORMED;
  const bool normed = NORMS && p.prologue.norm != NORM_NONE;
  const uint4* of_norm = static_cast<const uint4*>(p.prologue.weight) + chunks.first;
  if (normed) load_chunks(chunks, norm, [&](int at) { return of_norm[at]; });
  LatencyEpilogue<T> out[TURNS] = {};
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const uint32_t output_tile = warp + turn * GEMV_WARPS, tile = output_tile % N_TILES;
    auto own_column = [&](uint32_t r) { return column(tile, r); };
    auto own_row = [&](uint32_t r) { return weight_row(tile, r); };
    if (output_tile < OUTPUT_TILES)
      out[turn].prepare(p, first_row + g + 8 * (output_tile / N_TILES), t, own_column, own_row);
  }
  // Lanes past the last row of x take the last again; what they compute is not written.
  const uint4* from[M_TILES];
#pragma unroll
  for (int m = 0; m < M_TILES; ++m)
    from[m] = packs_of<T>(p.prologue.x, min(first_row + g + 8 * m, p.m - 1), p.k) + chunks.first;

  pdl_wait();
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) load_chunks(chunks, x[m], [&](int at) { return __ldcg(from[m] + at); });
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    if (warp + turn * GEMV_WARPS < OUTPUT_TILES) out[turn].prefetch(p.epilogue);
  }
  if (normed) norm_rows<T>(p, x, norm, squares);
#pragma unroll
  for (int tile = 0; tile < N_TILES; ++tile) {
    multiply_tile<T>(x, w[tile], [&](int m, float2 y) {
      *reinterpret_cast<float2*>(sums[m * N_TILES + tile][warp][lane]) = y;
    });
  }
  __syncthreads();
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const uint32_t output_tile = warp + turn * GEMV_WARPS;
    if (output_tile >= OUTPUT_TILES) return;
    const float2 sum = sum_of_warps(sums[output_tile], lane);
    float y[2] = {sum.x, sum.y};
    out[turn].epilogue(p, y);
  }
}

}  // namespace fused
