// 8-bit operands on Hopper (gemm_w8a8.cuh) by `wgmma`: persistent and warp-specialized after CUTLASS. A producer thread
// loads tiles of 128 bytes of K by TMA into 4 or 6 stages; two consumer warpgroups multiply 64 rows of x each with N
// rows of W. The next tile's operands are loaded during the epilogue; 16-bit outputs pass through shared memory, so
// that a warp writes 64 or 128 bytes of a row at a time.
//
// Tiles of 128 x 128 are bound by the bandwidth of shared memory and of the L2 cache. So N may be 256, and CTAs form
// clusters of two along M, each of which loads one of the two pieces of W for both (TMA multicast).
//
// `Kind` says what the operands are, and how many sets of sums a thread has.
#pragma once

#include "common/cluster.cuh"
#include "common/mma.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "linear/gemm_w8a8.cuh"

namespace fused {

constexpr int ROWS = W8A8_ROWS, CONSUMERS = ROWS / 64, BLOCK_K = W8A8_BLOCK_K;
constexpr int X_BYTES = ROWS * BLOCK_K;

// Of both pieces, two times 2 columns 8 apart, each in rows m and m + 8: [piece][2 columns + row][2].
using Pairs = float[2][4][2];

template <class Apply> __device__ __forceinline__ void each(Pairs& y, Apply apply) {
#pragma unroll
  for (int i = 0; i < 16; ++i) y[i / 8][i / 2 % 4][i % 2] = apply(y[i / 8][i / 2 % 4][i % 2]);
}

template <class Apply> __device__ __forceinline__ void gate_each(Pairs& y, Apply apply) {
#pragma unroll
  for (int i = 0; i < 8; ++i) y[0][i / 2][i % 2] = apply(y[0][i / 2][i % 2]) * y[1][i / 2][i % 2];
}

__device__ __forceinline__ void activate_pairs(const W8A8Product& p, Pairs& y) {
  switch (p.epilogue.activation) {
    case ACT_SWIGLU:
      gate_each(y, [](float v) { return silu(v); });
      break;
    case ACT_GEGLU:
      gate_each(y, [](float v) { return activate(ACT_GELU, v); });
      break;
    case ACT_GEGLU_TANH:
      gate_each(y, [](float v) { return activate(ACT_GELU_TANH, v); });
      break;
    case ACT_RELU2_GLU:
      gate_each(y, [](float v) { return activate(ACT_RELU2, v); });
      break;
    case ACT_SILU:
      each(y, [](float v) { return activate(ACT_SILU, v); });
      break;
    case ACT_GELU:
      each(y, [](float v) { return activate(ACT_GELU, v); });
      break;
    case ACT_GELU_TANH:
      each(y, [](float v) { return activate(ACT_GELU_TANH, v); });
      break;
    case ACT_RELU:
      each(y, [](float v) { return activate(ACT_RELU, v); });
      break;
    case ACT_RELU2:
      each(y, [](float v) { return activate(ACT_RELU2, v); });
      break;
  }
}

// Calls `take` with the number of each pair that is outputs, and with its element as it lies in outputs
// and residuals; the first is in row m and in this column of its piece.
template <int N, class Take>
__device__ __forceinline__ void each_pair(const W8A8Product& p, const Place& place, uint32_t m, uint32_t column,
                                          Take take) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t row = m + i % 2 * 8, c = column + i / 4 * (N / 2) + i / 2 % 2 * 8;
    if ((i < 4 || !gates(p)) && row < p.m && place.row[0] + c < place.limit)
      take(i, row * p.epilogue.stride + place.column[0] + c);
  }
}

template <int N>
__device__ __forceinline__ void add_residuals(const W8A8Product& p, const Place& place, uint32_t m, uint32_t column,
                                              Pairs& y) {
  const Epilogue& e = p.epilogue;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!e.residuals[r]) continue;
    float2 of[8] = {};
    if (e.dtype == F32) {
      each_pair<N>(p, place, m, column, [&](int i, uint64_t at) {
        of[i] = __ldcg(reinterpret_cast<const float2*>(static_cast<const float*>(e.residuals[r]) + at));
      });
    } else {
      uint32_t words[8] = {};
      each_pair<N>(p, place, m, column, [&](int i, uint64_t at) {
        words[i] = __ldcg(reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(e.residuals[r]) + at));
      });
#pragma unroll
      for (int i = 0; i < 8; ++i)
        of[i] = e.dtype == BF16 ? unpack2<__nv_bfloat16>(words[i]) : unpack2<__half>(words[i]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i / 4][i % 4][0] += of[i].x, y[i / 4][i % 4][1] += of[i].y;
  }
}

// Whole numbers: sums of all of K are exact, a scale belongs to each row of x and of W.
struct Int8Sums {
  using Sum = int;
  static constexpr int SETS = 1;

  // A piece of W from a row and a value of it on.
  template <class... Blocks>
  static __device__ __forceinline__ void copy(uint32_t to, const TensorMap& map, uint32_t barrier, uint32_t k,
                                              uint32_t row, Blocks... blocks) {
    bulk_copy_rows(to, map, barrier, k, row, blocks...);
  }

  static __device__ __forceinline__ float column_scale(const W8A8Weights& w, uint32_t row) {
    return w.scales[row];
  }
};

// N rows of W at a time, and CLUSTER blocks, one or two, that share them.
template <int N, int CLUSTER, class Kind> struct Tiles {
  using Sum = typename Kind::Sum;
  static constexpr int STAGES = N == 128 ? 6 : 4;
  static constexpr int STAGE_BYTES = X_BYTES + N * BLOCK_K;
  static constexpr int PIECE = N / 2;
  // Threads for the launch bounds, which set the registers of each of the block's 384 threads at the launch: 96 with 640,
  // 168 with 384. Narrow tiles leave registers to the preceding kernel, beside which their first weights are loaded.
  static constexpr int THREADS = N * Kind::SETS == 128 ? 640 : 384;
  // Registers of a thread after the launch, of a producer and of a consumer.
  static constexpr int PRODUCER = 24, CONSUMER = N * Kind::SETS == 128 ? 128 : 240;
  static constexpr int STAGED = W8A8_STAGED, PITCH = W8A8_STAGED_PITCH;

  const W8A8Sm90Params& p;
  const W8A8Product& product;
  const uint32_t room, barriers;  // in shared memory

  __device__ __forceinline__ Tiles(const W8A8Sm90Params& p, uint32_t room, uint32_t barriers)
      : p(p), product(p.product), room(room), barriers(barriers) {}

  // The barriers of a block, 8 bytes each.
  __device__ __forceinline__ uint32_t full(int stage) const { return barriers + 8 * stage; }
  __device__ __forceinline__ uint32_t free(int stage) const { return barriers + 8 * (STAGES + stage); }

  static __device__ __forceinline__ uint32_t rank() { return CLUSTER > 1 ? rank_in_cluster() : 0; }
  __device__ __forceinline__ uint32_t count() const { return product.m_tiles * product.n_tiles; }
  __device__ __forceinline__ Place place(uint32_t tile) const {
    Place place = Place::of<N>(product, tile);
    place.m_tile = place.m_tile * CLUSTER + rank();
    return place;
  }

  // This block's pieces of W, for all blocks of the cluster.
  __device__ __forceinline__ void fetch_weights(const Place& place, int stage, uint32_t k) const {
    barrier_expect(full(stage), STAGE_BYTES);
#pragma unroll
    for (int i = 0; i < 2 / CLUSTER; ++i) {
      const uint32_t piece = CLUSTER > 1 ? rank() : i, row = piece ? place.row[1] : place.row[0];
      const TensorMap& map = p.weights[piece ? place.part[1] : place.part[0]];
      const uint32_t to = room + stage * STAGE_BYTES + X_BYTES + piece * PIECE * BLOCK_K;
      if constexpr (CLUSTER > 1)
        Kind::copy(to, map, full(stage), k, row, uint16_t((1 << CLUSTER) - 1));
      else
        Kind::copy(to, map, full(stage), k, row);
    }
  }

  __device__ __forceinline__ void produce() const {
    const uint32_t begin = blockIdx.x / CLUSTER;
    // W need not wait for x, which is on its way to int8.
    uint32_t early = min(uint32_t(STAGES), (product.k + BLOCK_K - 1) / BLOCK_K);
    const Place first = place(begin);
    for (uint32_t i = 0; i < early; ++i) fetch_weights(first, i, i * BLOCK_K);
    pdl_wait();
    PipelineState<STAGES> at;
    for (uint32_t tile = begin; tile < count(); tile += gridDim.x / CLUSTER) {
      const Place here = place(tile);
      for (uint32_t k = 0; k < product.k; k += BLOCK_K) {
        if (early > 0) {
          --early;
        } else {
          barrier_wait(free(at.stage), at.phase ^ 1);
          fetch_weights(here, at.stage, k);
        }
        bulk_copy_rows(room + at.stage * STAGE_BYTES, p.x, full(at.stage), k, here.m_tile * ROWS);
        at.next();
      }
    }
  }

  // Where the two times 8 columns of a step are in both pieces, and in both rows of a thread.
  static __device__ __forceinline__ int index(int step, int piece, int n, int j) {
    return 4 * (piece * PIECE / 8 + 2 * step + n / 2) + n % 2 * 2 + j;
  }

  // The outputs of a warp are staged as 16 rows of four times 16 columns.
  template <typename T>
  static __device__ __forceinline__ void stage(uint32_t to, uint32_t first, const float (&y)[4][2]) {
#pragma unroll
    for (int n = 0; n < 4; ++n)
      store_shared(to + n % 2 * 8 * PITCH + 2 * (first + n / 2 * 8), pack2<T>(y[n][0], y[n][1]));
  }
  // And are written from there to rows from `row` on, and columns of which `column` tells for each of eight times 8.
  template <class Column>
  __device__ __forceinline__ void send(const Place& place, uint32_t from, uint32_t row, Column column) const {
    const uint32_t lane = threadIdx.x % WARP, c = column(lane % 8);
    const Epilogue& e = product.epilogue;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t line = lane / 8 + 4 * i;
      const uint4 words = load_shared(from + line * PITCH + lane % 8 * 16);
      if (row + line < product.m && place.row[0] + c < place.limit)
        store16(static_cast<uint16_t*>(e.out) + (row + line) * e.stride + place.column[0] + c, words);
    }
    __syncwarp();
  }

  // Outputs of rows `row` and `row + 8` for a thread, without activation and residuals, of 16 bits: short
  // enough to be unrolled.
  template <typename T>
  __device__ __forceinline__ void write_sums(const Place& place, const Columns<N>& columns, uint32_t row, uint32_t room,
                                             const float (&x_scales)[2], const Sum (&sums)[N / 2]) const {
    const uint32_t lane = threadIdx.x % WARP, to = room + lane / 4 * PITCH + lane % 4 * 4;
#pragma unroll
    for (int chunk = 0; chunk < N / STAGED; ++chunk) {
#pragma unroll
      for (int group = 0; group < STAGED / 16; ++group) {
        const int first = STAGED * chunk + 16 * group;
        float y[4][2];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const Sum of[2] = {sums[index(first / 16, 0, n, 0)], sums[index(first / 16, 0, n, 1)]};
          columns.scale2(first + n / 2 * 8 + lane % 4 * 2, x_scales[n % 2], of, y[n]);
        }
        stage<T>(to, 16 * group, y);
      }
      send(place, room, row - lane / 4, [&](uint32_t q) { return STAGED * chunk + 8 * q; });
    }
  }

  // The outputs of rows `row` and `row + 8` for a thread.
  __device__ __forceinline__ void write_rows(const Place& place, const Columns<N>& columns, uint32_t row, uint32_t room,
                                             const float (&x_scales)[2], const Sum (&sums)[N / 2]) const {
    constexpr int STEPS = PIECE / 16;
    const Epilogue& e = product.epilogue;
    const uint32_t lane = threadIdx.x % WARP, to = room + lane / 4 * PITCH + lane % 4 * 4;
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
      const uint32_t column = 16 * step + lane % 4 * 2;
      Sum picked[2][4][2];
      pick<STEPS>(step, sums, picked, index);
      Pairs y;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        columns.scale2(i / 4 * PIECE + column + i / 2 % 2 * 8, x_scales[i % 2], picked[i / 4][i % 4], y[i / 4][i % 4]);
      activate_pairs(product, y);
      add_residuals<N>(product, place, row, column, y);
      if (e.out_dtype == F32) {
        each_pair<N>(product, place, row, column, [&](int i, uint64_t at) {
          const float(&pair)[2] = y[i / 4][i % 4];
          *reinterpret_cast<float2*>(static_cast<float*>(e.out) + at) = make_float2(pair[0], pair[1]);
        });
        continue;
      }
      // Two steps of one piece, then those of the other.
#pragma unroll
      for (int piece = 0; piece < 2; ++piece) {
        const uint32_t first = 32 * piece + step % 2 * 16;
        if (e.out_dtype == BF16)
          stage<__nv_bfloat16>(to, first, y[piece]);
        else
          stage<__half>(to, first, y[piece]);
      }
      if (step % 2 == 0) continue;
      send(place, room, row - lane / 4, [&](uint32_t q) {
        // What gates multiply is no output.
        return gates(product) && q >= 4 ? place.limit : q / 4 * PIECE + 16 * (step - 1) + q % 4 * 8;
      });
    }
  }

  // A warp is through with a stage, which all blocks of the cluster fill.
  __device__ __forceinline__ void release(int stage) const {
    const uint32_t lane = threadIdx.x % WARP;
    if constexpr (CLUSTER > 1) {
      if (lane < CLUSTER) barrier_arrive(free(stage), lane);
    } else {
      if (lane == 0) barrier_arrive(free(stage));
    }
  }

  // The products of a stage, added to the sums or in their place.
  __device__ __forceinline__ void multiply_stage(Sum (&sums)[N / 2], uint32_t x, uint32_t w, int stage,
                                                 bool add) const {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK_K / 32; ++i)
      wgmma(sums, descriptor<128>(x + stage * STAGE_BYTES + 32 * i, 0),
            descriptor<128>(w + stage * STAGE_BYTES + 32 * i, 0), i > 0 || add);
    wgmma_commit();
  }

  // The sums of a tile over all of K.
  __device__ __forceinline__ void sum_up(Sum (&sums)[N / 2], uint32_t x, uint32_t w,
                                         PipelineState<STAGES>& at) const {
    PipelineState<STAGES> before;
    for (uint32_t k = 0; k < product.k; k += BLOCK_K) {
      barrier_wait(full(at.stage), at.phase);
      multiply_stage(sums, x, w, at.stage, k > 0);
      if (k > 0) {
        wgmma_wait<1>();
        release(before.stage);
      }
      before = at;
      at.next();
    }
    wgmma_wait<0>();
    settle(sums);
    release(before.stage);
  }

  // The same where a block of K has scales of its own: its sums are scaled and added up in f32.
  __device__ __forceinline__ void sum_up_scaled(Sum (&sums)[N / 2], uint32_t x, uint32_t w, PipelineState<STAGES>& at,
                                                const Place& here, uint32_t row) const {
    Sum part[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sums[i] = 0;
    for (uint32_t k = 0; k < product.k; k += BLOCK_K) {
      float by[2][2];  // of a piece of W and a row of x
      Kind::scales(product, here, row, k / BLOCK_K, by);
      barrier_wait(full(at.stage), at.phase);
      multiply_stage(part, x, w, at.stage, false);
      wgmma_wait<0>();
      settle(part);
      release(at.stage);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) sums[i] = fmaf(part[i], by[i / (N / 4)][i / 2 % 2], sums[i]);
      at.next();
    }
  }

  __device__ __forceinline__ void consume(Columns<N>* all_columns) const {
    // The same in all lanes of a warp, as the compiler is told by the shuffle.
    const int number = __shfl_sync(FULL, int(threadIdx.x) / 128 - 1, 0);
    const uint32_t thread = threadIdx.x % 128, lane = threadIdx.x % WARP;
    const uint32_t first_row = number * 64 + thread / WARP * 16 + lane / 4;
    const uint32_t x = room + number * 64 * BLOCK_K, w = room + X_BYTES;
    const uint32_t staged = room + STAGES * STAGE_BYTES + first_row / 16 * (16 * PITCH);
    Columns<N>& columns = all_columns[number];
    PipelineState<STAGES> at;
    Sum sums[N / 2];
    pdl_wait();
    for (uint32_t tile = blockIdx.x / CLUSTER; tile < count(); tile += gridDim.x / CLUSTER) {
      const Place here = place(tile);
      // What the epilogue needs comes while the tensor cores work.
      const uint32_t row = here.m_tile * ROWS + first_row;
      typename Columns<N>::One mine[N / 128];
#pragma unroll
      for (int i = 0; i < N / 128; ++i) mine[i] = Columns<N>::read(product, here, thread + 128 * i, Kind::column_scale);
      float x_scales[2] = {1.f, 1.f};
      if constexpr (Kind::SETS == 1) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          x_scales[i] = row + 8 * i < product.m ? __ldcg(product.x_scales + row + 8 * i) : 0.f;
        sum_up(sums, x, w, at);
      } else {
        sum_up_scaled(sums, x, w, at, here, row);
      }
      // All warps of the group are through with the columns of the tile before.
      barrier(1 + number, 128);
#pragma unroll
      for (int i = 0; i < N / 128; ++i) columns.put(thread + 128 * i, mine[i]);
      barrier(1 + number, 128);
      const Epilogue& e = product.epilogue;
      const bool plain = e.activation == ACT_NONE && !e.residuals[0] && !e.residuals[1];
      if (plain && e.out_dtype == BF16)
        write_sums<__nv_bfloat16>(here, columns, row, staged, x_scales, sums);
      else if (plain && e.out_dtype == F16)
        write_sums<__half>(here, columns, row, staged, x_scales, sums);
      else
        write_rows(here, columns, row, staged, x_scales, sums);
    }
  }
};

template <int N, int CLUSTER, class Kind> __device__ __forceinline__ void w8a8(const W8A8Sm90Params& p) {
  using Of = Tiles<N, CLUSTER, Kind>;
  extern __shared__ char shared[];
  __shared__ __align__(8) uint64_t barriers[2 * Of::STAGES];
  __shared__ __align__(16) Columns<N> columns[CONSUMERS];
  // At the same address in all blocks of a cluster, since they are alike.
  const Of tiles(p, (shared_address(shared) + 1023) & ~1023u, shared_address(barriers));
  if (threadIdx.x == 0) {
    prefetch_tensor_map(p.x);
    for (int i = 0; i < 3; ++i) prefetch_tensor_map(p.weights[i]);
    for (int i = 0; i < Of::STAGES; ++i) {
      barrier_init(tiles.full(i), 1);
      barrier_init(tiles.free(i), 4 * CONSUMERS * CLUSTER);
    }
    barriers_made();
  }
  if constexpr (CLUSTER > 1)
    cluster_sync();
  else
    __syncthreads();
  pdl_launch();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Of::PRODUCER));
    if (threadIdx.x == 0) tiles.produce();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Of::CONSUMER));
    tiles.consume(columns);
  }
  // No block goes while others may still write to its shared memory.
  if constexpr (CLUSTER > 1) cluster_sync();
}

}  // namespace fused
