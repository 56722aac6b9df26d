// y = act(x W^T + bias) + residuals for quantized W and bf16 x on Hopper, for any number of tokens.
//
// The transposed problem, as in Machete (Neural Magic, 2024): a warpgroup's `wgmma.m64nTk16` has 64 output channels
// of W as operand A, dequantized in registers (gemm_wna16_weights.cuh), and T tokens of x as operand B, which TMA
// brings to shared memory in stages of 128 values of K. A block has two such warpgroups, side by side in N, and a
// producer warpgroup. The blocks of a cluster split K: each leaves its sums in its shared memory, and each adds up and
// writes a part of the outputs through distributed shared memory, always in the order of K.
//
// Weights go from memory to registers without shared memory, DEPTH blocks of K ahead. Those loads begin in front of
// the wait for the preceding kernel.
//
// For few tokens, where issuing instructions bounds a product, weights are not scaled: a group of them gives sums of
// its own, which are scaled in f32. What a GGUF format adds to all weights of a block meets the sum of its 32 values
// of x, which the preceding kernel has computed.
//
// x of more than 8 significant bits comes as two rows of operand B for each token, the second what rounding to bf16
// leaves over; their sums are added up.
#pragma once

#include "common/cluster.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "linear/gemm_wna16_outputs.cuh"
#include "linear/gemm_wna16_weights.cuh"

namespace fused {

template <int TOKENS> struct GemmShape {
  static constexpr int WARPS = 8, CONSUMERS = WARPS * WARP;
  // Whether a warpgroup of its own brings x; where there are few tokens a consumer does that beside its products, and
  // two blocks of a multiprocessor have more registers.
  static constexpr bool PRODUCER = TOKENS > GEMM_WNA16_SMALL_TOKENS;
  static constexpr int THREADS = CONSUMERS + (PRODUCER ? 128 : 0);
  static constexpr int CHANNELS = GEMM_WNA16_CHANNELS;
  static_assert(CHANNELS == 16 * WARPS);
  static constexpr int STAGES = TOKENS >= 256 ? 3 : TOKENS >= 64 ? 4 : 6;
  // Whether groups are scaled as sums, which there are fewer of than weights.
  static constexpr bool SCALES_SUMS = TOKENS <= GEMM_WNA16_SUMS_TOKENS;
  static constexpr int BLOCKS = PRODUCER ? 1 : 2;     // of an SM
  static constexpr uint32_t HALF = TOKENS * 128;      // 64 values of K
  static constexpr uint32_t STAGE = 2 * HALF;
  static constexpr uint32_t PITCH = CHANNELS + 4;     // f32 of a token's sums
  static constexpr uint32_t X_SUMS = SCALES_SUMS ? TOKENS * 16 : 0;  // of each 32 values of K, of a stage
};

__device__ __forceinline__ float2 load_pair(uint32_t at) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at));
  return v;
}
// Behind it the blocks of the cluster see one another's writes to shared memory.
__device__ __forceinline__ void cluster_sync_memory() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

template <class Weights, int TOKENS> struct GemmWna16 {
  using Shape = GemmShape<TOKENS>;
  static constexpr int STAGES = Shape::STAGES;
  // Blocks of K whose weights are on their way to registers.
  static constexpr int DEPTH = 2;
  static constexpr bool BY_GROUPS = Shape::SCALES_SUMS && !Weights::CHANNEL_SCALES;

  const GemmWna16Params& g;
  const Gemv& p;
  const uint32_t rank, tile, first_row;  // in the cluster; of channels; of operand B
  const uint32_t begin, end;             // blocks of K
  const uint32_t stages, barriers;

  static __device__ uint32_t warp() { return threadIdx.x / WARP; }
  static __device__ uint32_t lane() { return threadIdx.x % WARP; }

  __device__ __forceinline__ GemmWna16(const GemmWna16Params& g, uint32_t stages, uint32_t barriers)
      : g(g), p(g.product), rank(blockIdx.x % g.split_k), tile(blockIdx.x / g.split_k / g.m_tiles),
        first_row(blockIdx.x / g.split_k % g.m_tiles * TOKENS),
        begin(uint64_t(k_blocks_of(p.k)) * rank / g.split_k), end(uint64_t(k_blocks_of(p.k)) * (rank + 1) / g.split_k),
        stages(stages), barriers(barriers) {}

  __device__ __forceinline__ uint32_t full(int stage) const { return barriers + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return barriers + 8 * (STAGES + stage); }

  __device__ __forceinline__ uint32_t x_sums(int stage) const {
    return stages + STAGES * Shape::STAGE + stage * Shape::X_SUMS;
  }

  // One thread: x of a block of K on its way to a stage.
  __device__ __forceinline__ void copy(int stage, uint32_t k_block) const {
    const uint32_t to = stages + stage * Shape::STAGE;
    const bool with_sums = Shape::SCALES_SUMS && Weights::HAS_OFFSET;
    barrier_expect(full(stage), Shape::STAGE + (with_sums ? Shape::X_SUMS : 0));
    if (with_sums) bulk_copy_rows(x_sums(stage), g.x_sums, full(stage), first_row, 4 * k_block);
    bulk_copy_rows(to, g.x, full(stage), 128 * k_block, first_row);
    bulk_copy_rows(to + Shape::HALF, g.x, full(stage), 128 * k_block + 64, first_row);
  }
  // One thread of the producer.
  __device__ __forceinline__ void produce() const {
    PipelineState<STAGES> pipeline;
    for (uint32_t k_block = begin; k_block < end; ++k_block) {
      if (k_block >= begin + STAGES) barrier_wait(empty(pipeline.stage), pipeline.phase ^ 1);
      copy(pipeline.stage, k_block);
      pipeline.next();
    }
  }

  __device__ __forceinline__ void multiply(float (&sums)[TOKENS / 2], const typename Weights::Block& block, int stage,
                                           int done, int& add) const {
    const auto scales = Weights::scales(block, p);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      WeightFragment a = Weights::fragment(block, scales, p, e);
      // In front of the fence, which orders registers that are ready.
#pragma unroll
      for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(a.v[i]));
      const uint32_t x = stages + stage * Shape::STAGE + e / 2 * Shape::HALF + e % 2 * 64;
      wgmma_fence();
      wgmma_k_major(sums, a.v, descriptor<128>(x, 16), add);
      wgmma_k_major(sums, a.v + 4, descriptor<128>(x + 32, 16), 1);
      add = 1;
      wgmma_commit();
      // The products before these are complete: their registers are free, and so is their stage.
      wgmma_wait<1>();
      if (e == 0 && done >= 0 && lane() == 0) barrier_arrive(empty(done));
    }
  }

  // Groups as they are, to be scaled in f32.
  __device__ __forceinline__ void multiply_groups(float (&sums)[TOKENS / 2], const typename Weights::Block& block,
                                                  int stage) const {
    constexpr int GROUPS = Weights::GROUPS;
    float c[2][TOKENS / 2];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      WeightFragment a = Weights::raw(block, p, e);
#pragma unroll
      for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(a.v[i]));
      const uint32_t x = stages + stage * Shape::STAGE + e / 2 * Shape::HALF + e % 2 * 64;
      if constexpr (GROUPS == 8) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          wgmma_fence();
          wgmma_k_major(c[h], a.v + 4 * h, descriptor<128>(x + 32 * h, 16), 0);
          wgmma_commit();
          if (2 * e + h > 0) wgmma_wait<1>(), settle(c[1 - h]), add_group(sums, c[1 - h], block, stage, 2 * e + h - 1);
        }
      } else {
        const int set = GROUPS == 4 ? e % 2 : 0;
        wgmma_fence();
        wgmma_k_major(c[set], a.v, descriptor<128>(x, 16), GROUPS == 1 && e > 0);
        wgmma_k_major(c[set], a.v + 4, descriptor<128>(x + 32, 16), 1);
        wgmma_commit();
        if (e > 0) wgmma_wait<1>();
        if (GROUPS == 4 && e > 0) settle(c[1 - set]), add_group(sums, c[1 - set], block, stage, e - 1);
      }
    }
    wgmma_wait<0>();
    settle(c[GROUPS == 1 ? 0 : 1]);
    add_group(sums, c[GROUPS == 1 ? 0 : 1], block, stage, GROUPS - 1);
  }

  __device__ __forceinline__ void add_group(float (&sums)[TOKENS / 2], const float (&c)[TOKENS / 2],
                                            const typename Weights::Block& block, int stage, int group) const {
    const auto scale = Weights::group(block, p, group);
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j) {
      float2 x = {0.f, 0.f};
      if constexpr (Weights::HAS_OFFSET) {
        const uint32_t at = x_sums(stage) + 4 * (8 * j + 2 * (lane() % 4));
        if constexpr (Weights::GROUPS == 1) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float2 part = load_pair(at + e * TOKENS * 4);
            x.x += part.x, x.y += part.y;
          }
        } else {
          x = load_pair(at + group * 4 / Weights::GROUPS * TOKENS * 4);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& sum = sums[4 * j + i];
        sum = fmaf(scale.by[i / 2], c[4 * j + i], sum);
        if constexpr (Weights::HAS_OFFSET) sum = fmaf(scale.plus[i / 2], i % 2 == 0 ? x.x : x.y, sum);
      }
    }
  }

  // Products of a block of K, whose x has come.
  __device__ __forceinline__ void step(float (&sums)[TOKENS / 2], const typename Weights::Block& block, int stage, int done,
                                       int& add) const {
    if constexpr (BY_GROUPS) {
      multiply_groups(sums, block, stage);
      if (done >= 0 && lane() == 0) barrier_arrive(empty(done));
    } else {
      multiply(sums, block, stage, done, add);
    }
  }

  __device__ __forceinline__ void consume(float* shared_sums) const {
    const Weights weights(p, tile * Shape::WARPS + warp());
    float sums[TOKENS / 2];
    if constexpr (BY_GROUPS) {
#pragma unroll
      for (int i = 0; i < TOKENS / 2; ++i) sums[i] = 0.f;
    }
    typename Weights::Block blocks[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      if (begin + d < end) weights.load(blocks[d], p, begin + d);
    }
    pdl_wait();
    if (!Shape::PRODUCER && threadIdx.x == 0) {
      for (int i = 0; i < STAGES && begin + i < end; ++i) copy(i, begin + i);
    }
    PipelineState<STAGES> pipeline;
    int done = -1, add = 0;
    uint32_t done_phase = 0;
#pragma unroll 1
    for (uint32_t k_block = begin; k_block < end; k_block += DEPTH) {
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        if (k_block + d >= end) break;
        barrier_wait(full(pipeline.stage), pipeline.phase);
        step(sums, blocks[d], pipeline.stage, done, add);
        if (k_block + d + DEPTH < end) weights.load(blocks[d], p, k_block + d + DEPTH);
        // Where there is no producer: the stage before this one is free as soon as all warps have come so far.
        if (!Shape::PRODUCER && threadIdx.x == 0 && done >= 0 && k_block + d - 1 + STAGES < end) {
          barrier_wait(empty(done), done_phase);
          copy(done, k_block + d - 1 + STAGES);
        }
        done = pipeline.stage, done_phase = pipeline.phase;
        pipeline.next();
      }
    }
    wgmma_wait<0>();
    settle(sums);
    // Nobody reads x any more: its stages become sums.
    sync_first(Shape::CONSUMERS);
    float by[2] = {1.f, 1.f};
    if constexpr (Weights::CHANNEL_SCALES) by[0] = weights.channel_scale(p, 0), by[1] = weights.channel_scale(p, 1);
    float* to = shared_sums + 16 * warp() + lane() / 4;
    if (g.parts == 1) {
      to += lane() % 4 * 2 * Shape::PITCH;
#pragma unroll
      for (int j = 0; j < TOKENS / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[(8 * j + i % 2) * Shape::PITCH + 8 * (i / 2)] = by[i / 2] * sums[4 * j + i];
      }
    } else {
      // The parts of a token lie side by side.
      to += lane() % 4 * Shape::PITCH;
#pragma unroll
      for (int j = 0; j < TOKENS / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          to[4 * j * Shape::PITCH + 8 * i] = by[i] * (sums[4 * j + 2 * i] + sums[4 * j + 2 * i + 1]);
      }
    }
  }

  // The consumers: this block's part of the outputs.
  __device__ __forceinline__ void write_outputs() const {
    const uint32_t first_token = first_row / g.parts;
    const TileOutputs outputs = {p,
                                 stages,
                                 Shape::PITCH,
                                 1,
                                 0,
                                 g.split_k,
                                 rank,
                                 tile * Shape::WARPS,
                                 Shape::WARPS,
                                 first_token,
                                 min(TOKENS / g.parts, p.m - first_token),
                                 g.vectors != 0};
    outputs.write(Shape::CONSUMERS);
  }
};

template <class Weights, int TOKENS> __device__ __forceinline__ void gemm_wna16(const GemmWna16Params& g) {
  using Shape = GemmShape<TOKENS>;
  extern __shared__ char shared[];
  __shared__ __align__(8) uint64_t barriers[2 * Shape::STAGES];
  const uint32_t base = shared_address(shared), stages = (base + 1023) & ~1023u;
  const GemmWna16<Weights, TOKENS> gemm(g, stages, shared_address(barriers));
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::STAGES; ++i) {
      barrier_init(gemm.full(i), 1);
      barrier_init(gemm.empty(i), Shape::WARPS);
    }
    barriers_made();
  }
  __syncthreads();
  pdl_launch();
  float* sums = reinterpret_cast<float*>(shared + (stages - base));
  if (Shape::PRODUCER && threadIdx.x >= Shape::CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(24));
    pdl_wait();
    if (threadIdx.x == Shape::CONSUMERS) gemm.produce();
    __syncwarp();
    cluster_sync_memory();
  } else {
    if constexpr (Shape::PRODUCER) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(240));
    gemm.consume(sums);
    cluster_sync_memory();
    gemm.write_outputs();
  }
  // No block's shared memory goes while others read it.
  if (g.split_k > 1) cluster_sync();
}

}  // namespace fused

#define FUSED_GEMM_WNA16_SM90_STAGES(TOKENS, STAGES_)                                            \
  static_assert(fused::GemmShape<TOKENS>::STAGES == STAGES_, "the host goes by the table's stages");
FUSED_GEMM_WNA16(FUSED_GEMM_WNA16_SM90_STAGES)

#define FUSED_GEMM_WNA16_SM90_FORM(NAME, WEIGHTS, TOKENS)                                          \
  extern "C" __global__ void __launch_bounds__(fused::GemmShape<TOKENS>::THREADS,                  \
                                               fused::GemmShape<TOKENS>::BLOCKS)                   \
      NAME##_##TOKENS(const __grid_constant__ fused::GemmWna16Params p) {                          \
    fused::gemm_wna16<WEIGHTS, TOKENS>(p);                                                         \
  }

// `NAME_T`: a kernel for tiles of T tokens, for each of the table.
#define FUSED_GEMM_WNA16_SM90(NAME, ...)                \
  namespace NAME##_of { using Weights = __VA_ARGS__; }  \
  FUSED_GEMM_WNA16_SM90_FORM(NAME, NAME##_of::Weights, 8)   \
  FUSED_GEMM_WNA16_SM90_FORM(NAME, NAME##_of::Weights, 16)  \
  FUSED_GEMM_WNA16_SM90_FORM(NAME, NAME##_of::Weights, 32)  \
  FUSED_GEMM_WNA16_SM90_FORM(NAME, NAME##_of::Weights, 64)  \
  FUSED_GEMM_WNA16_SM90_FORM(NAME, NAME##_of::Weights, 128) \
  FUSED_GEMM_WNA16_SM90_FORM(NAME, NAME##_of::Weights, 256)
