// gemm_wna16_m16.cuh's GEMM for long K, where a warp would read x again for every two K blocks: INT4 in groups of 128,
// with x in a pipeline of three TMA stages that all warps of a CTA share.
//
// Split-K over a cluster of two CTAs, and over the two halves of a CTA's eight warps: four warps have an N tile of 16
// output channels each with one half of the CTA's K, four the same N tiles with the other; sums stay in registers
// for all of K. A K block of x is read once for four N tiles. Every warp has its weights and scales in a pipeline of
// three `cp.async` stages of its own.
#pragma once

#include "linear/gemm_wna16_m16.cuh"

namespace fused {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

struct GemmM16Tma : GemmM16 {
  static constexpr int SPLIT_K = 2, CTA_N_TILES = WARPS / SPLIT_K, STAGES = 3, X_STAGES = 3;
  // A chunk is 64 values of each row of x, as TMA leaves them: 16 bytes u of row r at u ^ r % 8.
  static constexpr uint32_t LINE = 128, CHUNK = 8 * M_TILES * LINE, PART = DEPTH * K_BLOCK / 64 * CHUNK;
  static constexpr uint32_t X_STAGE = SPLIT_K * PART, PIPELINE = STAGES * R::STAGE_BYTES, PIPELINES_AT = X_STAGES * X_STAGE;
  static constexpr uint32_t SUMS_AT = PIPELINES_AT + WARPS * PIPELINE, GIVEN_AT = SUMS_AT + WARPS * SUMS * 4;
  static_assert(BATCH == CTA_N_TILES, "a batch is a n_tile for each warp of a half");

  const TensorMap& x;
  const uint32_t rounds;  // of a batch
  uint32_t x_stages;      // of x, in shared memory
  uint32_t full, empty;   // [X_STAGES] barriers

  // `memory` begins at a multiple of what TMA's pattern repeats after.
  __device__ GemmM16Tma(const GemmM16TmaParams& s, char* memory, uint32_t given_barriers, uint32_t stage_barriers)
      : GemmM16(s.m16, memory, nullptr, given_barriers), x(s.x),
        rounds(((k_blocks_of(p.k) + 1) / 2 + SPLIT_K * DEPTH - 1) / (SPLIT_K * DEPTH)), full(stage_barriers),
        empty(stage_barriers + 8 * X_STAGES) {
    const uint32_t clusters = gridDim.x / cluster_size, cluster = blockIdx.x / cluster_size;
    const uint32_t all = (p.width + outputs - 1) / outputs, batches = (all + BATCH - 1) / BATCH;
    first = uint64_t(batches) * cluster / clusters * BATCH;
    n_tiles = min(uint32_t(uint64_t(batches) * (cluster + 1) / clusters * BATCH), all) - first;
    x_stages = shared_address(memory);
    pipeline = x_stages + PIPELINES_AT + warp() * PIPELINE;
    parts = reinterpret_cast<float*>(memory + SUMS_AT);
    given = x_stages + GIVEN_AT;
  }

  // Where a warp's codes and scales of a batch lie: those of an N tile's two row groups, from the warp's first
  // K block on, which follow one another.
  struct PrefetchCursor {
    const char *codes[2], *scales;
    uint32_t from, k_block;
  };
  __device__ __forceinline__ void begin_n_tile(PrefetchCursor& of) const {
    const uint32_t n_tile = first + min(of.from + place, n_tiles - 1), k_blocks = k_blocks_of(p.k);
    of.k_block = begin;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t row = gates(p) ? 8 * n_tile + i * p.width : min(16 * n_tile + 8 * i, (p.width - 1) & ~7u);
      const Matrix& matrix = matrix_of(p, row);
      const uint64_t place = uint64_t(row / ROW_GROUP) * k_blocks + begin;
      of.codes[i] = static_cast<const char*>(matrix.data) + place * R::PIECE + 16 * lane();
      // Lanes 0 and 1 copy the scales of the first eight rows, 2 and 3 those of the others.
      if (lane() / DEPTH == i)
        of.scales = static_cast<const char*>(matrix.scales) + (place + lane() % DEPTH) * (2 * ROW_GROUP);
    }
  }
  __device__ __forceinline__ void prefetch_next(PrefetchCursor& of, uint32_t stage) const {
    if (of.from < n_tiles) {
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        if (of.k_block + d >= end) break;
#pragma unroll
        for (int i = 0; i < 2; ++i)
          copy_async(stage + (d * 2 + i) * R::PIECE + 16 * lane(), of.codes[i] + d * R::PIECE);
      }
      if (lane() < 2 * DEPTH && of.k_block + lane() % DEPTH < end)
        copy_async(stage + R::CODES + 16 * lane(), of.scales);
      of.codes[0] += DEPTH * R::PIECE, of.codes[1] += DEPTH * R::PIECE, of.scales += DEPTH * 2 * ROW_GROUP;
      of.k_block += DEPTH;
      if (of.k_block >= begin + rounds * DEPTH) {
        of.from += BATCH;
        if (of.from < n_tiles) begin_n_tile(of);
      }
    }
    commit_copies();
  }

  // A thread: the K blocks of x that both halves of the block meet in a round. What x does not have are zeros.
  __device__ __forceinline__ void load_x(uint32_t round, uint32_t x_stage) const {
    const uint32_t cta_k_blocks = (k_blocks_of(p.k) + 1) / 2, warp_k_blocks = (cta_k_blocks + SPLIT_K - 1) / SPLIT_K,
                   barrier = full + 8 * x_stage;
    barrier_expect(barrier, X_STAGE);
#pragma unroll
    for (int q = 0; q < SPLIT_K; ++q) {
      const uint32_t k_block = rank * cta_k_blocks + q * warp_k_blocks + round * DEPTH;
      bulk_copy_chunks(x_stages + x_stage * X_STAGE + q * PART, x, barrier, k_block * (K_BLOCK / 64));
    }
  }

  __device__ __forceinline__ void multiply_round(uint32_t stage, uint32_t k_block, uint32_t x,
                                                 float (&sums)[M_TILES][4]) const {
    Format::Piece pieces[DEPTH][2];
    float by[DEPTH][2];
    const uint32_t there = min(end - min(end, k_block), uint32_t(DEPTH));
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
#pragma unroll
      for (int i = 0; i < 2; ++i) pieces[d][i] = piece(stage, d, i), by[d][i] = scale_of(stage, d, i);
    }
    const uint32_t r = row_of(lane() / 4), line = x + r * LINE;
    const uint32_t at[2] = {line + (lane() % 4 ^ r) * 16, line + ((lane() % 4 + 4) ^ r) * 16};
    float c[DEPTH][M_TILES][4] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        const Operands w = Format::operands(pieces[d][0], pieces[d][1], e, {});
#pragma unroll
        for (int n = 0; n < M_TILES; ++n)
          mma_both(c[d][n], w, load_shared(at[e % 2] + (2 * d + e / 2) * CHUNK + n * (8 * LINE)));
      }
    }
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      if (d >= there) break;  // past the end of K: the stage's old contents
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int n = 0; n < M_TILES; ++n) sums[n][i] = fmaf(by[d][i / 2], c[d][n][i], sums[n][i]);
      }
    }
  }
  // Which of eight rows of x is column c of the products: eight lanes that read two rows meet all banks.
  static __device__ __forceinline__ uint32_t row_of(uint32_t c) { return c / 2 + 4 * (c % 2); }
  // The scale of row g of eight i, and K block d.
  __device__ __forceinline__ float scale_of(uint32_t stage, int d, int i) const {
    uint16_t v;
    const uint32_t at = stage + R::CODES + (i * DEPTH + d) * 2 * ROW_GROUP + lane() / 4 * 2;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
    return __half2float(__ushort_as_half(v));
  }

  // All threads of both blocks, at the end of a batch: as `exchange`, but the other's sums are waited for at once.
  // A block sends its sums of a batch after it has received those of the one before, so two buffers are enough.
  __device__ __forceinline__ void meet(uint32_t from, float4 y) const {
    const uint32_t batch = from / BATCH, turn = batch % 2, at = given + turn * GIVEN + 8 * threadIdx.x;
    const uint32_t barrier = barriers + 8 * turn, other = rank ^ 1;
    const float2 others = rank ? make_float2(y.x, y.z) : make_float2(y.y, y.w);
    send(in_block(at, other), others, in_block(barrier, other));
    const float2 own = rank ? make_float2(y.y, y.w) : make_float2(y.x, y.z);
    barrier_wait(barrier, batch / 2 % 2);
    if (threadIdx.x == 0) barrier_expect(barrier, GIVEN);
    const float2 theirs = load_shared_float2(at);
    const uint32_t n_tile = from + threadIdx.x / (SUMS / 4),
                   m = threadIdx.x / WARP % 2 * 8 + row_of(lane() % 4 * 2 + rank);
    if (n_tile < n_tiles && m < p.m)
      write_outputs(first + n_tile, lane() / 4, m, make_float2(own.x + theirs.x, own.y + theirs.y));
  }

  __device__ __forceinline__ void make_barriers() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) barrier_init(barriers + 8 * i, 1), barrier_expect(barriers + 8 * i, GIVEN);
      for (int i = 0; i < X_STAGES; ++i) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, WARPS);
    }
    barriers_made();
    cluster_arrive();
  }

  __device__ __forceinline__ void run() const {
    pdl_launch();
    if (threadIdx.x == 0) prefetch_tensor_map(x);
    make_barriers();
    PrefetchCursor ahead = {};
    begin_n_tile(ahead);
#pragma unroll 1
    for (int i = 0; i < STAGES; ++i) prefetch_next(ahead, pipeline + i * R::STAGE_BYTES);
    cluster_wait();
    pdl_wait();
    const uint32_t batches = (n_tiles + BATCH - 1) / BATCH, all = batches * rounds;
    if (warp() < min(X_STAGES, all) && lane() == 0) load_x(warp() % rounds, warp());
    PipelineState<X_STAGES> x_stage;
    uint32_t stage = 0, done = 0;
#pragma unroll 1
    for (uint32_t from = 0; from < n_tiles; from += BATCH) {
      float sums[M_TILES][4] = {};
#pragma unroll 1
      for (uint32_t round = 0; round < rounds; ++round, ++done) {
        // The stage of x of the round before, which all are about to leave, for the round that comes in two.
        if (done > 0 && done - 1 + X_STAGES < all && warp() == done % WARPS && lane() == 0) {
          const uint32_t old = (done - 1) % X_STAGES;
          barrier_wait(empty + 8 * old, (done - 1) / X_STAGES % 2);
          load_x((done - 1 + X_STAGES) % rounds, old);
        }
        await_copies_but<STAGES - 1>();
        __syncwarp();  // scales are copied by other lanes
        barrier_wait(full + 8 * x_stage.stage, x_stage.phase);
        const uint32_t at = pipeline + stage * R::STAGE_BYTES;
        multiply_round(at, begin + round * DEPTH, x_stages + x_stage.stage * X_STAGE + part * PART, sums);
        __syncwarp();
        if (lane() == 0) barrier_arrive(empty + 8 * x_stage.stage);
        prefetch_next(ahead, at);
        x_stage.next();
        if (++stage == STAGES) stage = 0;
      }
      store_sums(sums, 0, false);
      __syncthreads();
      float4 total = {};
      add(total);
      meet(from, total);
      __syncthreads();
    }
  }
};

#endif

__device__ __forceinline__ void gemm_m16_tma(const GemmM16TmaParams& s) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ float4 dynamic_shared[];
  __shared__ alignas(8) uint64_t barriers[2 + 2 * GemmM16Tma::X_STAGES];
  char* memory = reinterpret_cast<char*>(dynamic_shared);
  const uint32_t start = shared_address(memory), at = shared_address(barriers);
  GemmM16Tma(s, memory + (-start & 1023), at, at + 16).run();
#endif
}

}  // namespace fused

// `NAME`: a kernel for up to 16 rows of x, with registers for two blocks on an SM.
#define FUSED_GEMM_M16_TMA(NAME)                                                                                 \
  extern "C" __global__ void __launch_bounds__(256, 2) NAME(const __grid_constant__ fused::GemmM16TmaParams p) { \
    fused::gemm_m16_tma(p);                                                                                      \
  }
