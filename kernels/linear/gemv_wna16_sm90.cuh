// y = act(prologue(x) W^T + bias) + residuals for one row of x and weights in INT4 or ternary codes
// (formats/packed.cuh), on Hopper: the weights stream through a ring in shared memory.
//
// A product of one row is a chain: the preceding kernel ends, x is read, multiplied, summed up, written. While
// one kernel is in it, the next one's weights are to come. So a block takes half of an SM: that of
// the next kernel has the other half and fills its ring. A thread that does nothing else loads weights, and
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

constexpr uint32_t SLICE = CHUNK * CONSUMER_WARPS;  // steps of a slot
static_assert(SLICE == GEMV_SM90_K_BLOCKS);
constexpr uint32_t MAX_SLOTS = GEMV_SM90_MAX_STAGES;
constexpr int ROUND = 8;  // units whose sums meet at once
constexpr int GAINS = 2;  // slices of a norm's weight that a warp loads before the PDL wait

// A place in the ring, and the parity of its barriers.
struct StageState {
  uint32_t stage, phase;

  __device__ __forceinline__ void next(uint32_t slots) {
    if (++stage == slots) stage = 0, phase ^= 1;
  }
};

template <class Format> struct GemvSm90 {
  static constexpr uint32_t SCALES = 2 * ROW_GROUP * Format::GROUPS;  // bytes of the scales of 8 rows in a step
  static constexpr uint32_t CODES_OF_SLICE = SLICE * Format::CODES, SCALES_OF_SLICE = SLICE * SCALES;
  static constexpr uint32_t SLOT = 2 * (CODES_OF_SLICE + SCALES_OF_SLICE);

  const Gemv& p;
  uint32_t steps, slices, units;  // of a row; this block's
  char* ring;
  char* xs;
  uint32_t full, empty;  // barriers of slots

  __device__ GemvSm90(const Gemv& p, char* memory, uint32_t barriers)
      : p(p), steps(steps_of(p.k)), slices((steps + SLICE - 1) / SLICE), ring(memory), xs(memory + p.slots * SLOT),
        full(barriers), empty(barriers + 8 * MAX_SLOTS) {
    const uint32_t outputs = gates(p) ? ROW_GROUP : 2 * ROW_GROUP, all = (p.width + outputs - 1) / outputs;
    units = (all + gridDim.x - 1 - blockIdx.x) / gridDim.x;
  }

  // The row of the weights that is row r of unit i of this block.
  __device__ uint32_t weight_row(uint32_t i, uint32_t r) const {
    const uint32_t unit = blockIdx.x + i * gridDim.x;
    if (gates(p)) return unit * ROW_GROUP + r % ROW_GROUP + (r < ROW_GROUP ? 0 : p.width);
    return unit * (2 * ROW_GROUP) + r;
  }

  // One thread loads all weights: each copy costs it some 50 ns, so they had better be large.
  __device__ void produce() const {
    const uint64_t policy = evict_first();
    StageState next = {}, behind = {};
    const uint32_t ahead = min(Format::AHEAD, p.slots);
    uint32_t i = 0;
#pragma unroll 1
    for (uint32_t unit = 0; unit < units; ++unit) {
      const char *codes[2], *scales[2];
#pragma unroll
      for (int o = 0; o < 2; ++o) {
        // Past the last row the last are read again and not used.
        uint32_t row = min(weight_row(unit, o * ROW_GROUP), p.rows - 1);
        const Matrix& matrix = matrix_of(p, row);
        const uint64_t place = uint64_t(row / ROW_GROUP) * steps;
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
  struct EpilogueInputs {
    Addends addends;
    float by;
  };
  // Its output, or one past the last.
  __device__ uint32_t column(uint32_t i, uint32_t r) const {
    const uint32_t unit = blockIdx.x + i * gridDim.x;
    if (i >= units || (gates(p) && r >= ROW_GROUP)) return p.width;
    return gates(p) ? unit * ROW_GROUP + r : unit * (2 * ROW_GROUP) + r;
  }
  __device__ float scale_of(uint32_t row) const {
    if (Format::GROUPS != ROW_SCALES) return 1.f;
    const Matrix& matrix = matrix_of(p, row);
    return __uint_as_float(load_u32(static_cast<const uint32_t*>(matrix.scales) + row));
  }
  __device__ void prefetch(EpilogueInputs& a, uint32_t i, uint32_t r) const {
    a = {};
    if (column(i, r) >= p.width) return;
    a.addends.load_bias(p.epilogue, weight_row(i, r));
    a.by = scale_of(weight_row(i, r));
  }
  __device__ void load_residuals(EpilogueInputs& a, uint32_t i, uint32_t r) const {
    if (column(i, r) < p.width) a.addends.load_residuals(p.epilogue, 0, column(i, r));
  }
  __device__ void epilogue(const EpilogueInputs& a, uint32_t i, uint32_t r, const float (*sums)[2 * ROW_GROUP]) const {
    const Epilogue& e = p.epilogue;
    const uint32_t column = this->column(i, r);
    if (column >= p.width) return;
    const auto total = [&](uint32_t r) {
      float y = 0.f;
#pragma unroll
      for (int w = 0; w < CONSUMER_WARPS; ++w) y += sums[w][r];
      return y;
    };
    float y = fmaf(a.by, total(r), e.bias ? widen_raw(a.addends.bias, e.dtype) : 0.f);
    if (gates(p)) {
      const uint32_t row = weight_row(i, r + ROW_GROUP);
      const float bias = e.bias ? widen_raw(read_raw(e.bias, e.dtype, row), e.dtype) : 0.f;
      y = silu(y) * fmaf(scale_of(row), total(r + ROW_GROUP), bias);
    } else {
      y = activate(e.activation, y);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) y += e.residuals[r] ? widen_raw(a.addends.residuals[r], e.dtype) : 0.f;
    write(e.out, e.out_dtype, column, y);
  }

  // Whether each warp can have its part of x in registers. Otherwise the block stages all of x together.
  __device__ bool owns() const {
    return p.prologue.dtype == BF16 && (p.prologue.norm == NORM_NONE || slices <= OWNED);
  }

  // Norms what this lane has of x.
  __device__ void norm(uint4 (&owned)[OWNED], const uint4 (&gains)[GAINS], float (*scratch)[CONSUMER_WARPS]) const {
    const Prologue& x = p.prologue;
    const ThreadGroup group(CONSUMER_THREADS);
    const auto sum = [&](float mean, bool squares) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < OWNED; ++i) {
        if (pack_of(i) >= p.k / 8) break;
        float v[8];
        unpack8<__nv_bfloat16>(owned[i], v);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += squares ? (v[j] - mean) * (v[j] - mean) : v[j];
      }
      return sum;
    };
    const float mean = x.norm == NORM_LAYER ? group.sum(sum(0.f, false), scratch[0]) / p.k : 0.f;
    const float factor = rsqrtf(__fdividef(group.sum(sum(mean, true), scratch[1]), p.k) + x.eps);
#pragma unroll
    for (int i = 0; i < OWNED; ++i) {
      if (pack_of(i) >= p.k / 8) break;
      const uint4 gain = i < GAINS ? gains[i % GAINS] : read_pack(x.weight, p.k, pack_of(i));
      const uint4 bias = x.bias ? read_pack(x.bias, p.k, pack_of(i)) : uint4{};
      owned[i] = normed<__nv_bfloat16>(x, owned[i], mean, factor, gain, bias);
    }
  }

  // Puts what this warp needs of x where it is multiplied from, and returns what codes are multiplied by.
  __device__ float stage(const typename Format::Row& row, const RowStage<typename Format::Row>& stage,
                         const uint4 (&gains)[GAINS], float (*scratch)[CONSUMER_WARPS]) const {
    if (!owns()) {
      stage.stage(p.prologue.x, 0);
      row.clear_tail(CONSUMER_THREADS);
      sync_first(CONSUMER_THREADS);
      return row.taken();
    }
    uint4 owned[OWNED];
#pragma unroll
    for (int i = 0; i < OWNED; ++i) {
      if (i < slices) owned[i] = read_pack(p.prologue.x, p.k, pack_of(i));
    }
    if (p.prologue.norm != NORM_NONE) norm(owned, gains, scratch);
    const float by = row.take(p.prologue, owned, slices);
    __syncwarp();
    return by;
  }

  // One unit's sums of this warp.
  __device__ void multiply(const typename Format::Row& x, uint32_t warp, float by, StageState& slot,
                           float (*sums)[2 * ROW_GROUP]) const {
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
    if (lane % 4 == 0) sums[warp][lane / 4] = y[0], sums[warp][lane / 4 + ROW_GROUP] = y[1];
  }

  __device__ void run(float (*sums)[CONSUMER_WARPS][2 * ROW_GROUP], float (*scratch)[CONSUMER_WARPS]) const {
    const uint32_t warp = threadIdx.x / WARP;
    if (threadIdx.x < p.slots) {
      barrier_init(full + 8 * threadIdx.x, 1);
      barrier_init(empty + 8 * threadIdx.x, CONSUMER_THREADS);
    }
    barriers_made();
    __syncthreads();
    pdl_launch();
    if (warp == CONSUMER_WARPS) {
      if (threadIdx.x % WARP == 0) produce();
      return;
    }
    typename Format::Row row(p, xs);
    RowStage<typename Format::Row> stages(p, row, scratch[0], ThreadGroup(CONSUMER_THREADS));
    uint4 gains[GAINS];
    if (!owns()) {
      stages.prefetch();
    } else if (p.prologue.norm != NORM_NONE) {
#pragma unroll
      for (int i = 0; i < GAINS; ++i) gains[i] = read_pack(p.prologue.weight, p.k, pack_of(i));
    }
    const uint32_t i = threadIdx.x / (2 * ROW_GROUP), r = threadIdx.x % (2 * ROW_GROUP);
    EpilogueInputs a = {};
    if (i < ROUND) prefetch(a, i, r);
    pdl_wait();
    if (units == 0) return;
    if (i < ROUND) load_residuals(a, i, r);
    const float by = stage(row, stages, gains, scratch);
    StageState slot = {};
#pragma unroll 1
    for (uint32_t begin = 0;; begin += ROUND) {
#pragma unroll 1
      for (uint32_t unit = begin; unit < min(begin + ROUND, units); ++unit)
        multiply(row, warp, by, slot, sums[unit - begin]);
      sync_first(CONSUMER_THREADS);
      if (i < ROUND) epilogue(a, begin + i, r, sums[i]);
      if (begin + ROUND >= units) return;
      sync_first(CONSUMER_THREADS);
      if (i < ROUND) prefetch(a, begin + ROUND + i, r), load_residuals(a, begin + ROUND + i, r);
    }
  }
};

#endif

template <class Format> __device__ __forceinline__ void gemv_sm90(const Gemv& p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ float4 dynamic_shared[];
  __shared__ float sums[ROUND][CONSUMER_WARPS][2 * ROW_GROUP];
  __shared__ alignas(16) float scratch[2][CONSUMER_WARPS];
  __shared__ uint64_t barriers[2 * MAX_SLOTS];
  GemvSm90<Format>(p, reinterpret_cast<char*>(dynamic_shared), shared_address(barriers)).run(sums, scratch);
#endif
}

}  // namespace fused

// `NAME`: a kernel for one row and weights of this format.
#define FUSED_GEMV_SM90(NAME, FORMAT)                                                \
  extern "C" __global__ void __launch_bounds__(fused::GEMV_THREADS + fused::WARP, 2)   \
      NAME(const __grid_constant__ fused::Gemv p) {                                    \
    fused::gemv_sm90<fused::FORMAT>(p);                                              \
  }
