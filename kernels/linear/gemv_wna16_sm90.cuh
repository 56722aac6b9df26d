// y = act(prologue(x) W^T + bias) + residuals for one row of x and weights in INT4 or ternary codes
// (formats/packed.cuh), on Hopper: the weights stream through a ring in shared memory.
//
// A product of one row is a chain: the kernel before ends, x is read, multiplied, summed up, written. While
// one kernel is in it, the next one's weights are to come. So a block takes half of a multiprocessor: that of
// the next kernel has the other half and fills its ring. A thread that does nothing else asks for weights, and
// for no more at a time than keep memory busy: x is not to stand in line behind all of them.
//
// A unit is 16 rows, operand A of a 16-row `mma`, and a slot of the ring has 16 steps of them. Of each slice
// of so many steps warp w multiplies the two from 2w on, for all units: it needs no x but that, and behind
// the wait no warp waits for another until the sums meet.
#pragma once

#include "common/tma.cuh"
#include "linear/gemv_wna16_sm90_mma.cuh"

namespace fused {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

constexpr uint32_t SLICE = CHUNK * STREAM_WARPS;  // steps of a slot
static_assert(SLICE == CODE_STREAM_SLICE);
constexpr uint32_t MOST_SLOTS = CODE_STREAM_MAX_SLOTS;
constexpr int ROUND = 8;  // units whose sums meet at once
constexpr int GAINS = 2;  // slices of a norm's weight that a warp asks for before the wait

// A place in the ring, and the parity of its barriers.
struct Place {
  uint32_t stage, phase;

  __device__ __forceinline__ void next(uint32_t slots) {
    if (++stage == slots) stage = 0, phase ^= 1;
  }
};

template <class Format> struct CodeStream {
  static constexpr uint32_t SCALES = 2 * OCTET * Format::GROUPS;  // bytes of the scales of 8 rows in a step
  static constexpr uint32_t CODES_OF_SLICE = SLICE * Format::CODES, SCALES_OF_SLICE = SLICE * SCALES;
  static constexpr uint32_t SLOT = 2 * (CODES_OF_SLICE + SCALES_OF_SLICE);

  const Gemv& p;
  uint32_t steps, slices, units;  // of a row; this block's
  char* ring;
  char* xs;
  uint32_t full, empty;  // barriers of slots

  __device__ CodeStream(const Gemv& p, char* memory, uint32_t barriers)
      : p(p), steps(steps_of(p.k)), slices((steps + SLICE - 1) / SLICE), ring(memory), xs(memory + p.slots * SLOT),
        full(barriers), empty(barriers + 8 * MOST_SLOTS) {
    const uint32_t outputs = gates(p) ? OCTET : 2 * OCTET, all = (p.width + outputs - 1) / outputs;
    units = (all + gridDim.x - 1 - blockIdx.x) / gridDim.x;
  }

  // The row of the weights that is row r of unit i of this block.
  __device__ uint32_t weight_row(uint32_t i, uint32_t r) const {
    const uint32_t unit = blockIdx.x + i * gridDim.x;
    if (gates(p)) return unit * OCTET + r % OCTET + (r < OCTET ? 0 : p.width);
    return unit * (2 * OCTET) + r;
  }

  // One thread asks for all weights: each copy costs it some 50 ns, so they had better be large.
  __device__ void fill() const {
    const uint64_t policy = evict_first();
    Place next = {}, behind = {};
    const uint32_t ahead = min(Format::AHEAD, p.slots);
    uint32_t i = 0;
#pragma unroll 1
    for (uint32_t unit = 0; unit < units; ++unit) {
      const char *codes[2], *scales[2];
#pragma unroll
      for (int o = 0; o < 2; ++o) {
        // Past the last row the last are read again and not used.
        uint32_t row = min(weight_row(unit, o * OCTET), p.rows - 1);
        const Matrix& matrix = matrix_of(p, row);
        const uint64_t place = uint64_t(row / OCTET) * steps;
        codes[o] = static_cast<const char*>(matrix.data) + place * Format::CODES;
        scales[o] = static_cast<const char*>(matrix.scales) + place * SCALES;
      }
#pragma unroll 1
      for (uint32_t step = 0; step < steps; step += SLICE, ++i) {
        if (i >= p.slots) barrier_wait(empty + 8 * next.stage, next.phase ^ 1);
        if (i >= ahead) {
          barrier_wait(full + 8 * behind.stage, behind.phase);
          behind.next(p.slots);
        }
        const uint32_t n = min(SLICE, steps - step), at = full + 8 * next.stage;
        const uint32_t to = shared_address(ring) + next.stage * SLOT;
        barrier_expect(at, 2 * n * (Format::CODES + SCALES));
#pragma unroll
        for (int o = 0; o < 2; ++o) {
          bulk_copy(to + o * CODES_OF_SLICE, codes[o] + step * Format::CODES, n * Format::CODES, at, policy);
          if (SCALES > 0)
            bulk_copy(to + 2 * CODES_OF_SLICE + o * SCALES_OF_SLICE, scales[o] + step * SCALES, n * SCALES, at, policy);
        }
        next.next(p.slots);
      }
    }
  }

  // What the thread that finishes row `r` of a unit reads ahead.
  struct Ahead {
    Addends addends;
    float by;
  };
  // Its output, or one past the last.
  __device__ uint32_t column(uint32_t i, uint32_t r) const {
    const uint32_t unit = blockIdx.x + i * gridDim.x;
    if (i >= units || (gates(p) && r >= OCTET)) return p.width;
    return gates(p) ? unit * OCTET + r : unit * (2 * OCTET) + r;
  }
  __device__ float scale_of(uint32_t row) const {
    if (Format::GROUPS != ROW_SCALES) return 1.f;
    const Matrix& matrix = matrix_of(p, row);
    return __uint_as_float(load_u32(static_cast<const uint32_t*>(matrix.scales) + row));
  }
  __device__ void ask(Ahead& a, uint32_t i, uint32_t r) const {
    a = {};
    if (column(i, r) >= p.width) return;
    a.addends.ask_bias(p.epilogue, weight_row(i, r));
    a.by = scale_of(weight_row(i, r));
  }
  __device__ void ask_residuals(Ahead& a, uint32_t i, uint32_t r) const {
    if (column(i, r) < p.width) a.addends.ask_residuals(p.epilogue, 0, column(i, r));
  }
  __device__ void finish(const Ahead& a, uint32_t i, uint32_t r, const float (*sums)[2 * OCTET]) const {
    const Epilogue& e = p.epilogue;
    const uint32_t column = this->column(i, r);
    if (column >= p.width) return;
    const auto total = [&](uint32_t r) {
      float y = 0.f;
#pragma unroll
      for (int w = 0; w < STREAM_WARPS; ++w) y += sums[w][r];
      return y;
    };
    float y = fmaf(a.by, total(r), e.bias ? widen_raw(a.addends.bias, e.dtype) : 0.f);
    if (gates(p)) {
      const uint32_t row = weight_row(i, r + OCTET);
      const float bias = e.bias ? widen_raw(read_raw(e.bias, e.dtype, row), e.dtype) : 0.f;
      y = silu(y) * fmaf(scale_of(row), total(r + OCTET), bias);
    } else {
      y = activate(e.activation, y);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) y += e.residuals[r] ? widen_raw(a.addends.residuals[r], e.dtype) : 0.f;
    write(e.out, e.out_dtype, column, y);
  }

  // Whether each warp can have its part of x in registers. Otherwise the block stages all of x together.
  __device__ bool holds() const {
    return p.prologue.dtype == BF16 && (p.prologue.norm == NORM_NONE || slices <= HELD);
  }

  // Norms what this lane has of x.
  __device__ void norm(uint4 (&held)[HELD], const uint4 (&gains)[GAINS], float (*scratch)[STREAM_WARPS]) const {
    const Prologue& x = p.prologue;
    const Team team(STREAM_THREADS);
    const auto sum = [&](float mean, bool squares) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < HELD; ++i) {
        if (pack_of(i) >= p.k / 8) break;
        float v[8];
        unpack8<__nv_bfloat16>(held[i], v);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += squares ? (v[j] - mean) * (v[j] - mean) : v[j];
      }
      return sum;
    };
    const float mean = x.norm == NORM_LAYER ? team.sum(sum(0.f, false), scratch[0]) / p.k : 0.f;
    const float factor = rsqrtf(__fdividef(team.sum(sum(mean, true), scratch[1]), p.k) + x.eps);
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      if (pack_of(i) >= p.k / 8) break;
      const uint4 gain = i < GAINS ? gains[i % GAINS] : read_pack(x.weight, p.k, pack_of(i));
      const uint4 bias = x.bias ? read_pack(x.bias, p.k, pack_of(i)) : uint4{};
      held[i] = normed<__nv_bfloat16>(x, held[i], mean, factor, gain, bias);
    }
  }

  // Puts what this warp needs of x where it is multiplied from, and returns what codes are multiplied by.
  __device__ float stage(const typename Format::Row& row, const RowStage<typename Format::Row>& stage,
                         const uint4 (&gains)[GAINS], float (*scratch)[STREAM_WARPS]) const {
    if (!holds()) {
      stage.stage(p.prologue.x, 0);
      row.clear_tail(STREAM_THREADS);
      sync_first(STREAM_THREADS);
      return row.taken();
    }
    uint4 held[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      if (i < slices) held[i] = read_pack(p.prologue.x, p.k, pack_of(i));
    }
    if (p.prologue.norm != NORM_NONE) norm(held, gains, scratch);
    const float by = row.take(p.prologue, held, slices);
    __syncwarp();
    return by;
  }

  // One unit's sums of this warp.
  __device__ void multiply(const typename Format::Row& x, uint32_t warp, float by, Place& slot,
                           float (*sums)[2 * OCTET]) const {
    const uint32_t lane = threadIdx.x % WARP;
    typename Format::Sums own = {};
#pragma unroll 1
    for (uint32_t step = CHUNK * warp; step < slices * SLICE; step += SLICE) {
      const char* at = ring + slot.stage * SLOT + warp * (CHUNK * Format::CODES);
      const char* second = ring + slot.stage * SLOT + 2 * CODES_OF_SLICE + warp * (CHUNK * SCALES);
      const char* codes[2] = {at, at + CODES_OF_SLICE};
      const char* scales[2] = {second, second + SCALES_OF_SLICE};
      barrier_wait(full + 8 * slot.stage, slot.phase);
      if (step + CHUNK <= steps) {
        Format::template multiply<CHUNK>(codes, scales, x, step, lane, own);
      } else if (step < steps) {
        Format::template multiply<1>(codes, scales, x, step, lane, own);
      }
      // Each lane for itself: no slower than one for all, and racecheck follows it.
      barrier_arrive(empty + 8 * slot.stage);
      slot.next(p.slots);
    }
    float y[2];
    own.total(by, y);
    if (lane % 4 == 0) sums[warp][lane / 4] = y[0], sums[warp][lane / 4 + OCTET] = y[1];
  }

  __device__ void run(float (*sums)[STREAM_WARPS][2 * OCTET], float (*scratch)[STREAM_WARPS]) const {
    const uint32_t warp = threadIdx.x / WARP;
    if (threadIdx.x < p.slots) {
      barrier_init(full + 8 * threadIdx.x, 1);
      barrier_init(empty + 8 * threadIdx.x, STREAM_THREADS);
    }
    barriers_made();
    __syncthreads();
    allow_next();
    if (warp == STREAM_WARPS) {
      if (threadIdx.x % WARP == 0) fill();
      return;
    }
    typename Format::Row row(p, xs);
    RowStage<typename Format::Row> stages(p, row, scratch[0], Team(STREAM_THREADS));
    uint4 gains[GAINS];
    if (!holds()) {
      stages.ask();
    } else if (p.prologue.norm != NORM_NONE) {
#pragma unroll
      for (int i = 0; i < GAINS; ++i) gains[i] = read_pack(p.prologue.weight, p.k, pack_of(i));
    }
    const uint32_t i = threadIdx.x / (2 * OCTET), r = threadIdx.x % (2 * OCTET);
    Ahead a = {};
    if (i < ROUND) ask(a, i, r);
    wait_previous();
    if (units == 0) return;
    if (i < ROUND) ask_residuals(a, i, r);
    const float by = stage(row, stages, gains, scratch);
    Place slot = {};
#pragma unroll 1
    for (uint32_t begin = 0;; begin += ROUND) {
#pragma unroll 1
      for (uint32_t unit = begin; unit < min(begin + ROUND, units); ++unit)
        multiply(row, warp, by, slot, sums[unit - begin]);
      sync_first(STREAM_THREADS);
      if (i < ROUND) finish(a, begin + i, r, sums[i]);
      if (begin + ROUND >= units) return;
      sync_first(STREAM_THREADS);
      if (i < ROUND) ask(a, begin + ROUND + i, r), ask_residuals(a, begin + ROUND + i, r);
    }
  }
};

#endif

template <class Format> __device__ __forceinline__ void code_stream(const Gemv& p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ float4 dynamic_shared[];
  __shared__ float sums[ROUND][STREAM_WARPS][2 * OCTET];
  __shared__ alignas(16) float scratch[2][STREAM_WARPS];
  __shared__ uint64_t barriers[2 * MOST_SLOTS];
  CodeStream<Format>(p, reinterpret_cast<char*>(dynamic_shared), shared_address(barriers)).run(sums, scratch);
#endif
}

}  // namespace fused

// `NAME`: a kernel for one row and weights of this format.
#define FUSED_CODE_STREAM(NAME, FORMAT)                                                \
  extern "C" __global__ void __launch_bounds__(fused::GEMV_THREADS + fused::WARP, 2)   \
      NAME(const __grid_constant__ fused::Gemv p) {                                    \
    fused::code_stream<fused::FORMAT>(p);                                              \
  }
