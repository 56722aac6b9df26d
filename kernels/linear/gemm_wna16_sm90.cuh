// y = act(x W^T + bias) + residuals for quantized W and bf16 x on Hopper, for any number of tokens.
//
// The transposed problem, as in Machete (Neural Magic, 2024): a warpgroup's `wgmma.m64nTk16` has 64 output channels
// of W as operand A, dequantized in registers (gemm_wna16_weights.cuh), and T tokens of x as operand B, which TMA
// brings to shared memory in stages of 128 values of K. A block has two such warpgroups, side by side in N, and a
// producer warpgroup. The blocks of a cluster split K: each leaves its sums in its shared memory, and each adds up and
// writes a part of the outputs through distributed shared memory, always in the order of K. Where there are tiles
// enough for all multiprocessors, they do not: a block takes one tile after the other, or a share of the K blocks of all
// (gemm_wna16_schedule.cuh), writes the outputs of one while the producer brings x of the next, and the two blocks of a
// cluster, side by side in N, share x (TMA multicast).
//
// Weights go from global memory straight to registers. All loads of the loop share one scoreboard, so a warp that waits
// for one load waits for all. The loads of a block of K are issued at the beginning of the step before its own, after
// that step's wait for its own weights, and so have a step's time. With few tokens other warps of the multiprocessor hide
// the wait and each instruction counts: there integer weights are loaded at the end of the step before that one. The
// first loads are issued before the wait for the preceding kernel.
//
// For few tokens, where issuing instructions bounds a product, weights are not scaled: a group of them gives sums of
// its own, which are scaled in f32. What a GGUF format adds to all weights of a block meets the sum of its 32 values
// of x, which the preceding kernel has computed. Q2_K, which adds to each 16, is dequantized here too.
//
// x of more than 8 significant bits comes as two rows of operand B for each token, the second what rounding to bf16
// leaves over; their sums are added up.
#pragma once

#include "common/cluster.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "linear/gemm_wna16_outputs.cuh"
#include "linear/gemm_wna16_schedule.cuh"
#include "linear/gemm_wna16_weights.cuh"

namespace fused {

template <class Weights, int TOKENS> struct GemmWna16 : GemmSchedule<TOKENS> {
  using Shape = GemmShape<TOKENS>;
  using Schedule = GemmSchedule<TOKENS>;
  using typename Schedule::Place;
  using typename Schedule::Segment;
  using Schedule::cluster, Schedule::g, Schedule::k_blocks, Schedule::p, Schedule::rank;
  using Schedule::lane, Schedule::warp, Schedule::place, Schedule::first_segment, Schedule::advance;
  static constexpr int STAGES = Shape::STAGES;
  // Sums of x are those of 32 values: weights with an offset for each 16 are dequantized.
  static constexpr bool BY_GROUPS =
      Shape::SCALES_SUMS && !Weights::CHANNEL_SCALES && !(Weights::HAS_OFFSET && Weights::GROUPS > 4);

  // Whether the loads of a block of K are issued at the beginning of the step before its own, or at the end of the step
  // before that.
  static constexpr bool LOADS_EARLY = Weights::loads_early(TOKENS);

  const uint32_t stages, barriers;
  const uint32_t first_operand;  // of the first stage, as a descriptor

  __device__ __forceinline__ GemmWna16(const GemmWna16Params& g, uint32_t stages, uint32_t barriers)
      : GemmSchedule<TOKENS>(g), stages(stages), barriers(barriers), first_operand(descriptor_low(stages, 16)) {}

  __device__ __forceinline__ uint32_t full(int stage) const { return barriers + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return barriers + 8 * (STAGES + stage); }

  // Of a stage's operand B, 32 bytes of each token, `at` bytes behind the first.
  __device__ __forceinline__ uint64_t operand(uint32_t stage, uint32_t at) const { return descriptor_at(stage + at / 16); }
  __device__ __forceinline__ uint32_t operands(int stage) const { return first_operand + stage * (Shape::STAGE / 16); }

  __device__ __forceinline__ uint32_t x_sums(int stage) const {
    return stages + STAGES * Shape::STAGE + stage * Shape::X_SUMS;
  }

  // One thread: x of a block of K on its way to a stage.
  __device__ __forceinline__ void copy(int stage, uint32_t first_row, uint32_t k_block) const {
    const uint32_t to = stages + stage * Shape::STAGE;
    const bool with_sums = BY_GROUPS && Weights::HAS_OFFSET;
    barrier_expect(full(stage), Shape::STAGE + (with_sums ? Shape::X_SUMS : 0));
    if (with_sums) bulk_copy_rows(x_sums(stage), g.x_sums, full(stage), first_row, 4 * k_block);
    if (Shape::PRODUCER && g.sharing > 1) {
      // Half of the tokens, for both CTAs.
      constexpr uint16_t BOTH = 3;
      const uint32_t row = first_row + rank * (TOKENS / 2), at = to + rank * (Shape::HALF / 2);
      bulk_copy_rows(at, g.x, full(stage), 128 * k_block, row, BOTH);
      bulk_copy_rows(at + Shape::HALF, g.x, full(stage), 128 * k_block + 64, row, BOTH);
      return;
    }
    bulk_copy_rows(to, g.x, full(stage), 128 * k_block, first_row);
    bulk_copy_rows(to + Shape::HALF, g.x, full(stage), 128 * k_block + 64, first_row);
  }
  // The "empty" barriers of the CTAs that fill this CTA's stages: each of a warp's first lanes arrives at those of one.
  struct EmptyBarriers {
    bool arrives;
    uint32_t first;  // that of the first stage in the lane's CTA

    // The warp has read the stage, if `read`. Predicated: a branch between products would serialize them.
    __device__ __forceinline__ void release(int stage, bool read = true) const {
      barrier_arrive_if(arrives & read, first + 8 * stage);
    }
  };
  // `first`: that of the first stage in this CTA.
  __device__ __forceinline__ EmptyBarriers empty_barriers(uint32_t first) const {
    const uint32_t lane = thread_now() % WARP;
    return {lane < g.sharing, in_block(first, g.sharing > 1 ? lane % 2 : rank_in_cluster())};
  }
  // One thread of the producer, which runs ahead into the next tile.
  __device__ __forceinline__ void produce() const {
    PipelineState<STAGES> pipeline;
    uint32_t copied = 0;
    Segment segment = first_segment();
    do {
      const uint32_t first_row = place(segment.tile).first_row;
      for (uint32_t k_block = segment.begin; k_block < segment.end; ++k_block) {
        if (copied >= STAGES) barrier_wait(empty(pipeline.stage), pipeline.phase ^ 1);
        copy(pipeline.stage, first_row, k_block);
        pipeline.next();
        ++copied;
      }
    } while (advance(segment));
  }

  // The stage before another.
  static __device__ __forceinline__ int before(int stage) { return stage == 0 ? STAGES - 1 : stage - 1; }

  // `b`: x of the stage, as a descriptor. `add`: 0 for the first block of K of a segment. `release_previous` is
  // called when the products of the block before are complete, so that its stage may be filled again.
  template <class Release>
  __device__ __forceinline__ void multiply(float (&sums)[TOKENS / 2], const typename Weights::Block& block, uint32_t b,
                                           int add, Release release_previous) const {
    const auto scales = Weights::scales(block, p);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      WeightFragment a = Weights::fragment(block, scales, p, e);
      // In front of the fence, which orders registers that are ready.
#pragma unroll
      for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(a.v[i]));
      const uint32_t x = e / 2 * Shape::HALF + e % 2 * 64;
      wgmma_fence();
      wgmma_k_major(sums, a.v, operand(b, x), e == 0 ? add : 1);
      wgmma_k_major(sums, a.v + 4, operand(b, x + 32), 1);
      wgmma_commit();
      wgmma_wait<1>();
      if (e == 0) release_previous();
    }
  }

  // Groups as they are, to be scaled in f32.
  __device__ __forceinline__ void multiply_groups(float (&sums)[TOKENS / 2], const typename Weights::Block& block,
                                                  int stage) const {
    constexpr int GROUPS = Weights::GROUPS;
    const uint32_t b = operands(stage);
    float c[2][TOKENS / 2];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      WeightFragment a = Weights::raw(block, p, e);
#pragma unroll
      for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(a.v[i]));
      const uint32_t x = e / 2 * Shape::HALF + e % 2 * 64;
      if constexpr (GROUPS == 8) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          wgmma_fence();
          wgmma_k_major(c[h], a.v + 4 * h, operand(b, x + 32 * h), 0);
          wgmma_commit();
          if (2 * e + h > 0) wgmma_wait<1>(), settle(c[1 - h]), add_group(sums, c[1 - h], block, stage, 2 * e + h - 1);
        }
      } else {
        constexpr int LENGTH = 4 / GROUPS;  // of a group, in 32 values
        const int set = e / LENGTH % 2;
        wgmma_fence();
        wgmma_k_major(c[set], a.v, operand(b, x), e % LENGTH > 0);
        wgmma_k_major(c[set], a.v + 4, operand(b, x + 32), 1);
        wgmma_commit();
        if (e > 0) wgmma_wait<1>();
        if (e > 0 && e % LENGTH == 0) settle(c[1 - set]), add_group(sums, c[1 - set], block, stage, e / LENGTH - 1);
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
            const float2 part = load_shared_float2(at + e * TOKENS * 4);
            x.x += part.x, x.y += part.y;
          }
        } else {
          x = load_shared_float2(at + group * 4 / Weights::GROUPS * TOKENS * 4);
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
  __device__ __forceinline__ void multiply_block(float (&sums)[TOKENS / 2], const typename Weights::Block& block,
                                                 int stage, int add) const {
    const auto release_previous = [&] {
      if (add && lane() == 0) barrier_arrive(empty(before(stage)));
    };
    if constexpr (BY_GROUPS) {
      multiply_groups(sums, block, stage);
      release_previous();
    } else {
      multiply(sums, block, operands(stage), add, release_previous);
    }
  }

  using Block = typename Weights::Block;

  // Loads the blocks of K that have to be in registers before the loop over a segment begins.
  __device__ __forceinline__ void prefetch(Block (&blocks)[2], const Weights& weights, const Segment& of) const {
    weights.load(blocks[0], p, of.begin);
    if (!LOADS_EARLY && of.begin + 1 < of.end) weights.load(blocks[1], p, of.begin + 1);
  }

  // 0, which is known only after a block has been loaded: an address that it is added to cannot be read before.
  __device__ __forceinline__ uint32_t after(const Block& block) const { return Weights::loaded(block) & (g.split_k >> 16); }

  // The sums of a segment, not scaled by channel, in a CTA with a producer. The first block of K is on its way. `steps`
  // is the step modulo 2 STAGES: its stage is steps % STAGES, the parity of its barriers steps / STAGES.
  //
  // `ptxas` spills a value along its whole live range, so one that is live while outputs are written would be loaded from
  // local memory in every step, and a weight stored there as soon as it comes. Live ranges begin in front of the loop.
  __device__ __forceinline__ void multiply_segment(float (&sums)[TOKENS / 2], Block (&blocks)[2], const Weights& weights,
                                                   const Segment& of, uint32_t& steps) const {
    static_assert(Shape::PRODUCER && LOADS_EARLY && !BY_GROUPS);
    uint32_t k_block = of.begin, end = of.end, first_full = barriers, first_x = first_operand, step = steps;
    asm volatile("" : "+r"(k_block), "+r"(end), "+r"(first_full), "+r"(first_x), "+r"(step));
    blocks[1] = blocks[0];
    int add = 0;
#pragma unroll 1
    for (; k_block < end; ++k_block) {
      // The condition keeps the compiler from moving them at the end of the step before, too soon for the loads.
      if (add) blocks[0] = blocks[1];
      const uint32_t stage = step < STAGES ? step : step - STAGES;
      // Read here, the latency of %tid is hidden.
      const EmptyBarriers empties = empty_barriers(first_full + 8 * STAGES);
      barrier_wait(first_full + 8 * stage, step >= STAGES);
      // The branch waits for this step's block, and keeps the new loads where they are.
      const uint32_t following = k_block + 1 + after(blocks[0]);
      if (following < end) weights.load(blocks[1], p, following), __syncwarp();
      multiply(sums, blocks[0], first_x + stage * (Shape::STAGE / 16), add,
               [&] { empties.release(before(stage), add); });
      add = 1;
      step = step == 2 * STAGES - 1 ? 0 : step + 1;
    }
    wgmma_wait<0>();
    settle(sums);
    empty_barriers(empty(0)).release(before(step < STAGES ? step : step - STAGES));
    steps = step;
  }
  // The same where there is no producer.
  __device__ __forceinline__ void multiply_segment(float (&sums)[TOKENS / 2], Block (&blocks)[2], const Weights& weights,
                                                   const Segment& of) const {
    const uint32_t end = of.end, first_row = place(of.tile).first_row;
    PipelineState<STAGES> pipeline;
    if constexpr (BY_GROUPS) {
#pragma unroll
      for (int i = 0; i < TOKENS / 2; ++i) sums[i] = 0.f;
    }
    int add = 0;
    const auto next = [&](int d, uint32_t k_block) {
      barrier_wait(full(pipeline.stage), pipeline.phase);
      if constexpr (LOADS_EARLY) {
        // The branch waits for this step's block, and keeps the new loads where they are.
        const uint32_t following = k_block + 1 + after(blocks[d]);
        if (following < end) weights.load(blocks[1 - d], p, following), __syncwarp();
      }
      multiply_block(sums, blocks[d], pipeline.stage, add);
      if (!LOADS_EARLY && k_block + 2 < end) weights.load(blocks[d], p, k_block + 2);
      // The stage before this one is free as soon as all warps have come so far.
      if (threadIdx.x == 0 && add && k_block - 1 + STAGES < end) {
        const int done = before(pipeline.stage);
        barrier_wait(empty(done), pipeline.phase ^ (pipeline.stage == 0));
        copy(done, first_row, k_block - 1 + STAGES);
      }
      add = 1;
      pipeline.next();
    };
    uint32_t k_block = of.begin;
    // In pairs, without moves. A branch out of the middle of the loop would move all sums.
#pragma unroll 1
    for (; k_block + 1 < end; k_block += 2) next(0, k_block), next(1, k_block + 1);
    if (k_block < end) next(0, k_block);
    wgmma_wait<0>();
    settle(sums);
  }

  // Tokens `first` to `first + COUNT` of the warp's sums: `[token][channel]`.
  template <int COUNT>
  __device__ __forceinline__ void stage_sums(float* to, const float (&sums)[TOKENS / 2], int first) const {
    constexpr uint32_t pitch = Shape::PITCH;
    to += lane() / 4;
    if (g.parts == 1) {
      to += lane() % 4 * 2 * pitch;
#pragma unroll
      for (int j = 0; j < COUNT / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[(8 * j + i % 2) * pitch + 8 * (i / 2)] = sums[first / 2 + 4 * j + i];
      }
    } else {
      // The parts of a token lie side by side.
      to += lane() % 4 * pitch;
#pragma unroll
      for (int j = 0; j < COUNT / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float* of = sums + first / 2 + 4 * j + 2 * i;
          to[4 * j * pitch + 8 * i] = of[0] + of[1];
        }
      }
    }
  }

  // Of a tile of channels, `rows` rows of operand B from a token on, whose sums lie at `sums`.
  __device__ __forceinline__ TileOutputs outputs(uint32_t sums, uint32_t n, uint32_t first_token, uint32_t rows) const {
    return {p,
            sums,
            Shape::PITCH,
            1,
            0,
            g.split_k,
            n * Shape::WARPS,
            Shape::WARPS,
            first_token,
            min(rows / g.parts, p.m - first_token),
            g.vectors != 0};
  }

  // The CTAs of a cluster, one tile: each leaves its sums where x was.
  __device__ __forceinline__ void write_shared_tile(float* shared_sums, const float (&sums)[TOKENS / 2],
                                                    Place at) const {
    sync_first(Shape::CONSUMERS);
    stage_sums<TOKENS>(shared_sums + 16 * warp(), sums, 0);
    cluster_sync_memory();
    outputs(stages, at.n, at.first_row / g.parts, TOKENS)
        .write(rank * Shape::CONSUMERS + threadIdx.x, g.split_k * Shape::CONSUMERS);
  }

  // Of a type that outputs, bias and residuals share.
  template <typename T>
  __device__ __forceinline__ void write_warp(float* staged, const float (&sums)[TOKENS / 2], Place at) const {
    using Outputs = WarpOutputs<T, TOKENS>;
    Outputs{p, staged + warp() * (Outputs::CHUNK * Outputs::PITCH), at.n * Shape::WARPS + warp(), at.first_row}.write(
        sums);
  }

  // A CTA that shares no K, while the producer fills the stages for the next tile.
  __device__ __forceinline__ void write_own_tile(float* staged, const float (&sums)[TOKENS / 2], Place at) const {
    const Epilogue& e = p.epilogue;
    if (g.vectors && g.parts == 1 && e.out_dtype == e.dtype) {
      if (e.dtype == BF16) return write_warp<__nv_bfloat16>(staged, sums, at);
      if (e.dtype == F32) return write_warp<float>(staged, sums, at);
    }
    constexpr int COUNT = Shape::STAGED_TOKENS;
#pragma unroll 1
    for (int chunk = 0; chunk < TOKENS / COUNT; ++chunk) {
      const uint32_t first_token = (at.first_row + chunk * COUNT) / g.parts;
      if (first_token >= p.m) break;
      sync_first(Shape::CONSUMERS);
      // Sums are in registers, which have no addresses.
#pragma unroll
      for (int i = 0; i < TOKENS / COUNT; ++i) {
        if (i == chunk) stage_sums<COUNT>(staged + 16 * warp(), sums, i * COUNT);
      }
      sync_first(Shape::CONSUMERS);
      outputs(shared_address(staged), at.n, first_token, COUNT).write(threadIdx.x, Shape::CONSUMERS);
    }
  }

  __device__ __forceinline__ void consume(float* shared_sums) const {
    Segment segment = first_segment();
    Place at = place(segment.tile);
    Weights weights(p, at.n * Shape::WARPS + warp());
    weights.keep();
    Block blocks[2];
    prefetch(blocks, weights, segment);
    pdl_wait();
    if (!Shape::PRODUCER && threadIdx.x == 0) {
      for (int i = 0; i < STAGES && segment.begin + i < segment.end; ++i) copy(i, at.first_row, segment.begin + i);
    }
    uint32_t steps = 0;
#pragma unroll 1
    while (true) {
      float sums[TOKENS / 2];
      if constexpr (Shape::PRODUCER) {
        multiply_segment(sums, blocks, weights, segment, steps);
      } else {
        multiply_segment(sums, blocks, weights, segment);
      }
      if constexpr (Weights::CHANNEL_SCALES) {
        const float by[2] = {weights.channel_scale(0), weights.channel_scale(1)};
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) sums[i] *= by[i / 2 % 2];
      }
      if (!Shape::PRODUCER || g.split_k > 1) return write_shared_tile(shared_sums, sums, at);
      if constexpr (Shape::PRODUCER) {
        if (segment.end < k_blocks) {
          this->leave_partial(sums);
        } else {
          if (segment.begin > 0) this->add_partials(sums, segment);
          write_own_tile(shared_sums + STAGES * Shape::STAGE / 4, sums, at);
        }
        if (!advance(segment)) return;
        // Not in front of the outputs, which need the registers.
        at = place(segment.tile);
        weights = Weights(p, at.n * Shape::WARPS + warp());
        weights.keep();
        prefetch(blocks, weights, segment);
      }
    }
  }
};

template <class Weights, int TOKENS> __device__ __forceinline__ void gemm_wna16(const GemmWna16Params& g) {
  using Shape = GemmShape<TOKENS>;
  extern __shared__ char shared[];
  __shared__ __align__(8) uint64_t barriers[2 * Shape::STAGES];
  const uint32_t base = shared_address(shared);
  uint32_t stages = (base + 1023) & ~1023u, first_barrier = shared_address(barriers);
  asm volatile("" : "+r"(stages), "+r"(first_barrier));  // or they are computed again in the loop
  const GemmWna16<Weights, TOKENS> gemm(g, stages, first_barrier);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::STAGES; ++i) {
      barrier_init(gemm.full(i), 1);
      barrier_init(gemm.empty(i), Shape::WARPS * (Shape::PRODUCER ? g.sharing : 1));
    }
    barriers_made();
  }
  __syncthreads();
  // Barriers are there before another CTA arrives at them.
  if (Shape::PRODUCER && g.sharing > 1) cluster_arrive(), cluster_wait();
  pdl_launch();
  float* sums = reinterpret_cast<float*>(shared + (stages - base));
  if (Shape::PRODUCER && threadIdx.x >= Shape::CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Shape::PRODUCER_REGISTERS));
    pdl_wait();
    if (threadIdx.x == Shape::CONSUMERS) gemm.produce();
    __syncwarp();
    if (g.split_k > 1) cluster_sync_memory();
  } else {
    if constexpr (Shape::PRODUCER) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Shape::CONSUMER_REGISTERS));
    gemm.consume(sums);
  }
  // No block's shared memory goes while others read it.
  if (gemm.cluster > 1) cluster_sync();
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
  FUSED_GEMM_WNA16_SM90_FORM(NAME, NAME##_of::Weights, 192) \
  FUSED_GEMM_WNA16_SM90_FORM(NAME, NAME##_of::Weights, 256)
