// How a stage of weight_stream_sm90.cuh lies in memory and in shared memory: as tiles of 8 rows and a K block
// (formats/packed.cuh), or row by row (INT8). Planes of both are copied by TMA: codes, scales and what comes behind them. A
// copy takes an SM some 40 ns, however short it is: on an H200, planes of GGUF blocks, with 32 to 64 copies of a stage,
// were slower than loads to registers (Q4_0 14336x4096 19.0 us for 15.6, Q4_K 26.3 for 17.4).
#pragma once

#include "common/tma.cuh"
#include "linear/gemm_wna16_stages.cuh"

namespace fused {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

constexpr uint32_t CHUNK = 2;                    // K blocks that a warp takes at once; one may be left over
constexpr uint32_t CONSUMER_WARPS = GEMV_WARPS;  // that multiply
constexpr uint32_t CONSUMER_THREADS = CONSUMER_WARPS * WARP;
constexpr uint32_t STAGE_K_BLOCKS = CHUNK * CONSUMER_WARPS;  // K blocks of a stage
static_assert(STAGE_K_BLOCKS == GEMV_SM90_K_BLOCKS);

// Tiles of 8 rows: bytes of their codes, scales and what comes behind the scales, of a K block.
template <uint32_t CODES_, uint32_t SCALES_ = 0, uint32_t SECOND_ = 0> struct TilePlanes {
  static constexpr uint32_t CODES = CODES_, SCALES = SCALES_, SECOND = SECOND_;
  static constexpr uint32_t LANE_ROWS = ROW_GROUP;  // that one lane of the producer copies
  static constexpr uint32_t SCALES_AT = 2 * STAGE_K_BLOCKS * CODES, SECOND_AT = SCALES_AT + 2 * STAGE_K_BLOCKS * SCALES;
  static constexpr uint32_t STAGE_BYTES = SECOND_AT + 2 * STAGE_K_BLOCKS * SECOND;

  struct Source {
    const char *codes, *scales, *second;

    __device__ __forceinline__ Source(const Matrix& matrix, uint32_t row, uint32_t k) {
      const uint64_t place = uint64_t(row / ROW_GROUP) * k_blocks_of(k);
      codes = static_cast<const char*>(matrix.data) + place * CODES;
      scales = static_cast<const char*>(matrix.scales) + place * SCALES;
      second = static_cast<const char*>(matrix.scales) + 2 * uint64_t(matrix.zeros) + place * SECOND;
    }
    __device__ __forceinline__ uint32_t bytes(uint32_t, uint32_t n) const { return n * (CODES + SCALES + SECOND); }
    __device__ __forceinline__ void copy(uint32_t to, uint32_t lane, uint32_t k_block, uint32_t n, uint32_t barrier,
                                         uint64_t policy) const {
      const uint32_t first = lane * STAGE_K_BLOCKS;
      bulk_copy(to + first * CODES, codes + k_block * CODES, n * CODES, barrier, policy);
      if constexpr (SCALES > 0)
        bulk_copy(to + SCALES_AT + first * SCALES, scales + k_block * SCALES, n * SCALES, barrier, policy);
      if constexpr (SECOND > 0)
        bulk_copy(to + SECOND_AT + first * SECOND, second + k_block * SECOND, n * SECOND, barrier, policy);
    }
  };

  // A warp's K blocks: where those of rows g (i = 0) and g + 8 lie.
  struct WarpStage {
    const char* stage;
    uint32_t warp;

    __device__ __forceinline__ WarpStage(const char* stage, uint32_t warp) : stage(stage), warp(warp) {}
    __device__ __forceinline__ const char* codes(int i, int s) const {
      return stage + (i * STAGE_K_BLOCKS + CHUNK * warp + s) * CODES;
    }
    __device__ __forceinline__ const char* scales(int i, int s) const {
      return stage + SCALES_AT + (i * STAGE_K_BLOCKS + CHUNK * warp + s) * SCALES;
    }
    __device__ __forceinline__ const char* second(int i, int s) const {
      return stage + SECOND_AT + (i * STAGE_K_BLOCKS + CHUNK * warp + s) * SECOND;
    }
  };
};

// Rows of INT8.
struct Int8Planes {
  // Between rows of a stage: lanes that read two rows together meet no bank twice.
  static constexpr uint32_t PITCH = K_BLOCK * STAGE_K_BLOCKS + 64;
  static constexpr uint32_t LANE_ROWS = 1, STAGE_BYTES = 2 * ROW_GROUP * PITCH;

  struct Source {
    const char* row;
    uint32_t pitch;

    __device__ __forceinline__ Source(const Matrix& matrix, uint32_t row, uint32_t k)
        : row(static_cast<const char*>(matrix.data) + uint64_t(row) * Int8::pitch(k)), pitch(Int8::pitch(k)) {}
    // The last K block of a row may be a part of one. What is behind it in the stage meets zeros of x.
    __device__ __forceinline__ uint32_t bytes(uint32_t k_block, uint32_t n) const {
      return min(n * K_BLOCK, pitch - k_block * K_BLOCK);
    }
    __device__ __forceinline__ void copy(uint32_t to, uint32_t lane, uint32_t k_block, uint32_t n, uint32_t barrier,
                                         uint64_t policy) const {
      bulk_copy(to + lane * PITCH, row + k_block * K_BLOCK, bytes(k_block, n), barrier, policy);
    }
  };

  struct WarpStage {
    uint32_t at;

    __device__ __forceinline__ WarpStage(const char* stage, uint32_t warp)
        : at(shared_address(stage) + CHUNK * warp * K_BLOCK + threadIdx.x % WARP / 4 * PITCH +
             16 * (threadIdx.x % 4)) {}
    // 16 codes of half q of K block s.
    __device__ __forceinline__ uint4 codes(int i, int s, int q) const {
      return load_shared(at + i * (ROW_GROUP * PITCH) + s * K_BLOCK + 64 * q);
    }
  };
};

#endif

}  // namespace fused
