// W8A8 GEMM by `mma.sync` (gemm_w8a8.cuh), from sm_75 on: tiles of 128 x 128 outputs and 64 bytes of K, a pipeline of
// three `cp.async` stages. A warp has 32 rows of x and 32 of each piece of W. In the epilogue a quad exchanges sums so
// that each thread has 8 outputs in a row.
#include "common/mma.cuh"
#include "linear/gemm_w8a8_epilogue.cuh"

using namespace fused;

constexpr int ROWS = W8A8_ROWS, COLUMNS = 128, BLOCK_K = 64;
constexpr int THREADS = 256;
constexpr int STAGES = 3;
constexpr int TILE_BYTES = ROWS * BLOCK_K, STAGE_BYTES = 2 * TILE_BYTES;

// d += a b for a of 16 x 32, b of 32 x 8.
__device__ __forceinline__ void mma_int8(int* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
               "{%8, %9}, {%0, %1, %2, %3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  // Turing multiplies 8 rows and 16 values of k at a time.
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+r"(d[i % 2 * 2]), "+r"(d[i % 2 * 2 + 1])
                 : "r"(a[i]), "r"(i < 2 ? b0 : b1));
#endif
}

// Where 16 bytes of a row lie in a tile: 8 rows at the same k meet no bank twice.
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t chunk) {
  return row * BLOCK_K + (chunk ^ row / 2 % 4) * 16;
}

struct Loader {
  const int8_t* x[2];  // this thread's rows, at its 16 bytes of a step of k
  const int8_t* w[2];
  bool has_x[2], has_w[2];
  uint32_t to[2], k, limit;

  __device__ __forceinline__ Loader(const W8A8Product& p, const Place& place) : k(threadIdx.x % 4 * 16), limit(p.k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // 64 rows of x, and the `i`-th piece of W.
      const uint32_t line = threadIdx.x / 4, m = place.m_tile * ROWS + 64 * i + line;
      const W8A8Weights& weights = p.weights[place.part[i]];
      const uint32_t row = place.row[i] + line;
      has_x[i] = m < p.m, has_w[i] = row < weights.rows;
      x[i] = p.x + uint64_t(has_x[i] ? m : 0) * p.k + k;
      w[i] = weights.codes + uint64_t(has_w[i] ? row : 0) * p.k + k;
      to[i] = swizzled(64 * i + line, threadIdx.x % 4);
    }
  }

  // The next step of k; zeros past the end.
  __device__ __forceinline__ void prefetch(uint32_t stage) {
    const bool inside = k < limit;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      copy_async(stage + to[i], x[i], inside && has_x[i]);
      copy_async(stage + TILE_BYTES + to[i], w[i], inside && has_w[i]);
      x[i] += BLOCK_K, w[i] += BLOCK_K;
    }
    k += BLOCK_K;
  }
};

__device__ __forceinline__ void step(uint32_t stage, uint32_t warp_row, uint32_t warp_column, int (&sums)[64]) {
  const uint32_t lane = threadIdx.x % WARP;
#pragma unroll
  for (int k = 0; k < BLOCK_K / 32; ++k) {
    uint32_t a[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      load_matrices(a[i], stage + swizzled(warp_row + 16 * i + lane % 16, 2 * k + lane / 16));
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      // Columns n and n + 1 of 8, both halves of k.
      const uint32_t row = 64 * (n / 4) + warp_column + n % 4 * 8 + lane / 16 * 8 + lane % 8;
      uint32_t b[4];
      load_matrices(b, stage + TILE_BYTES + swizzled(row, 2 * k + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        mma_int8(sums + 32 * i + 4 * n, a[i], b[0], b[1]);
        mma_int8(sums + 32 * i + 4 * n + 4, a[i], b[2], b[3]);
      }
    }
  }
}

// Four numbers of 8 columns each, of which lane t of a quad has columns 2 t and 2 t + 1: it gets all
// of number t.
__device__ __forceinline__ void trade(const int (&from)[4][2], int (&to)[8]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  int x[4][2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int even_one = from[2 * i][j], odd_one = from[2 * i + 1][j];
      const int other = __shfl_xor_sync(FULL, odd ? even_one : odd_one, 1);
      x[2 * i][j] = odd ? other : even_one;
      x[2 * i + 1][j] = odd ? odd_one : other;
    }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int other = __shfl_xor_sync(FULL, upper ? x[i][j] : x[2 + i][j], 2);
      to[2 * i + j] = upper ? other : x[i][j];
      to[4 + 2 * i + j] = upper ? x[2 + i][j] : other;
    }
}

// Outputs of row m in 32 columns from `offset` on in both pieces; a quad has a row.
template <int N> __device__ __forceinline__ void epilogue(const W8A8Product& p, const Place& place,
                                                          const Columns<N>& columns, uint32_t m, float x_scale,
                                                          uint32_t offset, const int (&picked)[2][4][2]) {
  int first[8], second[8];
  trade(picked[0], first);
  trade(picked[1], second);
  if (m >= p.m) return;
  offset += threadIdx.x % 4 * 8;
  // Both pieces by the same code: unrolled it would be twice as long.
#pragma unroll 1
  for (int i = 0; i < (gates(p) ? 1 : 2); ++i) {
    const uint32_t column = i * (N / 2) + offset;
    if (place.row[0] + column >= place.limit) return;
    int sums[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[j] = i ? second[j] : first[j];
    epilogue8(p, place, columns, m, x_scale, column, sums, second);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) gemm_w8a8_mma(const __grid_constant__ W8A8Product p) {
  __shared__ __align__(128) char shared[STAGES * STAGE_BYTES];
  pdl_launch();
  pdl_wait();
  const Place place = Place::of<COLUMNS>(p, blockIdx.x);
  const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const uint32_t warp_row = warp / 2 * 32, warp_column = warp % 2 * 32;
  const uint32_t room = shared_address(shared), steps = (p.k + BLOCK_K - 1) / BLOCK_K;
  Loader loader(p, place);
  // What the epilogue needs comes while the tensor cores work.
  const auto mine = Columns<COLUMNS>::read(p, place, threadIdx.x % COLUMNS);
  int sums[64] = {};
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    loader.prefetch(room + s * STAGE_BYTES);
    commit_copies();
  }
  for (uint32_t s = 0; s < steps; ++s) {
    await_copies_but<STAGES - 2>();
    __syncthreads();
    loader.prefetch(room + (s + STAGES - 1) % STAGES * STAGE_BYTES);
    commit_copies();
    step(room + s % STAGES * STAGE_BYTES, warp_row, warp_column, sums);
  }
  await_copies_but<0>();
  __syncthreads();
  auto& columns = *reinterpret_cast<Columns<COLUMNS>*>(shared);
  if (threadIdx.x < COLUMNS) columns.put(threadIdx.x, mine);
  __syncthreads();
#pragma unroll 1
  for (int step = 0; step < 4; ++step) {
    int picked[2][4][2];
    pick<4>(step, sums, picked, [](int step, int piece, int n, int j) {
      return step / 2 * 32 + 4 * (4 * piece + n) + step % 2 * 2 + j;
    });
    const uint32_t m = place.m_tile * ROWS + warp_row + step / 2 * 16 + step % 2 * 8 + lane / 4;
    const float x_scale = m < p.m ? __ldcg(p.x_scales + m) : 0.f;
    epilogue(p, place, columns, m, x_scale, warp_column, picked);
  }
}
