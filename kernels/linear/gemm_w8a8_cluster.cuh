// W8A8 GEMM for small products on Hopper in one launch (gemm_w8a8_cluster.cu): how operands come to shared memory and
// from there to the tensor cores.
//
// The CTAs of a cluster lie side by side along N. Each quantizes its share of their rows of x to int8, as
// quantize_rows.cu does, and sends it to the shared memory of all (DSMEM), where all of K is then. This takes longest,
// so what has arrived is multiplied at once, and W is loaded by TMA after x. Arrivals are counted by mbarriers of the
// receiver: no CTA waits for a fence of the cluster, which takes as long as a small product.
#pragma once

#include <type_traits>

#include "common/cluster.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "formats/int8_rows.cuh"
#include "linear/gemm_w8a8_epilogue.cuh"

namespace fused {

constexpr int BLOCK_K = W8A8_BLOCK_K, MAX_STAGES = W8A8_CLUSTER_MAX_STAGES;
constexpr int X_LOADED = 4;  // a named barrier, after those of gemm_w8a8_cluster.cu
// Values of x that a lane quantizes at once: stores to other CTAs take as long for 8 bytes as for 16.
constexpr int PACK = 16;
constexpr int PART = 2 * BLOCK_K;  // values of a row of x that are counted together

// Orders what threads have written to shared memory, or waited for, before what the tensor cores read there.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Keeps the address of a barrier in a register: the compiler would compute it again at every use.
__device__ __forceinline__ uint32_t kept(uint32_t address) {
  asm volatile("" : "+r"(address));
  return address;
}

// A CTA: WARPGROUPS multiply, BESIDE of them with N rows of W each side by side, and ROWS rows of x. PRODUCERS are
// warps that quantize x, LANES for a row, with PACKS packs of it each at most. The CTAs of a CLUSTER share rows of x.
// WHOLE: there is a stage for each K block. W is loaded by a warp of its own, after x, or, where it is so much that
// the memory would idle meanwhile, by the last of PRODUCERS as soon as it has issued the loads of its own rows
// (LOADS_W).
//
// Where two warpgroups have rows of their own (HALVES), they quantize those of the first themselves before they
// multiply, and PRODUCERS those of the second.
template <int ROWS_, int WARPGROUPS, int BESIDE_, int N_, int PRODUCERS_, bool LOADS_W_, int CLUSTER_, int LANES_,
          int PACKS_, bool WHOLE_, int EARLY_>
struct Form {
  static constexpr int ROWS = ROWS_, BESIDE = BESIDE_, N = N_, PRODUCERS = PRODUCERS_, CLUSTER = CLUSTER_;
  static constexpr int LANES = LANES_, PACKS = PACKS_;
  static constexpr bool LOADS_W = LOADS_W_, WHOLE = WHOLE_;
  static constexpr uint32_t EARLY = EARLY_;
  static constexpr int HALVES = WARPGROUPS / BESIDE;
  static constexpr int CONSUMERS = 128 * WARPGROUPS;  // threads that multiply
  static constexpr int WORKERS = CONSUMERS + WARP * PRODUCERS, THREADS = WORKERS + (LOADS_W ? 0 : WARP);
  static constexpr int COLUMNS = N * BESIDE, PIECE = N / 2, STAGE = COLUMNS * BLOCK_K;
  static constexpr int AT_ONCE = WARP / LANES;  // rows of x that a warp has beside one another
  static constexpr int HALF = ROWS / HALVES;
  static constexpr int SHARE =
      (HALF + CLUSTER * PRODUCERS * AT_ONCE - 1) / (CLUSTER * PRODUCERS * AT_ONCE);  // of a lane
  static constexpr int OF_BLOCK = SHARE * PRODUCERS * AT_ONCE;  // rows of each half
  static constexpr int PARTS = (PACKS * LANES * PACK + PART - 1) / PART;
  static_assert(COLUMNS <= WARP * PRODUCERS);
  static_assert(WHOLE || !LOADS_W);  // a producer of x must not wait for a free stage
  static_assert(LANES >= 8);  // which so write 128 bytes of a row together
  static_assert(HALVES == 1 || (CONSUMERS == WARP * PRODUCERS && OF_BLOCK * CLUSTER == HALF && HALF == 64));
};

template <class F> struct Operands {
  static constexpr int N = F::N, CLUSTER = F::CLUSTER;
  using Scales = Columns<N>;

  struct Fixed {
    alignas(8) uint64_t full[MAX_STAGES], free[MAX_STAGES], quantized[F::HALVES * F::PARTS], loaded;
    alignas(16) Scales columns[F::BESIDE];
    float x_scales[F::ROWS];
  };
  static_assert(sizeof(Fixed) <= 4096);  // FIXED of gemm_w8a8_cluster.rs

  const W8A8ClusterParams& p;
  const W8A8Product& product;
  Fixed& fixed;
  const uint32_t room, k_blocks, rank;

  __device__ __forceinline__ Operands(const W8A8ClusterParams& p, Fixed& fixed, uint32_t room)
      : p(p), product(p.product), fixed(fixed), room(room), k_blocks((p.product.k + BLOCK_K - 1) / BLOCK_K),
        rank(rank_in_cluster()) {}

  __device__ __forceinline__ uint32_t full(uint32_t stage) const { return shared_address(fixed.full + stage); }
  __device__ __forceinline__ uint32_t free(uint32_t stage) const { return shared_address(fixed.free + stage); }
  __device__ __forceinline__ uint32_t quantized(uint32_t half, uint32_t part) const {
    return shared_address(fixed.quantized + half * F::PARTS + part);
  }
  __device__ __forceinline__ uint32_t loaded() const { return shared_address(&fixed.loaded); }
  __device__ __forceinline__ uint32_t weights(uint32_t stage) const {
    return room + k_blocks * F::ROWS * BLOCK_K + stage * F::STAGE;
  }
  __device__ __forceinline__ Place place(uint32_t beside) const {
    return Place::of<N>(product, blockIdx.x * F::BESIDE + beside);
  }

  // Of the last warp.
  __device__ __forceinline__ void prepare() const {
    const uint32_t lane = threadIdx.x % WARP;
    if (lane < p.stages) {
      barrier_init(full(lane), 1);
      barrier_init(free(lane), F::CONSUMERS / WARP);
    }
    if (lane < F::HALVES * F::PARTS) barrier_init(quantized(0, lane), 1 + F::PRODUCERS);
    if (lane == 0) barrier_init(loaded(), F::PRODUCERS), prefetch_tensor_map(p.weights[0]);
    barriers_made();
    // Codes that the other blocks send of each part, and scales.
    if (lane < F::HALVES * F::PARTS) {
      const int part = lane % F::PARTS;
      const int others = F::HALF - max(0, min(F::OF_BLOCK, F::HALF - int(rank) * F::OF_BLOCK));
      const int codes = max(0, min(PART, int(product.k) - part * PART));
      barrier_expect(quantized(0, lane), others * (codes + (part == 0 ? 4 : 0)));
    }
    __syncwarp();
  }

  __device__ __forceinline__ void fetch(const Place (&places)[F::BESIDE], uint32_t stage, uint32_t k) const {
    barrier_expect(full(stage), F::STAGE);
#pragma unroll
    for (int i = 0; i < 2 * F::BESIDE; ++i) {
      const Place& place = places[i / 2];
      const uint32_t row = i % 2 ? place.row[1] : place.row[0];
      const TensorMap& map = p.weights[i % 2 ? place.part[1] : place.part[0]];
      bulk_copy_rows(weights(stage) + i * F::PIECE * BLOCK_K, map, full(stage), k, row);
    }
  }

  // One thread loads all of W.
  __device__ __forceinline__ void load_w() const {
    Place places[F::BESIDE];
#pragma unroll
    for (int i = 0; i < F::BESIDE; ++i) places[i] = place(i);
    uint32_t k_block = 0, stage = 0, phase = 0;
    const auto up_to = [&](uint32_t end) {
#pragma unroll 1
      for (; k_block < end; ++k_block) {
        if (!F::WHOLE && k_block >= p.stages) barrier_wait(free(stage), phase ^ 1);
        fetch(places, stage, k_block * BLOCK_K);
        if (++stage == p.stages) stage = 0, phase ^= 1;
      }
    };
    if (F::EARLY > 0) up_to(min(F::EARLY, k_blocks));
    if (!F::LOADS_W) {
      // x would have to share the way with it.
      pdl_wait();
      barrier_wait(loaded(), 0);
    }
    up_to(k_blocks);
  }

  // The first of this lane's rows among those of the blocks.
  template <int HALF> __device__ __forceinline__ uint32_t first_row() const {
    const uint32_t producer = rank * F::PRODUCERS + (threadIdx.x - (F::HALVES > HALF + 1 ? 0 : F::CONSUMERS)) / WARP;
    return HALF * F::HALF + producer * (F::SHARE * F::AT_ONCE) + threadIdx.x % WARP / F::LANES;
  }

  // The largest magnitude over the lanes that share a row.
  static __device__ __forceinline__ uint32_t over_lanes(uint32_t most) {
    if constexpr (F::LANES == WARP) {
      return __reduce_max_sync(FULL, most);
    } else {
#pragma unroll
      for (int other = F::LANES / 2; other; other /= 2) most = max(most, __shfl_xor_sync(FULL, most, other));
      return most;
    }
  }

  // In two accesses, of which the second finds in the L1 cache what the first has brought there with its own half.
  template <typename T> static __device__ __forceinline__ Pack<T, PACK> read(const T* x) {
    const Pack<T, PACK / 2> halves[2] = {load<T, PACK / 2>(x), load<T, PACK / 2>(x + PACK / 2)};
    Pack<T, PACK> pack;
#pragma unroll
    for (int i = 0; i < PACK; ++i) pack.v[i] = halves[i / (PACK / 2)].v[i % (PACK / 2)];
    return pack;
  }

  // This lane's packs of x, the first row of which is row m, in int8 to all blocks of the cluster, a part after the
  // other. What the epilogue needs of the thread's column, if it has one, is put down while x comes.
  template <typename T, int HALF>
  __device__ __forceinline__ void quantize(const char* x_at, uint32_t m, const typename Scales::One* column) const {
    const uint32_t lane = threadIdx.x % F::LANES, packs = product.k / PACK, first = first_row<HALF>();
    const bool leads = threadIdx.x % WARP == 0;
    Pack<T, PACK> x[F::SHARE][F::PACKS];
    // The half that is multiplied first comes first.
    if (HALF > 0) barrier(X_LOADED, F::WORKERS);
#pragma unroll
    for (int r = 0; r < F::SHARE; ++r) {
      const uint32_t row = r * F::AT_ONCE;
      const T* from = reinterpret_cast<const T*>(x_at) + row * product.k;
#pragma unroll
      for (int i = 0; i < F::PACKS; ++i) {
        const bool there = lane + i * F::LANES < packs && first + row < F::ROWS && m + row < product.m;
        x[r][i] = {};
        if (there) x[r][i] = read(from + i * F::LANES * PACK);
      }
    }
    if (F::HALVES > HALF + 1) barrier_pass(X_LOADED, F::WORKERS);
    if (F::LOADS_W && threadIdx.x == F::THREADS - WARP) load_w();
    if (column) put(*column);
    uint32_t away[CLUSTER];
#pragma unroll
    for (int b = 1; b < CLUSTER; ++b) away[b] = in_block(room, (rank + b) % CLUSTER) - room;
    uint32_t largest = 0;
#pragma unroll
    for (int r = 0; r < F::SHARE; ++r) {
      MaxMagnitude<T, PACK> most;
#pragma unroll
      for (int i = 0; i < F::PACKS; ++i) most.take(x[r][i]);
      const uint32_t over_row = over_lanes(most.widened());
      if (lane == r) largest = over_row;
    }
    if (!F::LOADS_W && leads) barrier_arrive(loaded());
    // Lane r of those that share rows has the r-th.
    const Scale mine(__uint_as_float(largest));
    if (const uint32_t row = first + lane * F::AT_ONCE; lane < F::SHARE && row < F::ROWS) {
      fixed.x_scales[row] = mine.scale;
      const uint32_t at = shared_address(fixed.x_scales + row);
#pragma unroll
      for (int b = 1; b < CLUSTER; ++b) send(away[b] + at, mine.scale, away[b] + quantized(HALF, 0));
    }
    float inverse[F::SHARE];
#pragma unroll
    for (int r = 0; r < F::SHARE; ++r) inverse[r] = __shfl_sync(FULL, mine.inverse, r, F::LANES);
#pragma unroll
    for (int i = 0; i < F::PACKS; ++i) {
#pragma unroll
      for (int r = 0; r < F::SHARE; ++r) {
        const uint32_t row = first + r * F::AT_ONCE, pack = lane + i * F::LANES;
        if (row >= F::ROWS || pack >= packs) break;
        // As a bulk copy swizzles rows of 128 bytes.
        const uint32_t chunk = room + (pack / 8 * F::ROWS + row) * BLOCK_K;
        const uint32_t at = chunk + (pack % 8 ^ row % 8) * 16, part = pack * PACK / PART;
        const auto words = code_words(codes_of(x[r][i], inverse[r]));
        store_shared(at, words);
#pragma unroll
        for (int b = 1; b < CLUSTER; ++b) send(away[b] + at, words, away[b] + quantized(HALF, part));
      }
      // The parts that are through.
      constexpr int AT_ONCE = F::LANES * PACK;
      const int before = i * AT_ONCE / PART, after = i == F::PACKS - 1 ? F::PARTS : (i + 1) * AT_ONCE / PART;
      if (after > before) __syncwarp();
#pragma unroll
      for (int part = before; part < after; ++part)
        if (leads) barrier_arrive(quantized(HALF, part));
    }
  }

  // What the epilogue needs of the thread's column, if it has one.
  __device__ __forceinline__ void put(const typename Scales::One& one) const {
    const uint32_t column = threadIdx.x - F::CONSUMERS;
    if (column < F::COLUMNS) fixed.columns[column / N].put(column % N, one);
  }

  // Of warps that make int8 of a half of x, and if they are to `put` it down what the epilogue needs of a column.
  template <int HALF> __device__ __forceinline__ void produce_x(const Place& here, bool puts) const {
    const uint32_t column = threadIdx.x - F::CONSUMERS, m = here.m_tile * F::ROWS + first_row<HALF>();
    const char* x = static_cast<const char*>(p.x) + 2 * (uint64_t(m) * product.k + threadIdx.x % F::LANES * PACK);
    cluster_wait();
    pdl_wait();
    pdl_launch();
    typename Scales::One one = {};
    if (puts && column < F::COLUMNS) one = Scales::read(product, here, column % N);
    // Where rows of x are long it is faster to load them behind the columns (by 6 % on an H100), elsewhere beside.
    if (puts && F::PARTS > 3) put(one);
    const auto* to_put = !puts || F::PARTS > 3 ? nullptr : &one;
    if (product.epilogue.dtype == BF16)
      quantize<__nv_bfloat16, HALF>(x, m, to_put);
    else
      quantize<__half, HALF>(x, m, to_put);
  }

  // A warpgroup's product: of 64 rows of x at `x_at` and the N rows of W that are `w_at` bytes into each stage, or, if
  // W is the first factor, of N rows of W, which are 64, and all rows of x.
  template <bool W_FIRST, int SUMS>
  __device__ __forceinline__ void multiply(uint32_t rows_half, uint32_t x_at, uint32_t w_at, int (&sums)[SUMS]) const {
    const uint32_t lane = threadIdx.x % WARP, halves = (product.k + BLOCK_K / 2 - 1) / (BLOCK_K / 2);
    const uint32_t quantized_at = kept(quantized(rows_half, 0)), full_at = kept(full(0)), free_at = kept(free(0));
    const uint64_t w = descriptor<128>(weights(0) + w_at, 0);
    uint64_t x = descriptor<128>(x_at, 0);
    const auto part_comes = [&](uint32_t part) {
      barrier_wait(quantized_at + 8 * part, 0);
      fence_async();
    };
    // A K block, or half of one. How many products there are is known beforehand, since with a branch among them the
    // compiler has those behind it wait for those in front. There are zeros behind W's k: what lies behind that of x
    // does not matter.
    const auto consume = [&](uint32_t k_block, uint32_t stage, auto products) {
      const uint64_t rows = w + stage * (F::STAGE / 16);
#pragma unroll
      for (int i = 0; i < decltype(products)::value; ++i)
        wgmma(sums, (W_FIRST ? rows : x) + 2 * i, (W_FIRST ? x : rows) + 2 * i, i > 0 || k_block > 0);
      x += F::ROWS * BLOCK_K / 16;
    };
    const std::integral_constant<int, 4> all;
    const std::integral_constant<int, 2> half;
    if constexpr (F::WHOLE && !F::LOADS_W) {
      // W is there when x is: two K blocks at a time.
      const auto begin = [&](uint32_t k_block, uint32_t halves) {
        part_comes(k_block / 2);
        barrier_wait(full_at + 8 * k_block, 0);
        if (halves > 2) barrier_wait(full_at + 8 * k_block + 8, 0);
        wgmma_fence();
      };
      uint32_t k_block = 0;
#pragma unroll 1
      for (; k_block + 2 <= halves / 2; k_block += 2) {
        begin(k_block, 4);
        consume(k_block, k_block, all);
        consume(k_block + 1, k_block + 1, all);
        wgmma_commit();
      }
      if (const uint32_t rest = halves % 4) {
        begin(k_block, rest);
        if (rest == 1) consume(k_block, k_block, half);
        if (rest > 1) consume(k_block, k_block, all);
        if (rest > 2) consume(k_block + 1, k_block + 1, half);
        wgmma_commit();
      }
    } else {
      uint32_t stage = 0, phase = 0, before = 0;
      const auto one = [&](uint32_t k_block, auto products) {
        if (k_block % 2 == 0) part_comes(k_block / 2);
        barrier_wait(full_at + 8 * stage, phase);
        wgmma_fence();
        consume(k_block, stage, products);
        wgmma_commit();
        if (!F::WHOLE && k_block > 0) {
          wgmma_wait<1>();
          if (lane == 0) barrier_arrive(free_at + 8 * before);
        }
        before = stage;
        if (++stage == p.stages) stage = 0, phase ^= 1;
      };
#pragma unroll 1
      for (uint32_t k_block = 0; k_block < halves / 2; ++k_block) one(k_block, all);
      if (halves % 2) one(k_blocks - 1, half);
    }
    wgmma_wait<0>();
    settle(sums);
  }
};

}  // namespace fused
