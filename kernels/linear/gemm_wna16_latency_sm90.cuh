// Products of small quantized matrices with up to 64 rows of x and few output channels: a decode step of several
// sequences of a small model. As in gemv_dense_latency.cuh the latency from x to the output is all that counts, so
// weights are in registers before x arrives.
//
// A block computes N_TILES N tiles of 16 output channels for up to 8 x M_TILES rows of x; more rows take more blocks.
// Each of its warps has a K block of 128 values, so there are as many warps as K blocks. Before the PDL wait the
// weights are dequantized, multiplied by the norm's weights and rounded to x's type: operands A of `mma`. INT8's scales of
// channels multiply the sums instead. Rows of x are operands B, which come from memory straight to registers. The factor
// of an RMS norm is one for each row of x, so it multiplies the sums, and no warp waits for the others before the end.
//
// With x in f16 there is no norm: the plan refuses it, since a weight times the norm's may be more, or less, than f16 holds.
#pragma once

#include "common/mma.cuh"
#include "linear/gemm_wna16_weights.cuh"
#include "linear/gemv_dense_latency.cuh"

namespace fused {

constexpr int K_BLOCK_STEPS = K_BLOCK / 32;

// A lane has 8 values of K in each of the four steps of a K block: four from `first` on, and four SECOND values behind the
// first. Once lanes have exchanged weights it multiplies the 8 neighbours from `of_x` on: x is loaded 16 bytes at a time.
template <class Weights> struct LatencyOrder;
template <class Format> struct LatencyOrder<GemmInt<Format>> {
  static constexpr uint32_t SECOND = 4;
  static __device__ __forceinline__ uint32_t first(int e, uint32_t t) { return Format::value(e, t); }
  static __device__ __forceinline__ uint32_t of_x(int e, uint32_t t) { return Format::value(e, t); }
  static __device__ __forceinline__ void exchange(WeightFragment&) {}
};
// Of 8 fours, lane t has four t and four t + 4. Two neighbouring lanes exchange one of theirs: lanes 0 to 3 then have
// fours 0 and 1, 4 and 5, 2 and 3, 6 and 7.
template <class Format> struct LatencyOrder<GemmGguf<Format>> {
  static constexpr uint32_t SECOND = BLOCK / 2;
  static __device__ __forceinline__ uint32_t first(int e, uint32_t t) { return BLOCK * e + 4 * t; }
  static __device__ __forceinline__ uint32_t of_x(int e, uint32_t t) { return BLOCK * e + 4 * t + t % 2 * 12; }
  static __device__ __forceinline__ void exchange(WeightFragment& a) {
    const bool odd = threadIdx.x % 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t other = __shfl_xor_sync(FULL, odd ? a.at(i, j) : a.at(i, j + 2), 1);
        if (odd) a.at(i, j) = other;
        else a.at(i, j + 2) = other;
      }
    }
  }
};

// A lane's weights of a step, times the norm's weights, rounded to T. `norm` has 8 of these, in the order of the weights.
template <typename T, class Weights>
__device__ __forceinline__ WeightFragment normed_weights(const typename Weights::Block& block,
                                                         const typename Weights::Scales& scales, const Gemv& p, int e,
                                                         const uint32_t (&norm)[4]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    WeightFragment a = Weights::fragment(block, scales, p, e);
    if (p.prologue.norm == NORM_NONE) return a;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) a.at(i, j) = bf16x2_mul(a.at(i, j), norm[j]);
    }
    return a;
  } else {
    constexpr int HALVES = Weights::GROUPS == 8 ? 2 : 1, PAIRS = 4 / HALVES;
    WeightFragment a = Weights::raw(block, p, e);
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      GroupScale scale = {{1.f, 1.f}, {}};
      if constexpr (!Weights::CHANNEL_SCALES)
        scale = Weights::group(block, p, Weights::GROUPS < 4 ? e * Weights::GROUPS / 4 : HALVES * e + h);
#pragma unroll
      for (int j = PAIRS * h; j < PAIRS * (h + 1); ++j) {
        const float2 by = p.prologue.norm == NORM_NONE ? make_float2(1.f, 1.f) : unpack2<T>(norm[j]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 q = unpack2<__nv_bfloat16>(a.at(i, j));
          const float plus = Weights::HAS_OFFSET ? scale.plus[i] : 0.f;
          a.at(i, j) = pack2<T>(fmaf(q.x, scale.by[i], plus) * by.x, fmaf(q.y, scale.by[i], plus) * by.y);
        }
      }
    }
    return a;
  }
}

// T: f16 or bf16. WARPS: at most.
template <typename T, class Weights, int N_TILES, int M_TILES, int WARPS> struct LatencyGemm {
  using Order = LatencyOrder<Weights>;
  // An output tile is half of an N tile by 8 rows of x; 8 channels, or 4 and those that they gate.
  static constexpr int OUTPUT_TILES = 2 * N_TILES * M_TILES;

  const Gemv& p;
  float* sums;                           // [M tile][N tile][warp][channel][row of x]
  float (&squares)[8 * M_TILES][WARPS];  // of a row of x, the warps' sums
  uint32_t lane, warp, first_tile, first_row;
  uint32_t k_blocks;  // as many warps have one; the others only write outputs

  __device__ __forceinline__ LatencyGemm(const Gemv& p, float* sums, float (&squares)[8 * M_TILES][WARPS])
      : p(p), sums(sums), squares(squares), lane(threadIdx.x % WARP), warp(threadIdx.x / WARP),
        first_tile(blockIdx.x * N_TILES), first_row(blockIdx.y * (8 * M_TILES)), k_blocks(k_blocks_of(p.k)) {}

  __device__ __forceinline__ bool normed() const { return p.prologue.norm != NORM_NONE; }
  __device__ __forceinline__ float* sums_of(uint32_t m_and_n, uint32_t of_warp) const {
    return sums + (m_and_n * k_blocks + of_warp) * (N_TILE * 8);
  }

  // The warp's weights times the norm's, and the scales of their channels where the format has such.
  __device__ __forceinline__ void load_weights(WeightFragment (&w)[N_TILES][K_BLOCK_STEPS],
                                               float (&channels)[N_TILES][2]) const {
    typename Weights::Block blocks[N_TILES];
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
      const Weights weights(p, first_tile + n);
      weights.load(blocks[n], p, warp);
      if constexpr (Weights::CHANNEL_SCALES)
        channels[n][0] = weights.channel_scale(0), channels[n][1] = weights.channel_scale(1);
    }
    uint32_t norm[K_BLOCK_STEPS][4] = {};
#pragma unroll
    for (int e = 0; e < K_BLOCK_STEPS; ++e) {
      const uint32_t k = K_BLOCK * warp + Order::first(e, lane % 4);
      if (normed() && k < p.k) {
        const T* from = static_cast<const T*>(p.prologue.weight) + k;
        const uint2 a = load_u64(from), b = load_u64(from + Order::SECOND);
        norm[e][0] = a.x, norm[e][1] = a.y, norm[e][2] = b.x, norm[e][3] = b.y;
      }
    }
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
      const auto scales = Weights::scales(blocks[n], p);
#pragma unroll
      for (int e = 0; e < K_BLOCK_STEPS; ++e) {
        w[n][e] = normed_weights<T, Weights>(blocks[n], scales, p, e, norm[e]);
        Order::exchange(w[n][e]);
        // Keeps the compiler from moving what has been computed behind the PDL wait.
#pragma unroll
        for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(w[n][e].v[i]));
      }
    }
  }

  // The warp's partial sums of an N tile. Two sets of few, as a product that goes on from the sums of another waits for it.
  __device__ __forceinline__ void multiply(int n, const WeightFragment (&w)[K_BLOCK_STEPS], const float (&channels)[2],
                                           const uint4 (&x)[M_TILES][K_BLOCK_STEPS]) const {
    constexpr int SETS = M_TILES < 4 ? 2 : 1;
    float c[SETS][M_TILES][4] = {};
#pragma unroll
    for (int e = 0; e < K_BLOCK_STEPS; ++e) {
      const auto& v = w[e].v;
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) mma<T>(c[0][m], {v[0], v[1], v[2], v[3]}, x[m][e].x, x[m][e].y);
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) mma<T>(c[SETS - 1][m], {v[4], v[5], v[6], v[7]}, x[m][e].z, x[m][e].w);
    }
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      float* to = sums_of(m * N_TILES + n, warp) + 2 * lane;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float2 sum = make_float2(c[0][m][2 * i], c[0][m][2 * i + 1]);
        if constexpr (SETS == 2) sum.x += c[1][m][2 * i], sum.y += c[1][m][2 * i + 1];
        if constexpr (Weights::CHANNEL_SCALES) sum.x *= channels[i], sum.y *= channels[i];
        *reinterpret_cast<float2*>(to + i * (8 * 8)) = sum;
      }
    }
  }

  // The sums of the squares of the warp's values of each row: products of rows with themselves, the diagonal of x x^T.
  __device__ __forceinline__ void put_squares(const uint4 (&x)[M_TILES][K_BLOCK_STEPS]) const {
    float c[M_TILES][4] = {};
#pragma unroll
    for (int e = 0; e < K_BLOCK_STEPS; ++e) {
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) mma<T>(c[m], {x[m][e].x, 0, x[m][e].y, 0}, x[m][e].x, x[m][e].y);
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) mma<T>(c[m], {x[m][e].z, 0, x[m][e].w, 0}, x[m][e].z, x[m][e].w);
    }
    const uint32_t row = lane / 4;
    if (lane % 4 != row / 2) return;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) squares[8 * m + row][warp] = row % 2 == 0 ? c[m][0] : c[m][1];
  }

  // Place i of two: of an output tile's channels those that the lane has sums of, two neighbours or a gate and what it
  // gates.
  __device__ __forceinline__ uint32_t channel(uint32_t tile, int i) const {
    const uint32_t half = tile % 2, t = lane % 4;
    return gates(p) ? 4 * half + t + 8 * i : 8 * half + 2 * t + i;
  }

  // Its two sums, in row lane / 4, times the norm's factor.
  __device__ __forceinline__ void add_warps(uint32_t tile, float (&y)[2]) const {
    float square = 0.f;
    const uint32_t row = lane / 4, first = channel(tile, 0) * 8 + row, second = channel(tile, 1) * 8 + row;
#pragma unroll
    for (int other = 0; other < WARPS; ++other) {
      const bool there = other < k_blocks;
      const float* from = sums_of(tile / 2, other);
      y[0] += there ? from[first] : 0.f;
      y[1] += there ? from[second] : 0.f;
      square += there ? squares[tile / (2 * N_TILES) * 8 + row][other] : 0.f;
    }
    if (!normed()) return;
    const float factor = rsqrtf(__fdividef(square, p.k) + p.prologue.eps);
    y[0] *= factor, y[1] *= factor;
  }

  __device__ __forceinline__ void prepare(uint32_t tile, LatencyEpilogue<T, true>& out) const {
    const uint32_t n_tile = first_tile + tile / 2 % N_TILES;
    out.prepare(
        p, first_row + tile / (2 * N_TILES) * 8 + lane / 4, 0,
        [&](uint32_t i) { return n_tile_column(p, n_tile, channel(tile, i)); },
        [&](uint32_t i) { return n_tile_row(p, n_tile, channel(tile, i)); });
  }

  __device__ __forceinline__ void run() const {
    pdl_launch();
    const bool multiplies = warp < k_blocks;
    WeightFragment w[N_TILES][K_BLOCK_STEPS];
    float channels[N_TILES][2];
    if (multiplies) load_weights(w, channels);
    LatencyEpilogue<T, true> out = {};
    if (warp < OUTPUT_TILES) prepare(warp, out);
    // Lanes past the last row of x take the last again; what they compute is not written.
    const T* from[M_TILES];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      const uint32_t row = min(first_row + 8 * m + lane / 4, p.m - 1);
      from[m] = static_cast<const T*>(p.prologue.x) + uint64_t(row) * p.k + K_BLOCK * warp;
    }

    pdl_wait();
    if (multiplies) {
      uint4 x[M_TILES][K_BLOCK_STEPS];
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
        for (int e = 0; e < K_BLOCK_STEPS; ++e) {
          const uint32_t k = Order::of_x(e, lane % 4);
          x[m][e] = make_uint4(0, 0, 0, 0);
          if (K_BLOCK * warp + k < p.k) x[m][e] = __ldcg(reinterpret_cast<const uint4*>(from[m] + k));
        }
      }
      if (warp < OUTPUT_TILES) out.prefetch(p.epilogue);
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) multiply(n, w[n], channels[n], x);
      if (normed()) put_squares(x);
    } else if (warp < OUTPUT_TILES) {
      out.prefetch(p.epilogue);
    }
    __syncthreads();
    for (uint32_t tile = warp; tile < OUTPUT_TILES; tile += blockDim.x / WARP) {
      if (tile != warp) {
        prepare(tile, out);
        out.prefetch(p.epilogue);
      }
      float y[2] = {};
      add_warps(tile, y);
      out.epilogue(p, y);
    }
  }
};

template <typename T, class Weights, int N_TILES, int M_TILES, int WARPS>
__device__ __forceinline__ void gemm_latency(const Gemv& p) {
  extern __shared__ __align__(16) float dynamic_sums[];
  __shared__ float squares[8 * M_TILES][WARPS];
  LatencyGemm<T, Weights, N_TILES, M_TILES, WARPS>(p, dynamic_sums, squares).run();
}

}  // namespace fused

#define FUSED_GEMM_LATENCY_FORM(NAME, TYPE, WEIGHTS, K_BLOCKS, N_TILES, ROWS)                                   \
  extern "C" __global__ void __launch_bounds__(K_BLOCKS * fused::WARP)                                          \
      NAME##_##K_BLOCKS##_##N_TILES##_##ROWS(const __grid_constant__ fused::Gemv p) {                           \
    if constexpr (fused::COMPILED_FOR >= 900) fused::gemm_latency<TYPE, WEIGHTS, N_TILES, ROWS / 8, K_BLOCKS>(p); \
  }
#define FUSED_GEMM_LATENCY_FORMS(NAME, TYPE, WEIGHTS)           \
  FUSED_GEMM_LATENCY_FORM(NAME, TYPE, WEIGHTS, 8, 1, 8)         \
  FUSED_GEMM_LATENCY_FORM(NAME, TYPE, WEIGHTS, 16, 1, 8)        \
  FUSED_GEMM_LATENCY_FORM(NAME, TYPE, WEIGHTS, 8, 3, 8)         \
  FUSED_GEMM_LATENCY_FORM(NAME, TYPE, WEIGHTS, 16, 1, 16)       \
  FUSED_GEMM_LATENCY_FORM(NAME, TYPE, WEIGHTS, 8, 3, 16)        \
  FUSED_GEMM_LATENCY_FORM(NAME, TYPE, WEIGHTS, 12, 1, 32)       \
  FUSED_GEMM_LATENCY_FORM(NAME, TYPE, WEIGHTS, 8, 3, 32)

// `NAME_DTYPE_K_N_R`: kernels for up to K blocks of 128 values of K, N tiles of a block and R rows of x, by the dtype of x.
#define FUSED_GEMM_LATENCY(NAME, WEIGHTS)               \
  FUSED_GEMM_LATENCY_FORMS(NAME##_f16, __half, WEIGHTS) \
  FUSED_GEMM_LATENCY_FORMS(NAME##_bf16, __nv_bfloat16, WEIGHTS)
