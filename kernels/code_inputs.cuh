// Rows of x in shared memory as the cores for INT8, INT4 and ternary codes meet them (code_rows.cuh,
// code_tiles.cuh): in parts of bf16, or as bytes.
#pragma once

#include "codes.cuh"
#include "mma.cuh"
#include "row_stage.cuh"

namespace fused {

// Rows of x in one or two parts of bf16, in their order, each filled up with zeros to whole steps.
template <uint32_t PAD_> struct PartRows {
  static constexpr uint32_t PAD = PAD_;
  static constexpr int BATCH = 2;
  static constexpr bool SUMS = false, SCALES = false;
  char* at;
  uint32_t m, steps, parts;

  __device__ PartRows(const Gemv& p, char* at)
      : at(at), m(p.m), steps(steps_of(p.k)), parts(p.prologue.dtype == BF16 ? 1 : 2) {}

  __device__ uint32_t pitch() const { return steps * (2 * STEP) + PAD; }
  __device__ char* part(uint32_t row, uint32_t part) const { return at + (row * parts + part) * pitch(); }
  __device__ uint2* words(uint32_t row, uint32_t of, uint32_t piece) const {
    return reinterpret_cast<uint2*>(part(row, of)) + piece;
  }

  // The upper halves of the values are all there is to bf16.
  __device__ void put_raw(uint32_t row, uint32_t piece, float4 v) const {
    const uint32_t a = __float_as_uint(v.x), b = __float_as_uint(v.y), c = __float_as_uint(v.z), d = __float_as_uint(v.w);
    *words(row, 0, piece) = make_uint2(__byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x7632));
    if (parts == 2) *words(row, 1, piece) = make_uint2(__byte_perm(a, b, 0x5410), __byte_perm(c, d, 0x5410));
  }
  __device__ float4 get_raw(uint32_t row, uint32_t piece) const {
    const uint2 high = *words(row, 0, piece);
    uint2 low = make_uint2(0, 0);
    if (parts == 2) low = *words(row, 1, piece);
    return make_float4(__uint_as_float(__byte_perm(low.x, high.x, 0x5410)),
                       __uint_as_float(__byte_perm(low.x, high.x, 0x7632)),
                       __uint_as_float(__byte_perm(low.y, high.y, 0x5410)),
                       __uint_as_float(__byte_perm(low.y, high.y, 0x7632)));
  }
  __device__ void put(uint32_t row, uint32_t piece, float4 v) const {
    const uint32_t a = split(v.x), b = split(v.y), c = split(v.z), d = split(v.w);
    *words(row, 0, piece) = make_uint2(__byte_perm(a, b, 0x5410), __byte_perm(c, d, 0x5410));
    if (parts == 2) *words(row, 1, piece) = make_uint2(__byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x7632));
  }
  __device__ float put_largest(uint32_t, float) const { return 1.f; }
  // A row of bf16 as it is, k being a multiple of 8.
  __device__ bool take(const char* x, uint32_t row, uint32_t k, const Team& team, float*) const {
    // All of it on its way at once, without registers.
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(part(row, 0)));
    for (uint32_t i = team.rank(); i < k / 8; i += team.size()) copy_async(to + 16 * i, x + 16 * i, true);
    await_copies();
    return true;
  }
  __device__ void clear_tail(uint32_t m, uint32_t k) const {
    const uint32_t first = k / 4, tail = steps * (STEP / 4) - first;
    for (uint32_t i = threadIdx.x; i < m * parts * tail; i += blockDim.x)
      *words(0, i / tail, first + i % tail) = make_uint2(0, 0);
  }

  // 8 values from `value` on as column `column` of operand B: part c % 2 of row c / 2.
  __device__ __forceinline__ uint4 column(uint32_t column, uint32_t value) const {
    if (column >= 2 * m || column % 2 >= parts) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4*>(part(column / 2, column % 2) + 2 * value);
  }
  // Their sum with 8 weights.
  __device__ __forceinline__ float dot(uint32_t row, uint32_t value, const float (&w)[8]) const {
    float y = 0.f;
    for (uint32_t part = 0; part < parts; ++part) {
      float x[8];
      unpack8<__nv_bfloat16>(column(2 * row + part, value), x);
#pragma unroll
      for (int c = 0; c < 8; ++c) y = fmaf(w[c], x[c], y);
    }
    return y;
  }
};

// Rows of x in int8, filled up with zeros to whole steps, then the rows as f32, then what each row's
// codes are multiplied by.
struct ByteRows {
  static constexpr int BATCH = 2;
  static constexpr bool SUMS = false, SCALES = true;
  static constexpr uint32_t PAD = 32;
  char* at;
  uint32_t m, k, steps;

  __device__ ByteRows(const Gemv& p, char* at) : at(at), m(p.m), k(p.k), steps(steps_of(p.k)) {}

  __device__ uint32_t pitch() const { return steps * STEP + PAD; }
  __device__ float4* raw() const { return reinterpret_cast<float4*>(at + m * pitch()); }
  __device__ float* scales() const { return reinterpret_cast<float*>(raw() + m * (k / 4)); }

  __device__ void put_raw(uint32_t row, uint32_t piece, float4 v) const { raw()[row * (k / 4) + piece] = v; }
  __device__ float4 get_raw(uint32_t row, uint32_t piece) const { return raw()[row * (k / 4) + piece]; }
  __device__ void put(uint32_t row, uint32_t piece, float4 v) const {
    const uint32_t a = __float2int_rn(v.x) & 255, b = __float2int_rn(v.y) & 255, c = __float2int_rn(v.z) & 255;
    reinterpret_cast<uint32_t*>(at + row * pitch())[piece] = a | b << 8 | c << 16 | uint32_t(__float2int_rn(v.w)) << 24;
  }
  __device__ void put_sum(uint32_t, uint32_t, float) const {}
  // A row of zeros has codes of zero.
  __device__ float put_largest(uint32_t row, float largest) const {
    scales()[row] = largest / 127.f;
    return largest > 0.f ? 127.f / largest : 0.f;
  }
  // A row of bf16, k being a multiple of 8, if its threads can hold it.
  __device__ bool take(const char* x, uint32_t row, uint32_t k, const Team& team, float* scratch) const {
    constexpr int MOST = 4;
    if (k / 8 > MOST * team.size()) return false;
    uint4 held[MOST];
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
      const uint32_t at = team.rank() + i * team.size();
      held[i] = make_uint4(0, 0, 0, 0);
      if (at < k / 8) held[i] = __ldcg(reinterpret_cast<const uint4*>(x) + at);
    }
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
      const uint32_t words[4] = {held[i].x, held[i].y, held[i].z, held[i].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) largest = max(largest, max(words[w] << 16 & 0x7fffffffu, words[w] & 0x7fff0000u));
    }
    const float by = put_largest(row, __uint_as_float(team.max(largest, scratch)));
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
      const uint32_t at = team.rank() + i * team.size();
      if (at >= k / 8) break;
      float v[8];
      unpack8<__nv_bfloat16>(held[i], v);
      put(row, 2 * at, make_float4(v[0] * by, v[1] * by, v[2] * by, v[3] * by));
      put(row, 2 * at + 1, make_float4(v[4] * by, v[5] * by, v[6] * by, v[7] * by));
    }
    return true;
  }
  __device__ void clear_tail(uint32_t m, uint32_t k) const {
    const uint32_t first = k / 4, tail = steps * (STEP / 4) - first;
    for (uint32_t i = threadIdx.x; i < m * tail; i += blockDim.x)
      reinterpret_cast<uint32_t*>(at + i / tail * pitch())[first + i % tail] = 0;
  }

  __device__ __forceinline__ uint2 eight(uint32_t row, uint32_t value) const {
    return *reinterpret_cast<const uint2*>(at + row * pitch() + value);
  }
  __device__ __forceinline__ uint2 column(uint32_t column, uint32_t value) const {
    if (column >= 2 * m || column % 2 > 0) return make_uint2(0, 0);
    return eight(column / 2, value);
  }
};

}  // namespace fused
