// y = act(x W^T + bias) + residuals for quantized W and few rows of bf16 x, by `mma.sync`, from Ampere on.
//
// A CTA has eight or sixteen warps. Each has an N tile of 16 output channels, which it shares with the other warps of its N tile
// that split K, as the CTAs of a cluster do. It streams its weights through a `cp.async` pipeline of its own
// (gemm_wna16_stages.cuh), which is filled in front of the PDL wait, and makes operands A of them in registers
// (gemm_wna16_weights.cuh). Up to TOKENS rows of x are operands B. They pass through shared memory in slabs of K, two at a
// time, at whose borders the warps wait for one another.
//
// Groups of weights are scaled as sums, in f32. What a GGUF format adds to all weights of a block, or of a half of it, is
// multiplied with the sum of its values of x, which is a product of x with ones.
//
// x of more than 8 significant bits comes as two rows for each token, the second what rounding to bf16 leaves over;
// their sums are added up.
#pragma once

#include "linear/gemm_wna16_outputs.cuh"
#include "linear/gemm_wna16_stages.cuh"

namespace fused {

template <class Stage, int TOKENS> struct GemmMma {
  using Weights = typename Stage::Weights;
  static constexpr int THREADS = GEMM_WNA16_MMA_MAX_WARPS * WARP, M_TILES = TOKENS / 8;
  static constexpr int STAGES = Stage::BYTES > 1536 ? 3 : Stage::BYTES > 768 ? 4 : 8;
  static constexpr bool BY_GROUPS = !Weights::CHANNEL_SCALES;
  static constexpr bool HAS_OFFSET = Weights::HAS_OFFSET;
  static constexpr int SETS = BY_GROUPS ? 1 : 2;  // of sums
  static constexpr uint32_t CHUNKS_LOG2 = 4;     // of the 16-byte chunks of a row of x in a K block
  static_assert(2 * K_BLOCK == 16 << CHUNKS_LOG2);
  static constexpr uint32_t ONES = 0x3f803f80u;  // two bf16

  const GemmWna16MmaParams& g;
  const Gemv& p;
  const uint32_t rank, tile, first_row;      // in the cluster; of N tiles; of operand B
  const uint32_t slab_k_blocks;              // K blocks of x that are in shared memory together, twice
  const uint32_t begin, end, slabs;          // the CTA's K blocks
  const uint32_t n_warps, n_tile, k_warp;    // N tiles of the CTA; the warp's N tile, and its part of K
  const uint32_t pitch, slab_bytes;          // of x in shared memory
  const uint32_t chunks_log2;                // of the 16-byte chunks of a row of a slab
  const uint32_t pipeline, x;                // in shared memory

  static __device__ uint32_t lane() { return threadIdx.x % WARP; }
  static __device__ uint32_t warp() { return threadIdx.x / WARP; }
  static __device__ uint32_t warps() { return blockDim.x / WARP; }

  __device__ __forceinline__ GemmMma(const GemmWna16MmaParams& g, uint32_t shared)
      : g(g), p(g.product), rank(blockIdx.x % g.cluster_size), tile(blockIdx.x / g.cluster_size / g.m_tiles),
        first_row(blockIdx.x / g.cluster_size % g.m_tiles * TOKENS),
        slab_k_blocks(1u << g.slab_log2), begin(k_blocks_of(p.k) * rank / g.cluster_size),
        end(k_blocks_of(p.k) * (rank + 1) / g.cluster_size), slabs((end - begin + slab_k_blocks - 1) >> g.slab_log2),
        n_warps(warps() / p.split_k), n_tile(tile * n_warps + warp() % n_warps), k_warp(warp() / n_warps),
        pitch(slab_k_blocks * (2 * K_BLOCK) + Stage::X_PADDING), slab_bytes(TOKENS * pitch),
        chunks_log2(g.slab_log2 + CHUNKS_LOG2), pipeline(shared + warp() * (STAGES * Stage::BYTES)),
        x(shared + warps() * (STAGES * Stage::BYTES)) {}

  // K blocks that a warp has of each slab, side by side.
  __device__ __forceinline__ uint32_t of_slab() const { return slab_k_blocks / p.split_k; }

  // What the warp prefetches next: a K block, and its place among those of the slab.
  struct PrefetchCursor {
    uint32_t k_block, place;
  };
  __device__ __forceinline__ void prefetch(PrefetchCursor& next, const Weights& weights, uint32_t stage) const {
    if (next.k_block < end) Stage::copy(weights, p, next.k_block, pipeline + stage * Stage::BYTES);
    commit_copies();
    ++next.k_block;
    if (++next.place == of_slab()) next.place = 0, next.k_block += slab_k_blocks - of_slab();
  }

  // All threads: a slab of x on its way, with zeros for values that are not there. Rows that are not there are what
  // they are: nobody writes their outputs.
  __device__ __forceinline__ void copy_slab(uint32_t slab) const {
    const uint32_t first = (begin + slab * slab_k_blocks) * K_BLOCK, past = min(p.k, end * K_BLOCK);
    const uint32_t to = x + slab % 2 * slab_bytes, rows = min(uint32_t(TOKENS), g.rows - first_row);
    const char* from = static_cast<const char*>(p.prologue.x) + 2 * (uint64_t(first_row) * p.k + first);
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < rows << chunks_log2; i += blockDim.x) {
      const uint32_t row = i >> chunks_log2, chunk = i & ((1u << chunks_log2) - 1);
      const bool valid = first + 8 * chunk < past;
      copy_async(to + row * pitch + 16 * chunk, valid ? from + 2 * uint64_t(row) * p.k + 16 * chunk : from, valid);
    }
  }

  // The thread's copies of a slab, which it committed with the first of the K blocks of the slab before.
  __device__ __forceinline__ void await_slab() const {
    switch (of_slab()) {
      case 1: return await_copies_but<0>();
      case 2: return await_copies_but<1>();
      case 4: return await_copies_but<3>();
      default: return await_copies_but<7>();
    }
  }

  __device__ __forceinline__ uint4 x_at(uint32_t slab, uint32_t place, int n, int e) const {
    const uint32_t row = x + slab % 2 * slab_bytes + (8 * n + lane() / 4) * pitch;
    return Stage::x(row + place * (2 * K_BLOCK), e, lane() % 4);
  }

  // Adds scale * c + offset * (sum of x).
  __device__ __forceinline__ void add_group(float (&sums)[M_TILES][4], const float (&c)[M_TILES][4],
                                            const float (&x_sums)[M_TILES][4], const typename Stage::Block& block,
                                            int group) const {
    const GroupScale scale = Weights::group(block, p, group);
#pragma unroll
    for (int n = 0; n < M_TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[n][i] = fmaf(scale.by[i / 2], c[n][i], sums[n][i]);
        if constexpr (HAS_OFFSET) sums[n][i] = fmaf(scale.plus[i / 2], x_sums[n][i], sums[n][i]);
      }
    }
  }

  // The K block of a stage with its place in a slab of x.
  __device__ __forceinline__ void multiply(const Weights& weights, float (&sums)[SETS][M_TILES][4], uint32_t stage,
                                           uint32_t slab, uint32_t k_block, uint32_t place) const {
    const auto block = Stage::read(weights, p, k_block, pipeline + stage * Stage::BYTES);
    // Of each 32 values of K: one group of them, two of 16, or a part of one.
    constexpr int HALVES = Weights::GROUPS == 8 ? 2 : 1;
    float c[HALVES][M_TILES][4] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const WeightFragment a = Weights::raw(block, p, e);
      uint4 v[M_TILES];
#pragma unroll
      for (int n = 0; n < M_TILES; ++n) v[n] = x_at(slab, place, n, e);
      if constexpr (!BY_GROUPS) {
        // Products in turns, as one that goes on from the sums of another waits for it.
#pragma unroll
        for (int n = 0; n < M_TILES; ++n) {
          mma_bf16(sums[0][n], a.v[0], a.v[1], a.v[2], a.v[3], v[n].x, v[n].y);
          mma_bf16(sums[SETS - 1][n], a.v[4], a.v[5], a.v[6], a.v[7], v[n].z, v[n].w);
        }
      } else {
        float x_sums[HALVES][M_TILES][4] = {};
#pragma unroll
        for (int n = 0; n < M_TILES; ++n) {
          mma_bf16(c[0][n], a.v[0], a.v[1], a.v[2], a.v[3], v[n].x, v[n].y);
          mma_bf16(c[HALVES - 1][n], a.v[4], a.v[5], a.v[6], a.v[7], v[n].z, v[n].w);
          if constexpr (HAS_OFFSET) {
            mma_bf16(x_sums[0][n], ONES, ONES, ONES, ONES, v[n].x, v[n].y);
            mma_bf16(x_sums[HALVES - 1][n], ONES, ONES, ONES, ONES, v[n].z, v[n].w);
          }
        }
        constexpr int LENGTH = Weights::GROUPS < 4 ? 4 / Weights::GROUPS : 1;  // of a group, in 32 values
        if ((e + 1) % LENGTH > 0) continue;
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
          add_group(sums[0], c[h], x_sums[h], block, Weights::GROUPS < 4 ? e / LENGTH : HALVES * e + h);
#pragma unroll
          for (int n = 0; n < M_TILES; ++n) c[h][n][0] = c[h][n][1] = c[h][n][2] = c[h][n][3] = 0.f;
        }
      }
    }
  }

  // All threads: a slab that is on its way has come, and the one after it is on its way, with the group of copies that
  // is committed next.
  __device__ __forceinline__ void enter(uint32_t slab) const {
    if (slab > 0) await_slab();
    __syncthreads();
    if (slab + 1 < slabs) copy_slab(slab + 1);
  }

  // A warp's sums, `[token][channel]`, scaled.
  __device__ __forceinline__ void store_sums(const Weights& weights, float (&sums)[SETS][M_TILES][4], float* to) const {
    float by[2] = {1.f, 1.f};
    if constexpr (Weights::CHANNEL_SCALES) by[0] = weights.channel_scale(0), by[1] = weights.channel_scale(1);
    const uint32_t row = sums_pitch();
    to += k_warp * TOKENS * row + 16 * (warp() % n_warps) + lane() / 4;
#pragma unroll
    for (int n = 0; n < M_TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float even = sums[0][n][2 * i], odd = sums[0][n][2 * i + 1];
        if constexpr (SETS == 2) even += sums[1][n][2 * i], odd += sums[1][n][2 * i + 1];
        even *= by[i], odd *= by[i];
        if (g.parts == 2) {
          to[(4 * n + lane() % 4) * row + 8 * i] = even + odd;
        } else {
          to[(8 * n + lane() % 4 * 2) * row + 8 * i] = even;
          to[(8 * n + lane() % 4 * 2 + 1) * row + 8 * i] = odd;
        }
      }
    }
  }
  __device__ __forceinline__ uint32_t sums_pitch() const { return 16 * n_warps + 4; }

  __device__ __forceinline__ void run(float* memory, uint32_t shared) const {
    pdl_launch();
    const Weights weights(p, n_tile);
    PrefetchCursor next = {begin + k_warp * of_slab(), 0};
#pragma unroll
    for (int i = 0; i < STAGES; ++i) prefetch(next, weights, i);
    pdl_wait();
    copy_slab(0);
    await_copies();
    float sums[SETS][M_TILES][4] = {};
    uint32_t stage = 0;
#pragma unroll 1
    for (uint32_t slab = 0; slab < slabs; ++slab) {
      enter(slab);
      const uint32_t first = k_warp * of_slab(), k_block = begin + slab * slab_k_blocks + first;
#pragma unroll 1
      for (uint32_t j = 0; j < of_slab(); ++j) {
        await_copies_but<STAGES - 1>();
        __syncwarp();  // scales are copied by other lanes
        if (k_block + j < end) multiply(weights, sums, stage, slab, k_block + j, first + j);
        __syncwarp();
        prefetch(next, weights, stage);
        if (++stage == STAGES) stage = 0;
      }
    }
    // Nobody reads stages and x any more: sums take their place.
    await_copies();
    __syncthreads();
    store_sums(weights, sums, memory);
    write_outputs(shared);
  }

  __device__ __forceinline__ void write_outputs(uint32_t shared) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cluster_sync_memory();
#else
    __syncthreads();
#endif
    const uint32_t first_token = first_row / g.parts;
    const TileOutputs outputs = {p,
                                 shared,
                                 sums_pitch(),
                                 p.split_k,
                                 TOKENS * sums_pitch(),
                                 g.cluster_size,
                                 tile * n_warps,
                                 n_warps,
                                 first_token,
                                 min(TOKENS / g.parts, p.m - first_token),
                                 g.vectors != 0};
    outputs.write(rank * blockDim.x + threadIdx.x, g.cluster_size * blockDim.x);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // No CTA's shared memory goes while others read it.
    if (g.cluster_size > 1) cluster_sync();
#endif
  }
};

template <class Stage, int TOKENS> __device__ __forceinline__ void gemm_mma(const GemmWna16MmaParams& g) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  extern __shared__ float4 dynamic_shared[];
  const uint32_t shared = shared_address(dynamic_shared);
  GemmMma<Stage, TOKENS>(g, shared).run(reinterpret_cast<float*>(dynamic_shared), shared);
#endif
}

}  // namespace fused

#define FUSED_GEMM_WNA16_MMA_TOKENS(NAME, STAGE, TOKENS)                                    \
  extern "C" __global__ void __launch_bounds__(fused::GemmMma<STAGE, TOKENS>::THREADS, 1)   \
      NAME##_##TOKENS(const __grid_constant__ fused::GemmWna16MmaParams p) {                \
    fused::gemm_mma<STAGE, TOKENS>(p);                                                      \
  }

// `NAME_T`: a kernel for T rows of operand B, for each of 8, 16 and 32; its stages as the host knows them.
#define FUSED_GEMM_WNA16_MMA(NAME, STAGE, STAGES_, BYTES_)                                          \
  static_assert(fused::GemmMma<STAGE, 8>::STAGES == STAGES_ && STAGE::BYTES == BYTES_, "the host's"); \
  FUSED_GEMM_WNA16_MMA_TOKENS(NAME, STAGE, 8)                                                       \
  FUSED_GEMM_WNA16_MMA_TOKENS(NAME, STAGE, 16)                                                      \
  FUSED_GEMM_WNA16_MMA_TOKENS(NAME, STAGE, 32)
