// GEMM for up to 32 rows of bf16 x and packed weights or GGUF blocks on Hopper: y = act(x W^T + bias) + residuals, with
// all of x in shared memory and the weights in a TMA pipeline (weight_stream_sm90.cuh).
//
// A block has N tiles of 16 output channels, one after the other. Its warps are specialized: one brings weights, eight
// multiply, two write outputs. Of each stage of 16 K blocks consumer warp w multiplies K blocks 2w and 2w + 1, for all N
// tiles, so it copies only that part of x to shared memory, and never waits for another consumer. It leaves its sums of
// an N tile in one of two buffers, where an epilogue warp adds those of all eight, always in the same order, while the
// consumers go on with the next N tile.
//
// Where x has no room beside a pipeline, blocks of a cluster share K. Then each has some of the tokens of an N tile to
// write: an epilogue warp adds up the sums of its own block first and sends each token's to the block that writes it
// (DSMEM).
//
// x of more than 8 significant bits comes as two rows of operand B for each token, the second what rounding to bf16
// leaves over; their sums are added up.
#pragma once

#include "linear/gemm_wna16_outputs.cuh"
#include "linear/streamed_weights_sm90.cuh"

namespace fused {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// M_TILES: tiles of 8 rows of operand B.
template <class Format, int M_TILES> struct GemmSkinny : WeightStream<Format> {
  using Stream = WeightStream<Format>;
  using Stage = typename Format::Stage;
  using Weights = typename Stage::Weights;
  using Products = StreamedProducts<Format, M_TILES>;
  using Sums = typename Products::Sums;
  using Stream::full, Stream::k_blocks, Stream::n_tile, Stream::p, Stream::share, Stream::stages_of_row, Stream::n_tiles;
  static constexpr int EPILOGUE_WARPS = SKINNY_EPILOGUE_WARPS, BUFFERS = EPILOGUE_WARPS;
  static constexpr uint32_t ROWS = 8 * M_TILES;
  // Sums of a warp and an N tile, `[row][channel]` in f32, free of bank conflicts.
  static constexpr uint32_t PITCH = 2 * ROW_GROUP + 4, PLANE = ROWS * PITCH, BUFFER = CONSUMER_WARPS * PLANE;
  // Sums that a block of a cluster receives for an N tile: `[block of the cluster][row that it writes][channel]`. An
  // epilogue warp has two such slots and takes turns. A block sends the next N tile's sums behind those that it has
  // received for this one, and so when their sender has read the slot of the N tile before: no block overwrites what is
  // still to be read.
  static constexpr uint32_t SLOTS = 2, RECEIVED = EPILOGUE_WARPS * SLOTS * PLANE;
  // Sums of x for each 32 values, of those kernels that want them.
  static constexpr int X_SUMS = Products::X_SUMS;

  const GemmSkinnyParams& g;
  float* const sums;             // [BUFFERS][CONSUMER_WARPS][ROWS][PITCH]
  const uint32_t received;       // [EPILOGUE_WARPS][SLOTS][cluster_size][ROWS / cluster_size][PITCH]
  const uint32_t x, x_pitch;     // in shared memory
  const uint32_t x_sums, x_sums_pitch;
  const uint32_t filled, freed;  // barriers of buffers
  const uint32_t arrived;        // barriers of slots

  // `barriers`: two of each stage and of each buffer, and one of each slot.
  __device__ __forceinline__ GemmSkinny(const GemmSkinnyParams& g, char* memory, uint32_t barriers)
      : Stream(g.product, StreamShare(k_blocks_of(g.product.k), g.cluster_size), memory + before_pipeline(g), barriers),
        g(g), sums(reinterpret_cast<float*>(memory)),
        received(shared_address(memory) + uint32_t(BUFFERS * BUFFER * sizeof(float))),
        x(shared_address(memory) + before_pipeline(g) + p.stages * Stream::STAGE_BYTES),
        x_pitch(k_blocks * (2 * K_BLOCK) + Stage::X_PADDING), x_sums(x + g.rows * x_pitch),
        x_sums_pitch(k_blocks * (K_BLOCK / 32 * X_SUMS * sizeof(uint2)) + SKINNY_SUMS_PADDING),
        filled(barriers + 16 * MAX_STAGES), freed(filled + 8 * BUFFERS), arrived(freed + 8 * BUFFERS) {}

  static __device__ __forceinline__ uint32_t before_pipeline(const GemmSkinnyParams& g) {
    return (BUFFERS * BUFFER + (g.cluster_size > 1 ? RECEIVED : 0)) * sizeof(float);
  }

  // A consumer warp: the K blocks that it has of x, zeros where x has no values.
  __device__ __forceinline__ void load_x(uint32_t warp) const {
    const uint32_t lane = threadIdx.x % WARP, first = share.first_k_block * (K_BLOCK / 8), packs = p.k / 8;
    const char* const from = static_cast<const char*>(p.prologue.x);
#pragma unroll 1
    for (uint32_t stage = 0; stage < stages_of_row; ++stage) {
      const uint32_t pack = (stage * STAGE_K_BLOCKS + CHUNK * warp) * (K_BLOCK / 8) + lane;
      if (pack >= k_blocks * (K_BLOCK / 8)) break;
      const bool valid = first + pack < packs;
      const char* at = from + (valid ? 16 * (first + pack) : 0);
      uint32_t to = x + 16 * pack;
#pragma unroll 4
      for (uint32_t row = 0; row < g.rows; ++row) {
        copy_async(to, at, valid);
        to += x_pitch, at += 2 * p.k;
      }
    }
    commit_copies();
    await_copies();
    if constexpr (X_SUMS > 0) sum_x(warp);
    __syncwarp();
  }

  // Each lane the values that it has copied.
  __device__ __forceinline__ void sum_x(uint32_t warp) const {
    constexpr uint32_t LANES = 4 / X_SUMS;
    const uint32_t lane = threadIdx.x % WARP;
#pragma unroll 1
    for (uint32_t stage = 0; stage < stages_of_row; ++stage) {
      const uint32_t pack = (stage * STAGE_K_BLOCKS + CHUNK * warp) * (K_BLOCK / 8) + lane;
      const bool in_row = pack < k_blocks * (K_BLOCK / 8);
#pragma unroll 2
      for (uint32_t row = 0; row < g.rows; ++row) {
        const float sum = sum_of_packs<LANES>(in_row ? load_shared(x + row * x_pitch + 16 * pack) : uint4{});
        const uint2 parts = both_parts(sum);
        if (in_row && lane % LANES == 0)
          store_shared(x_sums + row * x_sums_pitch + pack / LANES * sizeof(uint2), parts.x, parts.y);
      }
    }
  }

  // What a channel's sums are multiplied by.
  __device__ __forceinline__ float channel_scale(uint32_t i, uint32_t r) const {
    if constexpr (Products::BY_GROUPS) {
      return 1.f;
    } else {
      // Past the last row that of the last, which is not used.
      return Weights::UNIT * this->scale_of(min(this->weight_row(i, r), p.rows - 1));
    }
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
    uint32_t rows[M_TILES], sums_of_rows[M_TILES];
    // Rows that are not there are read as the last: nobody writes their outputs.
#pragma unroll
    for (int n = 0; n < M_TILES; ++n) {
      const uint32_t row = min(8 * n + lane / 4, g.rows - 1);
      rows[n] = x + row * x_pitch, sums_of_rows[n] = x_sums + row * x_sums_pitch;
    }
    StageState stage = {};
#pragma unroll 1
    for (uint32_t i = 0; i < n_tiles; ++i) {
      const float by[2] = {channel_scale(i, lane / 4), channel_scale(i, lane / 4 + ROW_GROUP)};
      Sums y;
      Products::multiply(*this, i, warp, rows, sums_of_rows, stage, y);
      const uint32_t buffer = i % BUFFERS, turn = i / BUFFERS;
      if (turn > 0) barrier_wait(freed + 8 * buffer, turn % 2 ^ 1);
      store_sums(y, by, sums + buffer * BUFFER + warp * PLANE);
      barrier_arrive(filled + 8 * buffer);
    }
  }

  // The first token whose outputs a block of the cluster writes.
  __device__ __forceinline__ uint32_t first_token(uint32_t rank) const { return rank * p.m / g.cluster_size; }
  // Where values of a token go among what the block receives that writes it.
  __device__ __forceinline__ uint32_t place_of(uint32_t token, uint32_t sender) const {
    return 4 * (sender * (PLANE / g.cluster_size) + token * PITCH);
  }

  // Adds up the sums of this block's warps, and sends each token's to the block of the cluster that writes it.
  __device__ __forceinline__ void send_sums(uint32_t from, uint32_t slot, uint32_t slot_arrived, uint32_t rank) const {
    for (uint32_t i = threadIdx.x % WARP; i < 4 * p.m; i += WARP) {
      const uint32_t token = i / 4, channel = i % 4 * 4;
      float4 y = {};
#pragma unroll
      for (int w = 0; w < CONSUMER_WARPS; ++w) {
        const float4 v = load_shared_float4(from + 4 * (w * PLANE + token * PITCH + channel));
        y.x += v.x, y.y += v.y, y.z += v.z, y.w += v.w;
      }
      uint32_t to = 0;
      for (uint32_t r = 1; r < g.cluster_size; ++r) to += token >= first_token(r);
      const uint32_t at = slot + place_of(token - first_token(to), rank) + 4 * channel;
      send(in_block(at, to), y, in_block(slot_arrived, to));
    }
  }

  // The outputs of an N tile, of the tokens that this block writes.
  __device__ __forceinline__ void write_tokens(uint32_t i, uint32_t sums, uint32_t planes, uint32_t plane, uint32_t first,
                                               uint32_t count) const {
    const TileOutputs outputs = {p, sums, PITCH, planes, plane, 1, n_tile(i), 1, first, count, g.vectors != 0};
    outputs.write(threadIdx.x % WARP, WARP);
  }

  // An epilogue warp: the outputs of every second N tile.
  __device__ __forceinline__ void write(uint32_t warp) const {
    const uint32_t rank = blockIdx.x % g.cluster_size, first = first_token(rank), count = first_token(rank + 1) - first;
    if (g.cluster_size > 1) cluster_wait();
#pragma unroll 1
    for (uint32_t i = warp; i < n_tiles; i += EPILOGUE_WARPS) {
      const uint32_t turn = i / BUFFERS, from = shared_address(sums + warp * BUFFER);
      barrier_wait(filled + 8 * warp, turn % 2);
      if (g.cluster_size == 1) {
        write_tokens(i, from, CONSUMER_WARPS, PLANE, 0, p.m);
        barrier_arrive(freed + 8 * warp);
        continue;
      }
      const uint32_t number = warp * SLOTS + turn % SLOTS, slot = received + number * uint32_t(PLANE * sizeof(float));
      send_sums(from, slot, arrived + 8 * number, rank);
      barrier_arrive(freed + 8 * warp);
      if (threadIdx.x % WARP == 0)
        barrier_expect(arrived + 8 * number, g.cluster_size * count * (2 * ROW_GROUP * sizeof(float)));
      barrier_wait(arrived + 8 * number, turn / SLOTS % 2);
      write_tokens(i, slot, g.cluster_size, PLANE / g.cluster_size, first, count);
      __syncwarp();
    }
  }

  __device__ __forceinline__ void run() const {
    const uint32_t warp = threadIdx.x / WARP;
    if (threadIdx.x < BUFFERS) {
      barrier_init(filled + 8 * threadIdx.x, CONSUMER_THREADS);
      barrier_init(freed + 8 * threadIdx.x, WARP);
    }
    if (threadIdx.x < EPILOGUE_WARPS * SLOTS) barrier_init(arrived + 8 * threadIdx.x, 1);
    this->make_barriers();
    if (g.cluster_size > 1) cluster_arrive();
    __syncthreads();
    pdl_launch();
    if (warp == CONSUMER_WARPS) return this->produce();
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
  __shared__ uint64_t barriers[2 * (MAX_STAGES + Gemm::BUFFERS) + Gemm::EPILOGUE_WARPS * Gemm::SLOTS];
  Gemm(g, reinterpret_cast<char*>(dynamic_shared), shared_address(barriers)).run();
#endif
}

}  // namespace fused

#define FUSED_GEMM_SKINNY_ROWS(NAME, M_TILES, ROWS, ...)                                               \
  extern "C" __global__ void __launch_bounds__(fused::SKINNY_THREADS, 1)                               \
      NAME##_##ROWS(const __grid_constant__ fused::GemmSkinnyParams p) {                               \
    fused::gemm_skinny<__VA_ARGS__, M_TILES>(p);                                                       \
  }

// `NAME_8`, `NAME_16`, `NAME_32`: kernels for so many rows of operand B and weights of this format.
#define FUSED_GEMM_SKINNY(NAME, ...)                \
  FUSED_GEMM_SKINNY_ROWS(NAME, 1, 8, __VA_ARGS__)   \
  FUSED_GEMM_SKINNY_ROWS(NAME, 2, 16, __VA_ARGS__)  \
  FUSED_GEMM_SKINNY_ROWS(NAME, 4, 32, __VA_ARGS__)
