// y = act(s x_q (t W_q)^T + bias) + residuals on Hopper (w8a8.cuh) in one launch: blocks make int8 of x
// themselves, as quantize_rows.cu does. Where the product is small, a launch of its own takes as long.
//
// The blocks of a cluster lie side by side: each quantizes its share of their rows of x and sends the codes
// to the shared memory of all, where all of k is then. W comes by the bulk copy engine meanwhile. What
// arrives is counted where it arrives: no block waits behind a fence of the cluster's memory, which takes
// as long as a small product.
// Other architectures, which the host asks for none of this, have nothing to read here.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "bulk_copy.cuh"
#include "clusters.cuh"
#include "int8_rows.cuh"
#include "mma.cuh"
#include "rows.cuh"
#include "w8a8_rows.cuh"
#include "wgmma.cuh"

using namespace fused;

struct Params {
  TensorMap weights[3];  // tiles of half a group's rows
  Product product;       // without x and its scales
  const void* x;         // [m, k] of f16 or bf16
  uint32_t stages;       // of W in shared memory
  int early;             // whether W may be read before the kernel in front is complete
};

constexpr int BLOCK_K = 128, MOST_STAGES = 12;
constexpr int PACK = 8;  // values of x that a lane reads at once

// Between what threads have written to shared memory, or waited for, and what the tensor cores read there.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// GROUPS of four warps beside one another, with N rows of W each, and HELPERS that only quantize; lanes have
// PACKS packs of a row of x at most; CLUSTER blocks share rows of x.
template <int GROUPS, int HELPERS, int N, int CLUSTER, int PACKS> struct Direct {
  static constexpr int CONSUMERS = 128 * GROUPS, WARPS = 4 * (GROUPS + HELPERS);
  static constexpr int THREADS = WARP * (WARPS + 1);
  static constexpr int ROWS = 64, COLUMNS = N * GROUPS;
  static constexpr int PIECE = N / 2, STAGE = COLUMNS * BLOCK_K;
  static constexpr int SHARE = (ROWS + CLUSTER * WARPS - 1) / (CLUSTER * WARPS);  // rows of a warp
  // Bytes from one row of sums, or of outputs, to the next: what lanes write together meets no bank twice.
  static constexpr int SUMS = 4 * N + 32, OUTPUTS = 2 * N + 16;

  struct Fixed {
    alignas(8) uint64_t full[MOST_STAGES], free[MOST_STAGES], quantized;
    alignas(16) Columns<N> columns[GROUPS];
    float x_scales[ROWS];
  };

  const Params& p;
  const Product& product;
  Fixed& fixed;
  const uint32_t room, steps, rank;

  __device__ __forceinline__ Direct(const Params& p, Fixed& fixed, uint32_t room)
      : p(p), product(p.product), fixed(fixed), room(room), steps((p.product.k + BLOCK_K - 1) / BLOCK_K),
        rank(rank_in_cluster()) {}

  __device__ __forceinline__ uint32_t full(uint32_t stage) const { return shared_address(fixed.full + stage); }
  __device__ __forceinline__ uint32_t free(uint32_t stage) const { return shared_address(fixed.free + stage); }
  __device__ __forceinline__ uint32_t weights(uint32_t stage) const { return room + steps * ROWS * BLOCK_K + stage * STAGE; }
  __device__ __forceinline__ Place place(uint32_t group) const {
    return Place::of<N>(product, blockIdx.x * GROUPS + group);
  }

  __device__ __forceinline__ void prepare() const {
    const uint32_t lane = threadIdx.x % WARP;
    if (lane < p.stages) {
      barrier_init(full(lane), 1);
      barrier_init(free(lane), 4 * GROUPS);
    }
    if (lane == 0) {
      const uint32_t quantized = shared_address(&fixed.quantized);
      barrier_init(quantized, 1 + WARPS);
      prefetch(p.weights[0]);
    }
    barriers_made();
    // Codes and scales that the other blocks send.
    if (lane == 0) {
      const int own = SHARE * WARPS, others = ROWS - max(0, min(own, ROWS - int(rank) * own));
      barrier_expect(shared_address(&fixed.quantized), others * (product.k + 4));
    }
    __syncwarp();
  }

  __device__ __forceinline__ void fetch(const Place (&places)[GROUPS], uint32_t stage, uint32_t k) const {
    barrier_expect(full(stage), STAGE);
#pragma unroll
    for (int i = 0; i < 2 * GROUPS; ++i) {
      const Place& place = places[i / 2];
      const uint32_t row = i % 2 ? place.row[1] : place.row[0];
      const TensorMap& map = p.weights[i % 2 ? place.part[1] : place.part[0]];
      bulk_copy_rows(weights(stage) + i * PIECE * BLOCK_K, map, full(stage), k, row);
    }
  }

  // One thread asks for all of W.
  __device__ __forceinline__ void produce() const {
    Place places[GROUPS];
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) places[i] = place(i);
    if (!p.early) wait_previous();
    uint32_t stage = 0, phase = 0;
#pragma unroll 1
    for (uint32_t step = 0; step < steps; ++step) {
      if (step >= p.stages) barrier_wait(free(stage), phase ^ 1);
      fetch(places, stage, step * BLOCK_K);
      if (++stage == p.stages) stage = 0, phase ^= 1;
    }
  }

  // This warp's rows of x, in int8, to all blocks of the cluster.
  template <typename T> __device__ __forceinline__ void quantize(uint32_t m_tile) const {
    const uint32_t lane = threadIdx.x % WARP, packs = product.k / PACK;
    const uint32_t first = (rank * WARPS + threadIdx.x / WARP) * SHARE;
    Pack<T, PACK> x[SHARE][PACKS];
#pragma unroll
    for (int r = 0; r < SHARE; ++r) {
      const uint32_t m = m_tile * ROWS + first + r;
      const T* from = static_cast<const T*>(p.x) + uint64_t(m) * product.k + lane * PACK;
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        x[r][i] = {};
        if (lane + i * WARP < packs && first + r < ROWS && m < product.m) x[r][i] = load_stream<T, PACK>(from + i * WARP * PACK);
      }
    }
    uint32_t largest = 0;
#pragma unroll
    for (int r = 0; r < SHARE; ++r) {
      Most<T, PACK> most;
#pragma unroll
      for (int i = 0; i < PACKS; ++i) most.take(x[r][i]);
      const uint32_t over_row = __reduce_max_sync(FULL, most.widened());
      if (lane == r) largest = over_row;
    }
    // Lane r has row r's.
    const Scale mine(__uint_as_float(largest));
    // All blocks of the cluster have begun, and may be written to.
    cluster_wait();
    const uint32_t barrier = shared_address(&fixed.quantized);
    uint32_t away[CLUSTER], barriers[CLUSTER];
#pragma unroll
    for (int b = 1; b < CLUSTER; ++b) {
      const uint32_t other = (rank + b) % CLUSTER;
      away[b] = in_block(room, other), barriers[b] = in_block(barrier, other);
    }
    if (lane < SHARE && first + lane < ROWS) {
      fixed.x_scales[first + lane] = mine.scale;
      const uint32_t at = shared_address(fixed.x_scales + first + lane) - room;
#pragma unroll
      for (int b = 1; b < CLUSTER; ++b) send(away[b] + at, mine.scale, barriers[b]);
    }
#pragma unroll
    for (int r = 0; r < SHARE; ++r) {
      const uint32_t row = first + r;
      if (row >= ROWS) break;
      const float inverse = __shfl_sync(FULL, mine.inverse, r);
      // As a bulk copy swizzles rows of 128 bytes.
      const uint32_t at = (lane / 16 * ROWS + row) * BLOCK_K + (lane % 16 / 2 ^ row % 8) * 16 + lane % 2 * 8;
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        if (lane + i * WARP >= packs) break;
        const auto words = code_words(codes_of(x[r][i], inverse));
        const uint32_t here = at + i * (2 * ROWS * BLOCK_K);
        store_shared(room + here, words.v[0], words.v[1]);
#pragma unroll
        for (int b = 1; b < CLUSTER; ++b) send(away[b] + here, words, barriers[b]);
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  }

  __device__ __forceinline__ void multiply(uint32_t group, int (&sums)[N / 2]) const {
    const uint32_t lane = threadIdx.x % WARP;
    uint32_t stage = 0, phase = 0, before = 0, x = room;
#pragma unroll 1
    for (uint32_t step = 0; step < steps; ++step) {
      barrier_wait(full(stage), phase);
      const uint32_t w = weights(stage) + group * N * BLOCK_K;
      const uint64_t a = descriptor<128>(x, 0), b = descriptor<128>(w, 0);
      wgmma_fence();
      // There are zeros behind W's k: what lies behind that of x does not matter.
#pragma unroll
      for (int i = 0; i < 2; ++i) wgmma(sums, a + 2 * i, b + 2 * i, i > 0 || step > 0);
      if (step * BLOCK_K + 64 < product.k) {
#pragma unroll
        for (int i = 2; i < 4; ++i) wgmma(sums, a + 2 * i, b + 2 * i, 1);
      }
      wgmma_commit();
      if (step > 0) {
        wgmma_wait<1>();
        if (lane == 0) barrier_arrive(free(before));
      }
      before = stage, x += ROWS * BLOCK_K;
      if (++stage == p.stages) stage = 0, phase ^= 1;
    }
    wgmma_wait<0>();
    settle(sums);
  }

  // Sums of 16 rows and N columns, scaled, by way of shared memory, so that a warp writes whole pieces of rows.
  template <typename T>
  __device__ __forceinline__ void write_sums(const Place& here, uint32_t group, uint32_t first, const int (&sums)[N / 2]) const {
    const uint32_t lane = threadIdx.x % WARP, staged = room + threadIdx.x / WARP * (16 * OUTPUTS);
    const uint32_t to = staged + lane / 4 * OUTPUTS + lane % 4 * 4;
    const Columns<N>& columns = fixed.columns[group];
    const float x_scales[2] = {fixed.x_scales[first + lane / 4], fixed.x_scales[first + lane / 4 + 8]};
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int of[2] = {sums[4 * n + 2 * i], sums[4 * n + 2 * i + 1]};
        float y[2];
        columns.scale2(8 * n + lane % 4 * 2, x_scales[i], of, y);
        store_shared(to + i * 8 * OUTPUTS + 16 * n, pack2<T>(y[0], y[1]));
      }
    __syncwarp();
    const Epilogue& e = product.epilogue;
#pragma unroll
    for (int i = 0; i < N / 16; ++i) {
      const uint32_t unit = lane + i * WARP, row = unit / (N / 8), column = unit % (N / 8) * 8;
      const uint32_t m = here.m_tile * ROWS + first + row;
      const uint4 words = load_shared(staged + row * OUTPUTS + 2 * column);
      if (m < product.m && here.row[0] + column < here.limit)
        store16(static_cast<uint16_t*>(e.out) + m * e.stride + here.column[0] + column, words);
    }
  }

  // The same with all that may be behind the sums.
  __device__ __forceinline__ void write_rows(const Place& here, uint32_t group, uint32_t first, const int (&sums)[N / 2]) const {
    const uint32_t lane = threadIdx.x % WARP, staged = room + threadIdx.x / WARP * (16 * SUMS);
    const uint32_t to = staged + lane / 4 * SUMS + lane % 4 * 8;
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        store_shared(to + i * 8 * SUMS + 32 * n, sums[4 * n + 2 * i], sums[4 * n + 2 * i + 1]);
    __syncwarp();
    const uint32_t across = gates(product) ? PIECE : N;
#pragma unroll 1
    for (uint32_t half = 0; half < 16; half += 8)
#pragma unroll 1
      for (uint32_t column = lane % 4 * 8; column < across; column += 32) {
        const uint32_t row = half + lane / 4, m = here.m_tile * ROWS + first + row;
        if (m >= product.m || here.row[0] + column >= here.limit) continue;
        const uint32_t from = staged + row * SUMS + 4 * column;
        int sums[8], gated[8];
        read_sums(from, sums);
        if (gates(product)) read_sums(from + 4 * PIECE, gated);
        finish8(product, here, fixed.columns[group], m, fixed.x_scales[first + row], column, sums, gated);
      }
  }

  static __device__ __forceinline__ void read_sums(uint32_t from, int (&sums)[8]) {
    const uint4 a = load_shared(from), b = load_shared(from + 16);
    sums[0] = a.x, sums[1] = a.y, sums[2] = a.z, sums[3] = a.w;
    sums[4] = b.x, sums[5] = b.y, sums[6] = b.z, sums[7] = b.w;
  }

  __device__ __forceinline__ void consume() const {
    const int group = __shfl_sync(FULL, int(threadIdx.x) / 128, 0);
    // Those of helpers are not used.
    const Place here = place(min(group, GROUPS - 1));
    asm volatile("" ::"r"(here.m_tile), "r"(here.row[0]), "r"(here.row[1]), "r"(here.limit) : "memory");
    wait_previous();
    allow_next();
    if (product.epilogue.dtype == BF16)
      quantize<__nv_bfloat16>(here.m_tile);
    else
      quantize<__half>(here.m_tile);
    if (group >= GROUPS) return;
    // What the epilogue needs comes while the tensor cores work.
    const uint32_t thread = threadIdx.x % 128;
    const bool reads = thread < N;
    typename Columns<N>::One column = {};
    if (reads) column = Columns<N>::read(product, here, thread);
    barrier_wait(shared_address(&fixed.quantized), 0);
    fence_async();
    int sums[N / 2];
    multiply(group, sums);
    if (reads) fixed.columns[group].put(thread, column);
    // All are through with x and W, in whose place sums go.
    barrier(1, CONSUMERS);
    const Epilogue& e = product.epilogue;
    const uint32_t first = threadIdx.x / WARP % 4 * 16;
    const bool plain = e.activation == ACT_NONE && !e.residuals[0] && !e.residuals[1];
    if (plain && e.out_dtype == BF16)
      write_sums<__nv_bfloat16>(here, group, first, sums);
    else if (plain && e.out_dtype == F16)
      write_sums<__half>(here, group, first, sums);
    else
      write_rows(here, group, first, sums);
  }
};

template <class Of> __device__ __forceinline__ void direct(const Params& p) {
  extern __shared__ char shared[];
  __shared__ typename Of::Fixed fixed;
  // At the same address in all blocks of a cluster, since they are alike.
  const Of blocks(p, fixed, (shared_address(shared) + 1023) & ~1023u);
  const bool produces = threadIdx.x >= WARP * Of::WARPS;
  if (produces) blocks.prepare();
  cluster_arrive();
  if (!produces) {
    blocks.consume();
  } else {
    if (threadIdx.x == WARP * Of::WARPS) blocks.produce();
    __syncwarp();
    cluster_wait();
  }
}

#define DIRECT(NAME, ...)                                                         \
  extern "C" __global__ void __launch_bounds__(Direct<__VA_ARGS__>::THREADS, 1)   \
      w8a8_direct_##NAME(const __grid_constant__ Params p) {                      \
    direct<Direct<__VA_ARGS__>>(p);                                               \
  }

DIRECT(64x128_4, 2, 0, 64, 4, 3)
DIRECT(64x48_4, 1, 1, 48, 4, 6)
DIRECT(64x192_3, 2, 1, 96, 3, 6)

#endif
