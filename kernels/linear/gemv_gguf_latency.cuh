// GEMV for small matrices in GGUF blocks and up to 4 rows of x: the decode step of a small quantized model. As in
// gemv_dense_latency.cuh the latency from x to the output is all that counts.
//
// A warp multiplies one group of 128 k values of N_TILES times 8 output channels, so no warp has a second K block.
// Lane 4 g + t has quarter t of row g. All that does not depend on x comes before the PDL wait, while the preceding
// kernel runs: weights are dequantized to f32 and multiplied by the norm's weights there. What follows is 32
// multiply-adds for each row of x and 8 outputs. They take a warp less time than `mma` would, whose operands hold f32 x
// in two parts. The factor of an RMS norm is one per row, so it multiplies the sums, and no warp waits for the others
// before the end; nothing is rounded in between.
#pragma once

#include "formats/gguf.cuh"
#include "linear/gemv_dense_latency.cuh"

namespace fused {

constexpr int LATENCY_ROWS = N_TILE_MAX_M;  // of x

// A lane's weights in f32: of one row of an 8-row tile, over the 128 values of K of its warp, four of each half block.
template <class Format> struct LatencyWeights {
  float4 values[GROUP][2];

  __device__ __forceinline__ void unpack(const typename Format::Piece& piece) {
    float own[Format::SCALES], offset[Format::SCALES];  // of block t
#pragma unroll
    for (int h = 0; h < Format::SCALES; ++h) {
      own[h] = Format::multiplier(piece.scale, piece.factors, h);
      offset[h] = Format::offset(piece.scale, piece.factors, h);
    }
#pragma unroll
    for (int b = 0; b < GROUP; ++b) {
      const auto codes = Format::codes(piece, b);
      float plus = 0.f;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (Format::HAS_OFFSET) {
          if (h < Format::SCALES) plus = __shfl_sync(FULL, offset[h], b, 4);
        }
        const float by = __shfl_sync(FULL, own[h % Format::SCALES], b, 4);
        const float2 first = unpack2<__nv_bfloat16>(Format::bf16_numbers(codes, 2 * h));
        const float2 second = unpack2<__nv_bfloat16>(Format::bf16_numbers(codes, 2 * h + 1));
        values[b][h] = make_float4(fmaf(first.x, by, plus), fmaf(first.y, by, plus), fmaf(second.x, by, plus),
                                   fmaf(second.y, by, plus));
      }
    }
  }

  __device__ __forceinline__ void scale(int b, int h, float4 norm) {
    float4& v = values[b][h];
    v = make_float4(v.x * norm.x, v.y * norm.y, v.z * norm.z, v.w * norm.w);
  }

  // Keeps the compiler from moving what has been computed behind the PDL wait.
  __device__ __forceinline__ void pin() {
#pragma unroll
    for (int b = 0; b < GROUP; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float4& v = values[b][h];
        asm volatile("" : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w));
      }
    }
  }
};

// The N tiles of a block: N_TILES times 8 rows of weights.
template <int N_TILES> struct LatencyTiles {
  const Gemv& p;

  __device__ __forceinline__ uint32_t column(uint32_t n_tile, uint32_t r) const {
    const uint32_t u = blockIdx.x * N_TILES + n_tile;
    return gates(p) ? 4 * u + r / 2 : 8 * u + r;
  }
  // Past the last column the last is computed again and not written.
  __device__ __forceinline__ uint32_t weight_row(uint32_t n_tile, uint32_t r) const {
    return min(column(n_tile, r), p.width - 1) + (gates(p) && r % 2 ? p.width : 0);
  }

  // Loads a lane's weights: quarter t of row g of each N tile, in its warp's group.
  template <class Format>
  __device__ __forceinline__ void load(typename Format::Piece (&pieces)[N_TILES], uint32_t warp, uint32_t g,
                                       uint32_t t) const {
    const uint32_t groups = groups_of(p.k);
#pragma unroll
    for (int u = 0; u < N_TILES; ++u) {
      uint32_t row = weight_row(u, g);
      const Matrix& matrix = matrix_of(p, row);
      pieces[u] = Format::load(Format::row(matrix.data, row, groups), groups, warp, t);
    }
  }
};

// A warp's group of a row of k values, four at a time.
struct LatencyGroup {
  uint32_t first, fours;  // its first four, and those of the row

  // Quarter t of half block h of block b.
  static __device__ __forceinline__ uint32_t place(int b, int h, uint32_t t) { return 8 * b + 4 * h + t; }
  __device__ __forceinline__ bool has(uint32_t place) const { return first + place < fours; }
};

// Four elements as they are stored, and in f32.
template <typename T> using Four = std::conditional_t<sizeof(T) == 4, uint4, uint2>;
template <typename T> __device__ __forceinline__ float4 widen_four(Four<T> raw) {
  if constexpr (sizeof(T) == 4) {
    return make_float4(__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z), __uint_as_float(raw.w));
  } else {
    const float2 a = unpack2<T>(raw.x), b = unpack2<T>(raw.y);
    return make_float4(a.x, a.y, b.x, b.y);
  }
}

// The weights of all N tiles, dequantized and multiplied by the norm's, if there is one.
template <typename T, class Format, int N_TILES>
__device__ __forceinline__ void prepare_weights(const Gemv& p, const LatencyGroup& group, uint32_t t,
                                                const typename Format::Piece (&pieces)[N_TILES],
                                                LatencyWeights<Format> (&weights)[N_TILES]) {
#pragma unroll
  for (int u = 0; u < N_TILES; ++u) weights[u].unpack(pieces[u]);
  if (p.prologue.norm != NORM_NONE) {
    const Four<T>* norm = static_cast<const Four<T>*>(p.prologue.weight) + group.first;
#pragma unroll
    for (int b = 0; b < GROUP; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t place = group.place(b, h, t);
        Four<T> raw = {};
        if (group.has(place)) raw = __ldg(norm + place);
        const float4 v = widen_four<T>(raw);
#pragma unroll
        for (int u = 0; u < N_TILES; ++u) weights[u].scale(b, h, v);
      }
    }
  }
#pragma unroll
  for (int u = 0; u < N_TILES; ++u) weights[u].pin();
}

// A lane's part of the products of a row of x, which lies in shared memory, with a row of each N tile.
template <class Format, int N_TILES>
__device__ __forceinline__ void multiply_row(const LatencyWeights<Format> (&weights)[N_TILES], const float4 (&x)[WARP],
                                             uint32_t t, float (&y)[N_TILES]) {
  float4 sums[N_TILES] = {};
#pragma unroll
  for (int b = 0; b < GROUP; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float4 v = x[LatencyGroup::place(b, h, t)];
#pragma unroll
      for (int u = 0; u < N_TILES; ++u) {
        const float4& w = weights[u].values[b][h];
        float4& sum = sums[u];
        sum.x = fmaf(w.x, v.x, sum.x), sum.y = fmaf(w.y, v.y, sum.y);
        sum.z = fmaf(w.z, v.z, sum.z), sum.w = fmaf(w.w, v.w, sum.w);
      }
    }
  }
#pragma unroll
  for (int u = 0; u < N_TILES; ++u) y[u] = (sums[u].x + sums[u].y) + (sums[u].z + sums[u].w);
}

// Adds the sums of all warps for an N tile, outputs 2t and 2t + 1 of row g of x, and applies the norm's factor.
template <int WARPS>
__device__ __forceinline__ void reduce_sums(const Gemv& p, float (&total)[2],
                                            const float (&sums)[WARPS][LATENCY_ROWS][8],
                                            const float (&squares)[LATENCY_ROWS][WARPS]) {
  const uint32_t lane = threadIdx.x % WARP, warps = blockDim.x / WARP, t = lane % 4;
  const uint32_t row = min(lane / 4, LATENCY_ROWS - 1);
  const bool normed = p.prologue.norm != NORM_NONE;
  float square = 0.f;
#pragma unroll
  for (int other = 0; other < WARPS; ++other) {
    if (other >= warps) break;
    const float2 part = *reinterpret_cast<const float2*>(&sums[other][row][2 * t]);
    total[0] += part.x, total[1] += part.y;
    if (normed) square += squares[row][other];
  }
  if (normed) {
    const float factor = rsqrtf(__fdividef(square, p.k) + p.prologue.eps);
    total[0] *= factor, total[1] *= factor;
  }
}

// Each of at most WARPS warps has a group of k, and there are as many groups as warps; one block for N_TILES times 8
// rows of weights. x, the norm's weight, bias and residuals have type T.
template <typename T, class Format, int N_TILES, int WARPS>
__device__ __forceinline__ void gemv_gguf_latency(const Gemv& p) {
  __shared__ float4 staged[WARPS][LATENCY_ROWS][WARP];
  __shared__ alignas(16) float sums[N_TILES][WARPS][LATENCY_ROWS][8];
  __shared__ float squares[LATENCY_ROWS][WARPS];
  pdl_launch();
  const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const LatencyTiles<N_TILES> tiles = {p};
  const LatencyGroup group = {warp * WARP, p.k / 4};
  typename Format::Piece pieces[N_TILES];
  tiles.template load<Format>(pieces, warp, g, t);
  LatencyEpilogue<T> out = {};
  if (warp < N_TILES) {
    out.prepare(
        p, g, t, [&](uint32_t r) { return tiles.column(warp, r); },
        [&](uint32_t r) { return tiles.weight_row(warp, r); });
  }
  LatencyWeights<Format> weights[N_TILES];
  prepare_weights<T, Format>(p, group, t, pieces, weights);
  const Four<T>* from = static_cast<const Four<T>*>(p.prologue.x) + group.first + lane;

  pdl_wait();
  Four<T> raw[LATENCY_ROWS] = {};
#pragma unroll
  for (int r = 0; r < LATENCY_ROWS; ++r) {
    if (r < p.m && group.has(lane)) raw[r] = __ldcg(from + r * group.fours);
  }
  if (warp < N_TILES) out.prefetch(p.epilogue);
  float4 x[LATENCY_ROWS];
#pragma unroll
  for (int r = 0; r < LATENCY_ROWS; ++r) {
    x[r] = widen_four<T>(raw[r]);
    if (r < p.m) staged[warp][r][lane] = x[r];
  }
  __syncwarp();
  float y[LATENCY_ROWS][N_TILES] = {};
#pragma unroll
  for (int r = 0; r < LATENCY_ROWS; ++r) {
    if (r >= p.m) break;
    multiply_row<Format>(weights, staged[warp][r], t, y[r]);
    if (p.prologue.norm != NORM_NONE) {
      const float4 v = x[r];
      const float square = warp_sum(fmaf(v.x, v.x, v.y * v.y) + fmaf(v.z, v.z, v.w * v.w));
      if (lane == 0) squares[r][warp] = square;
    }
  }
#pragma unroll
  for (int u = 0; u < N_TILES; ++u) {
    const float quarters[LATENCY_ROWS] = {y[0][u], y[1][u], y[2][u], y[3][u]};
    sums[u][warp][t][g] = SixteenRows::sum_of_quarters(quarters);
  }
  __syncthreads();
  if (warp >= N_TILES) return;
  float total[2] = {};
  reduce_sums<WARPS>(p, total, sums[warp], squares);
  out.epilogue(p, total);
}

}  // namespace fused

// `NAME`: a kernel for x of TYPE and blocks of FORMAT, N_TILES times 8 rows of weights, and up to WARPS groups of k.
// Turing has no bf16, and never runs it.
#define FUSED_GEMV_GGUF_LATENCY(NAME, TYPE, FORMAT, N_TILES, WARPS)                                      \
  extern "C" __global__ void __launch_bounds__(WARPS * fused::WARP)                                      \
      NAME(const __grid_constant__ fused::Gemv p) {                                                      \
    if constexpr (fused::COMPILED_FOR >= 800) fused::gemv_gguf_latency<TYPE, FORMAT, N_TILES, WARPS>(p); \
  }
