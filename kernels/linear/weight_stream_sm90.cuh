// The weights of the kernels for few rows of x on Hopper: packed FP8, NVFP4, NF4, INT4 or ternary weights (formats/packed.cuh), N tile
// by N tile, in a TMA pipeline of 2 to 16 stages in shared memory. A stage is 16 K blocks of an N tile of 16 output
// channels. One producer thread issues the copies, only as many at a time as keep the memory busy: loads of x must not
// queue behind all of them.
#pragma once

#include "common/tma.cuh"
#include "linear/gemv_wna16_sm90_mma.cuh"

namespace fused {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

constexpr uint32_t STAGE_K_BLOCKS = CHUNK * CONSUMER_WARPS;  // K blocks of a stage
static_assert(STAGE_K_BLOCKS == GEMV_SM90_K_BLOCKS);
constexpr uint32_t MAX_STAGES = GEMV_SM90_MAX_STAGES;

// The current stage of the pipeline, and the parity of its barriers.
struct StageState {
  uint32_t stage, phase;

  __device__ __forceinline__ void next(uint32_t stages) {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
};

// A block has N tiles blockIdx.x, blockIdx.x + gridDim.x and so on.
template <class Format> struct WeightStream {
  // Bytes of the scales of 8 rows in a K block that come with the codes.
  static constexpr bool HAS_GROUP16_SCALES = Format::GROUPS == ROW_AND_GROUP16_SCALES;
  static constexpr uint32_t SCALES =
      Format::GROUPS == ONE_GROUP        ? 2 * ROW_GROUP
      : Format::GROUPS == TWO_F32_GROUPS ? Nf4::SCALES * ROW_GROUP
      : HAS_GROUP16_SCALES               ? Nvfp4::SCALES * ROW_GROUP
                                         : 0;
  static constexpr uint32_t STAGE_CODES = STAGE_K_BLOCKS * Format::CODES, STAGE_SCALES = STAGE_K_BLOCKS * SCALES;
  static constexpr uint32_t STAGE_BYTES = 2 * (STAGE_CODES + STAGE_SCALES);

  const Gemv& p;
  const uint32_t k_blocks, stages_of_row;  // of a row
  const uint32_t n_tiles;                  // of this block
  char* const pipeline;
  const uint32_t full, empty;  // barriers of stages

  // `barriers`: room for two barriers of each stage.
  __device__ __forceinline__ WeightStream(const Gemv& p, char* pipeline, uint32_t barriers)
      : p(p), k_blocks(k_blocks_of(p.k)), stages_of_row((k_blocks + STAGE_K_BLOCKS - 1) / STAGE_K_BLOCKS),
        n_tiles(of_block(p)), pipeline(pipeline), full(barriers), empty(barriers + 8 * MAX_STAGES) {}

  static __device__ __forceinline__ uint32_t of_block(const Gemv& p) {
    const uint32_t outputs = n_tile_outputs(p), all = (p.width + outputs - 1) / outputs;
    return (all + gridDim.x - 1 - blockIdx.x) / gridDim.x;
  }

  // Some threads of the block, before they synchronize.
  __device__ __forceinline__ void make_barriers() const {
    if (threadIdx.x < p.stages) {
      barrier_init(full + 8 * threadIdx.x, 1);
      barrier_init(empty + 8 * threadIdx.x, CONSUMER_THREADS);
    }
    barriers_made();
  }

  __device__ uint32_t n_tile(uint32_t i) const { return blockIdx.x + i * gridDim.x; }
  // The row of the weights that is row r of N tile i of this block.
  __device__ uint32_t weight_row(uint32_t i, uint32_t r) const {
    if (gates(p)) return n_tile(i) * ROW_GROUP + r % ROW_GROUP + (r < ROW_GROUP ? 0 : p.width);
    return n_tile(i) * (2 * ROW_GROUP) + r;
  }
  // The scale of a row, where rows have one.
  __device__ float scale_of(uint32_t row) const {
    if (Format::GROUPS != ROW_SCALES && Format::GROUPS != FP8_ROWS && !HAS_GROUP16_SCALES) return 1.f;
    const Matrix& matrix = matrix_of(p, row);
    const uint32_t scale = load_u32(static_cast<const uint32_t*>(matrix.scales) + row);
    if (HAS_GROUP16_SCALES) return NVFP4_UNIT * __uint_as_float(scale);
    return Format::GROUPS == FP8_ROWS ? nan_if_negative(scale) : __uint_as_float(scale);
  }

  // The producer: one thread loads all weights. A copy costs it some 50 ns, so copies are large.
  __device__ void produce() const {
    const uint64_t policy = evict_first();
    StageState next = {}, behind = {};
    const uint32_t ahead = min(Format::AHEAD, p.stages);
    uint32_t i = 0;
#pragma unroll 1
    for (uint32_t n_tile = 0; n_tile < n_tiles; ++n_tile) {
      const char *codes[2], *scales[2];
#pragma unroll
      for (int o = 0; o < 2; ++o) {
        // Past the last row the last are read again and not used.
        uint32_t row = min(weight_row(n_tile, o * ROW_GROUP), p.rows - 1);
        const Matrix& matrix = matrix_of(p, row);
        const uint64_t place = uint64_t(row / ROW_GROUP) * k_blocks;
        codes[o] = static_cast<const char*>(matrix.data) + place * Format::CODES;
        const uint64_t behind_rows = HAS_GROUP16_SCALES ? 2 * uint64_t(matrix.zeros) : 0;
        scales[o] = static_cast<const char*>(matrix.scales) + behind_rows + place * SCALES;
      }
#pragma unroll 1
      for (uint32_t k_block = 0; k_block < k_blocks; k_block += STAGE_K_BLOCKS, ++i) {
        if (i >= p.stages) barrier_wait(empty + 8 * next.stage, next.phase ^ 1);
        if (i >= ahead) {
          barrier_wait(full + 8 * behind.stage, behind.phase);
          behind.next(p.stages);
        }
        const uint32_t n = min(STAGE_K_BLOCKS, k_blocks - k_block), at = full + 8 * next.stage;
        const uint32_t to = shared_address(pipeline) + next.stage * STAGE_BYTES;
        barrier_expect(at, 2 * n * (Format::CODES + SCALES));
#pragma unroll
        for (int o = 0; o < 2; ++o) {
          bulk_copy(to + o * STAGE_CODES, codes[o] + k_block * Format::CODES, n * Format::CODES, at, policy);
          if (SCALES > 0)
            bulk_copy(to + 2 * STAGE_CODES + o * STAGE_SCALES, scales[o] + k_block * SCALES, n * SCALES, at, policy);
        }
        next.next(p.stages);
      }
    }
  }

  // Where a warp's codes and scales of each 8 rows lie, of the K blocks that it has of a stage.
  struct WarpStage {
    const char *codes[2], *scales[2];
  };
  __device__ __forceinline__ WarpStage of_warp(uint32_t stage, uint32_t warp) const {
    const char* codes = pipeline + stage * STAGE_BYTES + warp * (CHUNK * Format::CODES);
    const char* scales = pipeline + stage * STAGE_BYTES + 2 * STAGE_CODES + warp * (CHUNK * SCALES);
    return {{codes, codes + STAGE_CODES}, {scales, scales + STAGE_SCALES}};
  }
};

#endif

}  // namespace fused
