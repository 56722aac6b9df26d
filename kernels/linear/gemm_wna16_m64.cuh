// y = act(x W^T + bias) + residuals for some tens of rows of bf16 x and weights in INT8 or INT4 codes
// (formats/packed.cuh): the tensor cores multiply codes as numbers of bf16, which holds them exactly, and
// the sums of a group are scaled in f32. In idea as Marlin (Frantar et al. 2024), codes lie in memory as
// the tensor cores take them and go from there into registers.
//
// A unit is 16 rows of weights, a block takes `side` units side by side, and `split` warps share the k of
// a unit: stage after stage each takes DEPTH steps of 128 values, asked for two stages ahead. What all
// warps of a block need of x in a stage is copied to shared memory meanwhile; if there is room for all
// stages they stay there for the block's next units.
//
// Lane 4 g + t has rows g and g + 8 of its warp's unit, and ends up with their sums for rows 2t and
// 2t + 1 of each eight of x.
#pragma once

#include "linear/gemv_wna16.cuh"

namespace fused {

template <class Format> struct CodeTiles {
  static constexpr int DEPTH = 1, AHEAD = 2;             // steps of a warp in a stage, stages
  static constexpr int ROWS = TILES_ROWS, EIGHTS = ROWS / 8;  // of x at most
  using Scales = TileScales<Format::GROUPS, Format::ZEROS, DEPTH>;

  const Gemv& p;
  const uint32_t side, slots, stages;
  const uint32_t part, place;   // of the warp's unit, and its unit among the block's
  const uint32_t units, steps;
  const uint32_t span, pitch;   // steps of a stage, bytes of a row of x in it
  const uint32_t total;         // stages of all units that this block takes one after the other
  const uint32_t shared;

  static __device__ uint32_t lane() { return threadIdx.x % WARP; }

  __device__ CodeTiles(const TilesParams& t, uint32_t shared)
      : p(t.product), side(t.side), slots(t.slots), stages(t.stages), part(threadIdx.x / WARP / t.side),
        place(threadIdx.x / WARP % t.side), units((p.width + unit_outputs(p) - 1) / unit_outputs(p)), steps(steps_of(p.k)),
        span(p.split * DEPTH), pitch(span * (2 * STEP) + Format::XRows::PAD), total(rounds() * t.stages), shared(shared) {}

  // Units are dealt out in turns, `side` to a block.
  __device__ uint32_t rounds() const {
    const uint32_t sets = (units + side - 1) / side;
    return blockIdx.x < sets ? (sets - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
  }
  __device__ uint32_t unit_of(uint32_t round) const { return (blockIdx.x + round * gridDim.x) * side + place; }
  // The warp's first step of a stage.
  __device__ uint32_t first_step(uint32_t stage) const { return stage * span + part * DEPTH; }

  struct Weights {
    typename Format::Piece pieces[DEPTH][2];
    Scales scales[2];
  };

  // Stage `at` of all that the block takes.
  __device__ __forceinline__ void ask(Weights& w, uint32_t at) const {
    if (at >= total) return;
    const uint32_t unit = unit_of(at / stages), step = first_step(at % stages);
    if (unit >= units) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const CodeRow row = CodeRow::of<Format>(p, unit_row(p, unit, lane() / 4 + 8 * i), lane() % 4);
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        if (step + d < steps) Format::load(w.pieces[d][i], row.codes, p.k, step + d, lane() % 4);
      }
      w.scales[i].ask(p, row, step, steps, lane() % 4);
    }
  }

  __device__ __forceinline__ uint32_t slot(uint32_t at) const { return shared + (at % slots) * (ROWS * pitch); }

  // All threads: rows of x of a stage on their way, zeros where there are none.
  __device__ __forceinline__ void copy(uint32_t at) const {
    // A block's later units find what is there.
    const bool stays = slots == stages;
    if (at < total && !(stays && at >= stages)) {
      const uint32_t chunks = span * (STEP / 8), first = at % stages * chunks;
      const char* x = static_cast<const char*>(p.prologue.x);
      for (uint32_t i = threadIdx.x; i < ROWS * chunks; i += blockDim.x) {
        const uint32_t row = i / chunks, chunk = i % chunks, value = 8 * (first + chunk);
        const bool valid = row < p.m && value < p.k;
        const uint64_t from = valid ? uint64_t(row) * p.k + value : 0;
        copy_async(slot(at) + row * pitch + 16 * chunk, x + 2 * from, valid);
      }
    }
    commit_copies();
  }

  __device__ __forceinline__ void multiply(const Weights& w, uint32_t at, float (&sums)[EIGHTS][4]) const {
    const uint32_t step = first_step(at % stages), g = lane() / 4, t = lane() % 4;
    const uint32_t x = slot(at) + g * pitch + part * (DEPTH * 2 * STEP);
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      if (step + d >= steps) break;
      float c[EIGHTS][4] = {};
      uint32_t zeros[2] = {};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (Scales::begins(p, e)) zeros[0] = w.scales[0].zero(p, d, e), zeros[1] = w.scales[1].zero(p, d, e);
        const auto a = Format::operands(w.pieces[d][0], w.pieces[d][1], e, zeros);
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n) {
          const uint4 v = load_shared(x + n * 8 * pitch + 2 * (d * STEP + Format::value(e, t)));
          mma_both(c[n], a, v);
        }
        if (!Scales::ends(p, e)) continue;
        const float by[2] = {w.scales[0].scale(p, d, e), w.scales[1].scale(p, d, e)};
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[n][i] = fmaf(by[i / 2], c[n][i], sums[n][i]), c[n][i] = 0.f;
        }
      }
    }
  }

  // Sums of row r of a unit and row m of x from one warp.
  __device__ __forceinline__ uint32_t sum_at(uint32_t warp, uint32_t r, uint32_t m) const {
    const uint32_t lane = 4 * (r % 8) + m % 8 / 2;
    return ((warp * EIGHTS + m / 8) * 4 + 2 * (r / 8) + m % 2) * WARP + lane;
  }
  // Output r of a unit of the block's, of those that begin with unit `first`, before activation.
  __device__ __forceinline__ float total_of(const float* parts, uint32_t first, uint32_t unit, uint32_t r, uint32_t m) const {
    const Epilogue& e = p.epilogue;
    float y = 0.f;
    for (uint32_t other = 0; other < p.split; ++other) y += parts[sum_at(other * side + unit, r, m)];
    if (e.bias) y += widen_raw(read_raw(e.bias, e.dtype, unit_row(p, first + unit, r)), e.dtype);
    return y;
  }

  // All threads: the sums of the warps that share units, added up in their order, become outputs. Nobody
  // comes back here before a barrier of the next units' stages.
  __device__ __forceinline__ void finish(uint32_t first, const float (&sums)[EIGHTS][4], float* parts) const {
    const uint32_t warp = threadIdx.x / WARP;
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) parts[((warp * EIGHTS + n) * 4 + i) * WARP + lane()] = sums[n][i];
    }
    __syncthreads();
    const Epilogue& e = p.epilogue;
    const uint32_t of_unit = unit_outputs(p), wide = side * of_unit;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < wide * p.m; i += blockDim.x) {
      const uint32_t m = i / wide, unit = i % wide / of_unit, r = i % of_unit, c = first * of_unit + i % wide;
      if (c >= p.width) continue;
      float y = total_of(parts, first, unit, r, m);
      if (gates(p)) {
        y = silu(y) * total_of(parts, first, unit, r + 8, m);
      } else {
        y = activate(e.activation, y);
      }
      Addends of;
      of.ask_residuals(e, m, c);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (e.residuals[j]) y += widen_raw(of.residuals[j], e.dtype);
      }
      write(e.out, e.out_dtype, m * e.stride + c, y);
    }
  }

  __device__ __forceinline__ void run(float* parts) const {
    Weights w[2] = {};
    allow_next();
    ask(w[0], 0);
    ask(w[1], 1);
    wait_previous();
    for (int i = 0; i < AHEAD; ++i) copy(i);
    float sums[EIGHTS][4] = {};
#pragma unroll 1
    for (uint32_t at = 0; at < total; ++at) {
      // Stage `at` of x has come, and everyone is done with the slot that the next copy goes to.
      await_copies_but<AHEAD - 1>();
      __syncthreads();
      copy(at + AHEAD);
      if (at % 2 == 0) {
        multiply(w[0], at, sums);
        ask(w[0], at + 2);
      } else {
        multiply(w[1], at, sums);
        ask(w[1], at + 2);
      }
      if ((at + 1) % stages > 0) continue;
      finish(unit_of(at / stages) - place, sums, parts);
#pragma unroll
      for (int n = 0; n < EIGHTS; ++n) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.f;
    }
  }
};

// Dynamic shared memory holds the sums of the warps that share units, then the slots.
template <class Format> __device__ __forceinline__ void code_tiles(const TilesParams& t) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  extern __shared__ float4 dynamic_shared[];
  const uint32_t parts = t.product.split * t.side * (CodeTiles<Format>::EIGHTS * 4 * WARP * 4);
  const uint32_t base = shared_address(dynamic_shared);
  CodeTiles<Format>(t, base + parts).run(reinterpret_cast<float*>(dynamic_shared));
#endif
}

}  // namespace fused

// `NAME`: a kernel for 64 rows of x and at most 8 warps.
#define FUSED_CODE_TILES(NAME, FORMAT)                             \
  extern "C" __global__ void __launch_bounds__(8 * fused::WARP, 1) \
      NAME(const __grid_constant__ fused::TilesParams p) {         \
    fused::code_tiles<FORMAT>(p);                                  \
  }
