// y = act(x W^T + bias) + residuals for dense W and x of one 16-bit type on Hopper, for few to some hundred tokens.
//
// The transposed problem: `wgmma` has 64 output channels of W as operand A and T tokens of x as operand B, both in
// shared memory, where TMA loads them in pipeline stages of 64 values of K. A box of x has as many rows as the tile has
// tokens and no more: filling out-of-bounds rows with zeros takes TMA longer than loading as many. A block has a
// warpgroup for each 64 channels of its tile, and a producer warp. The blocks of a cluster split K: each leaves its
// sums in its shared memory, and each adds up and writes a part of the outputs through distributed shared memory,
// always in the order of K.
//
// Such products are bound by reading W. The producer fills all stages with it in front of the wait for the preceding
// kernel, and two blocks have room on a multiprocessor, so that the next kernel of a chain can load its first weights
// while this one computes.
//
// Where one half of the outputs gates the other, a tile has as many channels of each half.
// Compiled for sm_90a alone: the host launches it on no other architecture.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "common/cluster.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "linear/gemm_wna16_outputs.cuh"

using namespace fused;

namespace {

constexpr int STAGE_K = 64;            // values
constexpr uint32_t ROW = STAGE_K * 2;  // bytes, a row of the 128-byte swizzle

template <typename T, int CHANNELS, int TOKENS, int STAGES> struct GemmDense {
  static constexpr int CONSUMERS = 2 * CHANNELS, THREADS = CONSUMERS + WARP;
  static constexpr int HALF = CHANNELS / 2;
  static constexpr uint32_t W_BYTES = CHANNELS * ROW, STAGE = W_BYTES + TOKENS * ROW;
  static constexpr uint32_t PITCH = CHANNELS + 4;  // f32 of a token's sums
  static_assert(TOKENS * PITCH * 4 <= STAGES * STAGE, "sums lie where the stages were");

  const GemmDenseParams& g;
  const Gemv& p;
  const uint32_t rank;            // of the block in its cluster
  const uint32_t n, first_token;  // the tile of channels, and of tokens
  const uint32_t begin, end;      // stages of K
  const uint32_t stages, barriers;

  static __device__ __forceinline__ uint32_t stages_of(uint32_t k) { return (k + STAGE_K - 1) / STAGE_K; }

  __device__ __forceinline__ GemmDense(const GemmDenseParams& g, uint32_t stages, uint32_t barriers)
      : g(g), p(g.product), rank(blockIdx.x % g.split_k), n(blockIdx.x / g.split_k / g.m_tiles),
        first_token(blockIdx.x / g.split_k % g.m_tiles * g.tokens), begin(stages_of(p.k) * rank / g.split_k),
        end(stages_of(p.k) * (rank + 1) / g.split_k), stages(stages), barriers(barriers) {}

  __device__ __forceinline__ uint32_t full(int stage) const { return barriers + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return barriers + 8 * (STAGES + stage); }

  // Channels of the tile that lie in one matrix, side by side.
  struct Box {
    const TensorMap* map;
    int row;
  };
  __device__ __forceinline__ Box box(uint32_t row) const {
    const uint32_t which = (row >= p.weights[1].first) + (row >= p.weights[2].first);
    return {&g.weights[which], int(row - p.weights[which].first)};
  }

  // One thread. What lies past a matrix comes as zeros.
  __device__ __forceinline__ void produce() const {
    const bool halves = g.halves != 0;
    const Box first = box(gates(p) ? n * HALF : n * CHANNELS);
    const Box second = box(!halves ? 0 : gates(p) ? p.width + n * HALF : n * CHANNELS + HALF);
    const auto copy_weights = [&](int stage, uint32_t k) {
      const uint32_t to = stages + stage * STAGE, barrier = full(stage);
      barrier_expect(barrier, W_BYTES + g.tokens * ROW);
      bulk_copy_rows(to, *first.map, barrier, k * STAGE_K, first.row);
      if (halves) bulk_copy_rows(to + W_BYTES / 2, *second.map, barrier, k * STAGE_K, second.row);
    };
    PipelineState<STAGES> pipeline;
    const uint32_t early = min(begin + STAGES, end);
    for (uint32_t k = begin; k < early; ++k) copy_weights(k - begin, k);
    pdl_wait();
    for (uint32_t k = begin; k < end; ++k) {
      if (k >= early) {
        barrier_wait(empty(pipeline.stage), pipeline.phase ^ 1);
        copy_weights(pipeline.stage, k);
      }
      bulk_copy_rows(stages + pipeline.stage * STAGE + W_BYTES, g.x, full(pipeline.stage), k * STAGE_K, first_token);
      pipeline.next();
    }
  }

  __device__ __forceinline__ void multiply(float (&sums)[TOKENS / 2]) const {
    const uint32_t w = stages + threadIdx.x / 128 * (64 * ROW), x = stages + W_BYTES;
    PipelineState<STAGES> at;
    int before = -1;
#pragma unroll 1
    for (uint32_t k = begin; k < end; ++k) {
      barrier_wait(full(at.stage), at.phase);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < STAGE_K / 16; ++i) {
        const uint32_t past = at.stage * STAGE + 32 * i;
        wgmma(T(), sums, descriptor<128>(w + past, 16), descriptor<128>(x + past, 16), i > 0 || k > begin);
      }
      wgmma_commit();
      // The products of the stage before are complete.
      wgmma_wait<1>();
      if (before >= 0 && threadIdx.x % WARP == 0) barrier_arrive(empty(before));
      before = at.stage;
      at.next();
    }
    wgmma_wait<0>();
    settle(sums);
  }

  // `[token][channel]`. Of a gated tile 8 channels that gate lie beside the 8 that they gate.
  __device__ __forceinline__ void stage_sums(float* to, const float (&sums)[TOKENS / 2]) const {
    const uint32_t lane = threadIdx.x % WARP;
    to += lane / 4 + lane % 4 * 2 * PITCH;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t channel = 16 * (threadIdx.x / WARP) + 8 * i;
      const uint32_t place = gates(p) ? channel % HALF * 2 + channel / HALF * 8 : channel;
#pragma unroll
      for (int j = 0; j < TOKENS / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) to[place + (8 * j + e) * PITCH] = sums[4 * j + 2 * i + e];
      }
    }
  }

  __device__ __forceinline__ void write() const {
    const TileOutputs outputs{p,         stages,      PITCH, 1, 0, g.split_k, n * (CHANNELS / 16), CHANNELS / 16,
                              first_token, min(g.tokens, p.m - first_token), g.vectors != 0};
    outputs.write(rank * CONSUMERS + threadIdx.x, g.split_k * CONSUMERS);
  }
};

template <typename T, int CHANNELS, int TOKENS, int STAGES>
__device__ __forceinline__ void gemm_dense(const GemmDenseParams& g) {
  using Gemm = GemmDense<T, CHANNELS, TOKENS, STAGES>;
  extern __shared__ char shared[];
  __shared__ __align__(8) uint64_t barriers[2 * STAGES];
  const uint32_t base = shared_address(shared), stages = (base + 1023) & ~1023u;
  const Gemm gemm(g, stages, shared_address(barriers));
  const bool producer = threadIdx.x >= Gemm::CONSUMERS;
  if (threadIdx.x == Gemm::CONSUMERS) {
    prefetch_tensor_map(g.x);
    for (int i = 0; i < 3; ++i) prefetch_tensor_map(g.weights[i]);
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(gemm.full(i), 1);
      barrier_init(gemm.empty(i), Gemm::CONSUMERS / WARP);
    }
    barriers_made();
  }
  __syncthreads();
  pdl_launch();
  if (producer) {
    if (threadIdx.x == Gemm::CONSUMERS) gemm.produce();
    __syncwarp();
  } else {
    float sums[TOKENS / 2];
    gemm.multiply(sums);
    // Residuals may be the preceding kernel's; x has come, so it is through.
    pdl_wait();
    // All warps have read the stages.
    sync_first(Gemm::CONSUMERS);
    gemm.stage_sums(reinterpret_cast<float*>(shared + (stages - base)), sums);
  }
  if (g.split_k > 1) {
    cluster_sync_memory();
  } else if (!producer) {
    sync_first(Gemm::CONSUMERS);
  }
  if (!producer) gemm.write();
  // No block's shared memory goes while others read it.
  if (g.split_k > 1) cluster_sync();
}

}  // namespace

#define GEMM_DENSE_FORM(SUFFIX, TYPE, CHANNELS, TOKENS, STAGES)                                     \
  extern "C" __global__ void __launch_bounds__(GemmDense<TYPE, CHANNELS, TOKENS, STAGES>::THREADS, 2)  \
      gemm_dense_sm90_##SUFFIX##_##CHANNELS##_##TOKENS(const __grid_constant__ GemmDenseParams p) {         \
    gemm_dense<TYPE, CHANNELS, TOKENS, STAGES>(p);                                                          \
  }
#define GEMM_DENSE_F16(...) GEMM_DENSE_FORM(f16, __half, __VA_ARGS__)
#define GEMM_DENSE_BF16(...) GEMM_DENSE_FORM(bf16, __nv_bfloat16, __VA_ARGS__)
FUSED_GEMM_DENSE_SM90(GEMM_DENSE_F16)
FUSED_GEMM_DENSE_SM90(GEMM_DENSE_BF16)

#endif
