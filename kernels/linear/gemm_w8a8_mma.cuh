// The W8A8 GEMM by `mma.sync` (gemm_w8a8.cuh): tiles of 128 x 128 outputs and 64 bytes of K, a pipeline of three
// `cp.async` stages. A warp has 32 rows of x and 32 of each piece of W. In the epilogue sums pass through shared memory, so
// that each thread has 8 outputs in a row.
//
// `Kind` says how W's rows lie in memory, how a stage is multiplied, and where scales are applied.
#pragma once

#include "common/mma.cuh"
#include "linear/gemm_w8a8_epilogue.cuh"

namespace fused {

constexpr int ROWS = W8A8_ROWS, COLUMNS = 128, BLOCK_K = 64;
constexpr int THREADS = 256;
constexpr int STAGES = 3;
constexpr int TILE_BYTES = ROWS * BLOCK_K, STAGE_BYTES = 2 * TILE_BYTES;

// Where a warp's rows of x and of each piece of W begin.
__device__ __forceinline__ uint32_t warp_row(uint32_t thread) { return thread / WARP / 2 * 32; }
__device__ __forceinline__ uint32_t warp_column(uint32_t thread) { return thread / WARP % 2 * 32; }

// blockIdx.x, by a volatile read as thread_now's.
__device__ __forceinline__ uint32_t block_now() {
  uint32_t block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

// Where 16 bytes of a row lie in a tile: 8 rows at the same k meet no bank twice.
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t chunk) {
  return row * BLOCK_K + (chunk ^ row / 2 % 4) * 16;
}

template <class Kind> struct Loader {
  const int8_t* x;  // this thread's first row, at its 16 bytes of a step of k; its second is 64 rows below
  const int8_t* w[2];
  bool has_x[2], has_w[2];
  uint32_t to, k, limit;

  __device__ __forceinline__ Loader(const W8A8Product& p, const Place& place) : k(threadIdx.x % 4 * 16), limit(p.k) {
    const uint32_t line = threadIdx.x / 4, m = place.m_tile * ROWS + line;
    x = p.x + uint64_t(m) * p.k + k;
    to = swizzled(line, threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const W8A8Weights& weights = p.weights[place.part[i]];
      const uint32_t row = place.row[i] + line;
      has_x[i] = m + 64 * i < p.m, has_w[i] = row < weights.rows;
      w[i] = weights.codes + Kind::row_at(row, p.k) + k;
    }
  }

  // The next step of k; zeros past the end, of which nothing is read.
  __device__ __forceinline__ void prefetch(uint32_t stage) {
    const bool inside = k < limit;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      copy_async(stage + to + 64 * i * BLOCK_K, x + 64 * i * uint64_t(limit), inside && has_x[i]);
      copy_async(stage + TILE_BYTES + to + 64 * i * BLOCK_K, w[i], inside && has_w[i]);
      w[i] += Kind::advance(k);
    }
    x += BLOCK_K;
    k += BLOCK_K;
  }
};

// Operand A, the warp's rows of x, and columns n and n + 1 of 8 of operand B, both halves of its k; for `k` of 32 in a
// stage.
__device__ __forceinline__ void load_x(uint32_t (&a)[2][4], uint32_t stage, int k) {
  const uint32_t lane = threadIdx.x % WARP;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    load_matrices(a[i], stage + swizzled(warp_row(threadIdx.x) + 16 * i + lane % 16, 2 * k + lane / 16));
}
__device__ __forceinline__ void load_w(uint32_t (&b)[4], uint32_t stage, int n, int k) {
  const uint32_t lane = threadIdx.x % WARP;
  const uint32_t row = 64 * (n / 4) + warp_column(threadIdx.x) + n % 4 * 8 + lane / 16 * 8 + lane % 8;
  load_matrices(b, stage + TILE_BYTES + swizzled(row, 2 * k + lane / 8 % 2));
}

// Sums of 16 rows, FIRST among a thread's, to where a warp has them in shared memory: of each row those of both pieces' 32
// columns. Lanes that read eight in a row (read_sums) have no bank conflicts.
constexpr int SUMS_PITCH = 2 * 32 * 4 + 16;

template <int FIRST, typename Sum> __device__ __forceinline__ void stage_sums(uint32_t to, const Sum (&sums)[64]) {
  const uint32_t lane = thread_now() % WARP;
  to += lane / 4 * SUMS_PITCH + lane % 4 * 8;
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Sum* pair = sums + FIRST + 4 * n + 2 * i;
      store_shared(to + i * 8 * SUMS_PITCH + 32 * n, sum_bits(pair[0]), sum_bits(pair[1]));
    }
}

// Outputs of row m in eight columns from `offset` on of both pieces, whose sums are at `from`.
template <class Kind, int N>
__device__ __forceinline__ void epilogue(const W8A8Product& p, const Place& place, const Columns<N>& columns, uint32_t m,
                                         uint32_t offset, uint32_t from) {
  const float x_scale = Kind::row_scale(p, m);
  // Both pieces by the same code: unrolled it would be twice as long.
#pragma unroll 1
  for (int piece = 0; piece < (gates(p) ? 1 : 2); ++piece) {
    const uint32_t column = piece * (N / 2) + offset;
    if (place.row[0] + column >= place.limit) return;
    typename Kind::Sum sums[8], gated[8];
    read_sums(from + piece * 128, sums);
    if (gates(p)) read_sums(from + 128, gated);
    epilogue8(p, place, columns, m, x_scale, column, sums, gated);
  }
}

template <class Kind> __device__ __forceinline__ void w8a8_mma(const W8A8Product& p) {
  using Sum = typename Kind::Sum;
  __shared__ __align__(128) char shared[STAGES * STAGE_BYTES];
  pdl_launch();
  pdl_wait();
  const Place first = Place::of<COLUMNS>(p, blockIdx.x);
  const uint32_t room = shared_address(shared), steps = (p.k + BLOCK_K - 1) / BLOCK_K;
  Loader<Kind> loader(p, first);
  Kind kind(p, first);
  // What the epilogue needs comes while the tensor cores work.
  const auto mine = Columns<COLUMNS>::read(p, first, threadIdx.x % COLUMNS, Kind::column_scale);
  Sum sums[64] = {};
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    loader.prefetch(room + s * STAGE_BYTES);
    commit_copies();
  }
  for (uint32_t s = 0; s < steps; ++s) {
    kind.fetch_scales(p, s * BLOCK_K);
    await_copies_but<STAGES - 2>();
    __syncthreads();
    loader.prefetch(room + (s + STAGES - 1) % STAGES * STAGE_BYTES);
    commit_copies();
    kind.multiply(room + s % STAGES * STAGE_BYTES, sums);
  }
  await_copies_but<0>();
  __syncthreads();
  auto& columns = *reinterpret_cast<Columns<COLUMNS>*>(shared);
  if (threadIdx.x < COLUMNS) columns.put(threadIdx.x, mine);
  __syncthreads();
  // Anew, so that no register holds it while the tensor cores work.
  const Place place = Place::of<COLUMNS>(p, block_now());
  const uint32_t thread = thread_now(), lane = thread % WARP, column = warp_column(thread) + lane % 4 * 8;
  const uint32_t staged = room + sizeof(columns) + thread / WARP * (16 * SUMS_PITCH);
  static_assert(sizeof(columns) + THREADS / WARP * 16 * SUMS_PITCH <= sizeof(shared));
  // Half of the sums at a time: their registers are free for the epilogue, which would spill with all 64 in registers.
  stage_sums<0>(staged, sums);
#pragma unroll 1
  for (uint32_t row = 0;; row += 8) {
    __syncwarp();
    const uint32_t m = place.m_tile * ROWS + warp_row(thread) + row + lane / 4;
    if (m < p.m) epilogue<Kind>(p, place, columns, m, column, staged + (row % 16 + lane / 4) * SUMS_PITCH + lane % 4 * 32);
    if (row == 24) break;
    __syncwarp();
    if (row == 8) stage_sums<32>(staged, sums);
  }
}

}  // namespace fused
