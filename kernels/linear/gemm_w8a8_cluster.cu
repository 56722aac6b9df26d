// W8A8 GEMM for small products on Hopper (gemm_w8a8.cuh) in one launch: CTAs quantize x themselves
// (gemm_w8a8_cluster.cuh). A separate kernel for that takes as long as the product.
// Empty for other architectures, which never run it.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "common/mma.cuh"
#include "common/rows.cuh"
#include "linear/gemm_w8a8_cluster.cuh"

using namespace fused;

// A warpgroup has 64 rows of x, the first factor, and N of W: a warp has 16 rows of outputs.
template <class F> struct RowsFirst : Operands<F> {
  using Operands<F>::product, Operands<F>::fixed, Operands<F>::room;
  using Operands<F>::Operands;
  static constexpr int N = F::N;
  using Sums = int[N / 2];
  // Columns that are scaled, and then written, at a time.
  static constexpr int CHUNK = N % 64 ? 48 : 64;
  // Bytes from one row of sums, or of outputs, to the next: what lanes write together meets no bank twice.
  static constexpr int SUMS = 4 * N + 32, OUTPUTS = 2 * N + 16;

  __device__ __forceinline__ void multiply(uint32_t warpgroup, Sums& sums) const {
    const uint32_t half = warpgroup / F::BESIDE, x_at = room + half * (64 * BLOCK_K);
    Operands<F>::template multiply<false>(half, x_at, warpgroup % F::BESIDE * N * BLOCK_K, sums);
  }

  // Outputs take the place of a warp's rows of x while other warpgroups still multiply: each warp that of another K
  // block.
  static constexpr bool APART = F::HALVES > 1;
  static_assert(!APART || 16 * OUTPUTS <= 64 * BLOCK_K);
  __device__ __forceinline__ uint32_t room_of_outputs(uint32_t warpgroup) const {
    if (APART) return room + (threadIdx.x / WARP % 4 * F::ROWS + warpgroup / F::BESIDE * 64) * BLOCK_K;
    return room + threadIdx.x / WARP * (16 * OUTPUTS);
  }

  template <typename T>
  __device__ __forceinline__ void write_sums(const Place& here, uint32_t warpgroup, const Sums& sums) const {
    if (product.epilogue.bias)
      write_chunks<T, true>(here, warpgroup, sums);
    else
      write_chunks<T, false>(here, warpgroup, sums);
  }

  // Outputs of the chunk of columns from FROM on, by way of shared memory, so that a warp writes whole pieces of rows.
  template <typename T, bool BIASED, int FROM = 0>
  __device__ __forceinline__ void write_chunks(const Place& here, uint32_t warpgroup, const Sums& sums) const {
    constexpr int UNITS = CHUNK / 8;
    const uint32_t lane = threadIdx.x % WARP, first = warpgroup / F::BESIDE * 64 + threadIdx.x / WARP % 4 * 16;
    const uint32_t staged = room_of_outputs(warpgroup) + 2 * FROM;
    const Columns<N>& columns = fixed.columns[warpgroup % F::BESIDE];
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
    if constexpr (FROM + CHUNK < N) write_chunks<T, BIASED, FROM + CHUNK>(here, warpgroup, sums);
  }

  // The same with all that may be behind the sums.
  __device__ __forceinline__ void write_rows(const Place& here, uint32_t warpgroup, const Sums& sums) const {
    const uint32_t lane = threadIdx.x % WARP, first = warpgroup / F::BESIDE * 64 + threadIdx.x / WARP % 4 * 16;
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
        const Columns<N>& columns = fixed.columns[warpgroup % F::BESIDE];
        epilogue8(product, here, columns, m, fixed.x_scales[first + row], column, of, gated);
      }
  }
};

// A warpgroup has 64 rows of W, the first factor, and all rows of x, which need not be 64: the fewer they are, the less
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

  __device__ __forceinline__ void multiply(uint32_t warpgroup, Sums& sums) const {
    Operands<F>::template multiply<true>(0, room, warpgroup * N * BLOCK_K, sums);
  }

  template <typename T>
  __device__ __forceinline__ void write_sums(const Place& here, uint32_t warpgroup, const Sums& sums) const {
    const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, own = warp * 16 + lane / 4;
    const uint32_t staged = room + warpgroup * (F::ROWS * OUTPUTS);
    const Columns<N>& columns = fixed.columns[warpgroup];
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
    barrier(2 + warpgroup, 128);
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

  __device__ __forceinline__ void write_rows(const Place& here, uint32_t warpgroup, const Sums& sums) const {
    const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
    const uint32_t staged = room + warpgroup * (F::ROWS * SUMS);
    const uint32_t to = staged + lane % 4 * 2 * SUMS + (warp * 16 + lane / 4) * 4;
#pragma unroll
    for (int n = 0; n < F::ROWS / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) store_shared(to + (8 * n + i % 2) * SUMS + i / 2 * 32, sums[4 * n + i]);
    barrier(2 + warpgroup, 128);
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
        epilogue8(product, here, fixed.columns[warpgroup], m, fixed.x_scales[row], column, of, gated);
      }
  }
};

// Of the warps that multiply.
template <class F, class Of> __device__ __forceinline__ void consume(const Of& blocks) {
  const int warpgroup = __shfl_sync(FULL, int(threadIdx.x) / 128, 0);
  const Place here = blocks.place(warpgroup % F::BESIDE);
  if constexpr (F::HALVES > 1) {
    blocks.template produce_x<0>(here, false);
  } else {
    cluster_wait();
    pdl_wait();
    pdl_launch();
  }
  typename Of::Sums sums;
  blocks.multiply(warpgroup, sums);
  // Scales and bias of columns were stored by warps that a warpgroup with rows of its own has not synchronized with.
  if (F::HALVES > 1) barrier_wait(blocks.quantized(F::HALVES - 1, 0), 0);
  const Epilogue& e = blocks.product.epilogue;
  const bool plain = e.activation == ACT_NONE && !e.residuals[0] && !e.residuals[1];
  // Those whose x and W sums take the place of are through with them.
  if (Of::APART && plain)
    barrier(2 + warpgroup, 128);
  else
    barrier(1, F::CONSUMERS);
  if (plain && e.out_dtype == BF16)
    blocks.template write_sums<__nv_bfloat16>(here, warpgroup, sums);
  else if (plain && e.out_dtype == F16)
    blocks.template write_sums<__half>(here, warpgroup, sums);
  else
    blocks.write_rows(here, warpgroup, sums);
}

template <class F, class Of> __device__ __forceinline__ void gemm_w8a8_cluster(const W8A8ClusterParams& p) {
  extern __shared__ char shared[];
  __shared__ typename Of::Fixed fixed;
  // At the same address in all blocks of a cluster, since they are alike.
  const Of blocks(p, fixed, (shared_address(shared) + 1023) & ~1023u);
  if (threadIdx.x >= F::THREADS - WARP) blocks.prepare();
  cluster_arrive();
  if (threadIdx.x < F::CONSUMERS) {
    consume<F>(blocks);
  } else if (threadIdx.x < F::WORKERS) {
    const uint32_t beside = min((threadIdx.x - F::CONSUMERS) / F::N, F::BESIDE - 1u);
    blocks.template produce_x<F::HALVES - 1>(blocks.place(beside), true);
  } else {
    if (threadIdx.x == F::WORKERS) blocks.load_w();
    __syncwarp();
    cluster_wait();
  }
}

// Rows of x that are no whole warpgroup's are the second operand.
#define FORM(ROWS, COLUMNS, WARPGROUPS, BESIDE, PRODUCERS, LOADS_W, CLUSTER, LANES, PACKS, WHOLE, EARLY) \
  FORM_OF(ROWS##x##COLUMNS##_##CLUSTER, ROWS % 64,                                                       \
              Form<ROWS, WARPGROUPS, BESIDE, COLUMNS / BESIDE, PRODUCERS, LOADS_W, CLUSTER, LANES, PACKS, WHOLE, EARLY>)
#define FORM_OF(NAME, REST, ...)                                                                 \
  extern "C" __global__ void __launch_bounds__(__VA_ARGS__::THREADS, 1)                          \
      gemm_w8a8_cluster_##NAME(const __grid_constant__ W8A8ClusterParams p) {                    \
    using Of = std::conditional_t<REST == 0, RowsFirst<__VA_ARGS__>, WeightsFirst<__VA_ARGS__>>; \
    gemm_w8a8_cluster<__VA_ARGS__, Of>(p);                                                       \
  }

FUSED_W8A8_CLUSTER(FORM)

#endif
