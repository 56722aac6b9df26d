// The weights of the kernels for few rows of x on Hopper: N tile by N tile, in a TMA pipeline of 2 to 16 stages in shared
// memory. A stage is 16 K blocks of an N tile of 16 output channels. One producer warp issues the copies, only as many
// stages at a time as keep the memory busy: loads of x must not queue behind all of them.
//
// How weights lie in memory and in a stage is the format's `Planes` (weight_planes_sm90.cuh).
#pragma once

#include "common/tma.cuh"
#include "linear/weight_planes_sm90.cuh"

namespace fused {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

constexpr uint32_t MAX_STAGES = GEMV_SM90_MAX_STAGES;

// The current stage of the pipeline, and the parity of its barriers.
struct StageState {
  uint32_t stage, phase;

  __device__ __forceinline__ void next(uint32_t stages) {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
};

// What a block multiplies: N tiles `first`, `first + step` and so on, and so many K blocks of each from `first_k_block` on.
// Blocks of a cluster share K out, in whole stages.
struct StreamShare {
  uint32_t first, step, first_k_block, k_blocks;

  __device__ __forceinline__ StreamShare(uint32_t k_blocks)
      : first(blockIdx.x), step(gridDim.x), first_k_block(0), k_blocks(k_blocks) {}
  __device__ __forceinline__ StreamShare(uint32_t k_blocks, uint32_t cluster_size)
      : first(blockIdx.x / cluster_size), step(gridDim.x / cluster_size) {
    const uint32_t rank = blockIdx.x % cluster_size, stages = (k_blocks + STAGE_K_BLOCKS - 1) / STAGE_K_BLOCKS;
    first_k_block = rank * stages / cluster_size * STAGE_K_BLOCKS;
    this->k_blocks = min((rank + 1) * stages / cluster_size * STAGE_K_BLOCKS, k_blocks) - first_k_block;
  }
};

// `Format`: one of streamed_weights_sm90.cuh. K blocks count from the first of the block's share.
template <class Format> struct WeightStream {
  using Planes = typename Format::Planes;
  using WarpStage = typename Planes::WarpStage;
  static constexpr uint32_t STAGE_BYTES = Planes::STAGE_BYTES;

  const Gemv& p;
  const StreamShare share;
  const uint32_t k_blocks, stages_of_row;  // of this block's part of a row
  const uint32_t n_tiles;                  // of this block
  char* const pipeline;
  const uint32_t full, empty;  // barriers of stages

  // `barriers`: room for two barriers of each stage.
  __device__ __forceinline__ WeightStream(const Gemv& p, const StreamShare& share, char* pipeline, uint32_t barriers)
      : p(p), share(share), k_blocks(share.k_blocks), stages_of_row((k_blocks + STAGE_K_BLOCKS - 1) / STAGE_K_BLOCKS),
        n_tiles(of_block()), pipeline(pipeline), full(barriers), empty(barriers + 8 * MAX_STAGES) {}

  __device__ __forceinline__ uint32_t of_block() const {
    const uint32_t outputs = n_tile_outputs(p), all = (p.width + outputs - 1) / outputs;
    return (all + share.step - 1 - share.first) / share.step;
  }

  // Some threads of the block, before they synchronize.
  __device__ __forceinline__ void make_barriers() const {
    if (threadIdx.x < p.stages) {
      barrier_init(full + 8 * threadIdx.x, 1);
      barrier_init(empty + 8 * threadIdx.x, CONSUMER_THREADS);
    }
    barriers_made();
  }

  __device__ uint32_t n_tile(uint32_t i) const { return share.first + i * share.step; }
  // The row of the weights that is row r of N tile i of this block.
  __device__ uint32_t weight_row(uint32_t i, uint32_t r) const {
    if (gates(p)) return n_tile(i) * ROW_GROUP + r % ROW_GROUP + (r < ROW_GROUP ? 0 : p.width);
    return n_tile(i) * (2 * ROW_GROUP) + r;
  }
  // The scale of a row, where rows have one.
  __device__ float scale_of(uint32_t row) const {
    if constexpr (!Format::ROW_SCALES) return 1.f;
    const Matrix& matrix = matrix_of(p, row);
    return Format::row_scale(load_u32(static_cast<const uint32_t*>(matrix.scales) + row));
  }

  // The producer: a warp, of which some lanes copy. A copy costs its lane some 50 ns, so copies are large. AHEAD: stages
  // that are on their way at once.
  template <uint32_t AHEAD = Format::AHEAD> __device__ void produce() const {
    const uint64_t policy = evict_first();
    const uint32_t lane = threadIdx.x % WARP;
    StageState next = {}, behind = {};
    const uint32_t ahead = min(AHEAD, p.stages);
    uint32_t i = 0;
#pragma unroll 1
    for (uint32_t n_tile = 0; n_tile < n_tiles; ++n_tile) {
      // Past the last row the last is read again and not used.
      uint32_t row = min(weight_row(n_tile, min(lane * Planes::LANE_ROWS, 2 * ROW_GROUP - 1)), p.rows - 1);
      const Matrix& matrix = matrix_of(p, row);
      const typename Planes::Source source(matrix, row, p.k);
#pragma unroll 1
      for (uint32_t done = 0; done < k_blocks; done += STAGE_K_BLOCKS, ++i) {
        if (i >= p.stages) barrier_wait(empty + 8 * next.stage, next.phase ^ 1);
        if (i >= ahead) {
          barrier_wait(full + 8 * behind.stage, behind.phase);
          behind.next(p.stages);
        }
        const uint32_t k_block = share.first_k_block + done, n = min(STAGE_K_BLOCKS, k_blocks - done);
        const uint32_t at = full + 8 * next.stage;
        if (lane == 0) barrier_expect(at, 2 * ROW_GROUP / Planes::LANE_ROWS * source.bytes(k_block, n));
        __syncwarp();
        if (lane * Planes::LANE_ROWS < 2 * ROW_GROUP)
          source.copy(shared_address(pipeline) + next.stage * STAGE_BYTES, lane, k_block, n, at, policy);
        next.next(p.stages);
      }
    }
  }

  // Where a warp finds its K blocks of a stage.
  __device__ __forceinline__ WarpStage of_warp(uint32_t stage, uint32_t warp) const {
    return WarpStage(pipeline + stage * STAGE_BYTES, warp);
  }
};

#endif

}  // namespace fused
