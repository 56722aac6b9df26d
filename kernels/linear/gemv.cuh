// y = act(prologue(x) W^T + bias) + residuals for 1 to 8 rows of x: every weight is read once, by
// one lane, and meets all rows. What a warp does with its weights is a core: `Lanes` below, whose
// lanes multiply and add by themselves and which takes the format of the weights as a policy, or
// `Tensor` of gemv_dense_mma.cuh.
//
// A unit is a core's number of outputs, computed by `split` warps of a block that share k among
// them. A tile is what a warp asks for at once. Every warp has two tiles on the way: both are asked
// for before the wait, so that weights flow while the kernel before is still at work, and each is
// asked for again as soon as it has been used, across the borders of units.
#pragma once

#include <type_traits>

#include "linear/epilogue.cuh"
#include "linear/prologue.cuh"

namespace fused {

__device__ __forceinline__ bool gates(const Gemv& p) { return p.epilogue.activation == ACT_SWIGLU; }

// The matrix that has a row, which becomes the row's place in it.
__device__ __forceinline__ const Matrix& matrix_of(const Gemv& p, uint32_t& row) {
  const Matrix& matrix = p.weights[(row >= p.weights[1].first) + (row >= p.weights[2].first)];
  row -= matrix.first;
  return matrix;
}

template <class Core> struct FewRows {
  static constexpr int VALUES = Core::VALUES;  // outputs that a lane finishes

  const Gemv& p;
  uint32_t units, part, place, per_block;  // this warp's share of a unit, its unit among the block's
  uint32_t begin, end;                     // its steps of k
  uint32_t block, blocks;                  // of those that share the product

  __device__ FewRows(const Gemv& params, uint32_t block, uint32_t blocks) : p(params), block(block), blocks(blocks) {
    const uint32_t warp = threadIdx.x / WARP;
    const int shift = __ffs(p.split) - 1;
    const uint32_t outputs = gates(p) ? Core::UNIT / 2 : Core::UNIT;
    units = (p.width + outputs - 1) / outputs;
    part = warp & (p.split - 1);
    place = warp >> shift;
    per_block = blockDim.x / WARP >> shift;
    const uint32_t steps = Core::steps(p), share = (steps + p.split - 1) >> shift;
    begin = min(part * share, steps);
    end = min(begin + share, steps);
  }

  // The unit of the block's round `round` that is this warp's: rounds go round the blocks, so that
  // all have as many, give or take one.
  __device__ uint32_t unit_of(uint32_t round) const {
    return (round * per_block + place) * blocks + block;
  }
  __device__ bool in_round(uint32_t round) const {
    return round * per_block * blocks + block < units;
  }

  // Output column of row r of a unit, and the row of the weights it comes from. Past the last
  // column the last is computed again and not written.
  __device__ uint32_t column(uint32_t unit, uint32_t r) const {
    return gates(p) ? unit * (Core::UNIT / 2) + Core::gated(r) : unit * Core::UNIT + r;
  }
  __device__ uint32_t weight_row(uint32_t unit, uint32_t r) const {
    return min(column(unit, r), p.width - 1) + (gates(p) && Core::is_gated(r) ? p.width : 0);
  }

  // Where the next tile to be asked for lies.
  struct Ahead {
    uint32_t round, step;
    typename Core::Rows rows;
  };

  __device__ void enter(Ahead& a) const {
    a.step = begin;
    const uint32_t unit = unit_of(a.round);
    if (unit < units) a.rows.enter(p, [&](uint32_t r) { return weight_row(unit, r); });
  }
  __device__ void ask(typename Core::Tile& tile, const Ahead& a) const {
    if (unit_of(a.round) < units) tile.ask(p, a.rows, a.step, end);
  }
  __device__ void advance(Ahead& a) const {
    a.step += Core::STEPS;
    if (a.step < end) return;
    ++a.round;
    enter(a);
  }

  // The outputs that this lane finishes, and what it reads for them before the sums are there.
  struct Outputs {
    uint32_t column[VALUES], m;
    bool valid[VALUES];
    Addends addends[VALUES];
  };

  __device__ Outputs outputs(uint32_t round) const {
    const uint32_t unit = unit_of(round);
    Outputs o;
    o.m = Core::row_of_x();
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      const uint32_t r = Core::output(i);
      o.column[i] = column(unit, r);
      o.valid[i] = part == 0 && unit < units && o.column[i] < p.width && o.m < p.m && Core::keeps();
      o.addends[i] = {};
      if (part == 0) o.addends[i].ask_bias(p.epilogue, weight_row(unit, r));
      if (gates(p) && Core::is_gated(r)) o.valid[i] = false;
    }
    return o;
  }
  __device__ void ask_residuals(Outputs& o) const {
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      if (o.valid[i]) o.addends[i].ask_residuals(p.epilogue, o.m, o.column[i]);
    }
  }

  __device__ void finish(const Outputs& o, float (&y)[VALUES]) const {
    const Epilogue& e = p.epilogue;
    if (e.bias) {
#pragma unroll
      for (int i = 0; i < VALUES; ++i) y[i] += widen_raw(o.addends[i].bias, e.dtype);
    }
    if (gates(p)) {
      y[0] = silu(y[0]) * Core::partner(y);
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
    if (p.split == 1) return;
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (part > 0) {
#pragma unroll
      for (int i = 0; i < VALUES; ++i) set[warp][i * WARP + lane] = y[i];
    }
    __syncthreads();
    if (part > 0) return;
#pragma unroll
    for (int other = 1; other < GEMV_WARPS; ++other) {
      if (other >= p.split) break;
#pragma unroll
      for (int i = 0; i < VALUES; ++i) y[i] += set[warp + other][i * WARP + lane];
    }
  }

  __device__ void run(typename Core::Staged* xs, float (*partial)[GEMV_WARPS][WARP * VALUES]) const {
    typename Core::Tile tiles[2] = {};
    Ahead ahead = {};
    allow_next();
    enter(ahead);
    ask(tiles[0], ahead);
    advance(ahead);
    ask(tiles[1], ahead);
    advance(ahead);
    typename Core::Prepare prepare(p, xs, partial[0][0]);
    prepare.ask();
    Outputs out = outputs(0);
    wait_previous();
    ask_residuals(out);
    prepare.run();
    __syncthreads();
    bool second = false;  // which tile is next
    for (uint32_t round = 0;;) {
      typename Core::Sums sums = {};
      for (uint32_t step = begin; step < end; step += Core::STEPS) {
        if (second) {
          tiles[1].multiply(p, step, end, xs, sums);
          ask(tiles[1], ahead);
        } else {
          tiles[0].multiply(p, step, end, xs, sums);
          ask(tiles[0], ahead);
        }
        second = !second;
        advance(ahead);
      }
      float y[VALUES];
      sums.total(p, xs, y);
      add_parts(y, partial[round % 2]);
      finish(out, y);
      if (!in_round(++round)) return;
      out = outputs(round);
      ask_residuals(out);
    }
  }
};

// What cores have in common whose unit is 16 rows of weights, operand A of a 16-row `mma`: lane 4 g + t
// has a quarter of rows g and g + 8, and ends up with their sums for row t of x.
struct SixteenRows {
  static constexpr int UNIT = fused::UNIT, VALUES = 2, MAX_M = UNIT_MAX_M;
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

// A core whose unit is ROWS outputs and whose step is a chunk for each lane. The format of the
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
//     static Chunk load(const Row&, uint32_t chunk);              // global loads, before the wait
//     static Values values(const Chunk&);
//     static Input input(const Gemv&, const float* xs, int m, uint32_t chunk);
//     static float dot(const Values&, const Input&);
//     // k is a multiple of VALUES; of 8, and x and the norm's vectors of 16 bytes, unless VALUES is 1.
//     // If PREPARES: all threads, between two barriers, on rows of f32 `staged_pitch<float>(k)` apart.
//     template <int M> static void prepare(const Gemv&, float* xs);
//   };
template <class Format, int M, int ROWS, int STEPS_> struct Lanes {
  static constexpr int UNIT = ROWS, STEPS = STEPS_, VALUES = 1;
  static constexpr int SUMS = ROWS * M;
  static_assert(ROWS > 1 && SUMS <= WARP && (SUMS & (SUMS - 1)) == 0);
  static constexpr int SHARE = WARP / SUMS;  // lanes that hold one sum
  using Staged = float;

  static __device__ uint32_t lane() { return threadIdx.x % WARP; }
  static __device__ uint32_t chunks(const Gemv& p) { return p.k / Format::VALUES; }
  static __device__ uint32_t steps(const Gemv& p) { return (chunks(p) + WARP - 1) / WARP; }

  // The first half of a gating unit's rows are gates, the second half what they gate.
  static __device__ uint32_t gated(uint32_t r) { return r % (ROWS / 2); }
  static __device__ bool is_gated(uint32_t r) { return r >= ROWS / 2; }
  static __device__ uint32_t output(int) { return lane() / SHARE / M; }
  static __device__ uint32_t row_of_x() { return lane() / SHARE % M; }
  static __device__ bool keeps() { return lane() % SHARE == 0; }
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
    typename Format::Chunk chunk[ROWS][STEPS];

    __device__ void ask(const Gemv& p, const Rows& from, uint32_t step, uint32_t end) {
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        const uint32_t c = (step + s) * WARP + lane();
        if (step + s < end && c < chunks(p)) {
#pragma unroll
          for (int r = 0; r < ROWS; ++r) chunk[r][s] = Format::load(from.rows[r], c);
        }
      }
    }

    __device__ void multiply(const Gemv& p, uint32_t step, uint32_t end, const float* xs, Sums& sums) const {
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        const uint32_t c = (step + s) * WARP + lane();
        if (step + s < end && c < chunks(p)) {
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
    __device__ void ask() { stage.ask(); }
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
  FewRows<Core>(p, block, blocks).run(reinterpret_cast<typename Core::Staged*>(dynamic_shared), partial);
}

}  // namespace fused

// `NAME`: a kernel of this core from an architecture on, with registers for BLOCKS full blocks on a
// multiprocessor.
#define FUSED_FEW_ROWS_FROM(FROM, NAME, BLOCKS, ...)                                                   \
  extern "C" __global__ void __launch_bounds__(fused::GEMV_THREADS, BLOCKS)                            \
      NAME(const __grid_constant__ fused::Gemv p) {                                                    \
    if constexpr (fused::COMPILED_FOR >= FROM) fused::gemv<__VA_ARGS__>(p, blockIdx.x, gridDim.x);     \
  }
#define FUSED_FEW_ROWS(NAME, BLOCKS, ...) FUSED_FEW_ROWS_FROM(750, NAME, BLOCKS, __VA_ARGS__)
// `NAME`: a kernel for this format, number of x rows, outputs of a unit and steps of a tile.
#define FUSED_GEMV(NAME, FORMAT, M, ROWS, STEPS) FUSED_FEW_ROWS(NAME, 2, fused::Lanes<FORMAT, M, ROWS, STEPS>)
