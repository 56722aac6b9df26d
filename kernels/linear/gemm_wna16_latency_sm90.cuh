// Products of small quantized matrices with up to 128 rows of x and few output channels: a decode step of several
// sequences of a small model. As in gemv_dense_latency.cuh the latency from x to the output is all that counts, so
// weights are in registers before x arrives.
//
// A block computes N_TILES N tiles of 16 output channels for up to 8 x M_TILES rows of x; more rows take more blocks.
// Each of its warps has a K block of 128 values, so there are as many warps as K blocks. Before the PDL wait the
// weights are dequantized, multiplied by the norm's weights and rounded: operands A of `mma`. INT8's scales of
// channels multiply the sums instead. Rows of x are operands B, which come from memory straight to registers. The factor
// of an RMS norm is one for each row of x, so it multiplies the sums, and no warp waits for the others before the end.
//
// Rows in f16 or bf16 are operands as they are, and weights are rounded to their type. Weights for f16 behind a norm are
// multiplied by a power of two, so that their products with the norm's weights stay in its range, and INT8's by the mantissa
// of their channel's scale. Rows in f32 are the sums of two bf16 numbers each, and so are weights in blocks of 8 rows of f32;
// of the products of parts the one of the two low ones is left out.
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

// Two numbers as sums of PARTS pairs of bf16 numbers.
template <int PARTS> __device__ __forceinline__ void split_pair(float a, float b, uint32_t (&parts)[PARTS]) {
  parts[0] = pack2<__nv_bfloat16>(a, b);
  if constexpr (PARTS == 2) {
    const float2 high = unpack2<__nv_bfloat16>(parts[0]);
    parts[1] = pack2<__nv_bfloat16>(a - high.x, b - high.y);
  }
}

// 8 neighbouring values of a row of x: as they are loaded, and then as operands B, the sums of PARTS of them.
template <typename T> struct LatencyRow {
  static constexpr int PARTS = sizeof(T) / 2;
  using Operand = typename std::conditional<PARTS == 1, T, __nv_bfloat16>::type;

  uint4 parts[PARTS];

  __device__ __forceinline__ void load(const T* from, bool there) {
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      parts[i] = make_uint4(0, 0, 0, 0);
      if (there) parts[i] = __ldcg(reinterpret_cast<const uint4*>(from) + i);
    }
  }
};

// From the values that were loaded to the parts; returns the sum of their squares.
__device__ __forceinline__ float split_row(LatencyRow<float>& row) {
  float v[8], even = 0.f, odd = 0.f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    v[4 * i] = __uint_as_float(row.parts[i].x), v[4 * i + 1] = __uint_as_float(row.parts[i].y);
    v[4 * i + 2] = __uint_as_float(row.parts[i].z), v[4 * i + 3] = __uint_as_float(row.parts[i].w);
  }
  uint32_t pairs[4][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    even = fmaf(v[2 * i], v[2 * i], even), odd = fmaf(v[2 * i + 1], v[2 * i + 1], odd);
    split_pair<2>(v[2 * i], v[2 * i + 1], pairs[i]);
  }
#pragma unroll
  for (int part = 0; part < 2; ++part)
    row.parts[part] = make_uint4(pairs[0][part], pairs[1][part], pairs[2][part], pairs[3][part]);
  return even + odd;
}

// Four neighbouring weights of a norm.
template <typename T> struct NormFour {
  uint2 words;
  __device__ __forceinline__ void load(const T* from) { words = load_u64(from); }
  __device__ __forceinline__ uint32_t pair(int j) const { return j == 0 ? words.x : words.y; }
  __device__ __forceinline__ float2 values(int j) const { return unpack2<T>(pair(j)); }
};
template <> struct NormFour<float> {
  float4 numbers;
  __device__ __forceinline__ void load(const float* from) { numbers = *reinterpret_cast<const float4*>(from); }
  __device__ __forceinline__ float2 values(int j) const {
    return j == 0 ? make_float2(numbers.x, numbers.y) : make_float2(numbers.z, numbers.w);
  }
};

// A lane's weights of a step in PARTS parts, as operands A: times the norm's weights if there are such, and in f16 times `by`
// of their channel.
template <typename T, class Weights, int PARTS>
__device__ __forceinline__ void normed_weights(const typename Weights::Block& block,
                                               const typename Weights::Scales& scales, const Gemv& p, int e, bool normed,
                                               const NormFour<T> (&norm)[2], const float (&by)[2],
                                               WeightFragment (&a)[PARTS]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    a[0] = Weights::fragment(block, scales, p, e);
    if (!normed) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) a[0].at(i, j) = bf16x2_mul(a[0].at(i, j), norm[j / 2].pair(j % 2));
    }
  } else {
    constexpr int HALVES = Weights::GROUPS == 8 ? 2 : 1, PAIRS = 4 / HALVES;
    WeightFragment raw = Weights::raw(block, p, e);
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      GroupScale scale = {{1.f, 1.f}, {}};
      if constexpr (!Weights::CHANNEL_SCALES)
        scale = Weights::group(block, p, Weights::GROUPS < 4 ? e * Weights::GROUPS / 4 : HALVES * e + h);
#pragma unroll
      for (int j = PAIRS * h; j < PAIRS * (h + 1); ++j) {
        const float2 n = normed ? norm[j / 2].values(j % 2) : make_float2(1.f, 1.f);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 q = unpack2<__nv_bfloat16>(raw.at(i, j));
          const float plus = Weights::HAS_OFFSET ? scale.plus[i] : 0.f;
          const float2 w = make_float2(fmaf(q.x, scale.by[i], plus) * n.x, fmaf(q.y, scale.by[i], plus) * n.y);
          if constexpr (std::is_same_v<T, __half>) {
            a[0].at(i, j) = pack2<T>(w.x * by[i], w.y * by[i]);
          } else {
            uint32_t parts[PARTS];
            split_pair<PARTS>(w.x, w.y, parts);
#pragma unroll
            for (int part = 0; part < PARTS; ++part) a[part].at(i, j) = parts[part];
          }
        }
      }
    }
  }
}

// A power of two for weights in f16, such that the largest of a K block's norm weights times it is from 64 to 128: products
// with weights up to 511 stay in range then, and those below 2^-14 keep fewer bits. All lanes of a warp.
template <int STEPS> __device__ __forceinline__ float unit_of_norm(const NormFour<__half> (&norm)[STEPS][2]) {
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < 4 * STEPS; ++i) {
    const float2 pair = norm[i / 4][i / 2 % 2].values(i % 2);
    most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
  }
  most = fmaxf(most, __shfl_xor_sync(FULL, most, 1));
  most = fmaxf(most, __shfl_xor_sync(FULL, most, 2));
  // f16 is from 2^-24 to 2^16.
  const uint32_t exponent = min(max(__float_as_uint(most) >> 23, 127 - 24), 127 + 16);
  return __uint_as_float((2 * 127 + 6 - exponent) << 23);
}

// T: of x. W_PARTS: of the weights. WARPS: at most.
template <typename T, class Weights, int W_PARTS, int N_TILES, int M_TILES, int WARPS> struct LatencyGemm {
  using Order = LatencyOrder<Weights>;
  using Row = LatencyRow<T>;
  using Operand = typename Row::Operand;
  static constexpr int X_PARTS = Row::PARTS;
  // Whether weights behind a norm are multiplied by a power of two, whose inverse multiplies the sums.
  static constexpr bool UNITS = std::is_same_v<T, __half>;
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

  // The warp's weights times the norm's, and what the sums of their channels are to be multiplied by: scales of channels
  // where the format has such, unless they are in the weights together with a power of two.
  __device__ __forceinline__ void load_weights(WeightFragment (&w)[N_TILES][K_BLOCK_STEPS][W_PARTS],
                                               float (&channels)[N_TILES][2]) const {
    typename Weights::Block blocks[N_TILES];
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
      const Weights weights(p, first_tile + n);
      weights.load(blocks[n], p, warp);
      if constexpr (Weights::CHANNEL_SCALES)
        channels[n][0] = weights.channel_scale(0), channels[n][1] = weights.channel_scale(1);
      else channels[n][0] = channels[n][1] = 1.f;
    }
    NormFour<T> norm[K_BLOCK_STEPS][2] = {};
#pragma unroll
    for (int e = 0; e < K_BLOCK_STEPS; ++e) {
      const uint32_t k = K_BLOCK * warp + Order::first(e, lane % 4);
      if (normed() && k < p.k) {
        const T* from = static_cast<const T*>(p.prologue.weight) + k;
        norm[e][0].load(from), norm[e][1].load(from + Order::SECOND);
      }
    }
    float unit = 1.f;
    if constexpr (UNITS) {
      if (normed()) unit = unit_of_norm(norm);
    }
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
      const auto scales = Weights::scales(blocks[n], p);
      float by[2] = {1.f, 1.f};
#pragma unroll
      for (int i = 0; i < 2 && UNITS; ++i) {
        if (!normed()) continue;
        // The mantissa of the channel's scale goes into the weights, its power of two stays with the sums.
        const uint32_t scale = __float_as_uint(channels[n][i]);
        by[i] = unit * __uint_as_float((scale & 0x7fffff) | 0x3f800000);
        channels[n][i] = __fdividef(__uint_as_float(scale & 0xff800000), unit);
      }
#pragma unroll
      for (int e = 0; e < K_BLOCK_STEPS; ++e) {
        normed_weights<T, Weights>(blocks[n], scales, p, e, normed(), norm[e], by, w[n][e]);
#pragma unroll
        for (int part = 0; part < W_PARTS; ++part) {
          Order::exchange(w[n][e][part]);
          // Keeps the compiler from moving what has been computed behind the PDL wait.
#pragma unroll
          for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(w[n][e][part].v[i]));
        }
      }
    }
  }

  // The warp's partial sums of an N tile. Several sets of few, as a product that goes on from the sums of another waits for
  // it.
  __device__ __forceinline__ void multiply(int n, const WeightFragment (&w)[K_BLOCK_STEPS][W_PARTS],
                                           const float (&channels)[2], const Row (&x)[M_TILES][K_BLOCK_STEPS]) const {
    constexpr int PRODUCTS = X_PARTS + W_PARTS - 1, SETS = M_TILES == 1 ? 2 * PRODUCTS : M_TILES == 2 ? 2 : 1;
    float c[SETS][M_TILES][4] = {};
#pragma unroll
    for (int e = 0; e < K_BLOCK_STEPS; ++e) {
#pragma unroll
      for (int i = 0; i < 2 * PRODUCTS; ++i) {
        // High by high, high by low, low by high.
        const int half = i % 2, x_part = i / 2 == 1 && X_PARTS == 2 ? 1 : 0, w_part = i / 2 == X_PARTS ? 1 : 0;
        const auto& v = w[e][w_part].v;
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
          const uint4& b = x[m][e].parts[x_part];
          if (half == 0) mma<Operand>(c[i % SETS][m], {v[0], v[1], v[2], v[3]}, b.x, b.y);
          else mma<Operand>(c[i % SETS][m], {v[4], v[5], v[6], v[7]}, b.z, b.w);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      float* to = sums_of(m * N_TILES + n, warp) + 2 * lane;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float2 sum = make_float2(c[SETS - 1][m][2 * i], c[SETS - 1][m][2 * i + 1]);
#pragma unroll
        for (int set = SETS - 2; set >= 0; --set) sum.x += c[set][m][2 * i], sum.y += c[set][m][2 * i + 1];
        if constexpr (Weights::CHANNEL_SCALES || UNITS) sum.x *= channels[i], sum.y *= channels[i];
        *reinterpret_cast<float2*>(to + i * (8 * 8)) = sum;
      }
    }
  }

  // The sums of the squares of the warp's values of each row, which are operands: products of rows with themselves, the
  // diagonal of x x^T.
  __device__ __forceinline__ void put_squares(const Row (&x)[M_TILES][K_BLOCK_STEPS]) const {
    float c[M_TILES][4] = {};
#pragma unroll
    for (int e = 0; e < K_BLOCK_STEPS; ++e) {
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
        const uint4& b = x[m][e].parts[0];
        mma<Operand>(c[m], {b.x, 0, b.y, 0}, b.x, b.y);
      }
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
        const uint4& b = x[m][e].parts[0];
        mma<Operand>(c[m], {b.z, 0, b.w, 0}, b.z, b.w);
      }
    }
    const uint32_t row = lane / 4;
    if (lane % 4 != row / 2) return;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) squares[8 * m + row][warp] = row % 2 == 0 ? c[m][0] : c[m][1];
  }

  // Rows in two parts from their values, of whose squares the sums are stored.
  __device__ __forceinline__ void split_rows(Row (&x)[M_TILES][K_BLOCK_STEPS]) const {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      float sum = 0.f;
#pragma unroll
      for (int e = 0; e < K_BLOCK_STEPS; ++e) sum += split_row(x[m][e]);
      sum += __shfl_xor_sync(FULL, sum, 1);
      sum += __shfl_xor_sync(FULL, sum, 2);
      if (lane % 4 == 0) squares[8 * m + lane / 4][warp] = sum;
    }
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
    WeightFragment w[N_TILES][K_BLOCK_STEPS][W_PARTS];
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
      Row x[M_TILES][K_BLOCK_STEPS];
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
        for (int e = 0; e < K_BLOCK_STEPS; ++e) {
          const uint32_t k = Order::of_x(e, lane % 4);
          x[m][e].load(from[m] + k, K_BLOCK * warp + k < p.k);
        }
      }
      if (warp < OUTPUT_TILES) out.prefetch(p.epilogue);
      if constexpr (X_PARTS == 2) split_rows(x);
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) multiply(n, w[n], channels[n], x);
      if constexpr (X_PARTS == 1) {
        if (normed()) put_squares(x);
      }
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

template <typename T, class Weights, int W_PARTS, int N_TILES, int M_TILES, int WARPS>
__device__ __forceinline__ void gemm_latency(const Gemv& p) {
  extern __shared__ __align__(16) float dynamic_sums[];
  __shared__ float squares[8 * M_TILES][WARPS];
  LatencyGemm<T, Weights, W_PARTS, N_TILES, M_TILES, WARPS>(p, dynamic_sums, squares).run();
}

}  // namespace fused

// Weights in blocks of 8 rows of f32 have two parts.
#define FUSED_GEMM_LATENCY_FORM(...) FUSED_GEMM_LATENCY_KERNEL(__VA_ARGS__)
#define FUSED_GEMM_LATENCY_KERNEL(NAME, TYPE, WEIGHTS, K_BLOCKS, N_TILES, ROWS)                                 \
  extern "C" __global__ void __launch_bounds__(K_BLOCKS * fused::WARP)                                          \
      NAME##_##K_BLOCKS##_##N_TILES##_##ROWS(const __grid_constant__ fused::Gemv p) {                           \
    constexpr int W_PARTS = sizeof(TYPE) == 4 && ROWS == 8 ? 2 : 1;                                             \
    if constexpr (fused::COMPILED_FOR >= 900)                                                                   \
      fused::gemm_latency<TYPE, WEIGHTS, W_PARTS, N_TILES, ROWS / 8, K_BLOCKS>(p);                              \
  }
#define FUSED_GEMM_LATENCY_FORMS(NAME, TYPE, WEIGHTS, MOST_ROWS) \
  FUSED_GEMM_LATENCY_FORM(NAME, TYPE, WEIGHTS, 8, 1, 8)          \
  FUSED_GEMM_LATENCY_FORM(NAME, TYPE, WEIGHTS, 16, 1, 8)         \
  FUSED_GEMM_LATENCY_FORM(NAME, TYPE, WEIGHTS, 8, 3, 8)          \
  FUSED_GEMM_LATENCY_FORM(NAME, TYPE, WEIGHTS, 16, 1, 16)        \
  FUSED_GEMM_LATENCY_FORM(NAME, TYPE, WEIGHTS, 8, 3, 16)         \
  FUSED_GEMM_LATENCY_FORM(NAME, TYPE, WEIGHTS, 12, 1, MOST_ROWS) \
  FUSED_GEMM_LATENCY_FORM(NAME, TYPE, WEIGHTS, 8, 3, 32)

// `NAME_DTYPE_K_N_R`, and for x in f32 `NAME_K_N_R`: kernels for up to K blocks of 128 values of K, N tiles of a block and R
// rows of x.
#define FUSED_GEMM_LATENCY(NAME, WEIGHTS)                   \
  FUSED_GEMM_LATENCY_FORMS(NAME##_f16, __half, WEIGHTS, 32) \
  FUSED_GEMM_LATENCY_FORMS(NAME##_bf16, __nv_bfloat16, WEIGHTS, 32)
// With 32 rows of f32, 12 warps would spill 77 registers each.
#define FUSED_GEMM_LATENCY_F32(NAME, WEIGHTS) FUSED_GEMM_LATENCY_FORMS(NAME, float, WEIGHTS, 24)
