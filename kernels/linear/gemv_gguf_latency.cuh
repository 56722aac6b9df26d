// GEMV for small matrices in GGUF blocks and up to 4 rows of f32 x: the decode step of a small quantized model. As in
// gemv_dense_latency.cuh the latency from x to the output is all that counts.
//
// A warp multiplies one group of 128 k values of N_TILES times 8 output channels, so no warp has a second K block.
// Lane 4 g + t has quarter t of row g. Here x is operand A: the first bf16 parts of its rows, and the second parts
// (gemv_gguf.cuh) as rows 8 and following. The factor of an RMS norm is one per row, so it multiplies the sums, and
// no warp waits for the others before the end. The sum of a block's x, for offsets, is a product with ones.
#pragma once

#include "linear/gemv_dense_latency.cuh"
#include "linear/gemv_gguf.cuh"

namespace fused {

constexpr int LATENCY_ROWS = 4;  // of x
constexpr uint32_t BF16_ONES = 0x3f803f80u;

// D += A B for a block's 32 values: A the two parts of x as `SplitRows` lays them out, B 8 columns.
__device__ __forceinline__ void multiply_parts(float (&c)[4], uint32_t high0, uint32_t low0, uint32_t high1,
                                               uint32_t low1, uint32_t b0, uint32_t b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(high0), "r"(low0), "r"(high1), "r"(low1), "r"(b0), "r"(b1));
#endif
}

// What a lane has of 8 rows of weights and its warp's group, ready to be multiplied.
template <class Format> struct LatencyWeights {
  uint32_t numbers[GROUP][4];
  // Of outputs 2t and 2t + 1 for each block: other lanes' rows.
  float by[GROUP][Format::SCALES][2], plus[GROUP][2];

  __device__ __forceinline__ void unpack(const typename Format::Piece& piece, uint32_t t) {
    float own[Format::SCALES];
#pragma unroll
    for (int h = 0; h < Format::SCALES; ++h) own[h] = Format::multiplier(piece.scale, piece.factors, h);
    const float offset = Format::offset(piece.scale, piece.factors);
#pragma unroll
    for (int b = 0; b < GROUP; ++b) {
      const auto codes = Format::codes(piece, b);
#pragma unroll
      for (int j = 0; j < 4; ++j) numbers[b][j] = Format::bf16_numbers(codes, j);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int lane = 4 * (2 * t + i) + b;
#pragma unroll
        for (int h = 0; h < Format::SCALES; ++h) by[b][h][i] = __shfl_sync(FULL, own[h], lane);
        if (Format::HAS_OFFSET) plus[b][i] = __shfl_sync(FULL, offset, lane);
      }
    }
  }
};

// Each warp's group of x: for each row and block its first parts, then its second ones.
struct LatencyRows {
  char* at;  // of this warp

  static constexpr uint32_t PITCH = GROUP * BLOCK * 4;

  __device__ __forceinline__ void put(uint32_t row, uint32_t lane, float4 v) const {
    char* to = at + row * PITCH + lane / 8 * (4 * BLOCK) + lane % 4 * 16 + lane % 8 / 4 * 8;
    const uint32_t a = split(v.x), b = split(v.y), c = split(v.z), d = split(v.w);
    *reinterpret_cast<uint2*>(to) = make_uint2(__byte_perm(a, b, 0x5410), __byte_perm(c, d, 0x5410));
    *reinterpret_cast<uint2*>(to + 2 * BLOCK) = make_uint2(__byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x7632));
  }
  // Quarter t of a block of a row, first or second parts.
  __device__ __forceinline__ uint4 get(uint32_t row, int block, uint32_t t, int part) const {
    return *reinterpret_cast<const uint4*>(at + row * PITCH + block * (4 * BLOCK) + part * (2 * BLOCK) + t * 16);
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
      pieces[u] = Format::load(static_cast<const char*>(matrix.data) + uint64_t(row) * Format::pitch(groups), groups,
                               warp, t);
    }
  }
};

// Stages a warp's group of the rows of x in two parts, and sums their squares if there is a norm.
template <int WARPS>
__device__ __forceinline__ void stage_rows(const LatencyRows& rows, const float4 (&x)[LATENCY_ROWS], uint32_t m,
                                           bool normed, float4 norm, float (&squares)[LATENCY_ROWS][WARPS]) {
  const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
  for (int r = 0; r < LATENCY_ROWS; ++r) {
    if (r >= m) break;
    const float4 v = x[r];
    rows.put(r, lane, make_float4(v.x * norm.x, v.y * norm.y, v.z * norm.z, v.w * norm.w));
    if (normed) {
      const float sum = warp_sum(fmaf(v.x, v.x, v.y * v.y) + fmaf(v.z, v.z, v.w * v.w));
      if (lane == 0) squares[r][warp] = sum;
    }
  }
  __syncwarp();
}

// Adds the sums of all warps for an N tile, and applies the norm's factor.
template <int WARPS>
__device__ __forceinline__ void reduce_sums(const Gemv& p, float (&total)[2], const float2 (&sums)[WARPS][WARP],
                                            bool normed, const float (&squares)[LATENCY_ROWS][WARPS]) {
  const uint32_t lane = threadIdx.x % WARP, warps = blockDim.x / WARP, g = lane / 4;
  float square = 0.f;
#pragma unroll
  for (int other = 0; other < WARPS; ++other) {
    if (other >= warps) break;
    const float2 part = sums[other][lane];
    total[0] += part.x, total[1] += part.y;
    if (normed) square += squares[min(g, LATENCY_ROWS - 1)][other];
  }
  if (normed) {
    const float factor = rsqrtf(__fdividef(square, p.k) + p.prologue.eps);
    total[0] *= factor, total[1] *= factor;
  }
}

// Each of at most WARPS warps has a group of k, and there are as many groups as warps; one block for
// N_TILES times 8 rows of weights. x, the RMS norm, bias, residuals and outputs are
// f32.
template <class Format, int N_TILES, int WARPS> __device__ __forceinline__ void gemv_gguf_latency(const Gemv& p) {
  __shared__ alignas(16) char staged[WARPS][LATENCY_ROWS * LatencyRows::PITCH];
  __shared__ alignas(16) float2 sums[N_TILES][WARPS][WARP];
  __shared__ float squares[LATENCY_ROWS][WARPS];
  pdl_launch();
  const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const LatencyTiles<N_TILES> tiles = {p};
  typename Format::Piece pieces[N_TILES];
  tiles.template load<Format>(pieces, warp, g, t);
  // 4 values of each row are this lane's to split.
  const uint32_t four = warp * WARP + lane;
  const bool mine = four < p.k / 4, normed = p.prologue.norm != NORM_NONE;
  float4 norm = make_float4(1.f, 1.f, 1.f, 1.f);
  if (normed && mine) norm = static_cast<const float4*>(p.prologue.weight)[four];
  LatencyEpilogue<float> out = {};
  if (warp < N_TILES) {
    out.prepare(
        p, g, t, [&](uint32_t r) { return tiles.column(warp, r); },
        [&](uint32_t r) { return tiles.weight_row(warp, r); });
  }
  const float4* from = static_cast<const float4*>(p.prologue.x) + four;

  pdl_wait();
  float4 x[LATENCY_ROWS] = {};
#pragma unroll
  for (int r = 0; r < LATENCY_ROWS; ++r) {
    if (r < p.m && mine) x[r] = __ldcg(from + r * (p.k / 4));
  }
  if (warp < N_TILES) out.prefetch(p.epilogue);
  LatencyWeights<Format> weights[N_TILES];
#pragma unroll
  for (int u = 0; u < N_TILES; ++u) weights[u].unpack(pieces[u], t);

  const LatencyRows rows = {staged[warp]};
  stage_rows<WARPS>(rows, x, p.m, normed, norm, squares);
  float y[N_TILES][2] = {};
#pragma unroll
  for (int b = 0; b < GROUP; ++b) {
    uint4 high = make_uint4(0, 0, 0, 0), low = high;
    if (g < p.m) high = rows.get(g, b, t, 0), low = rows.get(g, b, t, 1);
    float whole[4] = {};
    if constexpr (Format::HAS_OFFSET) {
      multiply_parts(whole, high.x, low.x, high.y, low.y, BF16_ONES, BF16_ONES);
      multiply_parts(whole, high.z, low.z, high.w, low.w, BF16_ONES, BF16_ONES);
    }
#pragma unroll
    for (int u = 0; u < N_TILES; ++u) {
      const auto& w = weights[u];
      constexpr int LAST = Format::SCALES - 1;
      float c[Format::SCALES][4] = {};
      multiply_parts(c[0], high.x, low.x, high.y, low.y, w.numbers[b][0], w.numbers[b][1]);
      multiply_parts(c[LAST], high.z, low.z, high.w, low.w, w.numbers[b][2], w.numbers[b][3]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int h = 0; h < Format::SCALES; ++h) y[u][i] = fmaf(w.by[b][h][i], c[h][i] + c[h][i + 2], y[u][i]);
        if constexpr (Format::HAS_OFFSET) y[u][i] = fmaf(w.plus[b][i], whole[i] + whole[i + 2], y[u][i]);
      }
    }
  }
#pragma unroll
  for (int u = 0; u < N_TILES; ++u) sums[u][warp][lane] = make_float2(y[u][0], y[u][1]);
  __syncthreads();
  if (warp >= N_TILES) return;
  float total[2] = {};
  reduce_sums<WARPS>(p, total, sums[warp], normed, squares);
  out.epilogue(p, total);
}

}  // namespace fused

// `NAME`: a kernel for blocks of FORMAT, N_TILES times 8 rows of weights, and up to WARPS groups of k. Turing
// has no bf16, and never runs it.
#define FUSED_GEMV_GGUF_LATENCY(NAME, FORMAT, N_TILES, WARPS)                                      \
  extern "C" __global__ void __launch_bounds__(WARPS * fused::WARP)                                \
      NAME(const __grid_constant__ fused::Gemv p) {                                                \
    if constexpr (fused::COMPILED_FOR >= 800) fused::gemv_gguf_latency<FORMAT, N_TILES, WARPS>(p); \
  }
