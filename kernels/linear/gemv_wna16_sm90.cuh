// GEMV for one row of x and packed weights or GGUF blocks on Hopper: y = act(prologue(x) W^T + bias) +
// residuals, with the weights in a TMA pipeline (weight_stream_sm90.cuh).
//
// A GEMV in a decode step is a chain of latencies: the preceding kernel ends, x is read, multiplied, reduced,
// written. Meanwhile the next kernel's weights should be loading. So a block takes half of an SM's shared memory,
// and that of the next kernel fills its own pipeline in the other half.
//
// An N tile is 16 output channels, operand A of a 16-row `mma`. Consumer warp w
// multiplies K blocks 2w and 2w + 1 of every stage, for all N tiles, so it needs only that part of x (`owned`, in
// registers), and after the PDL wait no warp waits for another until the sums are added.
#pragma once

#include "linear/gemv_wna16_sm90_mma.cuh"

namespace fused {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

constexpr int ROUND = 8;  // N tiles whose sums are added at once
constexpr int GAINS = 2;  // packs of the norm's weight that a thread loads before the PDL wait

template <class Products> struct GemvSm90 : Products::Stream {
  using Stream = typename Products::Stream;
  using Row = typename Products::Row;
  using Staging = typename Products::Staging;  // of rows that warps do not own
  using Stream::n_tile, Stream::n_tiles, Stream::p, Stream::scale_of, Stream::stages_of_row, Stream::weight_row;
  char* const xs;

  __device__ GemvSm90(const Gemv& p, char* memory, uint32_t barriers)
      : Stream(p, StreamShare(k_blocks_of(p.k)), memory, barriers), xs(memory + p.stages * Stream::STAGE_BYTES) {}

  // What the thread that writes row `r` of an N tile reads ahead.
  struct EpilogueInputs {
    Addends addends;
    float by;
  };
  // Its output, or one past the last.
  __device__ uint32_t column(uint32_t i, uint32_t r) const {
    if (i >= n_tiles || (gates(p) && r >= ROW_GROUP)) return p.width;
    return n_tile_column(p, n_tile(i), r);
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
      y = gate(e.activation, y) * fmaf(scale_of(row), total(r + ROW_GROUP), bias);
    } else {
      y = activate(e.activation, y);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) y += e.residuals[r] ? widen_raw(a.addends.residuals[r], e.dtype) : 0.f;
    write(e.out, e.out_dtype, column, y);
  }

  // Whether each warp owns its part of x in registers.
  __device__ bool owns() const {
    return p.prologue.dtype == BF16 && (p.prologue.norm == NORM_NONE || stages_of_row <= OWNED);
  }

  // Applies the norm to what this lane owns of x.
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

  // Stages this warp's part of x in shared memory, and returns the factor of its products.
  __device__ float stage(const Row& row, const Staging& staging, const uint4 (&gains)[GAINS],
                         float (*scratch)[CONSUMER_WARPS]) const {
    if (!owns()) return staging.run(stages_of_row);
    uint4 owned[OWNED];
#pragma unroll
    for (int i = 0; i < OWNED; ++i) {
      if (i < stages_of_row) owned[i] = read_pack(p.prologue.x, p.k, pack_of(i));
    }
    if (p.prologue.norm != NORM_NONE) norm(owned, gains, scratch);
    // The norm has left this scratch a barrier ago.
    const float by = row.take(p.prologue, owned, stages_of_row, scratch[0]);
    __syncwarp();
    return by;
  }

  // The consumer: this warp's sums of N tile `i`.
  __device__ void multiply(const Row& x, uint32_t i, uint32_t warp, float by, StageState& stage,
                           float (*sums)[2 * ROW_GROUP]) const {
    float y[2];
    Products::multiply(*this, x, i, warp, by, stage, y);
    const uint32_t lane = threadIdx.x % WARP;
    if (lane % 4 == 0) sums[warp][lane / 4] = y[0], sums[warp][lane / 4 + ROW_GROUP] = y[1];
  }

  __device__ void run(float (*sums)[CONSUMER_WARPS][2 * ROW_GROUP], float (*scratch)[CONSUMER_WARPS]) const {
    const uint32_t warp = threadIdx.x / WARP;
    this->make_barriers();
    __syncthreads();
    pdl_launch();
    if (warp == CONSUMER_WARPS) return this->template produce<Products::AHEAD>();
    Row row(p, xs);
    Staging staging(p, row, scratch);
    uint4 gains[GAINS];
    if (!owns()) {
      staging.prefetch();
    } else if (p.prologue.norm != NORM_NONE) {
#pragma unroll
      for (int i = 0; i < GAINS; ++i) gains[i] = read_pack(p.prologue.weight, p.k, pack_of(i));
    }
    const uint32_t i = threadIdx.x / (2 * ROW_GROUP), r = threadIdx.x % (2 * ROW_GROUP);
    EpilogueInputs a = {};
    if (i < ROUND) prefetch(a, i, r);
    pdl_wait();
    if (n_tiles == 0) return;
    if (i < ROUND) load_residuals(a, i, r);
    const float by = stage(row, staging, gains, scratch);
    StageState stage = {};
#pragma unroll 1
    for (uint32_t begin = 0;; begin += ROUND) {
#pragma unroll 1
      for (uint32_t n_tile = begin; n_tile < min(begin + ROUND, n_tiles); ++n_tile)
        multiply(row, n_tile, warp, by, stage, sums[n_tile - begin]);
      sync_first(CONSUMER_THREADS);
      if (i < ROUND) epilogue(a, begin + i, r, sums[i]);
      if (begin + ROUND >= n_tiles) return;
      sync_first(CONSUMER_THREADS);
      if (i < ROUND) prefetch(a, begin + ROUND + i, r), load_residuals(a, begin + ROUND + i, r);
    }
  }
};

#endif

template <class Products, uint32_t STAGE_BYTES> __device__ __forceinline__ void gemv_sm90(const Gemv& p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static_assert(Products::Stream::STAGE_BYTES == STAGE_BYTES, "the host's");
  extern __shared__ float4 dynamic_shared[];
  __shared__ float sums[ROUND][CONSUMER_WARPS][2 * ROW_GROUP];
  __shared__ alignas(16) float scratch[2][CONSUMER_WARPS];
  __shared__ uint64_t barriers[2 * MAX_STAGES];
  GemvSm90<Products>(p, reinterpret_cast<char*>(dynamic_shared), shared_address(barriers)).run(sums, scratch);
#endif
}

}  // namespace fused

// `NAME`: a kernel for one row and these products, and the bytes of a stage as the host knows them.
#define FUSED_GEMV_SM90(NAME, STAGE_BYTES, ...)                                      \
  extern "C" __global__ void __launch_bounds__(fused::GEMV_THREADS + fused::WARP, 2) \
      NAME(const __grid_constant__ fused::Gemv p) {                                  \
    fused::gemv_sm90<__VA_ARGS__, STAGE_BYTES>(p);                                   \
  }
