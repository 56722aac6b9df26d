// How a stage of weight_stream_sm90.cuh lies in memory and in shared memory: as tiles of 8 rows and a K block
// (formats/packed.cuh, formats/gguf.cuh), or row by row (INT8). Planes of both are copied by TMA: codes, scales and so on.
// A copy takes an SM some 40 ns, however short it is: with 32 to 64 of them for a stage, from GGUF blocks row by row, Q4_0
// 14336x4096 took 19.0 us on an H200 and Q4_K 26.3; by loads to registers they took 15.6 and 17.4.
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

// Tiles of 8 rows: bytes of their planes in a K block. `Source_` says where the planes of a tile begin in memory.
template <class Source_, uint32_t A, uint32_t B = 0, uint32_t C = 0, uint32_t D = 0> struct TilePlanes {
  static constexpr uint32_t LANE_ROWS = ROW_GROUP;  // that one lane of the producer copies
  static constexpr uint32_t STAGE_BYTES = 2 * STAGE_K_BLOCKS * (A + B + C + D);
  static __host__ __device__ constexpr uint32_t bytes(int plane) {
    return plane == 0 ? A : plane == 1 ? B : plane == 2 ? C : D;
  }
  // Where a plane begins in a stage.
  static __host__ __device__ constexpr uint32_t begin(int plane) {
    return 2 * STAGE_K_BLOCKS * ((plane > 0 ? A : 0) + (plane > 1 ? B : 0) + (plane > 2 ? C : 0));
  }

  struct Source {
    const char* planes[4];

    __device__ __forceinline__ Source(const Matrix& matrix, uint32_t row, uint32_t k) {
      Source_::find(matrix, row / ROW_GROUP, k, planes);
    }
    __device__ __forceinline__ uint32_t bytes(uint32_t, uint32_t n) const { return n * (A + B + C + D); }
    __device__ __forceinline__ void copy(uint32_t to, uint32_t lane, uint32_t k_block, uint32_t n, uint32_t barrier,
                                         uint64_t policy) const {
#pragma unroll
      for (int plane = 0; plane < 4; ++plane) {
        const uint32_t bytes = TilePlanes::bytes(plane);
        if (bytes > 0)
          bulk_copy(to + begin(plane) + lane * (STAGE_K_BLOCKS * bytes), planes[plane] + k_block * bytes, n * bytes,
                    barrier, policy);
      }
    }
  };

  // A warp's K blocks.
  struct WarpStage {
    const char* stage;
    uint32_t warp;

    __device__ __forceinline__ WarpStage(const char* stage, uint32_t warp) : stage(stage), warp(warp) {}
    // A plane of rows 0 to 7 (i = 0) or 8 to 15, and K block s of the warp's.
    template <int PLANE> __device__ __forceinline__ const char* at(int i, int s) const {
      return stage + begin(PLANE) + (i * STAGE_K_BLOCKS + CHUNK * warp + s) * bytes(PLANE);
    }
  };
};

// Codes, scales and what comes behind those, of so many bytes each.
template <uint32_t CODES, uint32_t SCALES, uint32_t SECOND> struct CodesSource {
  static __device__ __forceinline__ void find(const Matrix& matrix, uint32_t tile, uint32_t k, const char* (&planes)[4]) {
    const uint64_t place = uint64_t(tile) * k_blocks_of(k);
    planes[0] = static_cast<const char*>(matrix.data) + place * CODES;
    planes[1] = static_cast<const char*>(matrix.scales) + place * SCALES;
    planes[2] = static_cast<const char*>(matrix.scales) + 2 * uint64_t(matrix.zeros) + place * SECOND;
    planes[3] = nullptr;
  }
};
template <uint32_t CODES, uint32_t SCALES = 0, uint32_t SECOND = 0>
using CodePlanes = TilePlanes<CodesSource<CODES, SCALES, SECOND>, CODES, SCALES, SECOND>;

template <class Blocks> struct GgufSource {
  static __device__ __forceinline__ void find(const Matrix& matrix, uint32_t tile, uint32_t k, const char* (&planes)[4]) {
    const uint32_t groups = groups_of(k);
    planes[0] = static_cast<const char*>(matrix.data) + tile * Blocks::tile_bytes(groups);
    planes[1] = planes[0] + Blocks::high_at(groups);
    planes[2] = planes[0] + Blocks::scales_at(groups);
    planes[3] = planes[0] + Blocks::factors_at(groups);
  }
};
template <class Blocks>
using GgufPlanes = TilePlanes<GgufSource<Blocks>, Blocks::LOW_BYTES, Blocks::HIGH_BYTES, Blocks::SCALE_BYTES,
                              Blocks::FACTOR_BYTES>;

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
