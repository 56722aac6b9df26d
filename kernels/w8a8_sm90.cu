// y = act(s x_q (t W_q)^T + bias) + residuals for many rows on Hopper (w8a8.cuh): one warpgroup fetches
// tiles of 128 bytes of k with the bulk copy engine, two multiply 64 rows of x each with 128 rows of W
// by asynchronous tensor-core products. Blocks stay for tile after tile (persistent and warp
// specialised, after CUTLASS), and the next tile's operands arrive while outputs are written.
//
// Tiles of 256 rows of W, and clusters of two blocks that share them, read less from the L2 cache; on
// an H200 they were faster for the widest W and many rows of x only (14 %).
#include "bulk_copy.cuh"
#include "mma.cuh"
#include "w8a8.cuh"
#include "wgmma.cuh"

using namespace fused;

struct Params {
  TensorMap x;
  TensorMap weights[3];
  Product product;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int CONSUMERS = 2, ROWS = 64 * CONSUMERS, COLUMNS = 128;
constexpr int BLOCK_K = 128, STAGES = 6;
constexpr int THREADS = 128 * (CONSUMERS + 1);
// Of a thread, out of the 168 that each has at the launch.
constexpr int PRODUCER_REGISTERS = 40, REGISTERS = 232;
constexpr int X_BYTES = ROWS * BLOCK_K, PIECE_BYTES = COLUMNS / 2 * BLOCK_K;
constexpr int STAGE_BYTES = X_BYTES + 2 * PIECE_BYTES;

// The barriers of a block, 8 bytes each.
struct Barriers {
  uint32_t base;
  __device__ __forceinline__ uint32_t full(int stage) const { return base + 8 * stage; }
  __device__ __forceinline__ uint32_t free(int stage) const { return base + 8 * (STAGES + stage); }
};

__device__ __forceinline__ void produce(const Params& p, Barriers barriers, uint32_t room) {
  const Product& product = p.product;
  Ring<STAGES> at;
  for (uint32_t tile = blockIdx.x; tile < product.m_tiles * product.n_tiles; tile += gridDim.x) {
    const Place place = Place::of<COLUMNS>(product, tile);
    for (uint32_t k = 0; k < product.k; k += BLOCK_K) {
      const uint32_t full = barriers.full(at.stage), to = room + at.stage * STAGE_BYTES;
      barrier_wait(barriers.free(at.stage), at.phase ^ 1);
      barrier_expect(full, STAGE_BYTES);
      bulk_copy_rows(to, p.x, full, k, place.m_tile * ROWS);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        bulk_copy_rows(to + X_BYTES + i * PIECE_BYTES, p.weights[place.part[i]], full, k, place.row[i]);
      at.next();
    }
  }
}

// The outputs of a thread's rows `row` and `row + 8`.
__device__ __forceinline__ void write_rows(const Product& p, const Place& place, const Columns<COLUMNS>& columns,
                                           uint32_t row, const float (&x_scales)[2], const int (&sums)[COLUMNS / 2]) {
  constexpr int PIECE = COLUMNS / 2, GROUPS = PIECE / 32;
#pragma unroll 1
  for (int step = 0; step < 2 * GROUPS; ++step) {
    const int half = step / GROUPS;
    int picked[2][4][2];
    pick<2 * GROUPS>(step, sums, picked, [](int step, int piece, int n, int j) {
      return 4 * (piece * PIECE / 8 + step % GROUPS * 4 + n) + 2 * (step / GROUPS) + j;
    });
    finish(p, place, columns, row + 8 * half, half ? x_scales[1] : x_scales[0], step % GROUPS * 32, picked);
  }
}

__device__ __forceinline__ void consume(const Params& p, Barriers barriers, uint32_t room,
                                        Columns<COLUMNS>* all_columns) {
  const Product& product = p.product;
  // The same in all lanes of a warp, as the compiler is told by the shuffle.
  const int number = __shfl_sync(FULL, int(threadIdx.x) / 128 - 1, 0);
  const uint32_t thread = threadIdx.x % 128, lane = threadIdx.x % WARP;
  const uint32_t first_row = number * 64 + thread / WARP * 16 + lane / 4;
  const uint32_t x = room + number * 64 * BLOCK_K, w = room + X_BYTES;
  Columns<COLUMNS>& columns = all_columns[number];
  Ring<STAGES> at, before;
  int sums[COLUMNS / 2];
  const auto release = [&](int stage) {
    if (lane == 0) barrier_arrive(barriers.free(stage));
  };
  for (uint32_t tile = blockIdx.x; tile < product.m_tiles * product.n_tiles; tile += gridDim.x) {
    const Place place = Place::of<COLUMNS>(product, tile);
    // What the epilogue needs comes while the tensor cores work.
    const uint32_t row = place.m_tile * ROWS + first_row;
    const auto mine = Columns<COLUMNS>::read(product, place, thread);
    float x_scales[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) x_scales[i] = row + 8 * i < product.m ? __ldcg(product.x_scales + row + 8 * i) : 0.f;
    for (uint32_t k = 0; k < product.k; k += BLOCK_K) {
      barrier_wait(barriers.full(at.stage), at.phase);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < BLOCK_K / 32; ++i)
        wgmma(sums, descriptor<128>(x + at.stage * STAGE_BYTES + 32 * i, 0),
              descriptor<128>(w + at.stage * STAGE_BYTES + 32 * i, 0), i > 0 || k > 0);
      wgmma_commit();
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
    // All warps of the group are through with the columns of the tile before.
    barrier(1 + number, 128);
    columns.put(thread, mine);
    barrier(1 + number, 128);
    write_rows(product, place, columns, row, x_scales, sums);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) w8a8_sm90(const __grid_constant__ Params p) {
  extern __shared__ char shared[];
  __shared__ __align__(8) uint64_t barrier_room[2 * STAGES];
  __shared__ __align__(16) Columns<COLUMNS> columns[CONSUMERS];
  const uint32_t room = (shared_address(shared) + 1023) & ~1023u;
  const Barriers barriers = {shared_address(barrier_room)};
  if (threadIdx.x == 0) {
    prefetch(p.x);
    for (int i = 0; i < 3; ++i) prefetch(p.weights[i]);
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(barriers.full(i), 1);
      barrier_init(barriers.free(i), 4 * CONSUMERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  allow_next();
  wait_previous();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (threadIdx.x == 0) produce(p, barriers, room);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    consume(p, barriers, room, columns);
  }
}

#else
extern "C" __global__ void w8a8_sm90(const __grid_constant__ Params p) {}
#endif
