// y = act(s x_q (t W_q)^T + bias) + residuals on Hopper (gemm_w8a8.cuh) in one launch: blocks make int8 of x
// themselves (gemm_w8a8_cluster.cuh). Where the product is small, a launch of its own takes as long.
// Other architectures, which the host asks for none of this, have nothing to read here.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "common/mma.cuh"
#include "common/rows.cuh"
#include "linear/gemm_w8a8_cluster.cuh"

using namespace fused;

__device__ __forceinline__ void read_sums(uint32_t from, int (&sums)[8]) {
  const uint4 a = load_shared(from), b = load_shared(from + 16);
  sums[0] = a.x, sums[1] = a.y, sums[2] = a.z, sums[3] = a.w;
  sums[4] = b.x, sums[5] = b.y, sums[6] = b.z, sums[7] = b.w;
}

// A team has 64 rows of x, the first factor, and N of W: a warp has 16 rows of outputs.
template <class F> struct RowsFirst : Operands<F> {
  using Operands<F>::product, Operands<F>::fixed, Operands<F>::room;
  using Operands<F>::Operands;
  static constexpr int N = F::N;
  using Sums = int[N / 2];
  // Columns that are scaled, and then written, at a time.
  static constexpr int CHUNK = N % 64 ? 48 : 64;
  // Bytes from one row of sums, or of outputs, to the next: what lanes write together meets no bank twice.
  static constexpr int SUMS = 4 * N + 32, OUTPUTS = 2 * N + 16;

  __device__ __forceinline__ void multiply(uint32_t team, Sums& sums) const {
    const uint32_t half = team / F::BESIDE, x_at = room + half * (64 * BLOCK_K);
    Operands<F>::template multiply<false>(half, x_at, team % F::BESIDE * N * BLOCK_K, sums);
  }

  // Of its rows of x, in whose place outputs go while other teams still multiply, a warp has those of another step.
  static constexpr bool APART = F::HALVES > 1;
  static_assert(!APART || 16 * OUTPUTS <= 64 * BLOCK_K);
  __device__ __forceinline__ uint32_t room_of_outputs(uint32_t team) const {
    if (APART) return room + (threadIdx.x / WARP % 4 * F::ROWS + team / F::BESIDE * 64) * BLOCK_K;
    return room + threadIdx.x / WARP * (16 * OUTPUTS);
  }

  template <typename T>
  __device__ __forceinline__ void write_sums(const Place& here, uint32_t team, const Sums& sums) const {
    if (product.epilogue.bias)
      write_chunks<T, true>(here, team, sums);
    else
      write_chunks<T, false>(here, team, sums);
  }

  // Outputs of the chunk of columns from FROM on, by way of shared memory, so that a warp writes whole pieces of rows.
  template <typename T, bool BIASED, int FROM = 0>
  __device__ __forceinline__ void write_chunks(const Place& here, uint32_t team, const Sums& sums) const {
    constexpr int UNITS = CHUNK / 8;
    const uint32_t lane = threadIdx.x % WARP, first = team / F::BESIDE * 64 + threadIdx.x / WARP % 4 * 16;
    const uint32_t staged = room_of_outputs(team) + 2 * FROM;
    const Columns<N>& columns = fixed.columns[team % F::BESIDE];
    const float x_scales[2] = {fixed.x_scales[first + lane / 4], fixed.x_scales[first + lane / 4 + 8]};
    uint32_t outputs[CHUNK / 16][4];
#pragma unroll
    for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = FROM / 2 + 4 * n + 2 * i, of[2] = {sums[at], sums[at + 1]};
        float y[2];
        columns.template scale2<BIASED>(FROM + 8 * n + lane % 4 * 2, x_scales[i], of, y);
        outputs[n / 2][n % 2 * 2 + i] = pack2<T>(y[0], y[1]);
      }
    const uint32_t to = staged + lane % 16 * OUTPUTS + lane / 16 * 16;
#pragma unroll
    for (int n = 0; n < CHUNK / 16; ++n) store_matrices<false>(to + 32 * n, outputs[n]);
    __syncwarp();
    uint4 words[CHUNK / 16];
#pragma unroll
    for (int i = 0; i < CHUNK / 16; ++i) {
      const uint32_t unit = lane + i * WARP;
      words[i] = load_shared(staged + unit / UNITS * OUTPUTS + unit % UNITS * 16);
    }
    const Epilogue& e = product.epilogue;
#pragma unroll
    for (int i = 0; i < CHUNK / 16; ++i) {
      const uint32_t unit = lane + i * WARP, row = unit / UNITS, column = unit % UNITS * 8 + FROM;
      const uint32_t m = here.m_tile * F::ROWS + first + row;
      if (m < product.m && here.row[0] + column < here.limit)
        store16(static_cast<uint16_t*>(e.out) + m * e.stride + here.column[0] + column, words[i]);
    }
    if constexpr (FROM + CHUNK < N) write_chunks<T, BIASED, FROM + CHUNK>(here, team, sums);
  }

  // The same with all that may be behind the sums.
  __device__ __forceinline__ void write_rows(const Place& here, uint32_t team, const Sums& sums) const {
    const uint32_t lane = threadIdx.x % WARP, first = team / F::BESIDE * 64 + threadIdx.x / WARP % 4 * 16;
    const uint32_t staged = room + threadIdx.x / WARP * (16 * SUMS);
    const uint32_t to = staged + lane / 4 * SUMS + lane % 4 * 8;
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        store_shared(to + i * 8 * SUMS + 32 * n, sums[4 * n + 2 * i], sums[4 * n + 2 * i + 1]);
    __syncwarp();
    const uint32_t across = gates(product) ? F::PIECE : N;
#pragma unroll 1
    for (uint32_t half = 0; half < 16; half += 8)
#pragma unroll 1
      for (uint32_t column = lane % 4 * 8; column < across; column += 32) {
        const uint32_t row = half + lane / 4, m = here.m_tile * F::ROWS + first + row;
        if (m >= product.m || here.row[0] + column >= here.limit) continue;
        const uint32_t from = staged + row * SUMS + 4 * column;
        int of[8], gated[8];
        read_sums(from, of);
        if (gates(product)) read_sums(from + 4 * F::PIECE, gated);
        const Columns<N>& columns = fixed.columns[team % F::BESIDE];
        finish8(product, here, columns, m, fixed.x_scales[first + row], column, of, gated);
      }
  }
};

// A team has 64 rows of W, the first factor, and all rows of x, which need not be 64: the fewer they are, the less
// do blocks send each other. A warp has 16 columns of outputs.
template <class F> struct WeightsFirst : Operands<F> {
  using Operands<F>::product, Operands<F>::fixed, Operands<F>::room;
  using Operands<F>::Operands;
  static constexpr int N = F::N;
  static_assert(N == 64 && F::ROWS % 16 == 0 && F::HALVES == 1);
  static constexpr bool APART = false;
  using Sums = int[F::ROWS / 2];
  // As above, but that lanes write down columns.
  static constexpr int SUMS = 4 * N + 16, OUTPUTS = 2 * N + 16;

  __device__ __forceinline__ void multiply(uint32_t team, Sums& sums) const {
    Operands<F>::template multiply<true>(0, room, team * N * BLOCK_K, sums);
  }

  template <typename T>
  __device__ __forceinline__ void write_sums(const Place& here, uint32_t team, const Sums& sums) const {
    const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, own = warp * 16 + lane / 4;
    const uint32_t staged = room + team * (F::ROWS * OUTPUTS);
    const Columns<N>& columns = fixed.columns[team];
    const float scales[2] = {columns.scales[own], columns.scales[own + 8]};
    const float biases[2] = {columns.biases[own], columns.biases[own + 8]};
    const uint32_t to = staged + (lane / 16 * 8 + lane % 8) * OUTPUTS + warp * 32 + lane / 8 % 2 * 16;
#pragma unroll
    for (int n = 0; n < F::ROWS / 8; n += 2) {
      uint32_t outputs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x_scale = *reinterpret_cast<const float2*>(fixed.x_scales + 8 * (n + i / 2) + lane % 4 * 2);
        const int at = 4 * n + 2 * i;
        outputs[i] = pack2<T>(fmaf(float(sums[at]), x_scale.x * scales[i % 2], biases[i % 2]),
                              fmaf(float(sums[at + 1]), x_scale.y * scales[i % 2], biases[i % 2]));
      }
      store_matrices<true>(to + 8 * n * OUTPUTS, outputs);
    }
    barrier(2 + team, 128);
    const Epilogue& e = product.epilogue;
    const uint32_t column = lane % 8 * 8;
    if (here.row[0] + column >= here.limit) return;
#pragma unroll
    for (int i = 0; i < F::ROWS; i += 16) {
      const uint32_t row = i + warp * 4 + lane / 8, m = here.m_tile * F::ROWS + row;
      const uint4 words = load_shared(staged + row * OUTPUTS + 2 * column);
      if (m < product.m) store16(static_cast<uint16_t*>(e.out) + m * e.stride + here.column[0] + column, words);
    }
  }

  __device__ __forceinline__ void write_rows(const Place& here, uint32_t team, const Sums& sums) const {
    const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
    const uint32_t staged = room + team * (F::ROWS * SUMS);
    const uint32_t to = staged + lane % 4 * 2 * SUMS + (warp * 16 + lane / 4) * 4;
#pragma unroll
    for (int n = 0; n < F::ROWS / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) store_shared(to + (8 * n + i % 2) * SUMS + i / 2 * 32, sums[4 * n + i]);
    barrier(2 + team, 128);
    const uint32_t across = gates(product) ? F::PIECE : N;
#pragma unroll 1
    for (uint32_t row = warp * 8 + lane / 4; row < F::ROWS; row += 32)
#pragma unroll 1
      for (uint32_t column = lane % 4 * 8; column < across; column += 32) {
        const uint32_t m = here.m_tile * F::ROWS + row;
        if (m >= product.m || here.row[0] + column >= here.limit) continue;
        const uint32_t from = staged + row * SUMS + 4 * column;
        int of[8], gated[8];
        read_sums(from, of);
        if (gates(product)) read_sums(from + 4 * F::PIECE, gated);
        finish8(product, here, fixed.columns[team], m, fixed.x_scales[row], column, of, gated);
      }
  }
};

// Of the warps that multiply.
template <class F, class Of> __device__ __forceinline__ void consume(const Of& blocks) {
  const int team = __shfl_sync(FULL, int(threadIdx.x) / 128, 0);
  const Place here = blocks.place(team % F::BESIDE);
  if constexpr (F::HALVES > 1) {
    blocks.template make<0>(here, false);
  } else {
    cluster_wait();
    wait_previous();
    allow_next();
  }
  typename Of::Sums sums;
  blocks.multiply(team, sums);
  // What the epilogue needs of columns was put down by warps of which a team with rows of its own has not heard yet.
  if (F::HALVES > 1) barrier_wait(blocks.quantized(F::HALVES - 1, 0), 0);
  const Epilogue& e = blocks.product.epilogue;
  const bool plain = e.activation == ACT_NONE && !e.residuals[0] && !e.residuals[1];
  // Those whose x and W sums take the place of are through with them.
  if (Of::APART && plain)
    barrier(2 + team, 128);
  else
    barrier(1, F::CONSUMERS);
  if (plain && e.out_dtype == BF16)
    blocks.template write_sums<__nv_bfloat16>(here, team, sums);
  else if (plain && e.out_dtype == F16)
    blocks.template write_sums<__half>(here, team, sums);
  else
    blocks.write_rows(here, team, sums);
}

template <class F, class Of> __device__ __forceinline__ void direct(const W8A8DirectParams& p) {
  extern __shared__ char shared[];
  __shared__ typename Of::Fixed fixed;
  // At the same address in all blocks of a cluster, since they are alike.
  const Of blocks(p, fixed, (shared_address(shared) + 1023) & ~1023u);
  if (threadIdx.x >= F::THREADS - WARP) blocks.prepare();
  cluster_arrive();
  if (threadIdx.x < F::CONSUMERS) {
    consume<F>(blocks);
  } else if (threadIdx.x < F::MADE) {
    const uint32_t beside = min((threadIdx.x - F::CONSUMERS) / F::N, F::BESIDE - 1u);
    blocks.template make<F::HALVES - 1>(blocks.place(beside), true);
  } else {
    if (threadIdx.x == F::MADE) blocks.produce();
    __syncwarp();
    cluster_wait();
  }
}

// Rows of x that are no whole warpgroup's are the second operand.
#define DIRECT(ROWS, COLUMNS, TEAMS, BESIDE, MAKERS, ASKS, CLUSTER, LANES, PACKS, WHOLE, EARLY) \
  DIRECT_FORM(ROWS##x##COLUMNS##_##CLUSTER, ROWS % 64,                                          \
              Form<ROWS, TEAMS, BESIDE, COLUMNS / BESIDE, MAKERS, ASKS, CLUSTER, LANES, PACKS, WHOLE, EARLY>)
#define DIRECT_FORM(NAME, REST, ...)                                                             \
  extern "C" __global__ void __launch_bounds__(__VA_ARGS__::THREADS, 1)                          \
      w8a8_direct_##NAME(const __grid_constant__ W8A8DirectParams p) {                           \
    using Of = std::conditional_t<REST == 0, RowsFirst<__VA_ARGS__>, WeightsFirst<__VA_ARGS__>>; \
    direct<__VA_ARGS__, Of>(p);                                                                  \
  }

FUSED_W8A8_DIRECT(DIRECT)

#endif
