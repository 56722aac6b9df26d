// y = act(prologue(x) W^T + bias) + residuals for 1 to 8 rows of x: every weight is read once, by
// one lane, and meets all rows. The format of the weights is a policy:
//
//   struct Format {
//     static constexpr int VALUES;      // consecutive k values that a lane takes at a time
//     static constexpr bool PREPARES;   // whether `prepare` turns the staged rows into another form
//     struct Row;                       // where a row of weights lies
//     struct Chunk;                     // VALUES weights as they are stored, in registers
//     struct Values;                    // the same ready to be multiplied, once for all rows of x
//     struct Input;                     // the VALUES of x they meet
//     static Row row(const Gemv&, const Matrix&, uint32_t row);   // row of that matrix
//     static Chunk load(const Row&, uint32_t chunk);              // global loads, before the wait
//     static Values values(const Chunk&);
//     static Input input(const Gemv&, const float* xs, int m, uint32_t chunk);
//     static float dot(const Values&, const Input&);
//     // k is a multiple of VALUES; of 8, and x and the norm's vectors of 16 bytes, unless VALUES is 1.
//     // If PREPARES: all threads, between two barriers, on rows of f32 `staged_pitch(k)` apart.
//     template <int M> static void prepare(const Gemv&, float* xs);
//   };
//
// A unit is ROWS outputs, computed by `split` warps of a block that share k among them. A tile is
// ROWS x STEPS chunks for each lane. Every warp has two tiles on the way: both are asked for before
// the wait, so that weights flow while the kernel before is still at work, and each is asked for
// again as soon as it has been used, across the borders of units.
#pragma once

#include <type_traits>

#include "epilogue.cuh"
#include "prologue.cuh"

namespace fused {

// One of up to three weights of the same k, side by side in the output.
struct Matrix {
  const void* data;
  const void* scales;  // a second plane, for formats that have one
  uint32_t first;  // its first row among all rows; past them for a weight that is not there
  uint32_t unused;
};

struct Gemv {
  Matrix weights[3];
  Prologue prologue;
  Epilogue epilogue;
  uint32_t m;       // rows of x, at most the kernel's M
  uint32_t k;
  uint32_t rows;    // of all weights
  uint32_t width;   // outputs: rows, or half of them if one half gates the other
  uint32_t split;   // warps that share a unit: a power of two, at most GEMV_WARPS
  int weight_dtype; // of dense weights
};

constexpr int GEMV_THREADS = 256;
constexpr int GEMV_WARPS = GEMV_THREADS / WARP;

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

template <class Format, int M, int ROWS, int STEPS> struct FewRows {
  static constexpr int SUMS = ROWS * M;
  static_assert(SUMS <= WARP && (SUMS & (SUMS - 1)) == 0);
  static constexpr int HALF = ROWS > 1 ? ROWS / 2 : 1;
  static constexpr int LANES = WARP / SUMS;  // that hold one sum
  using Pack = std::conditional_t<Format::VALUES == 1, ScalarPack, VectorPack>;

  struct Tile {
    typename Format::Chunk chunks[ROWS][STEPS];
  };

  const Gemv& p;
  uint32_t chunks, slabs, units;     // chunks of a row, tiles of a unit, units in all
  uint32_t part, place, per_block;   // this warp's share of a unit, its unit among the block's
  uint32_t lane;

  __device__ explicit FewRows(const Gemv& params) : p(params) {
    lane = threadIdx.x % WARP;
    const uint32_t warp = threadIdx.x / WARP;
    chunks = p.k / Format::VALUES;
    slabs = (chunks + STEPS * WARP - 1) / (STEPS * WARP);
    units = gates() ? (p.width + HALF - 1) / HALF : (p.rows + ROWS - 1) / ROWS;
    const int shift = __ffs(p.split) - 1;
    part = warp & (p.split - 1);
    place = warp >> shift;
    per_block = GEMV_WARPS >> shift;
  }

  __device__ bool gates() const { return ROWS > 1 && p.epilogue.activation == ACT_SWIGLU; }

  // The unit of the block's round `round` that is this warp's: rounds go round the blocks, so that
  // all have as many, give or take one.
  __device__ uint32_t unit_of(uint32_t round) const {
    return (round * per_block + place) * gridDim.x + blockIdx.x;
  }
  __device__ bool in_round(uint32_t round) const {
    return round * per_block * gridDim.x + blockIdx.x < units;
  }

  // Output column of row r of a unit, and the row of the weights it comes from: the first half of a
  // gating unit's rows are gates, the second half what they gate.
  __device__ uint32_t column(uint32_t unit, int r) const {
    return gates() ? unit * HALF + r % HALF : unit * ROWS + r;
  }
  __device__ uint32_t weight_row(uint32_t unit, int r) const {
    return column(unit, r) + (gates() && r >= HALF ? p.width : 0);
  }

  // Where the next tile to be asked for lies.
  struct Ahead {
    uint32_t round, slab;
    typename Format::Row rows[ROWS];
  };

  __device__ void enter(Ahead& a) const {
    const uint32_t unit = unit_of(a.round);
    if (unit >= units) return;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      // Past the last row the last is read again, and its sum not used.
      const uint32_t row = min(weight_row(unit, r), p.rows - 1);
      const Matrix& matrix = p.weights[(row >= p.weights[1].first) + (row >= p.weights[2].first)];
      a.rows[r] = Format::row(p, matrix, row - matrix.first);
    }
  }

  __device__ void ask(Tile& tile, Ahead& a) const {
    if (unit_of(a.round) >= units) return;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const uint32_t chunk = (a.slab * STEPS + s) * WARP + lane;
      if (chunk < chunks) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) tile.chunks[r][s] = Format::load(a.rows[r], chunk);
      }
    }
  }

  __device__ void advance(Ahead& a) const {
    a.slab += p.split;
    if (a.slab < slabs) return;
    a.slab = part;
    ++a.round;
    enter(a);
  }

  __device__ void multiply(const Tile& tile, uint32_t slab, const float* xs, float (&sums)[SUMS]) const {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const uint32_t chunk = (slab * STEPS + s) * WARP + lane;
      if (chunk < chunks) {
        typename Format::Values w[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) w[r] = Format::values(tile.chunks[r][s]);
#pragma unroll
        for (int m = 0; m < M; ++m) {
          const auto x = Format::input(p, xs, m, chunk);
#pragma unroll
          for (int r = 0; r < ROWS; ++r) sums[r * M + m] += Format::dot(w[r], x);
        }
      }
    }
  }

  // The output that this lane finishes.
  struct Output {
    uint32_t column, row, m;
    bool valid;  // whether the lane has one at all
    Addends addends;
  };

  __device__ Output output(uint32_t round) const {
    const uint32_t unit = unit_of(round), r = lane / LANES / M;
    Output o;
    o.column = column(unit, r);
    o.row = weight_row(unit, r);
    o.m = lane / LANES % M;
    o.valid = part == 0 && unit < units && o.column < p.width && o.m < p.m;
    o.addends = {};
    if (o.valid) o.addends.ask_bias(p.epilogue, o.row);
    return o;
  }
  __device__ void ask_residuals(Output& o) const {
    if (o.valid) o.addends.ask_residuals(p.epilogue, o.m, o.column);
  }

  __device__ void finish(const Output& o, float y) const {
    const Epilogue& e = p.epilogue;
    if (e.bias) y += widen_raw(o.addends.bias, e.dtype);
    bool writes = o.valid && lane % LANES == 0;
    if constexpr (ROWS > 1) {
      if (gates()) {
        y = silu(y) * __shfl_xor_sync(FULL, y, WARP / 2);
        writes = writes && lane < WARP / 2;
      }
    }
    if (!writes) return;
    y = activate(e.activation, y);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (e.residuals[r]) y += widen_raw(o.addends.residuals[r], e.dtype);
    }
    write(e.out, e.out_dtype, o.m * e.stride + o.column, y);
  }

  __device__ void run(float* xs, float (*partial)[GEMV_WARPS][SUMS]) const {
    Tile tiles[2] = {};
    Ahead ahead = {0, part, {}};
    allow_next();
    enter(ahead);
    ask(tiles[0], ahead);
    advance(ahead);
    ask(tiles[1], ahead);
    advance(ahead);
    Stage<M, GEMV_THREADS, Pack> stage(p.prologue, p.k, xs, partial[0][0]);
    stage.ask();
    Output out = output(0);
    wait_previous();
    ask_residuals(out);
    stage.run(p.m);
    __syncthreads();
    if constexpr (Format::PREPARES) {
      Format::template prepare<M>(p, xs);
      __syncthreads();
    }

    float sums[SUMS];
    bool second = false;  // which tile is next
    for (uint32_t round = 0;;) {
#pragma unroll
      for (int i = 0; i < SUMS; ++i) sums[i] = 0.f;
      for (uint32_t slab = part; slab < slabs; slab += p.split) {
        if (second) {
          multiply(tiles[1], slab, xs, sums);
          ask(tiles[1], ahead);
        } else {
          multiply(tiles[0], slab, xs, sums);
          ask(tiles[0], ahead);
        }
        second = !second;
        advance(ahead);
      }
      finish(out, add_parts(spread_sums<SUMS>(sums), partial[round % 2]));
      ++round;
      if (!in_round(round)) return;
      out = output(round);
      ask_residuals(out);
    }
  }

  // The parts of a sum that other warps have, added up in the first of them. Two sets of partial
  // sums take turns, so that one barrier a round is enough.
  __device__ float add_parts(float y, float (*set)[SUMS]) const {
    if (p.split == 1) return y;
    const uint32_t warp = threadIdx.x / WARP;
    if (part > 0 && lane % LANES == 0) set[warp][lane / LANES] = y;
    __syncthreads();
    if (part == 0) {
      for (uint32_t i = 1; i < p.split; ++i) y += set[warp + i][lane / LANES];
    }
    return y;
  }
};

// The body of a kernel; dynamic shared memory holds the M staged rows.
template <class Format, int M, int ROWS, int STEPS>
__device__ __forceinline__ void gemv(const Gemv& p) {
  using Work = FewRows<Format, M, ROWS, STEPS>;
  extern __shared__ float4 dynamic_shared[];
  __shared__ float partial[2][GEMV_WARPS][Work::SUMS];
  Work(p).run(reinterpret_cast<float*>(dynamic_shared), partial);
}

}  // namespace fused

// `NAME`: a kernel for this format, number of x rows, outputs of a unit and steps of a tile.
#define FUSED_GEMV(NAME, FORMAT, M, ROWS, STEPS)                                       \
  extern "C" __global__ void __launch_bounds__(fused::GEMV_THREADS, 2)                 \
      NAME(const __grid_constant__ fused::Gemv p) {                                    \
    fused::gemv<FORMAT, M, ROWS, STEPS>(p);                                            \
  }
