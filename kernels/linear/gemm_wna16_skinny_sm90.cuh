// GEMM for up to 16 rows of bf16 x and packed FP8, NVFP4, NF4, INT4 or ternary weights on Hopper: y = act(x W^T + bias) + residuals,
// with all of x in shared memory and the weights in a TMA pipeline (weight_stream_sm90.cuh).
//
// A block has N tiles of 16 output channels, one after the other. Its warps are specialized: one brings weights, eight
// multiply, two write outputs. Of each stage of 16 K blocks consumer warp w multiplies K blocks 2w and 2w + 1, for all N
// tiles, so it copies only that part of x to shared memory, and never waits for another consumer. It leaves its sums of
// an N tile in one of two buffers, where an epilogue warp adds those of all eight, always in the same order, while the
// consumers go on with the next N tile.
//
// x of more than 8 significant bits comes as two rows of operand B for each token, the second what rounding to bf16
// leaves over; their sums are added up.
#pragma once

#include "linear/gemm_wna16_outputs.cuh"
#include "linear/gemm_wna16_stages.cuh"
#include "linear/weight_stream_sm90.cuh"

namespace fused {

struct SkinnyInt4;
struct SkinnyNvfp4;
struct SkinnyNf4;
template <int GROUPS> struct SkinnyFp8;
struct SkinnyTernary;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// A lane's codes of 4 bits of a row and a K block.
__device__ __forceinline__ Int4Weights<ONE_GROUP>::Piece read_words(const char* codes) {
  const uint4 v = *reinterpret_cast<const uint4*>(codes + 16 * (threadIdx.x % WARP));
  return {{v.x, v.y, v.z, v.w}};
}

// The formats: how a stage of the pipeline has them (`Stream`), how operands A are made of them and where those meet x
// (`Stage`), and how a lane reads what it has of K block `s` of a warp's two.
struct SkinnyInt4 {
  using Stream = WeightStream<Int4Sm90>;
  using Stage = Int4Stage<Int4Weights<ONE_GROUP>>;
  using BlockScales = NoBlockScales;

  static __device__ __forceinline__ Stage::Block read(const Stream::WarpStage& at, const BlockScales&, int s) {
    const uint32_t lane = threadIdx.x % WARP;
    Stage::Block block;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      block.pieces[i] = read_words(at.codes[i] + s * Int4Sm90::CODES);
      block.scales[i].by[0] =
          *reinterpret_cast<const uint16_t*>(at.scales[i] + s * Stream::SCALES + lane / 4 * sizeof(__half));
    }
    return block;
  }
};

struct SkinnyNvfp4 {
  using Stream = WeightStream<Nvfp4Sm90>;
  using Stage = Nvfp4Stage;
  using BlockScales = NoBlockScales;

  static __device__ __forceinline__ Stage::Block read(const Stream::WarpStage& at, const BlockScales&, int s) {
    const uint32_t lane = threadIdx.x % WARP, half = lane % 4 / 2 * 4;
    Stage::Block block;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      block.pieces[i] = read_words(at.codes[i] + s * Nvfp4Sm90::CODES);
      block.scales[i].by = *reinterpret_cast<const uint32_t*>(
          at.scales[i] + s * Stream::SCALES + lane / 4 * Nvfp4::SCALES + half);
    }
    return block;
  }
};

struct SkinnyNf4 {
  using Stream = WeightStream<Nf4Sm90>;
  using Stage = Nf4Stage;
  using BlockScales = NoBlockScales;

  static __device__ __forceinline__ Stage::Block read(const Stream::WarpStage& at, const BlockScales&, int s) {
    const uint32_t lane = threadIdx.x % WARP;
    Stage::Block block;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      block.pieces[i] = read_words(at.codes[i] + s * Nf4Sm90::CODES);
      block.scales[i].by =
          *reinterpret_cast<const uint2*>(at.scales[i] + s * Stream::SCALES + lane / 4 * Nf4::SCALES);
    }
    return block;
  }
};

template <int GROUPS> struct SkinnyFp8 {
  using Stream = WeightStream<Fp8Sm90<GROUPS>>;
  using Stage = ByteStage<Fp8Weights<GROUPS>>;
  using BlockScales = typename Fp8Sm90<GROUPS>::BlockScales;

  static __device__ __forceinline__ typename Stage::Block read(const typename Stream::WarpStage& at,
                                                               const BlockScales& of_blocks, int s) {
    const uint32_t g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    typename Stage::Block block;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int q = 0; q < 2; ++q)
        block.pieces[i].words[q] = *reinterpret_cast<const uint4*>(
            at.codes[i] + s * Fp8Sm90<GROUPS>::CODES + g * K_BLOCK + 64 * q + 16 * t);
      if constexpr (GROUPS == FP8_BLOCKS) block.scales[i].by = of_blocks.by[s][i];
    }
    return block;
  }
};

struct SkinnyTernary {
  using Stream = WeightStream<TernarySm90>;
  using Stage = TernaryStage;
  using BlockScales = NoBlockScales;

  static __device__ __forceinline__ Stage::Block read(const Stream::WarpStage& at, const BlockScales&, int s) {
    Stage::Block block;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 v =
          *reinterpret_cast<const uint2*>(at.codes[i] + s * TernarySm90::CODES + 8 * (threadIdx.x % WARP));
      block.pieces[i].words[0] = v.x, block.pieces[i].words[1] = v.y;
    }
    return block;
  }
};

// M_TILES: tiles of 8 rows of operand B.
template <class Format, int M_TILES> struct GemmSkinny : Format::Stream {
  using Stream = typename Format::Stream;
  using Stage = typename Format::Stage;
  using Weights = typename Stage::Weights;
  using Stream::empty, Stream::full, Stream::k_blocks, Stream::n_tile, Stream::p, Stream::stages_of_row, Stream::n_tiles;
  static constexpr int EPILOGUE_WARPS = SKINNY_EPILOGUE_WARPS, BUFFERS = EPILOGUE_WARPS;
  static constexpr uint32_t ROWS = 8 * M_TILES;
  // Sums of a warp and an N tile, `[row][channel]` in f32, free of bank conflicts.
  static constexpr uint32_t PITCH = 2 * ROW_GROUP + 4, PLANE = ROWS * PITCH, BUFFER = CONSUMER_WARPS * PLANE;
  static constexpr bool BY_GROUPS = !Weights::CHANNEL_SCALES;
  // Sets of sums for each of a warp's K blocks. With few rows both halves of each 32 values of K have one: a product that
  // adds to the sums of another waits for it.
  static constexpr int SETS = M_TILES == 1 ? 2 : 1;
  using Sums = float[M_TILES][4];
  static_assert(!Weights::HAS_OFFSET && (!BY_GROUPS || Weights::GROUPS <= 2));

  const GemmSkinnyParams& g;
  float* const sums;             // [BUFFERS][CONSUMER_WARPS][ROWS][PITCH]
  const uint32_t x, x_pitch;     // in shared memory
  const uint32_t filled, freed;  // barriers of buffers

  // `barriers`: two of each stage and of each buffer.
  __device__ __forceinline__ GemmSkinny(const GemmSkinnyParams& g, char* memory, uint32_t barriers)
      : Stream(g.product, memory + BUFFERS * BUFFER * sizeof(float), barriers), g(g),
        sums(reinterpret_cast<float*>(memory)),
        x(shared_address(memory) + uint32_t(BUFFERS * BUFFER * sizeof(float)) + p.stages * Stream::STAGE_BYTES),
        x_pitch(k_blocks * (2 * K_BLOCK) + Stage::X_PADDING), filled(barriers + 16 * MAX_STAGES),
        freed(filled + 8 * BUFFERS) {}

  // A consumer warp: the K blocks that it has of x, zeros where x has no values.
  __device__ __forceinline__ void load_x(uint32_t warp) const {
    const uint32_t lane = threadIdx.x % WARP, packs = p.k / 8;
    const char* const from = static_cast<const char*>(p.prologue.x);
#pragma unroll 1
    for (uint32_t stage = 0; stage < stages_of_row; ++stage) {
      const uint32_t pack = (stage * STAGE_K_BLOCKS + CHUNK * warp) * (K_BLOCK / 8) + lane;
      if (pack >= k_blocks * (K_BLOCK / 8)) break;
      const bool valid = pack < packs;
      const char* at = from + (valid ? 16 * pack : 0);
      uint32_t to = x + 16 * pack;
#pragma unroll 4
      for (uint32_t row = 0; row < g.rows; ++row) {
        copy_async(to, at, valid);
        to += x_pitch, at += 2 * p.k;
      }
    }
    commit_copies();
    await_copies();
    __syncwarp();
  }

  // Adds the products of K blocks `k_block` and, with N = 2, the one after it.
  template <int N>
  __device__ __forceinline__ void multiply(const typename Stream::WarpStage& at,
                                           const typename Format::BlockScales& of_blocks, uint32_t k_block,
                                           const uint32_t (&rows)[M_TILES], Sums (&y)[CHUNK][SETS]) const {
    typename Stage::Block blocks[N];
#pragma unroll
    for (int s = 0; s < N; ++s) blocks[s] = Format::read(at, of_blocks, s);
    constexpr int GROUPS = BY_GROUPS ? Weights::GROUPS : 1, LENGTH = 4 / GROUPS;  // of a K block; in 32 values
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      Sums of_group[N][SETS] = {};
#pragma unroll
      for (int e = LENGTH * group; e < LENGTH * (group + 1); ++e) {
#pragma unroll
        for (int s = 0; s < N; ++s) {
          const WeightFragment a = Weights::raw(blocks[s], p, e);
#pragma unroll
          for (int n = 0; n < M_TILES; ++n) {
            const uint4 v = Stage::x(rows[n] + (k_block + s) * (2 * K_BLOCK), e, threadIdx.x % 4);
            Sums(&to)[SETS] = BY_GROUPS ? of_group[s] : y[s];
            mma_bf16(to[0][n], a.v[0], a.v[1], a.v[2], a.v[3], v.x, v.y);
            mma_bf16(to[SETS - 1][n], a.v[4], a.v[5], a.v[6], a.v[7], v.z, v.w);
          }
        }
      }
      if constexpr (BY_GROUPS) {
#pragma unroll
        for (int s = 0; s < N; ++s) {
          const GroupScale scale = Weights::group(blocks[s], p, group);
#pragma unroll
          for (int n = 0; n < M_TILES; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              float sum = of_group[s][0][n][i];
              if constexpr (SETS == 2) sum += of_group[s][1][n][i];
              y[0][0][n][i] = fmaf(scale.by[i / 2], sum, y[0][0][n][i]);
            }
          }
        }
      }
    }
  }

  // The products of N tile `i` with the warp's part of K.
  __device__ __forceinline__ void multiply_tile(uint32_t i, uint32_t warp, const uint32_t (&rows)[M_TILES],
                                                StageState& stage, Sums& y) const {
    const uint32_t lane = threadIdx.x % WARP;
    typename Format::BlockScales of_blocks(p, this->weight_row(i, lane / 4), this->weight_row(i, lane / 4 + ROW_GROUP));
    Sums parts[CHUNK][SETS] = {};
#pragma unroll 1
    for (uint32_t k_block = CHUNK * warp; k_block < stages_of_row * STAGE_K_BLOCKS; k_block += STAGE_K_BLOCKS) {
      const auto at = this->of_warp(stage.stage, warp);
      of_blocks.load(k_block, k_blocks);
      barrier_wait(full + 8 * stage.stage, stage.phase);
      if (k_block + CHUNK <= k_blocks) {
        multiply<CHUNK>(at, of_blocks, k_block, rows, parts);
      } else if (k_block < k_blocks) {
        multiply<1>(at, of_blocks, k_block, rows, parts);
      }
      barrier_arrive(empty + 8 * stage.stage);
      stage.next(p.stages);
    }
#pragma unroll
    for (int n = 0; n < M_TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        y[n][i] = 0.f;
#pragma unroll
        for (int s = 0; s < CHUNK; ++s) {
#pragma unroll
          for (int h = 0; h < SETS; ++h) y[n][i] += parts[s][h][n][i];
        }
      }
    }
  }

  // What a channel's sums are multiplied by.
  __device__ __forceinline__ float channel_scale(uint32_t i, uint32_t r) const {
    if constexpr (BY_GROUPS) return 1.f;
    // Past the last row that of the last, which is not used.
    return Weights::UNIT * this->scale_of(min(this->weight_row(i, r), p.rows - 1));
  }

  __device__ __forceinline__ void store_sums(const Sums& y, const float (&by)[2], float* to) const {
    const uint32_t t = threadIdx.x % 4;
    to += threadIdx.x % WARP / 4;
#pragma unroll
    for (int n = 0; n < M_TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float even = by[i] * y[n][2 * i], odd = by[i] * y[n][2 * i + 1];
        if (g.parts == 2) {
          to[(4 * n + t) * PITCH + 8 * i] = even + odd;
        } else {
          to[(8 * n + 2 * t) * PITCH + 8 * i] = even;
          to[(8 * n + 2 * t + 1) * PITCH + 8 * i] = odd;
        }
      }
    }
  }

  __device__ __forceinline__ void consume(uint32_t warp) const {
    const uint32_t lane = threadIdx.x % WARP;
    load_x(warp);
    uint32_t rows[M_TILES];
    // Rows that are not there are read as the last: nobody writes their outputs.
#pragma unroll
    for (int n = 0; n < M_TILES; ++n) rows[n] = x + min(8 * n + lane / 4, g.rows - 1) * x_pitch;
    StageState stage = {};
#pragma unroll 1
    for (uint32_t i = 0; i < n_tiles; ++i) {
      const float by[2] = {channel_scale(i, lane / 4), channel_scale(i, lane / 4 + ROW_GROUP)};
      Sums y;
      multiply_tile(i, warp, rows, stage, y);
      const uint32_t buffer = i % BUFFERS, turn = i / BUFFERS;
      if (turn > 0) barrier_wait(freed + 8 * buffer, turn % 2 ^ 1);
      store_sums(y, by, sums + buffer * BUFFER + warp * PLANE);
      barrier_arrive(filled + 8 * buffer);
    }
  }

  // An epilogue warp: the outputs of every second N tile.
  __device__ __forceinline__ void write(uint32_t first) const {
#pragma unroll 1
    for (uint32_t i = first; i < n_tiles; i += EPILOGUE_WARPS) {
      const uint32_t buffer = i % BUFFERS;
      const TileOutputs outputs = {p,         shared_address(sums + buffer * BUFFER),
                                   PITCH,     CONSUMER_WARPS,
                                   PLANE,     1,
                                   n_tile(i), 1,
                                   0,         p.m,
                                   g.vectors != 0};
      barrier_wait(filled + 8 * buffer, i / BUFFERS % 2);
      outputs.write(threadIdx.x % WARP, WARP);
      barrier_arrive(freed + 8 * buffer);
    }
  }

  __device__ __forceinline__ void run() const {
    const uint32_t warp = threadIdx.x / WARP;
    if (threadIdx.x < BUFFERS) {
      barrier_init(filled + 8 * threadIdx.x, CONSUMER_THREADS);
      barrier_init(freed + 8 * threadIdx.x, WARP);
    }
    this->make_barriers();
    __syncthreads();
    pdl_launch();
    if (warp == CONSUMER_WARPS) {
      if (threadIdx.x % WARP == 0) this->produce();
      return;
    }
    pdl_wait();
    if (warp < CONSUMER_WARPS) return consume(warp);
    write(warp - CONSUMER_WARPS - 1);
  }
};

#endif

template <class Format, int M_TILES> __device__ __forceinline__ void gemm_skinny(const GemmSkinnyParams& g) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Gemm = GemmSkinny<Format, M_TILES>;
  extern __shared__ float4 dynamic_shared[];
  __shared__ uint64_t barriers[2 * (MAX_STAGES + Gemm::BUFFERS)];
  Gemm(g, reinterpret_cast<char*>(dynamic_shared), shared_address(barriers)).run();
#endif
}

}  // namespace fused

#define FUSED_GEMM_SKINNY_ROWS(NAME, FORMAT, M_TILES, ROWS)                                            \
  extern "C" __global__ void __launch_bounds__(fused::SKINNY_THREADS, 1)                               \
      NAME##_##ROWS(const __grid_constant__ fused::GemmSkinnyParams p) {                               \
    fused::gemm_skinny<fused::FORMAT, M_TILES>(p);                                                     \
  }

// `NAME_8`, `NAME_16`: kernels for so many rows of operand B and weights of this format.
#define FUSED_GEMM_SKINNY(NAME, FORMAT)        \
  FUSED_GEMM_SKINNY_ROWS(NAME, FORMAT, 1, 8)   \
  FUSED_GEMM_SKINNY_ROWS(NAME, FORMAT, 2, 16)
