// y = act(s x_q (t W_q)^T + bias) + residuals on Hopper (w8a8.cuh) in one launch: blocks make int8 of x
// themselves, as quantize_rows.cu does. Where the product is small, a launch of its own takes as long.
//
// The blocks of a cluster lie side by side: each quantizes its share of their rows of x and sends the codes
// to the shared memory of all, where all of k is then. This is what takes longest, so warps of their own do it,
// the others multiply what has come, and W, by the bulk copy engine, comes behind x. What arrives is counted
// where it arrives: no block waits behind a fence of the cluster's memory, which takes as long as a small product.
// Other architectures, which the host asks for none of this, have nothing to read here.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include <type_traits>

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
};

constexpr int BLOCK_K = 128, MOST_STAGES = 12;
constexpr int PACK = 8;  // values of x that a lane reads at once

// Between what threads have written to shared memory, or waited for, and what the tensor cores read there.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// GROUPS of four warps beside one another, with N rows of W each, and WARPS that make int8 of x; lanes have PACKS
// packs of a row of x at most; CLUSTER blocks share rows of x. WHOLE: there is a stage for each step.
template <int GROUPS, int WARPS, int N, int CLUSTER, int PACKS, bool WHOLE> struct Direct {
  static constexpr int CONSUMERS = 128 * GROUPS;  // threads that multiply
  static constexpr int ALL = CONSUMERS + WARP * WARPS, THREADS = ALL + WARP;
  static constexpr int ROWS = 64, COLUMNS = N * GROUPS;
  static constexpr int PIECE = N / 2, STAGE = COLUMNS * BLOCK_K;
  static constexpr int SHARE = (ROWS + CLUSTER * WARPS - 1) / (CLUSTER * WARPS);  // rows of a warp
  static constexpr int PART = WARP * PACK;  // values of a row that a warp has at a time: two steps
  // Bytes from one row of sums, or of outputs, to the next: what lanes write together meets no bank twice.
  static constexpr int SUMS = 4 * N + 32, OUTPUTS = 2 * N + 16;
  static_assert(COLUMNS <= WARP * WARPS);

  struct Fixed {
    alignas(8) uint64_t full[MOST_STAGES], free[MOST_STAGES], quantized[PACKS], loaded;
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
  __device__ __forceinline__ uint32_t quantized(uint32_t part) const { return shared_address(fixed.quantized + part); }
  __device__ __forceinline__ uint32_t loaded() const { return shared_address(&fixed.loaded); }
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
    if (lane < PACKS) barrier_init(quantized(lane), 1 + WARPS);
    if (lane == 0) barrier_init(loaded(), WARPS), prefetch(p.weights[0]);
    barriers_made();
    // Codes that the other blocks send of each part, and scales.
    if (lane < PACKS) {
      const int own = SHARE * WARPS, others = ROWS - max(0, min(own, ROWS - int(rank) * own));
      const int codes = max(0, min(PART, int(product.k) - int(lane) * PART));
      barrier_expect(quantized(lane), others * (codes + (lane == 0 ? 4 : 0)));
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

  // One thread asks for all of W, once x is there, which would have to share the way with it.
  __device__ __forceinline__ void produce() const {
    Place places[GROUPS];
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) places[i] = place(i);
    wait_previous();
    barrier_wait(loaded(), 0);
    uint32_t stage = 0, phase = 0;
#pragma unroll 1
    for (uint32_t step = 0; step < steps; ++step) {
      if (!WHOLE && step >= p.stages) barrier_wait(free(stage), phase ^ 1);
      fetch(places, stage, step * BLOCK_K);
      if (++stage == p.stages) stage = 0, phase ^= 1;
    }
  }

  // The first of this warp's rows among those of the blocks, and where the lane has its first pack of it.
  __device__ __forceinline__ uint32_t first_row() const {
    return (rank * WARPS + threadIdx.x / WARP - CONSUMERS / WARP) * SHARE;
  }
  __device__ __forceinline__ const char* first_pack(uint32_t m_tile) const {
    const uint64_t m = m_tile * ROWS + first_row();
    return static_cast<const char*>(p.x) + 2 * (m * product.k + threadIdx.x % WARP * PACK);
  }

  // This warp's rows of x, the first of which is row m, in int8 to all blocks of the cluster, a part after the other.
  // What the epilogue needs of the thread's column, if it has one, is put down while x comes.
  template <typename T>
  __device__ __forceinline__ void quantize(const char* x_at, uint32_t m, const typename Columns<N>::One* column) const {
    const uint32_t lane = threadIdx.x % WARP, packs = product.k / PACK, first = first_row();
    Pack<T, PACK> x[SHARE][PACKS];
#pragma unroll
    for (int r = 0; r < SHARE; ++r) {
      const T* from = reinterpret_cast<const T*>(x_at) + r * product.k;
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        const bool there = lane + i * WARP < packs && first + r < ROWS && m + r < product.m;
        x[r][i] = {};
        if (there) x[r][i] = load_stream<T, PACK>(from + i * WARP * PACK);
      }
    }
    if (column) put(*column);
    uint32_t largest = 0;
#pragma unroll
    for (int r = 0; r < SHARE; ++r) {
      Most<T, PACK> most;
#pragma unroll
      for (int i = 0; i < PACKS; ++i) most.take(x[r][i]);
      const uint32_t over_row = __reduce_max_sync(FULL, most.widened());
      if (lane == r) largest = over_row;
    }
    if (lane == 0) barrier_arrive(loaded());
    // Lane r has row r's.
    const Scale mine(__uint_as_float(largest));
    uint32_t away[CLUSTER];
#pragma unroll
    for (int b = 1; b < CLUSTER; ++b) away[b] = in_block(room, (rank + b) % CLUSTER) - room;
    if (lane < SHARE && first + lane < ROWS) {
      fixed.x_scales[first + lane] = mine.scale;
      const uint32_t at = shared_address(fixed.x_scales + first + lane);
#pragma unroll
      for (int b = 1; b < CLUSTER; ++b) send(away[b] + at, mine.scale, away[b] + quantized(0));
    }
    float inverse[SHARE];
#pragma unroll
    for (int r = 0; r < SHARE; ++r) inverse[r] = __shfl_sync(FULL, mine.inverse, r);
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
#pragma unroll
      for (int r = 0; r < SHARE; ++r) {
        const uint32_t row = first + r;
        if (row >= ROWS || lane + i * WARP >= packs) break;
        // As a bulk copy swizzles rows of 128 bytes.
        const uint32_t chunk = room + ((lane / 16 + 2 * i) * ROWS + row) * BLOCK_K;
        const uint32_t at = chunk + (lane % 16 / 2 ^ row % 8) * 16 + lane % 2 * 8;
        const auto words = code_words(codes_of(x[r][i], inverse[r]));
        store_shared(at, words.v[0], words.v[1]);
#pragma unroll
        for (int b = 1; b < CLUSTER; ++b) send(away[b] + at, words, away[b] + quantized(i));
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(quantized(i));
    }
  }

  __device__ __forceinline__ void multiply(uint32_t group, int (&sums)[N / 2]) const {
    const uint32_t lane = threadIdx.x % WARP;
    uint32_t stage = 0, phase = 0, before = 0, x = room;
    // A step, or half of one. How many products there are is known beforehand, since with a branch among them the
    // compiler has those behind it wait for those in front.
    const auto take = [&](uint32_t step, auto products) {
      if (step % 2 == 0) {
        barrier_wait(quantized(step / 2), 0);
        fence_async();
      }
      barrier_wait(full(stage), phase);
      const uint64_t a = descriptor<128>(x, 0), b = descriptor<128>(weights(stage) + group * N * BLOCK_K, 0);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < decltype(products)::value; ++i) wgmma(sums, a + 2 * i, b + 2 * i, i > 0 || step > 0);
      wgmma_commit();
      if (!WHOLE && step > 0) {
        wgmma_wait<1>();
        if (lane == 0) barrier_arrive(free(before));
      }
      before = stage, x += ROWS * BLOCK_K;
      if (++stage == p.stages) stage = 0, phase ^= 1;
    };
    // There are zeros behind W's k: what lies behind that of x does not matter.
    const bool half = (product.k - 1) % BLOCK_K < BLOCK_K / 2;
#pragma unroll 1
    for (uint32_t step = 0; step < steps - half; ++step) take(step, std::integral_constant<int, 4>());
    if (half) take(steps - 1, std::integral_constant<int, 2>());
    wgmma_wait<0>();
    settle(sums);
  }

  // Sums of 16 rows and N columns, scaled, by way of shared memory, so that a warp writes whole pieces of rows.
  template <typename T>
  __device__ __forceinline__ void write_sums(const Place& here, uint32_t group, uint32_t first, const int (&sums)[N / 2]) const {
    const uint32_t lane = threadIdx.x % WARP, staged = room + threadIdx.x / WARP * (16 * OUTPUTS);
    const Columns<N>& columns = fixed.columns[group];
    const float x_scales[2] = {fixed.x_scales[first + lane / 4], fixed.x_scales[first + lane / 4 + 8]};
    uint32_t outputs[N / 16][4];
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int of[2] = {sums[4 * n + 2 * i], sums[4 * n + 2 * i + 1]};
        float y[2];
        columns.scale2(8 * n + lane % 4 * 2, x_scales[i], of, y);
        outputs[n / 2][n % 2 * 2 + i] = pack2<T>(y[0], y[1]);
      }
    const uint32_t to = staged + lane % 16 * OUTPUTS + lane / 16 * 16;
#pragma unroll
    for (int n = 0; n < N / 16; ++n) store_matrices(to + 32 * n, outputs[n]);
    __syncwarp();
    uint4 words[N / 16];
#pragma unroll
    for (int i = 0; i < N / 16; ++i) {
      const uint32_t unit = lane + i * WARP;
      words[i] = load_shared(staged + unit / (N / 8) * OUTPUTS + unit % (N / 8) * 16);
    }
    const Epilogue& e = product.epilogue;
#pragma unroll
    for (int i = 0; i < N / 16; ++i) {
      const uint32_t unit = lane + i * WARP, row = unit / (N / 8), column = unit % (N / 8) * 8;
      const uint32_t m = here.m_tile * ROWS + first + row;
      if (m < product.m && here.row[0] + column < here.limit)
        store16(static_cast<uint16_t*>(e.out) + m * e.stride + here.column[0] + column, words[i]);
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

  // What the epilogue needs of the thread's column, if it has one.
  __device__ __forceinline__ typename Columns<N>::One read_column(const Place& here) const {
    const uint32_t column = threadIdx.x - CONSUMERS;
    if (column < COLUMNS) return Columns<N>::read(product, here, column % N);
    return {};
  }
  __device__ __forceinline__ void put(const typename Columns<N>::One& one) const {
    const uint32_t column = threadIdx.x - CONSUMERS;
    if (column < COLUMNS) fixed.columns[column / N].put(column % N, one);
  }

  // Of the warps that quantize.
  __device__ __forceinline__ void prepare_operands() const {
    const Place here = place(min((threadIdx.x - CONSUMERS) / N, GROUPS - 1u));
    const char* x = first_pack(here.m_tile);
    cluster_wait();
    wait_previous();
    allow_next();
    typename Columns<N>::One column = read_column(here);
    // Where rows of x are long it is faster to ask for them behind the columns (by 6 % on an H100), elsewhere beside.
    if (PACKS > 3) put(column);
    const auto* to_put = PACKS > 3 ? nullptr : &column;
    const uint32_t m = here.m_tile * ROWS + first_row();
    if (product.epilogue.dtype == BF16)
      quantize<__nv_bfloat16>(x, m, to_put);
    else
      quantize<__half>(x, m, to_put);
  }

  __device__ __forceinline__ void consume() const {
    const int group = __shfl_sync(FULL, int(threadIdx.x) / 128, 0);
    const Place here = place(group);
    cluster_wait();
    wait_previous();
    allow_next();
    int sums[N / 2];
    multiply(group, sums);
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
  const bool produces = threadIdx.x >= Of::ALL;
  if (produces) blocks.prepare();
  cluster_arrive();
  if (threadIdx.x < Of::CONSUMERS) {
    blocks.consume();
  } else if (!produces) {
    blocks.prepare_operands();
  } else {
    if (threadIdx.x == Of::ALL) blocks.produce();
    __syncwarp();
    cluster_wait();
  }
}

#define DIRECT(NAME, ...)                                                         \
  extern "C" __global__ void __launch_bounds__(Direct<__VA_ARGS__>::THREADS, 1)   \
      w8a8_direct_##NAME(const __grid_constant__ Params p) {                      \
    direct<Direct<__VA_ARGS__>>(p);                                               \
  }

DIRECT(64x64_4, 1, 8, 64, 4, 3, true)
DIRECT(64x128_4, 2, 8, 64, 4, 3, false)
DIRECT(64x48_4, 1, 8, 48, 4, 6, true)
DIRECT(64x192_3, 2, 11, 96, 3, 6, false)

#endif
