// y = act(norm(x) W^T + bias) + residuals for dense W and x in bf16 on Hopper, for some tens to some thousand rows of x.
//
// `wgmma` has 64 rows of x as operand A and CHANNELS rows of W as operand B; TMA loads both in pipeline stages of 64 values
// of K. A block has a warpgroup for each 64 rows, and a producer warp. Operand A comes from registers: there a warp multiplies
// its rows by the weights of an RMS norm, and adds up their squares. The norm's factor is one for each row, so it multiplies
// the sums in the epilogue, and neither a preceding kernel nor another pass over x is needed. x times the norm's weights is
// rounded to bf16.
//
// The producer fills all stages with W in front of the wait for the preceding kernel. Where one half of the outputs gates
// the other, a tile has as many channels of each half.
// Compiled for sm_90a alone: the host launches it on no other architecture.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "linear/gemm_wna16_outputs.cuh"

using namespace fused;

namespace {

using T = __nv_bfloat16;

constexpr int STAGE_K = 64;            // values
constexpr uint32_t ROW = STAGE_K * 2;  // bytes, a row of the 128-byte swizzle
constexpr int WARP_ROWS = 16;          // of x
// Rows of x up to which the next kernel may begin early, beside this one. In a step of SmolLM2-135M the next one is attention,
// which prefetches keys: 256 sequences make 170,000 tokens/s if it begins early and 185,000 if late, 128 make 122,000 and
// 115,000.
constexpr uint32_t OVERLAPPING_ROWS = 128;

template <int WARPGROUPS, int CHANNELS, int STAGES> struct GemmNormed {
  static constexpr int ROWS = 64 * WARPGROUPS, CONSUMERS = 128 * WARPGROUPS, THREADS = CONSUMERS + WARP;
  static constexpr int HALF = CHANNELS / 2;
  static constexpr uint32_t X_BYTES = ROWS * ROW, W_BYTES = CHANNELS * ROW, STAGE = X_BYTES + W_BYTES;
  static constexpr uint32_t PITCH = CHANNELS + 8;  // f32 of a row's sums
  static_assert(ROWS * PITCH * 4 <= STAGES * STAGE, "sums lie where the stages were");

  const GemmDenseParams& g;
  const Gemv& p;
  const uint32_t n, first_row, rows;  // the tile of channels; rows of x
  const uint32_t k_stages;
  char* const shared;             // stages, then the norm's weights
  const uint32_t stages, barriers;  // addresses

  __device__ __forceinline__ GemmNormed(const GemmDenseParams& g, char* shared, uint32_t barriers)
      : g(g), p(g.product), n(blockIdx.x / g.m_tiles), first_row(blockIdx.x % g.m_tiles * g.tokens),
        rows(min(g.tokens, p.m - first_row)), k_stages((p.k + STAGE_K - 1) / STAGE_K), shared(shared),
        stages(shared_address(shared)), barriers(barriers) {}

  __device__ __forceinline__ uint32_t full(int stage) const { return barriers + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return barriers + 8 * (STAGES + stage); }
  __device__ __forceinline__ uint32_t* norm() const { return reinterpret_cast<uint32_t*>(shared + STAGES * STAGE); }
  __device__ __forceinline__ bool overlaps() const { return p.m <= OVERLAPPING_ROWS; }
  __device__ __forceinline__ bool normed() const { return p.prologue.norm != NORM_NONE; }

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
      const uint32_t to = stages + stage * STAGE + X_BYTES, barrier = full(stage);
      barrier_expect(barrier, W_BYTES + g.tokens * ROW);
      bulk_copy_rows(to, *first.map, barrier, k * STAGE_K, first.row);
      if (halves) bulk_copy_rows(to + W_BYTES / 2, *second.map, barrier, k * STAGE_K, second.row);
    };
    PipelineState<STAGES> pipeline;
    const uint32_t early = min(uint32_t(STAGES), k_stages);
    for (uint32_t k = 0; k < early; ++k) copy_weights(k, k);
    pdl_wait();
    for (uint32_t k = 0; k < k_stages; ++k) {
      if (k >= early) {
        barrier_wait(empty(pipeline.stage), pipeline.phase ^ 1);
        copy_weights(pipeline.stage, k);
      }
      bulk_copy_rows(stages + pipeline.stage * STAGE, g.x, full(pipeline.stage), k * STAGE_K, first_row);
      pipeline.next();
    }
  }

  // The norm's weights to shared memory, ones if there is no norm, and zeros behind them.
  __device__ __forceinline__ void stage_norm() const {
    const uint32_t* from = static_cast<const uint32_t*>(p.prologue.weight);
    for (uint32_t i = threadIdx.x; i < k_stages * (STAGE_K / 2); i += CONSUMERS)
      norm()[i] = 2 * i >= p.k ? 0 : normed() ? from[i] : 0x3f803f80u;
    sync_first(CONSUMERS);
  }

  // 32 values of K of the warp's rows, in the layout of two operands A.
  using Fragments = uint32_t[2][4];

  __device__ __forceinline__ void load_rows(Fragments& x, int stage, int half) const {
    const uint32_t lane = threadIdx.x % WARP, row = threadIdx.x / WARP * WARP_ROWS + lane % 16;
    const uint32_t from = stages + stage * STAGE + row * ROW;
#pragma unroll
    for (int i = 0; i < 2; ++i) load_matrices(x[i], from + ((4 * half + 2 * i + lane / 16) ^ row % 8) * 16);
  }
  // Their squares, added to those of the lane's two rows.
  static __device__ __forceinline__ void add_squares(const Fragments& x, float (&squares)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 v = unpack2<T>(x[i][j]);
        squares[j % 2] = fmaf(v.x, v.x, fmaf(v.y, v.y, squares[j % 2]));
      }
    }
  }

  __device__ __forceinline__ void multiply(float (&sums)[CHANNELS / 2], float (&squares)[2]) const {
    PipelineState<STAGES> at;
    int before = -1;
#pragma unroll 1
    for (uint32_t k = 0; k < k_stages; ++k) {
      barrier_wait(full(at.stage), at.phase);
      const uint32_t w = stages + at.stage * STAGE + X_BYTES;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Fragments x;
        load_rows(x, at.stage, half);
        if (normed()) add_squares(x, squares);
        const uint32_t* weights = norm() + k * (STAGE_K / 2) + 16 * half + threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            x[i][j] = bf16x2_mul(x[i][j], weights[8 * i + j / 2 * 4]);
            // In front of the fence, which orders registers that are ready.
            asm volatile("" : "+r"(x[i][j]));
          }
        }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 2; ++i)
          wgmma_k_major(sums, x[i], descriptor<128>(w + 64 * half + 32 * i, 16), half > 0 || i > 0 || k > 0);
        wgmma_commit();
        // The products before these are complete, and with the first half those of the stage before.
        wgmma_wait<1>();
        if (half == 0 && before >= 0 && threadIdx.x % WARP == 0) barrier_arrive(empty(before));
      }
      before = at.stage;
      at.next();
    }
    wgmma_wait<0>();
    settle(sums);
  }

  // Of the lane's two rows.
  __device__ __forceinline__ void factors(const float (&squares)[2], float (&by)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = squares[i];
      sum += __shfl_xor_sync(FULL, sum, 1);
      sum += __shfl_xor_sync(FULL, sum, 2);
      by[i] = normed() ? rsqrtf(__fdividef(sum, p.k) + p.prologue.eps) : 1.f;
    }
  }

  // The warp's rows, `[row][channel]`.
  __device__ __forceinline__ float* staged() const {
    return reinterpret_cast<float*>(shared) + threadIdx.x / WARP * (WARP_ROWS * PITCH);
  }
  __device__ __forceinline__ void stage_sums(const float (&sums)[CHANNELS / 2], const float (&by)[2]) const {
    const uint32_t lane = threadIdx.x % WARP;
    float* to = staged() + lane / 4 * PITCH + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < CHANNELS / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<float2*>(to + 8 * i * PITCH + 8 * j) =
            make_float2(sums[4 * j + 2 * i] * by[i], sums[4 * j + 2 * i + 1] * by[i]);
    }
  }

  static __device__ __forceinline__ void read(const float* from, float (&y)[8]) {
    const float4 a = *reinterpret_cast<const float4*>(from), b = *reinterpret_cast<const float4*>(from + 4);
    y[0] = a.x, y[1] = a.y, y[2] = a.z, y[3] = a.w, y[4] = b.x, y[5] = b.y, y[6] = b.z, y[7] = b.w;
  }
  // The outputs of the warp's rows, 8 channels at a time.
  template <bool GATED> __device__ __forceinline__ void write() const {
    constexpr uint32_t WIDTH = GATED ? HALF : CHANNELS, PIECES = WIDTH / 8;
    const Epilogue& e = p.epilogue;
    const uint32_t of_warp = threadIdx.x / WARP * WARP_ROWS;
#pragma unroll 1
    for (uint32_t i = threadIdx.x % WARP; i < WARP_ROWS * PIECES; i += WARP) {
      const uint32_t row = i / PIECES, piece = i % PIECES, column = n * WIDTH + 8 * piece;
      if (of_warp + row >= rows || column >= p.width) continue;
      const uint64_t to = uint64_t(first_row + of_warp + row) * e.stride + column;
      const EightOutputs outputs(e, column, to, p.width, g.vectors != 0);
      float residuals[8] = {}, y[8];
      outputs.add_residuals(residuals);
      const float* from = staged() + row * PITCH + 8 * piece;
      read(from, y);
      outputs.add_bias(y, 0);
      if constexpr (GATED) {
        float up[8];
        read(from + HALF, up);
        outputs.add_bias(up, p.width);
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = gate(e.activation, y[j]) * up[j];
      } else if (e.activation != ACT_NONE) {
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = activate(e.activation, y[j]);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) y[j] += residuals[j];
      outputs.write(y);
    }
  }

  // All threads but the producer's.
  __device__ __forceinline__ void consume() const {
    float sums[CHANNELS / 2], squares[2] = {}, by[2];
    stage_norm();
    multiply(sums, squares);
    if (!overlaps()) pdl_launch();
    // Residuals may be the preceding kernel's; x has come, so it is through.
    pdl_wait();
    factors(squares, by);
    // All warps have read the stages.
    sync_first(CONSUMERS);
    stage_sums(sums, by);
    __syncwarp();
    if (gates(p)) write<true>();
    else write<false>();
  }
};

template <int WARPGROUPS, int CHANNELS, int STAGES>
__device__ __forceinline__ void gemm_normed(const GemmDenseParams& g) {
  using Gemm = GemmNormed<WARPGROUPS, CHANNELS, STAGES>;
  extern __shared__ char dynamic[];
  __shared__ __align__(8) uint64_t barriers[2 * STAGES];
  const uint32_t base = shared_address(dynamic);
  const Gemm gemm(g, dynamic + (((base + 1023) & ~1023u) - base), shared_address(barriers));
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
  if (gemm.overlaps()) pdl_launch();
  if (threadIdx.x < Gemm::CONSUMERS) gemm.consume();
  else if (threadIdx.x == Gemm::CONSUMERS) gemm.produce();
}

}  // namespace

// So many rows of x and output channels, pipeline stages, and blocks that a multiprocessor has room for.
#define GEMM_NORMED_FORM(ROWS, CHANNELS, STAGES, BLOCKS)                                                       \
  extern "C" __global__ void __launch_bounds__(GemmNormed<ROWS / 64, CHANNELS, STAGES>::THREADS, BLOCKS)       \
      gemm_dense_normed_sm90_##ROWS##_##CHANNELS##_##STAGES(const __grid_constant__ GemmDenseParams p) {       \
    gemm_normed<ROWS / 64, CHANNELS, STAGES>(p);                                                               \
  }
GEMM_NORMED_FORM(64, 32, 9, 2)
GEMM_NORMED_FORM(64, 64, 6, 2)
GEMM_NORMED_FORM(64, 128, 4, 2)
GEMM_NORMED_FORM(128, 64, 4, 2)
GEMM_NORMED_FORM(128, 128, 6, 1)
GEMM_NORMED_FORM(128, 192, 5, 1)

#endif
