// GEMV and products with 1 to 8 rows of x: y = act(prologue(x) W^T + bias) + residuals. Every weight is read once, by
// one lane, and is multiplied with all rows of x.
//
// `GemvLoop` is the kernel; a core says how a warp multiplies: `LanesCore` below by multiply-adds, with the format
// of the weights as a policy; `MmaCore` (gemv_dense_mma.cuh), `GgufCore` (gemv_gguf.cuh) and `PackedCore`
// (gemv_wna16.cuh) by tensor cores.
//
// An N tile is a core's number of output channels. `split_k` warps of a block share its K and add their sums in
// shared memory. A core's `Tile` is the K blocks that a warp prefetches at once into registers. Two are in flight:
// both are loaded before the PDL wait, while the preceding kernel still runs, and each is loaded again as soon as it
// has been multiplied, across the borders of N tiles.
#pragma once

#include <type_traits>

#include "linear/epilogue.cuh"
#include "linear/prologue.cuh"

namespace fused {

__device__ __forceinline__ bool gates(const Gemv& p) { return gates(p.epilogue); }

// The matrix that has a row, which becomes the row's place in it.
__device__ __forceinline__ const Matrix& matrix_of(const Gemv& p, uint32_t& row) {
  const Matrix& matrix = p.weights[(row >= p.weights[1].first) + (row >= p.weights[2].first)];
  row -= matrix.first;
  return matrix;
}

template <class Core> struct GemvLoop {
  static constexpr int VALUES = Core::VALUES;  // outputs that a lane writes

  const Gemv& p;
  uint32_t n_tiles, part, place, per_block;  // this warp's share of an N tile, its N tile among the block's
  uint32_t begin, end;                     // its K blocks
  uint32_t block, blocks;                  // of those that share the product

  __device__ GemvLoop(const Gemv& params, uint32_t block, uint32_t blocks) : p(params), block(block), blocks(blocks) {
    const uint32_t warp = threadIdx.x / WARP;
    const int shift = __ffs(p.split_k) - 1;
    const uint32_t outputs = gates(p) ? Core::N_TILE / 2 : Core::N_TILE;
    n_tiles = (p.width + outputs - 1) / outputs;
    part = warp & (p.split_k - 1);
    place = warp >> shift;
    per_block = blockDim.x / WARP >> shift;
    const uint32_t k_blocks = Core::k_blocks(p), warp_k_blocks = (k_blocks + p.split_k - 1) >> shift;
    begin = min(part * warp_k_blocks, k_blocks);
    end = min(begin + warp_k_blocks, k_blocks);
  }

  // The N tile of the block's round `round` that is this warp's: rounds go round the blocks, so that
  // all have as many, give or take one.
  __device__ uint32_t n_tile_of(uint32_t round) const {
    return (round * per_block + place) * blocks + block;
  }
  __device__ bool in_round(uint32_t round) const {
    return round * per_block * blocks + block < n_tiles;
  }

  // Output column of row r of an N tile, and the row of the weights it comes from. Past the last
  // column the last is computed again and not written.
  __device__ uint32_t column(uint32_t n_tile, uint32_t r) const {
    return gates(p) ? n_tile * (Core::N_TILE / 2) + Core::gated(r) : n_tile * Core::N_TILE + r;
  }
  __device__ uint32_t weight_row(uint32_t n_tile, uint32_t r) const {
    return min(column(n_tile, r), p.width - 1) + (gates(p) && Core::is_gated(r) ? p.width : 0);
  }

  // Where the next tile to be loaded lies.
  struct PrefetchCursor {
    uint32_t round, k_block;
    typename Core::Rows rows;
  };

  __device__ void enter(PrefetchCursor& a) const {
    a.k_block = begin;
    const uint32_t n_tile = n_tile_of(a.round);
    if (n_tile < n_tiles) a.rows.enter(p, [&](uint32_t r) { return weight_row(n_tile, r); });
  }
  __device__ void prefetch(typename Core::Tile& tile, const PrefetchCursor& a) const {
    if (n_tile_of(a.round) < n_tiles) tile.prefetch(p, a.rows, a.k_block, end);
  }
  __device__ void advance(PrefetchCursor& a) const {
    a.k_block += Core::K_BLOCKS;
    if (a.k_block < end) return;
    ++a.round;
    enter(a);
  }

  // The outputs that this lane writes, and what it reads for them before the sums are there.
  struct Outputs {
    uint32_t column[VALUES], m;
    bool valid[VALUES];
    Addends addends[VALUES];
  };

  __device__ Outputs outputs(uint32_t round) const {
    const uint32_t n_tile = n_tile_of(round);
    Outputs o;
    o.m = Core::row_of_x();
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      const uint32_t r = Core::output(i);
      o.column[i] = column(n_tile, r);
      o.valid[i] = part == 0 && n_tile < n_tiles && o.column[i] < p.width && o.m < p.m && Core::keeps();
      o.addends[i] = {};
      if (part == 0) o.addends[i].load_bias(p.epilogue, weight_row(n_tile, r));
      if (gates(p) && Core::is_gated(r)) o.valid[i] = false;
    }
    return o;
  }
  __device__ void load_residuals(Outputs& o) const {
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      if (o.valid[i]) o.addends[i].load_residuals(p.epilogue, o.m, o.column[i]);
    }
  }

  __device__ void epilogue(const Outputs& o, float (&y)[VALUES]) const {
    const Epilogue& e = p.epilogue;
    if (e.bias) {
#pragma unroll
      for (int i = 0; i < VALUES; ++i) y[i] += widen_raw(o.addends[i].bias, e.dtype);
    }
    if (gates(p)) {
      y[0] = gate(e.activation, y[0]) * Core::partner(y);
    } else if (e.activation != ACT_NONE) {
#pragma unroll
      for (int i = 0; i < VALUES; ++i) y[i] = activate(e.activation, y[i]);
    }
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      if (!o.valid[i]) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (e.residuals[r]) y[i] += widen_raw(o.addends[i].residuals[r], e.dtype);
      }
      write(e.out, e.out_dtype, o.m * e.stride + o.column[i], y[i]);
    }
  }

  // The parts of a sum that other warps have, added up in the first of them. Two sets of partial
  // sums take turns, so that one barrier a round is enough.
  __device__ void add_parts(float (&y)[VALUES], float (*set)[WARP * VALUES]) const {
    if (p.split_k == 1) return;
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (part > 0) {
#pragma unroll
      for (int i = 0; i < VALUES; ++i) set[warp][i * WARP + lane] = y[i];
    }
    __syncthreads();
    if (part > 0) return;
#pragma unroll
    for (int other = 1; other < GEMV_WARPS; ++other) {
      if (other >= p.split_k) break;
#pragma unroll
      for (int i = 0; i < VALUES; ++i) y[i] += set[warp + other][i * WARP + lane];
    }
  }

  __device__ void run(typename Core::Staged* xs, float (*partial)[GEMV_WARPS][WARP * VALUES]) const {
    typename Core::Tile tiles[2] = {};
    PrefetchCursor ahead = {};
    pdl_launch();
    enter(ahead);
    prefetch(tiles[0], ahead);
    advance(ahead);
    prefetch(tiles[1], ahead);
    advance(ahead);
    typename Core::Prepare prepare(p, xs, partial[0][0]);
    prepare.prefetch();
    Outputs out = outputs(0);
    pdl_wait();
    load_residuals(out);
    prepare.run();
    __syncthreads();
    bool second = false;  // which tile is next
    for (uint32_t round = 0;;) {
      typename Core::Sums sums = {};
      for (uint32_t k_block = begin; k_block < end; k_block += Core::K_BLOCKS) {
        if (second) {
          tiles[1].multiply(p, k_block, end, xs, sums);
          prefetch(tiles[1], ahead);
        } else {
          tiles[0].multiply(p, k_block, end, xs, sums);
          prefetch(tiles[0], ahead);
        }
        second = !second;
        advance(ahead);
      }
      float y[VALUES];
      sums.total(p, xs, y);
      add_parts(y, partial[round % 2]);
      epilogue(out, y);
      if (!in_round(++round)) return;
      out = outputs(round);
      load_residuals(out);
    }
  }
};

// What cores have in common whose N tile is 16 rows of weights, operand A of a 16-row `mma`: lane 4 g + t
// has a quarter of rows g and g + 8, and ends up with their sums for row t of x.
struct SixteenRows {
  static constexpr int N_TILE = fused::N_TILE, VALUES = 2, MAX_M = N_TILE_MAX_M;
  using Staged = char;

  static __device__ uint32_t lane() { return threadIdx.x % WARP; }
  static __device__ uint32_t group() { return lane() / 4; }  // a row of weights, and 8 below it
  static __device__ uint32_t member() { return lane() % 4; }

  // A lane has a gate and what it gates.
  static __device__ uint32_t gated(uint32_t r) { return r % 8; }
  static __device__ bool is_gated(uint32_t r) { return r >= 8; }
  static __device__ uint32_t output(int i) { return group() + 8 * i; }
  static __device__ uint32_t row_of_x() { return member(); }
  static __device__ bool keeps() { return true; }
  static __device__ float partner(const float (&y)[2]) { return y[1]; }

  // Of every row of x, from this lane's quarter of k: the sum of all four for the lane's row of x.
  static __device__ float sum_of_quarters(const float (&v)[MAX_M]) {
    const bool upper = member() & 2, odd = member() & 1;
    const float a = (upper ? v[2] : v[0]) + __shfl_xor_sync(FULL, upper ? v[0] : v[2], 2);
    const float b = (upper ? v[3] : v[1]) + __shfl_xor_sync(FULL, upper ? v[1] : v[3], 2);
    return (odd ? b : a) + __shfl_xor_sync(FULL, odd ? a : b, 1);
  }
};

// The sums of the first N of v (a power of two, at most 32) over the lanes of a warp: value i ends
// up in the lanes i * 32 / N and following.
template <int N, int OFFSET = WARP / 2, int SIZE>
__device__ __forceinline__ float spread_sums(float (&v)[SIZE]) {
  if constexpr (N > 1) {
    const bool upper = threadIdx.x & OFFSET;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float keep = upper ? v[i + N / 2] : v[i];
      const float give = upper ? v[i] : v[i + N / 2];
      v[i] = keep + __shfl_xor_sync(FULL, give, OFFSET);
    }
    return spread_sums<N / 2, OFFSET / 2>(v);
  } else if constexpr (OFFSET > 0) {
    v[0] += __shfl_xor_sync(FULL, v[0], OFFSET);
    return spread_sums<1, OFFSET / 2>(v);
  } else {
    return v[0];
  }
}

// A core whose N tile is ROWS outputs and whose K block is a chunk for each lane. The format of the
// weights is a policy:
//
//   struct Format {
//     static constexpr int VALUES;      // consecutive k values that a lane takes at a time
//     static constexpr bool PREPARES;   // whether `prepare` turns the staged rows into another form
//     struct Row;                       // where a row of weights lies
//     struct Chunk;                     // VALUES weights as they are stored, in registers
//     struct Values;                    // the same ready to be multiplied, once for all rows of x
//     struct Input;                     // the VALUES of x they meet
//     static Row row(const Gemv&, const Matrix&, uint32_t row);   // row of that matrix
//     static Chunk load(const Row&, uint32_t chunk);              // global loads, before the PDL wait
//     static Values values(const Chunk&);
//     static Input input(const Gemv&, const float* xs, int m, uint32_t chunk);
//     static float dot(const Values&, const Input&);
//     // k is a multiple of VALUES; of 8, and x and the norm's vectors of 16 bytes, unless VALUES is 1.
//     // If PREPARES: all threads, between two barriers, on rows of f32 `staged_pitch<float>(k)` apart.
//     template <int M> static void prepare(const Gemv&, float* xs);
//   };
template <class Format, int M, int ROWS, int K_BLOCKS_> struct LanesCore {
  static constexpr int N_TILE = ROWS, K_BLOCKS = K_BLOCKS_, VALUES = 1;
  static constexpr int SUMS = ROWS * M;
  static_assert(ROWS > 1 && SUMS <= WARP && (SUMS & (SUMS - 1)) == 0);
  static constexpr int SUM_LANES = WARP / SUMS;  // lanes that hold one sum
  using Staged = float;

  static __device__ uint32_t lane() { return threadIdx.x % WARP; }
  static __device__ uint32_t chunks(const Gemv& p) { return p.k / Format::VALUES; }
  static __device__ uint32_t k_blocks(const Gemv& p) { return (chunks(p) + WARP - 1) / WARP; }

  // The first half of a gating N tile's rows are gates, the second half what they gate.
  static __device__ uint32_t gated(uint32_t r) { return r % (ROWS / 2); }
  static __device__ bool is_gated(uint32_t r) { return r >= ROWS / 2; }
  static __device__ uint32_t output(int) { return lane() / SUM_LANES / M; }
  static __device__ uint32_t row_of_x() { return lane() / SUM_LANES % M; }
  static __device__ bool keeps() { return lane() % SUM_LANES == 0; }
  static __device__ float partner(const float (&y)[1]) { return __shfl_xor_sync(FULL, y[0], WARP / 2); }

  struct Rows {
    typename Format::Row rows[ROWS];

    template <class Find> __device__ void enter(const Gemv& p, Find find) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        uint32_t row = find(r);
        const Matrix& matrix = matrix_of(p, row);
        rows[r] = Format::row(p, matrix, row);
      }
    }
  };

  struct Sums {
    float v[SUMS];

    __device__ void total(const Gemv&, Staged*, float (&y)[1]) { y[0] = spread_sums<SUMS>(v); }
  };

  struct Tile {
    typename Format::Chunk chunk[ROWS][K_BLOCKS];

    __device__ void prefetch(const Gemv& p, const Rows& from, uint32_t k_block, uint32_t end) {
#pragma unroll
      for (int s = 0; s < K_BLOCKS; ++s) {
        const uint32_t c = (k_block + s) * WARP + lane();
        if (k_block + s < end && c < chunks(p)) {
#pragma unroll
          for (int r = 0; r < ROWS; ++r) chunk[r][s] = Format::load(from.rows[r], c);
        }
      }
    }

    __device__ void multiply(const Gemv& p, uint32_t k_block, uint32_t end, const float* xs, Sums& sums) const {
#pragma unroll
      for (int s = 0; s < K_BLOCKS; ++s) {
        const uint32_t c = (k_block + s) * WARP + lane();
        if (k_block + s < end && c < chunks(p)) {
          typename Format::Values w[ROWS];
#pragma unroll
          for (int r = 0; r < ROWS; ++r) w[r] = Format::values(chunk[r][s]);
#pragma unroll
          for (int m = 0; m < M; ++m) {
            const auto x = Format::input(p, xs, m, c);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) sums.v[r * M + m] += Format::dot(w[r], x);
          }
        }
      }
    }
  };

  // The rows of x as f32.
  struct Prepare {
    using Pack = std::conditional_t<Format::VALUES == 1, ScalarPack, VectorPack>;
    const Gemv& p;
    Stage<float, Pack> stage;

    __device__ Prepare(const Gemv& p, float* xs, float* scratch)
        : p(p), stage(p.prologue, M == 1, p.k, xs, scratch) {}
    __device__ void prefetch() { stage.prefetch(); }
    __device__ void run() const {
      const int dtype = p.prologue.dtype;
      if (dtype == BF16) {
        stage.template run<__nv_bfloat16>(p.m);
      } else if (dtype == F16) {
        stage.template run<__half>(p.m);
      } else {
        stage.template run<float>(p.m);
      }
      const uint32_t pitch = staged_pitch<float>(p.k);
      for (uint32_t i = p.m * pitch + threadIdx.x; i < M * pitch; i += blockDim.x) stage.rows[i] = 0.f;
      if constexpr (Format::PREPARES) {
        __syncthreads();
        Format::template prepare<M>(p, stage.rows);
      }
    }
  };
};

// The body of a kernel, or of those of its blocks that share the product; dynamic shared memory holds
// the staged rows.
template <class Core> __device__ __forceinline__ void gemv(const Gemv& p, uint32_t block, uint32_t blocks) {
  extern __shared__ float4 dynamic_shared[];
  __shared__ alignas(16) float partial[2][GEMV_WARPS][WARP * Core::VALUES];
  GemvLoop<Core>(p, block, blocks).run(reinterpret_cast<typename Core::Staged*>(dynamic_shared), partial);
}

}  // namespace fused

// `NAME`: a kernel of this core from an architecture on, with registers for BLOCKS full blocks on a
// SM.
#define FUSED_GEMV_CORE_FROM(FROM, NAME, BLOCKS, ...)                                              \
  extern "C" __global__ void __launch_bounds__(fused::GEMV_THREADS, BLOCKS)                        \
      NAME(const __grid_constant__ fused::Gemv p) {                                                \
    if constexpr (fused::COMPILED_FOR >= FROM) fused::gemv<__VA_ARGS__>(p, blockIdx.x, gridDim.x); \
  }
#define FUSED_GEMV_CORE(NAME, BLOCKS, ...) FUSED_GEMV_CORE_FROM(750, NAME, BLOCKS, __VA_ARGS__)
// `NAME`: a kernel for this format, number of x rows, outputs of an N tile and K blocks of a tile.
#define FUSED_GEMV(NAME, FORMAT, M, ROWS, K_BLOCKS) \
  FUSED_GEMV_CORE(NAME, 2, fused::LanesCore<FORMAT, M, ROWS, K_BLOCKS>)
