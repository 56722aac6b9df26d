// gemm_wna16_m16.cuh's product, y = act(x W^T + bias) + residuals for up to 16 rows of bf16 x, where k is so long that
// a warp would read x anew for every two steps of it: INT4 in groups of 128.
//
// Two blocks, a cluster, share k. Four warps of a block take a unit of 16 rows of weights each, with one half of
// the block's k, and four the same units with the other half; each keeps its sums in registers from end to end.
// The steps of x that they meet come through a ring in shared memory, which the copy engine fills: every step is
// read once for four units. A warp has its codes and scales in a ring of its own, as there.
#pragma once

#include "linear/gemm_wna16_m16.cuh"

namespace fused {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

struct CodeLong : CodeSlices<Int4Rows<ONE_GROUP>> {
  using Format = Int4Rows<ONE_GROUP>;
  static constexpr int SPLIT = 2, SIDE = WARPS / SPLIT, SLOTS = 3, STAGES = 3;
  // A chunk is 64 values of each row of x, as the copy engine leaves them: 16 bytes u of row r at u ^ r % 8.
  static constexpr uint32_t LINE = 128, CHUNK = 8 * EIGHTS * LINE, PART = DEPTH * STEP / 64 * CHUNK;
  static constexpr uint32_t STAGE = SPLIT * PART, RING = SLOTS * R::SLOT, RINGS_AT = STAGES * STAGE;
  static constexpr uint32_t SUMS_AT = RINGS_AT + WARPS * RING, GIVEN_AT = SUMS_AT + WARPS * SUMS * 4;
  static_assert(BATCH == SIDE, "a batch is a unit for each warp of a half");

  const TensorMap& x;
  const uint32_t rounds;  // of a batch
  uint32_t stages;        // of x
  uint32_t full, empty;   // [STAGES] barriers

  // `memory` begins at a multiple of what the copy engine's pattern repeats after.
  __device__ CodeLong(const LongSlicesParams& s, char* memory, uint32_t given_barriers, uint32_t stage_barriers)
      : CodeSlices(s.slices, memory, nullptr, given_barriers), x(s.x),
        rounds(((steps_of(p.k) + 1) / 2 + SPLIT * DEPTH - 1) / (SPLIT * DEPTH)), full(stage_barriers),
        empty(stage_barriers + 8 * STAGES) {
    const uint32_t clusters = gridDim.x / slices, cluster = blockIdx.x / slices;
    const uint32_t all = (p.width + outputs - 1) / outputs, batches = (all + BATCH - 1) / BATCH;
    first = uint64_t(batches) * cluster / clusters * BATCH;
    units = min(uint32_t(uint64_t(batches) * (cluster + 1) / clusters * BATCH), all) - first;
    stages = shared_address(memory);
    ring = stages + RINGS_AT + warp() * RING;
    parts = reinterpret_cast<float*>(memory + SUMS_AT);
    given = stages + GIVEN_AT;
  }

  // Where a warp's codes and scales of a batch lie: those of a unit's two eights of rows, from the warp's first
  // step on, which follow one another.
  struct Stream {
    const char *codes[2], *scales;
    uint32_t from, step;
  };
  __device__ __forceinline__ void begin_unit(Stream& of) const {
    const uint32_t unit = first + min(of.from + place, units - 1), steps = steps_of(p.k);
    of.step = begin;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t row = gates(p) ? 8 * unit + i * p.width : min(16 * unit + 8 * i, (p.width - 1) & ~7u);
      const Matrix& matrix = matrix_of(p, row);
      const uint64_t place = uint64_t(row / OCTET) * steps + begin;
      of.codes[i] = static_cast<const char*>(matrix.data) + place * R::PIECE + 16 * lane();
      // Lanes 0 and 1 copy the scales of the first eight rows, 2 and 3 those of the others.
      if (lane() / DEPTH == i)
        of.scales = static_cast<const char*>(matrix.scales) + (place + lane() % DEPTH) * (2 * OCTET);
    }
  }
  __device__ __forceinline__ void ask_next(Stream& of, uint32_t slot) const {
    if (of.from < units) {
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        if (of.step + d >= end) break;
#pragma unroll
        for (int i = 0; i < 2; ++i)
          copy_async(slot + (d * 2 + i) * R::PIECE + 16 * lane(), of.codes[i] + d * R::PIECE);
      }
      if (lane() < 2 * DEPTH && of.step + lane() % DEPTH < end) copy_async(slot + R::CODES + 16 * lane(), of.scales);
      of.codes[0] += DEPTH * R::PIECE, of.codes[1] += DEPTH * R::PIECE, of.scales += DEPTH * 2 * OCTET;
      of.step += DEPTH;
      if (of.step >= begin + rounds * DEPTH) {
        of.from += BATCH;
        if (of.from < units) begin_unit(of);
      }
    }
    commit_copies();
  }

  // A thread: the steps of x that both halves of the block meet in a round. What x does not have are zeros.
  __device__ __forceinline__ void ask_x(uint32_t round, uint32_t stage) const {
    const uint32_t slice = (steps_of(p.k) + 1) / 2, share = (slice + SPLIT - 1) / SPLIT, barrier = full + 8 * stage;
    barrier_expect(barrier, STAGE);
#pragma unroll
    for (int q = 0; q < SPLIT; ++q) {
      const uint32_t step = rank * slice + q * share + round * DEPTH;
      bulk_copy_chunks(stages + stage * STAGE + q * PART, x, barrier, step * (STEP / 64));
    }
  }

  __device__ __forceinline__ void multiply_round(uint32_t slot, uint32_t step, uint32_t x, float (&sums)[EIGHTS][4]) const {
    Format::Piece pieces[DEPTH][2];
    float by[DEPTH][2];
    const uint32_t there = min(end - min(end, step), uint32_t(DEPTH));
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
#pragma unroll
      for (int i = 0; i < 2; ++i) pieces[d][i] = piece(slot, d, i), by[d][i] = scale_of(slot, d, i);
    }
    const uint32_t r = row_of(lane() / 4), line = x + r * LINE;
    const uint32_t at[2] = {line + (lane() % 4 ^ r) * 16, line + ((lane() % 4 + 4) ^ r) * 16};
    float c[DEPTH][EIGHTS][4] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        const Operands w = Format::operands(pieces[d][0], pieces[d][1], e, {});
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n)
          mma_both(c[d][n], w, load_shared(at[e % 2] + (2 * d + e / 2) * CHUNK + n * (8 * LINE)));
      }
    }
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      if (d >= there) break;  // x had nothing for it: whatever stood there
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n) sums[n][i] = fmaf(by[d][i / 2], c[d][n][i], sums[n][i]);
      }
    }
  }
  // Which of eight rows of x is column c of the products: eight lanes that read two rows meet all banks.
  static __device__ __forceinline__ uint32_t row_of(uint32_t c) { return c / 2 + 4 * (c % 2); }
  // The scale of row g of eight i, and step d.
  __device__ __forceinline__ float scale_of(uint32_t slot, int d, int i) const {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(slot + R::CODES + (i * DEPTH + d) * 2 * OCTET + lane() / 4 * 2));
    return __half2float(__ushort_as_half(v));
  }

  // All threads of both blocks, at the end of a batch: as `exchange`, but the other's sums are waited for at once.
  // A block gives what it has of a batch when it has been given the one before, so there is room for two.
  __device__ __forceinline__ void meet(uint32_t from, float4 y) const {
    const uint32_t batch = from / BATCH, turn = batch % 2, at = given + turn * GIVEN + 8 * threadIdx.x;
    const uint32_t barrier = barriers + 8 * turn, other = rank ^ 1;
    const float2 others = rank ? make_float2(y.x, y.z) : make_float2(y.y, y.w);
    send(in_block(at, other), others, in_block(barrier, other));
    const float2 own = rank ? make_float2(y.y, y.w) : make_float2(y.x, y.z);
    barrier_wait(barrier, batch / 2 % 2);
    if (threadIdx.x == 0) barrier_expect(barrier, GIVEN);
    const float2 theirs = load_pair(at);
    const uint32_t unit = from + threadIdx.x / (SUMS / 4), m = threadIdx.x / WARP % 2 * 8 + row_of(lane() % 4 * 2 + rank);
    if (unit < units && m < p.m) write_outputs(first + unit, lane() / 4, m, make_float2(own.x + theirs.x, own.y + theirs.y));
  }

  __device__ __forceinline__ void make_barriers() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) barrier_init(barriers + 8 * i, 1), barrier_expect(barriers + 8 * i, GIVEN);
      for (int i = 0; i < STAGES; ++i) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, WARPS);
    }
    barriers_made();
    cluster_arrive();
  }

  __device__ __forceinline__ void run() const {
    allow_next();
    if (threadIdx.x == 0) prefetch(x);
    make_barriers();
    Stream asked = {};
    begin_unit(asked);
#pragma unroll 1
    for (int i = 0; i < SLOTS; ++i) ask_next(asked, ring + i * R::SLOT);
    cluster_wait();
    wait_previous();
    const uint32_t batches = (units + BATCH - 1) / BATCH, all = batches * rounds;
    if (warp() < min(STAGES, all) && lane() == 0) ask_x(warp() % rounds, warp());
    Ring<STAGES> stage;
    uint32_t slot = 0, done = 0;
#pragma unroll 1
    for (uint32_t from = 0; from < units; from += BATCH) {
      float sums[EIGHTS][4] = {};
#pragma unroll 1
      for (uint32_t round = 0; round < rounds; ++round, ++done) {
        // The stage of the round before, which all are about to leave, for the round that comes in two.
        if (done > 0 && done - 1 + STAGES < all && warp() == done % WARPS && lane() == 0) {
          const uint32_t old = (done - 1) % STAGES;
          barrier_wait(empty + 8 * old, (done - 1) / STAGES % 2);
          ask_x((done - 1 + STAGES) % rounds, old);
        }
        await_copies_but<SLOTS - 1>();
        __syncwarp();  // scales are copied by other lanes
        barrier_wait(full + 8 * stage.stage, stage.phase);
        const uint32_t at = ring + slot * R::SLOT;
        multiply_round(at, begin + round * DEPTH, stages + stage.stage * STAGE + part * PART, sums);
        __syncwarp();
        if (lane() == 0) barrier_arrive(empty + 8 * stage.stage);
        ask_next(asked, at);
        stage.next();
        if (++slot == SLOTS) slot = 0;
      }
      leave(sums, 0, false);
      __syncthreads();
      float4 total = {};
      add(total);
      meet(from, total);
      __syncthreads();
    }
  }
};

#endif

__device__ __forceinline__ void code_long(const LongSlicesParams& s) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ float4 dynamic_shared[];
  __shared__ alignas(8) uint64_t barriers[2 + 2 * CodeLong::STAGES];
  char* memory = reinterpret_cast<char*>(dynamic_shared);
  const uint32_t start = shared_address(memory), at = shared_address(barriers);
  CodeLong(s, memory + (-start & 1023), at, at + 16).run();
#endif
}

}  // namespace fused

// `NAME`: a kernel for up to 16 rows of x, with registers for two blocks on a multiprocessor.
#define FUSED_CODE_LONG(NAME)                                                                                \
  extern "C" __global__ void __launch_bounds__(256, 2) NAME(const __grid_constant__ fused::LongSlicesParams p) { \
    fused::code_long(p);                                                                                     \
  }
