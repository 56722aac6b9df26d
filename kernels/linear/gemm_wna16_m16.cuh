// GEMM for up to 16 rows of bf16 x and INT4 weights in groups of 128 (formats/packed.cuh): y = act(x W^T + bias) +
// residuals. Weights are dequantized to bf16 in registers, and x is in registers too.
//
// Split-K: one CTA, or a cluster of two, shares K, and within a CTA `split_k` warps. A warp holds two K blocks of 128
// values of all rows of x in registers while N tiles of 16 output channels pass by. It streams their weights and
// scales through a `cp.async` pipeline of 4 stages of its own, which is filled before the PDL wait and small
// enough for the next kernel's to fit beside it. If a warp has more K blocks, the N tiles of a batch pass again for
// the next two, and it goes on from its sums: warps synchronize once per batch.
//
// Codes are multiplied with a bias of 136 (128 of the bf16 trick and the zero point of 8): sums begin
// with minus that times the sum of x over the K block.
//
// After a batch of four N tiles every thread adds four outputs over the warps, in their order. The two CTAs of a
// cluster exchange sums through DSMEM: each writes every second row of x.
#pragma once

#include "common/cluster.cuh"
#include "common/tma.cuh"
#include "linear/gemv_wna16.cuh"

namespace fused {

// A warp's pipeline of weights and scales: stages, and where things lie in a stage.
template <class Format, int DEPTH> struct WeightPipeline {
  static constexpr int K_BLOCKS = DEPTH, STAGES = 4;
  static constexpr uint32_t PIECE = sizeof(typename Format::Piece) * WARP;  // of 8 rows and a K block
  static constexpr uint32_t CODES = 2 * K_BLOCKS * PIECE;
  static constexpr uint32_t SCALES = 2 * K_BLOCKS * ROW_GROUP * 2;
  static constexpr uint32_t STAGE_BYTES = CODES + SCALES;
};

struct GemmM16 {
  using Format = Int4Weights<ONE_GROUP>;
  static constexpr int WARPS = M16_WARPS, THREADS = WARPS * WARP, M_TILES = M16_ROWS / 8;
  static constexpr int DEPTH = M16_DEPTH, BATCH = M16_BATCH;
  using R = WeightPipeline<Format, DEPTH>;
  static constexpr int STAGES = R::STAGES, CHUNKS = DEPTH / R::K_BLOCKS;
  static constexpr uint32_t SUMS = 16 * 8 * M_TILES;  // of an N tile
  static constexpr uint32_t PIPELINES = WARPS * STAGES * R::STAGE_BYTES, PARTS = WARPS * BATCH * SUMS * 4;
  // Bytes that the other CTA sends for a batch, and batches that are buffered: sums are sent at the end of a batch and
  // used at the end of the next, and a CTA may be two batches ahead of the other.
  static constexpr uint32_t GIVEN = 8 * THREADS, TURNS = 4;
  static_assert(DEPTH % R::K_BLOCKS == 0 && BATCH * SUMS == 4 * THREADS);
  // Sums of a K block with the bias fit f32: they are off by 2^-18 of their magnitude at most.
  static constexpr float BIAS = 136.f;
  static constexpr uint32_t ONES = 0x3f803f80u;  // two bf16

  const Gemv& p;
  const uint32_t cluster_size, rank, cta_n_tiles, part, place;
  const uint32_t outputs;       // of an N tile
  uint32_t first, n_tiles;      // of the cluster
  uint32_t begin, end, passes;  // the warp's K blocks
  uint32_t pipeline;            // the warp's
  float* parts;                 // [BATCH][split_k][SUMS]
  float4* biases;               // the warp's: [DEPTH][4], initial sums of lane t
  uint32_t given;               // [TURNS] sums from the other CTA, then its own
  uint32_t barriers;            // [TURNS]

  static __device__ uint32_t lane() { return threadIdx.x % WARP; }
  static __device__ uint32_t warp() { return threadIdx.x / WARP; }

  __device__ GemmM16(const GemmM16Params& s, char* memory, float4* biases, uint32_t barriers)
      : p(s.product), cluster_size(s.cluster_size), rank(blockIdx.x & (s.cluster_size - 1)),
        cta_n_tiles(WARPS / s.product.split_k), part(warp() / cta_n_tiles), place(warp() % cta_n_tiles),
        outputs(n_tile_outputs(p)), biases(biases + warp() * (4 * DEPTH)), barriers(barriers) {
    const uint32_t clusters = gridDim.x / cluster_size, cluster = blockIdx.x / cluster_size;
    const uint32_t all = (p.width + outputs - 1) / outputs;
    first = uint64_t(all) * cluster / clusters;
    n_tiles = uint64_t(all) * (cluster + 1) / clusters - first;
    const uint32_t k_blocks = k_blocks_of(p.k), cta_k_blocks = (k_blocks + cluster_size - 1) / cluster_size;
    const uint32_t last = min(k_blocks, (rank + 1) * cta_k_blocks),
                   warp_k_blocks = (cta_k_blocks + p.split_k - 1) / p.split_k;
    begin = min(rank * cta_k_blocks + part * warp_k_blocks, last);
    end = min(begin + warp_k_blocks, last);
    passes = (warp_k_blocks + DEPTH - 1) / DEPTH;
    pipeline = shared_address(memory) + warp() * (STAGES * R::STAGE_BYTES);
    parts = reinterpret_cast<float*>(memory + PIPELINES);
    given = shared_address(memory) + PIPELINES + PARTS;
  }

  // What is prefetched next.
  struct PrefetchCursor {
    uint32_t from, pass, n_tile, chunk;  // first N tile of a batch, ..., the warps' first N tile of a round
  };
  __device__ void advance(PrefetchCursor& a) const {
    if (CHUNKS > 1 && ++a.chunk < CHUNKS) return;
    a.chunk = 0;
    a.n_tile += cta_n_tiles;
    if (a.n_tile < min(a.from + BATCH, n_tiles)) return;
    if (++a.pass == passes) a.pass = 0, a.from += BATCH;
    a.n_tile = a.from;
  }

  __device__ __forceinline__ void prefetch(PrefetchCursor& a, uint32_t stage) const {
    const uint32_t n_tile = a.n_tile + place, k_block = begin + a.pass * DEPTH + a.chunk * R::K_BLOCKS;
    if (n_tile < n_tiles && k_block < end) {
      prefetch_row_groups(first + n_tile, k_block, stage);
    }
    commit_copies();
    advance(a);
  }

  // Eight rows of an N tile and a K block are side by side: 512 bytes of codes and 16 of scales.
  __device__ __forceinline__ void prefetch_row_groups(uint32_t n_tile, uint32_t k_block, uint32_t stage) const {
    const uint32_t k_blocks = k_blocks_of(p.k);
    uint32_t places[2], of[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t row = gates(p) ? 8 * n_tile + i * p.width : min(16 * n_tile + 8 * i, (p.width - 1) & ~7u);
      of[i] = (row >= p.weights[1].first) + (row >= p.weights[2].first);
      places[i] = (row - p.weights[of[i]].first) / ROW_GROUP * k_blocks + k_block;
      const char* codes =
          static_cast<const char*>(p.weights[of[i]].data) + uint64_t(places[i]) * R::PIECE + 16 * lane();
#pragma unroll
      for (int d = 0; d < R::K_BLOCKS; ++d) {
        if (k_block + d < end) copy_async(stage + (d * 2 + i) * R::PIECE + 16 * lane(), codes + d * R::PIECE);
      }
    }
    constexpr uint32_t COUNT = R::K_BLOCKS;
    const uint32_t i = lane() % 16 / COUNT, c = lane() % COUNT;
    if (i < 2 && k_block + c < end) {
      const char* scales = static_cast<const char*>(p.weights[i ? of[1] : of[0]].scales);
      const uint32_t at = (i ? places[1] : places[0]) + c, to = stage + R::CODES, n = i * COUNT + c;
      if (lane() < 16) copy_async(to + 16 * n, scales + 16 * uint64_t(at));
    }
  }

  using X = uint4[DEPTH][4][M_TILES];

  // Addresses are those of a row's first values and constants, as there is nothing else to do meanwhile.
  __device__ __forceinline__ void load(X& x, uint32_t pass) const {
    const uint32_t g = lane() / 4, first = (begin + pass * DEPTH) * K_BLOCK + Format::value(0, lane() % 4);
    const int left = static_cast<int>(min(p.k, end * K_BLOCK)) - static_cast<int>(first);
#pragma unroll
    for (int n = 0; n < M_TILES; ++n) {
      const uint32_t m = 8 * n + g;
      const char* row = static_cast<const char*>(p.prologue.x) + 2 * (uint64_t(m) * p.k + first);
      const int values = m < p.m ? left : 0;
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int at = d * K_BLOCK + Format::value(e, 0);
          x[d][e][n] = make_uint4(0, 0, 0, 0);
          if (at < values) x[d][e][n] = __ldcg(reinterpret_cast<const uint4*>(row + 2 * at));
        }
      }
    }
    leave_biases(x);
  }

  // The sums of x over a K block, from products with ones.
  __device__ __forceinline__ void leave_biases(const X& x) const {
    const Operands ones = {ONES, ONES, ONES, ONES, ONES, ONES, ONES, ONES};
    __syncwarp();
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      float c[M_TILES][4] = {};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int n = 0; n < M_TILES; ++n) mma_both(c[n], ones, x[d][e][n]);
      }
      const float4 bias = make_float4(-BIAS * c[0][0], -BIAS * c[0][1], -BIAS * c[1][0], -BIAS * c[1][1]);
      if (lane() < 4) biases[4 * d + lane()] = bias;
    }
    __syncwarp();
  }
  // The initial sums of a group of K block d.
  __device__ __forceinline__ void begin_sums(float (&c)[M_TILES][4], int d) const {
    const float4 bias = biases[4 * d + lane() % 4];
    c[0][0] = c[0][2] = bias.x, c[0][1] = c[0][3] = bias.y, c[1][0] = c[1][2] = bias.z, c[1][1] = c[1][3] = bias.w;
  }

  __device__ __forceinline__ float scale(uint32_t stage, int i, int d) const {
    const uint32_t at = stage + R::CODES + ((i * R::K_BLOCKS + d) * ROW_GROUP + lane() / 4) * 2;
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
    return __half2float(__ushort_as_half(v));
  }
  __device__ __forceinline__ Format::Piece piece(uint32_t stage, int d, int i) const {
    Format::Piece v;
    uint4* words = reinterpret_cast<uint4*>(&v);
#pragma unroll
    for (int q = 0; q < int(sizeof(v) / 16); ++q)
      words[q] = load_shared(stage + (d * 2 + i) * R::PIECE + q * (16 * WARP) + 16 * lane());
    return v;
  }

  // The K blocks of a stage; they are multiplied with those of x from the d0-th on. K blocks past the end meet
  // zeros of x and a factor of zero, whatever is in the stage.
  __device__ __forceinline__ void multiply(uint32_t stage, uint32_t k_block, const X& x, int d0,
                                           float (&sums)[M_TILES][4]) const {
    Format::Piece pieces[R::K_BLOCKS][2];
    float by[R::K_BLOCKS][2];
#pragma unroll
    for (int d = 0; d < R::K_BLOCKS; ++d) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        pieces[d][i] = piece(stage, d, i);
        by[d][i] = scale(stage, i, d);
      }
    }
    float c[R::K_BLOCKS][M_TILES][4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int d = 0; d < R::K_BLOCKS; ++d) {
        if (e == 0) begin_sums(c[d], d);
        const Operands w = Format::biased_operands(pieces[d][0], pieces[d][1], e);
#pragma unroll
        for (int n = 0; n < M_TILES; ++n) mma_both(c[d][n], w, x[d0 + d][e][n]);
      }
    }
#pragma unroll
    for (int d = 0; d < R::K_BLOCKS; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float factor = k_block + d < end ? by[d][i / 2] : 0.f;
#pragma unroll
        for (int n = 0; n < M_TILES; ++n) sums[n][i] = fmaf(factor, c[d][n][i], sums[n][i]);
      }
    }
  }

  // Stores a warp's sums of one of a batch's N tiles, added to those of its former passes.
  __device__ __forceinline__ void store_sums(const float (&sums)[M_TILES][4], uint32_t n_tile, bool again) const {
    float4* mine = reinterpret_cast<float4*>(parts) + ((n_tile + place) * p.split_k + part) * (SUMS / 4) + lane();
#pragma unroll
    for (int n = 0; n < M_TILES; ++n) {
      float4 v = make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
      if (again) {
        const float4 old = mine[n * WARP];
        v.x += old.x, v.y += old.y, v.z += old.z, v.w += old.w;
      }
      mine[n * WARP] = v;
    }
  }

  // Where the first warp of those that share an N tile has stored what the thread adds: four sums, as a lane of
  // `mma` has them, of rows g and g + 8 of the weights, each for rows 2t and 2t + 1 of eight rows of x.
  __device__ __forceinline__ const float4* of_thread() const {
    const uint32_t n_tile = threadIdx.x / (SUMS / 4);
    return reinterpret_cast<const float4*>(parts) + n_tile * p.split_k * (SUMS / 4) + threadIdx.x % (SUMS / 4);
  }
  __device__ __forceinline__ void add(float4& y) const {
    const float4* from = of_thread();
    float4 v[WARPS];
#pragma unroll
    for (int q = 0; q < WARPS; ++q) {
      v[q] = float4{};
      if (q < p.split_k) v[q] = from[q * (SUMS / 4)];
    }
#pragma unroll
    for (int q = 0; q < WARPS; ++q) y.x += v[q].x, y.y += v[q].y, y.z += v[q].z, y.w += v[q].w;
  }

  // All threads: the outputs of a batch for rows 2t + b of eights of x.
  __device__ __forceinline__ void epilogue(uint32_t from, uint32_t b, float2 y) const {
    const uint32_t n_tile = from + threadIdx.x / (SUMS / 4), m = threadIdx.x / WARP % 2 * 8 + lane() % 4 * 2 + b;
    if (n_tile < n_tiles && m < p.m) write_outputs(first + n_tile, lane() / 4, m, y);
  }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // All threads of both CTAs: the first writes the even rows of x, the other the odd ones. Each sends its sums of the
  // other's rows, and keeps those of its own.
  __device__ __forceinline__ void exchange(uint32_t from, float4 y) const {
    const uint32_t turn = from / BATCH % TURNS, at = given + turn * GIVEN + 8 * threadIdx.x, other = rank ^ 1;
    const float2 others = rank ? make_float2(y.x, y.z) : make_float2(y.y, y.w);
    send(in_block(at, other), others, in_block(barriers + 8 * turn, other));
    if (from > 0) epilogue_exchanged(from - BATCH);
    const float2 own = rank ? make_float2(y.y, y.w) : make_float2(y.x, y.z);
    store_shared(given + TURNS * GIVEN + 8 * threadIdx.x, __float_as_uint(own.x), __float_as_uint(own.y));
  }
  __device__ __forceinline__ void epilogue_exchanged(uint32_t from) const {
    const uint32_t batch = from / BATCH, turn = batch % TURNS, barrier = barriers + 8 * turn;
    barrier_wait(barrier, batch / TURNS % 2);
    if (threadIdx.x == 0) barrier_expect(barrier, GIVEN);
    const float2 own = load_shared_float2(given + TURNS * GIVEN + 8 * threadIdx.x);
    const float2 other = load_shared_float2(given + turn * GIVEN + 8 * threadIdx.x);
    epilogue(from, rank, make_float2(own.x + other.x, own.y + other.y));
  }
#endif

  // Sums of rows g and g + 8 of an N tile for row m of x.
  __device__ __forceinline__ void write_outputs(uint32_t n_tile, uint32_t g, uint32_t m, float2 sums) const {
    const Epilogue& e = p.epilogue;
    float v[2] = {sums.x, sums.y};
    // A plain bf16 output. The general epilogue below takes up to a tenth of a product's time.
    if (is_plain(e) && e.out_dtype == BF16) {
      const uint32_t c = 16 * n_tile + g;
      auto* out = static_cast<__nv_bfloat16*>(e.out) + m * e.stride + c;
      if (c < p.width) out[0] = from_float<__nv_bfloat16>(v[0]);
      if (c + 8 < p.width) out[8] = from_float<__nv_bfloat16>(v[1]);
      return;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t row = n_tile_row(p, n_tile, g + 8 * i);
      v[i] += e.bias ? widen_raw(read_raw(e.bias, e.dtype, row), e.dtype) : 0.f;
    }
    if (gates(p)) v[0] = gate(e.activation, v[0]) * v[1];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t c = n_tile_column(p, n_tile, g + 8 * i);
      if ((i == 1 && gates(p)) || c >= p.width) continue;
      Addends of;
      of.load_residuals(e, m, c);
      float y = gates(p) ? v[i] : activate(e.activation, v[i]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (e.residuals[j]) y += widen_raw(of.residuals[j], e.dtype);
      }
      write(e.out, e.out_dtype, m * e.stride + c, y);
    }
  }

  __device__ __forceinline__ void run() const {
    pdl_launch();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (cluster_size > 1) {
      if (threadIdx.x == 0) {
        for (int i = 0; i < TURNS; ++i) barrier_init(barriers + 8 * i, 1), barrier_expect(barriers + 8 * i, GIVEN);
      }
      barriers_made();
      cluster_arrive();
    }
#endif
    PrefetchCursor ahead = {};
#pragma unroll 1
    for (int i = 0; i < STAGES; ++i) prefetch(ahead, pipeline + i * R::STAGE_BYTES);
    pdl_wait();
    X x;
    load(x, 0);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (cluster_size > 1) cluster_wait();
#endif
    uint32_t stage = 0;
#pragma unroll 1
    for (uint32_t from = 0; from < n_tiles; from += BATCH) {
      const uint32_t to = min(from + BATCH, n_tiles);
#pragma unroll 1
      for (uint32_t pass = 0; pass < passes; ++pass) {
#pragma unroll 1
        for (uint32_t n_tile = from; n_tile < to; n_tile += cta_n_tiles) {
          float sums[M_TILES][4] = {};
#pragma unroll
          for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            await_copies_but<STAGES - 1>();
            __syncwarp();  // scales are copied by other lanes
            const uint32_t at = pipeline + stage * R::STAGE_BYTES;
            multiply(at, begin + pass * DEPTH + chunk * R::K_BLOCKS, x, chunk * R::K_BLOCKS, sums);
            __syncwarp();
            prefetch(ahead, at);
            if (++stage == STAGES) stage = 0;
          }
          store_sums(sums, n_tile - from, pass > 0);
        }
        if (passes > 1 && (pass + 1 < passes || to < n_tiles)) load(x, (pass + 1) % passes);
      }
      __syncthreads();
      float4 total = {};
      add(total);
      __syncthreads();
      if (cluster_size == 1) {
        epilogue(from, 0, make_float2(total.x, total.z));
        epilogue(from, 1, make_float2(total.y, total.w));
      }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      if (cluster_size > 1) exchange(from, total);
#endif
    }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (cluster_size > 1) epilogue_exchanged((n_tiles - 1) / BATCH * BATCH);
#endif
  }
};

__device__ __forceinline__ void gemm_m16(const GemmM16Params& s) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  using Core = GemmM16;
  extern __shared__ float4 dynamic_shared[];
  __shared__ alignas(8) uint64_t barriers[Core::TURNS];
  __shared__ float4 biases[Core::WARPS * Core::DEPTH * 4];
  Core(s, reinterpret_cast<char*>(dynamic_shared), biases, shared_address(barriers)).run();
#endif
}

}  // namespace fused
