// The prologue of products with quantized weights: as in prologue.cuh rows of x pass a norm or none, and are then
// staged in shared memory in the form that a core multiplies (a policy, `Rows`).
#pragma once

#include "linear/gemv.cuh"

namespace fused {

// The bf16 nearest to v in the lower half, and what it leaves over in the upper one.
__device__ __forceinline__ uint32_t split(float v) {
  const uint32_t high = __bfloat16_as_ushort(__float2bfloat16_rn(v));
  const uint32_t low = __bfloat16_as_ushort(__float2bfloat16_rn(v - __uint_as_float(high << 16)));
  return high | low << 16;
}

__device__ __forceinline__ uint32_t magnitude(float v) { return __float_as_uint(v) & 0x7fffffffu; }

__device__ __forceinline__ float rounded_to(int dtype, float v) {
  if (dtype == BF16) return rounded<__nv_bfloat16>(v);
  return dtype == F16 ? rounded<__half>(v) : v;
}

// Reads and normalises the rows of x and puts them where a core wants them, each thread 4 values at a
// time. There is one copy of everything, for all types: what runs after the PDL wait is to be short. Where
// rows go is a policy:
//
//   struct Rows {
//     static constexpr int BATCH;      // pieces that a thread loads at once
//     static constexpr int SUMS;       // how many sums of x are wanted of 32 values: 0, 1, or 2 of 16 each
//     static constexpr bool SCALES;    // whether a row's largest magnitude is
//     // 4 values as they are; the thread that put them reads them back.
//     void put_raw(uint32_t row, uint32_t piece, float4) const;
//     float4 get_raw(uint32_t row, uint32_t piece) const;
//     void put(uint32_t row, uint32_t piece, float4) const;   // as the core takes them
//     void put_sum(uint32_t row, uint32_t i, float) const;    // if SUMS: the row's i-th
//     float put_largest(uint32_t row, float) const;           // if SCALES: what values are multiplied by then
//     void clear_tail(uint32_t m, uint32_t k) const;          // all threads: zeros behind the last value
//   };
template <class Rows> struct RowStage {
  static constexpr int BATCH = Rows::BATCH;  // pieces of 4 values that a thread has on the way at once
  const Gemv& p;
  Rows rows;
  float* scratch;  // 8 floats
  ThreadGroup group;
  uint4 weight;    // the first piece of the norm's

  __device__ RowStage(const Gemv& p, Rows rows, float* scratch) : RowStage(p, rows, scratch, ThreadGroup(p.m == 1)) {}
  __device__ RowStage(const Gemv& p, Rows rows, float* scratch, ThreadGroup group)
      : p(p), rows(rows), scratch(scratch), group(group), weight() {}

  // 4 elements as they are stored; the upper half is there for f32 only.
  __device__ __forceinline__ uint4 read(const void* from, uint32_t piece) const {
    if (p.prologue.dtype == F32) return __ldcg(static_cast<const uint4*>(from) + piece);
    const uint2 v = __ldcg(static_cast<const uint2*>(from) + piece);
    return make_uint4(v.x, v.y, 0, 0);
  }
  __device__ __forceinline__ float4 widen(uint4 raw) const {
    if (p.prologue.dtype == F32)
      return make_float4(__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z),
                         __uint_as_float(raw.w));
    const bool is_bf16 = p.prologue.dtype == BF16;
    const float2 a = is_bf16 ? unpack2<__nv_bfloat16>(raw.x) : unpack2<__half>(raw.x);
    const float2 b = is_bf16 ? unpack2<__nv_bfloat16>(raw.y) : unpack2<__half>(raw.y);
    return make_float4(a.x, a.y, b.x, b.y);
  }

  // Before the PDL wait: loads the norm's weight.
  __device__ __forceinline__ void prefetch() {
    if (p.prologue.norm != NORM_NONE && group.rank() < p.k / 4) weight = read(p.prologue.weight, group.rank());
  }

  __device__ __forceinline__ void run() const {
    const uint64_t bytes = uint64_t(p.k) * (p.prologue.dtype == F32 ? 4 : 2);
#pragma unroll 1
    for (uint32_t r = group.index(); r < p.m; r += group.count())
      stage(static_cast<const char*>(p.prologue.x) + r * bytes, r);
    rows.clear_tail(p.m, p.k);
  }

  // 4 values behind the norm, rounded as the norm's own kernel rounds.
  __device__ __forceinline__ float4 normed(float4 v, uint32_t piece, bool centres, float mean, float factor) const {
    const uint4 raw = piece == group.rank() ? weight : read(p.prologue.weight, piece);
    const float4 w = widen(raw);
    const int dtype = p.prologue.dtype;
    if (centres) {
      const float4 b = p.prologue.bias ? widen(read(p.prologue.bias, piece)) : float4{};
      v.x = rounded_to(dtype, fmaf((v.x - mean) * factor, w.x, b.x));
      v.y = rounded_to(dtype, fmaf((v.y - mean) * factor, w.y, b.y));
      v.z = rounded_to(dtype, fmaf((v.z - mean) * factor, w.z, b.z));
      v.w = rounded_to(dtype, fmaf((v.w - mean) * factor, w.w, b.w));
    } else {
      v.x = rounded_to(dtype, rounded_to(dtype, v.x * factor) * w.x);
      v.y = rounded_to(dtype, rounded_to(dtype, v.y * factor) * w.y);
      v.z = rounded_to(dtype, rounded_to(dtype, v.z * factor) * w.z);
      v.w = rounded_to(dtype, rounded_to(dtype, v.w * factor) * w.w);
    }
    return v;
  }

  __device__ __forceinline__ void stage(const void* x, uint32_t row) const {
    const uint32_t pieces = p.k / 4, size = group.size();
    const bool norms = p.prologue.norm != NORM_NONE, centres = p.prologue.norm == NORM_LAYER;
    float mean = 0.f, squares = 0.f;
#pragma unroll 1
    for (uint32_t first = group.rank(); first < pieces; first += BATCH * size) {
      uint4 raw[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        if (first + i * size < pieces) raw[i] = read(x, first + i * size);
      }
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        if (first + i * size >= pieces) break;
        const float4 v = widen(raw[i]);
        squares = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, squares))));
        if (centres) mean += (v.x + v.y) + (v.z + v.w);
        rows.put_raw(row, first + i * size, v);
      }
    }
    if (centres) {
      mean = group.sum(mean, scratch) / p.k;
      squares = 0.f;
#pragma unroll 1
      for (uint32_t piece = group.rank(); piece < pieces; piece += size) {
        // What this thread itself has put there.
        const float4 v = rows.get_raw(row, piece);
        const float4 d = make_float4(v.x - mean, v.y - mean, v.z - mean, v.w - mean);
        squares = fmaf(d.x, d.x, fmaf(d.y, d.y, fmaf(d.z, d.z, fmaf(d.w, d.w, squares))));
      }
      if (group.block) group.sync();  // the scratch is used again
    }
    float factor = 1.f;
    if (norms) factor = rsqrtf(__fdividef(group.sum(squares, scratch), p.k) + p.prologue.eps);
    const uint32_t lane = threadIdx.x % WARP;
    uint32_t largest = 0;
    // Whole warps: 8 lanes side by side have a block of 32.
#pragma unroll 1
    for (uint32_t first = group.rank() - lane; first < pieces; first += size) {
      const uint32_t piece = first + lane;
      const bool mine = piece < pieces;
      float4 v = {};
      if (mine) {
        // What this thread itself has put there.
        v = rows.get_raw(row, piece);
        if (norms) v = normed(v, piece, centres, mean, factor);
      }
      if constexpr (Rows::SCALES) {
        // As bits, of which those of NaN are the largest.
        largest = max(largest, max(max(magnitude(v.x), magnitude(v.y)), max(magnitude(v.z), magnitude(v.w))));
        if (mine) rows.put_raw(row, piece, v);
        continue;
      }
      __syncwarp();  // the parts of a block go where its raw values are
      if (mine) rows.put(row, piece, v);
      if constexpr (Rows::SUMS > 0) {
        constexpr int LANES = 8 / Rows::SUMS;  // that have the values of a sum
        float sum = (v.x + v.y) + (v.z + v.w);
#pragma unroll
        for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(FULL, sum, offset);
        if (mine && lane % LANES == 0) rows.put_sum(row, piece / LANES, sum);
      }
    }
    if constexpr (Rows::SCALES) {
      if (group.block) group.sync();  // the scratch is used again
      const float by = rows.put_largest(row, __uint_as_float(group.max(largest, scratch)));
#pragma unroll 1
      for (uint32_t piece = group.rank(); piece < pieces; piece += size) {
        const float4 v = rows.get_raw(row, piece);
        rows.put(row, piece, make_float4(v.x * by, v.y * by, v.z * by, v.w * by));
      }
    }
  }
};

}  // namespace fused
