// y = act(x W^T + bias) + residuals for INT8 weights and 17 to 64 rows of x in 16-bit whole numbers, on Hopper: `wgmma` of
// int8, which multiplies twice as fast as that of bf16, and reads the codes of the weights where TMA leaves them.
//
// A preceding kernel (quantize_rows.cu) quantizes x in K blocks of 128 values, with a power of two for each, to 256 times
// one int8 and another: two rows of operand B for each token, side by side. Sums over a K block are exact. In f32 they are
// scaled by the token's power of two, and at the end by the channel's scale.
//
// The problem is transposed: a warpgroup has 64 output channels, operand A, and all tokens. A block has two warpgroups, side
// by side in N, and a producer, whose one thread brings weights, x and its scales by TMA; the first weights before the PDL
// wait. The blocks of a cluster share K: each leaves its sums in its shared memory, and each adds up and writes a part of
// the outputs, in the order of K. A multiprocessor has two blocks.
#pragma once

#include "abi/w8a16.cuh"
#include "common/cluster.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "linear/gemm_wna16_outputs.cuh"

namespace fused {

constexpr int INT16_UNIT = W8A16_UNIT;  // tokens whose sums a warp has as whole numbers at a time

template <int TOKENS_, int STAGES_> struct W8A16Shape {
  static constexpr int TOKENS = TOKENS_, STAGES = STAGES_, UNITS = TOKENS / INT16_UNIT;
  static constexpr int CHANNELS = W8A16_CHANNELS, WARPS = CHANNELS / N_TILE, CONSUMERS = WARPS * WARP;
  static_assert(CONSUMERS + 128 == W8A16_THREADS);
  // Of a thread, behind the launch with 80 for each of 384, two blocks of a multiprocessor.
  static constexpr int PRODUCER_REGISTERS = 32, REGISTERS = 104;
  static_assert(128 * PRODUCER_REGISTERS + CONSUMERS * REGISTERS <= W8A16_THREADS * 80, "setmaxnreg would wait for ever");
  static constexpr uint32_t UNIT_X = 2 * INT16_UNIT * K_BLOCK, X = UNITS * UNIT_X;  // bytes of operand B
  static constexpr uint32_t CODES_AT = X, HALF = CHANNELS / 2 * K_BLOCK;            // of the weights
  static constexpr uint32_t SCALES_AT = CODES_AT + 2 * HALF, UNIT_SCALES = 4 * INT16_UNIT;
  static constexpr uint32_t FILLED = SCALES_AT + UNITS * UNIT_SCALES, STAGE = (FILLED + 1023) / 1024 * 1024;
  static constexpr uint32_t PITCH = CHANNELS + 8;  // f32 of a token's sums: no two lanes meet in a bank
  static_assert(4 * TOKENS * PITCH <= STAGES * STAGE);
};

template <class Shape> struct GemmW8A16 {
  static constexpr int TOKENS = Shape::TOKENS, STAGES = Shape::STAGES;

  const GemmW8A16Params& g;
  const Gemv& p;
  const uint32_t room, barriers;  // in shared memory
  const uint32_t rank, tile;
  const uint32_t begin, end;  // K blocks of this block

  __device__ __forceinline__ GemmW8A16(const GemmW8A16Params& g, uint32_t room, uint32_t barriers)
      : g(g), p(g.product), room(room), barriers(barriers), rank(blockIdx.x % g.split_k), tile(blockIdx.x / g.split_k),
        begin(p.k / K_BLOCK * rank / g.split_k), end(p.k / K_BLOCK * (rank + 1) / g.split_k) {}

  __device__ __forceinline__ uint32_t full(uint32_t stage) const { return barriers + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(uint32_t stage) const { return barriers + 8 * (STAGES + stage); }

  // The first row of half `h` of the tile's channels. Where one half of the outputs gates the other, tiles have some of both.
  __device__ __forceinline__ uint32_t first_row(uint32_t h) const {
    constexpr uint32_t HALF = Shape::CHANNELS / 2;
    return gates(p) ? tile * HALF + h * p.width : tile * (2 * HALF) + h * HALF;
  }

  __device__ __forceinline__ void copy_weights(uint32_t stage, uint32_t k_block) const {
    barrier_expect(full(stage), Shape::FILLED);
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      uint32_t row = first_row(h);
      const uint32_t which = (row >= p.weights[1].first) + (row >= p.weights[2].first);
      bulk_copy_rows(room + stage * Shape::STAGE + Shape::CODES_AT + h * Shape::HALF, g.weights[which], full(stage),
                     k_block * K_BLOCK, row - p.weights[which].first);
    }
  }
  __device__ __forceinline__ void copy_x(uint32_t stage, uint32_t k_block) const {
    constexpr uint32_t SCALES = Shape::UNITS * Shape::UNIT_SCALES;
    const uint32_t to = room + stage * Shape::STAGE;
    bulk_copy_rows(to, g.x, full(stage), k_block * K_BLOCK, 0);
    bulk_copy(to + Shape::SCALES_AT, reinterpret_cast<const char*>(g.x_scales) + k_block * SCALES, SCALES, full(stage),
              evict_first());
  }
  // One thread.
  __device__ __forceinline__ void produce() const {
    prefetch_tensor_map(g.x);
    const uint32_t early = min(begin + STAGES, end);
    for (uint32_t k_block = begin; k_block < early; ++k_block) copy_weights(k_block - begin, k_block);
    pdl_wait();
    PipelineState<STAGES> at;
    for (uint32_t k_block = begin; k_block < end; ++k_block) {
      if (k_block >= early) {
        barrier_wait(empty(at.stage), at.phase ^ 1);
        copy_weights(at.stage, k_block);
      }
      copy_x(at.stage, k_block);
      at.next();
    }
  }

  // Adds a K block's sums of a unit of tokens, scaled. Column 8 j + 2 t of lane 4 g + t is the upper part of token 4 j + t;
  // scales lie in the order of t and then j.
  static __device__ __forceinline__ void add(float* sums, const int (&c)[INT16_UNIT], uint32_t scales) {
    constexpr int TILES = INT16_UNIT / 4;
    const uint32_t at = scales + threadIdx.x % 4 * (4 * TILES);
#pragma unroll
    for (int first = 0; first < TILES; first += 4) {
      const float4 four = load_shared_float4(at + 4 * first);
      const float by[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = first; j < first + 4; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int whole = 256 * c[4 * j + 2 * i] + c[4 * j + 2 * i + 1];
          sums[2 * j + i] = fmaf(by[j - first], static_cast<float>(whole), sums[2 * j + i]);
        }
      }
    }
  }

  __device__ __forceinline__ void multiply(float (&sums)[TOKENS / 2]) const {
    const uint32_t half = threadIdx.x / 128;
    PipelineState<STAGES> at;
#pragma unroll 1
    for (uint32_t k_block = begin; k_block < end; ++k_block) {
      const uint32_t stage = room + at.stage * Shape::STAGE;
      const uint32_t rows = descriptor_low(stage + Shape::CODES_AT + half * Shape::HALF, 16), x = descriptor_low(stage, 16);
      barrier_wait(full(at.stage), at.phase);
#pragma unroll
      for (int unit = 0; unit < Shape::UNITS; ++unit) {
        int c[INT16_UNIT];
        wgmma_fence();
#pragma unroll
        for (int e = 0; e < 4; ++e)
          wgmma(c, descriptor_at(rows + 2 * e), descriptor_at(x + unit * (Shape::UNIT_X / 16) + 2 * e), e > 0);
        wgmma_commit();
        wgmma_wait<0>();
        settle(c);
        add(sums + unit * (INT16_UNIT / 2), c, stage + Shape::SCALES_AT + unit * Shape::UNIT_SCALES);
      }
      __syncwarp();
      if (threadIdx.x % WARP == 0) barrier_arrive(empty(at.stage));
      at.next();
    }
  }

  // Scales sums by channels and leaves them in shared memory, where the stages were: `[token][channel]`.
  __device__ __forceinline__ void leave(float* to, const float (&sums)[TOKENS / 2]) const {
    const uint32_t lane = threadIdx.x % WARP, half = threadIdx.x / 128, rows_before = threadIdx.x / WARP % 4 * N_TILE;
    float by[2];
    uint32_t place[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t in_half = rows_before + ROW_GROUP * i + lane / 4;
      uint32_t row = min(first_row(half) + in_half, p.rows - 1);
      const Matrix& matrix = matrix_of(p, row);
      by[i] = __ldg(static_cast<const float*>(matrix.scales) + row);
      // N tiles have 8 gates and what these multiply.
      place[i] = gates(p) ? in_half / ROW_GROUP * N_TILE + half * ROW_GROUP + in_half % ROW_GROUP
                          : half * (Shape::CHANNELS / 2) + in_half;
    }
    barrier(1, Shape::CONSUMERS);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* at = to + place[i] + lane % 4 * Shape::PITCH;
#pragma unroll
      for (int j = 0; j < TOKENS / 4; ++j) at[4 * j * Shape::PITCH] = by[i] * sums[2 * j + i];
    }
  }

  __device__ __forceinline__ void write() const {
    TileOutputs{p, room, Shape::PITCH, 1, 0, g.split_k, tile * Shape::WARPS, Shape::WARPS, 0, p.m, g.vectors != 0}.write(
        rank * Shape::CONSUMERS + threadIdx.x, g.split_k * Shape::CONSUMERS);
  }
};

template <class Shape> __device__ __forceinline__ void gemm_w8a16(const GemmW8A16Params& g) {
  extern __shared__ char shared[];
  __shared__ __align__(8) uint64_t barriers[2 * Shape::STAGES];
  const uint32_t base = shared_address(shared), room = (base + 1023) & ~1023u;
  const GemmW8A16<Shape> gemm(g, room, shared_address(barriers));
  if (threadIdx.x == Shape::CONSUMERS) {
    for (int i = 0; i < Shape::STAGES; ++i) {
      barrier_init(gemm.full(i), 1);
      barrier_init(gemm.empty(i), Shape::WARPS);
    }
    barriers_made();
  }
  __syncthreads();
  pdl_launch();
  if (threadIdx.x >= Shape::CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Shape::PRODUCER_REGISTERS));
    if (threadIdx.x == Shape::CONSUMERS) gemm.produce();
    __syncwarp();
    cluster_sync_memory();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Shape::REGISTERS));
    float sums[Shape::TOKENS / 2] = {};
    pdl_wait();
    gemm.multiply(sums);
    gemm.leave(reinterpret_cast<float*>(shared + (room - base)), sums);
    cluster_sync_memory();
    gemm.write();
  }
  // No block's shared memory goes while others read it.
  if (g.split_k > 1) cluster_sync();
}

}  // namespace fused
