// How rows of x lie in shared memory for packed weights (gemv_wna16.cuh): as one or two bf16
// parts for INT8 and INT4, as int8 with a scale per row for ternary.
#pragma once

#include "common/mma.cuh"
#include "formats/packed.cuh"
#include "linear/stage_x.cuh"

namespace fused {

// Rows of x in one or two parts of bf16, in their order, each filled up with zeros to whole K blocks.
template <uint32_t PAD_> struct PartRows {
  static constexpr uint32_t PAD = PAD_;
  static constexpr int BATCH = 2;
  static constexpr int SUMS = 0;
  static constexpr bool SCALES = false;
  char* at;
  uint32_t m, k_blocks, parts;

  __device__ PartRows(const Gemv& p, char* at)
      : at(at), m(p.m), k_blocks(k_blocks_of(p.k)), parts(p.prologue.dtype == BF16 ? 1 : 2) {}

  __device__ uint32_t pitch() const { return k_blocks * (2 * K_BLOCK) + PAD; }
  __device__ char* part(uint32_t row, uint32_t part) const { return at + (row * parts + part) * pitch(); }
  __device__ uint2* words(uint32_t row, uint32_t of, uint32_t piece) const {
    return reinterpret_cast<uint2*>(part(row, of)) + piece;
  }

  // The upper halves of the values are all there is to bf16.
  __device__ void put_raw(uint32_t row, uint32_t piece, float4 v) const {
    const uint32_t a = __float_as_uint(v.x), b = __float_as_uint(v.y), c = __float_as_uint(v.z),
                   d = __float_as_uint(v.w);
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
  // A row of bf16 as it is, k being a multiple of 8.
  __device__ bool take(const char* x, uint32_t row, uint32_t k, const ThreadGroup& group, float*) const {
    // All of it on its way at once, without registers.
    const uint32_t to = shared_address(part(row, 0));
    for (uint32_t i = group.rank(); i < k / 8; i += group.size()) copy_async(to + 16 * i, x + 16 * i);
    await_copies();
    return true;
  }
  __device__ void clear_tail(uint32_t m, uint32_t k) const {
    const uint32_t first = k / 4, tail = k_blocks * (K_BLOCK / 4) - first;
    for (uint32_t i = threadIdx.x; i < m * parts * tail; i += blockDim.x)
      *words(0, i / tail, first + i % tail) = make_uint2(0, 0);
  }

  // What lanes of a column of operand B meet in a K block.
  struct KBlock {
    const PartRows& x;
    uint32_t column;

    __device__ __forceinline__ uint4 block(int, uint32_t value) const { return x.column(column, value); }
  };
  __device__ __forceinline__ KBlock k_block(uint32_t column, uint32_t, uint32_t) const { return {*this, column}; }

  // 8 values from `value` on as column `column` of operand B: part c % 2 of row c / 2.
  __device__ __forceinline__ uint4 column(uint32_t column, uint32_t value) const {
    if (column >= 2 * m || column % 2 >= parts) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4*>(part(column / 2, column % 2) + 2 * value);
  }
  // The values of row `row` from `value` on, their parts put together again.
  struct Eight {
    float v[8];
  };
  __device__ __forceinline__ Eight eight(uint32_t row, uint32_t value) const {
    Eight x;
    unpack8<__nv_bfloat16>(*reinterpret_cast<const uint4*>(part(row, 0) + 2 * value), x.v);
    // Without a branch, for which the loop around it would be there twice.
    uint4 words = *reinterpret_cast<const uint4*>(part(row, parts - 1) + 2 * value);
    const uint32_t mask = parts == 2 ? ~0u : 0;
    words.x &= mask, words.y &= mask, words.z &= mask, words.w &= mask;
    float low[8];
    unpack8<__nv_bfloat16>(words, low);
#pragma unroll
    for (int c = 0; c < 8; ++c) x.v[c] += low[c];
    return x;
  }
  static __device__ __forceinline__ float dot(const float (&w)[8], const Eight& x) {
    float y = 0.f;
#pragma unroll
    for (int c = 0; c < 8; ++c) y = fmaf(w[c], x.v[c], y);
    return y;
  }
};

// What the numbers of ternary codes are multiplied by as operands: they take the upper two bits of a byte.
constexpr float TERNARY_UNIT = 64.f;

// Of whole numbers byte 1 when they are rounded to whole 256s, or byte 0, which has a sign.
__device__ __forceinline__ uint32_t bytes_of(uint32_t a, uint32_t b, int part) {
  return part == 0 ? __byte_perm(a + 128, b + 128, 0x0051) : __byte_perm(a, b, 0x0040);
}
__device__ __forceinline__ uint32_t bytes_of(const uint32_t (&v)[4], int part) {
  return __byte_perm(bytes_of(v[0], v[1], part), bytes_of(v[2], v[3], part), 0x5410);
}

// Rows of x in int8, filled up with zeros to whole K blocks, then room for the rows as they were, then what
// each row's codes are multiplied by. What lane t meets in a K block is together: for each block of 32 its
// values 0, 2, 4 and 6 of 8, then the others.
struct ByteRows {
  static constexpr int BATCH = 2;
  static constexpr int SUMS = 0;
  static constexpr bool SCALES = true;
  static constexpr uint32_t PAD = TERNARY_PADDING;
  char* at;
  uint32_t m, k, k_blocks;

  __device__ ByteRows(const Gemv& p, char* at) : at(at), m(p.m), k(p.k), k_blocks(k_blocks_of(p.k)) {}

  __device__ uint32_t pitch() const { return k_blocks * K_BLOCK + PAD; }
  __device__ float4* raw() const { return reinterpret_cast<float4*>(at + m * pitch()); }
  __device__ float* scales() const { return reinterpret_cast<float*>(raw() + m * (k / 4)); }
  // Where 8 values from `value` on lie.
  __device__ __forceinline__ char* place(uint32_t row, uint32_t value) const {
    const uint32_t block = value % K_BLOCK / 32, t = value % 32 / 8;
    return at + row * pitch() + value / K_BLOCK * K_BLOCK + 32 * t + 8 * block;
  }

  __device__ void put_raw(uint32_t row, uint32_t piece, float4 v) const { raw()[row * (k / 4) + piece] = v; }
  __device__ float4 get_raw(uint32_t row, uint32_t piece) const { return raw()[row * (k / 4) + piece]; }
  // The nearest whole number, of up to 22 bits, in the lower bits: a sum has no others left.
  static __device__ __forceinline__ uint32_t whole(float v) { return __float_as_uint(__fadd_rn(v, 12582912.f)); }
  __device__ void put_bytes(uint32_t row, uint32_t piece, uint32_t even, uint32_t odd) const {
    uint16_t* to = reinterpret_cast<uint16_t*>(place(row, piece / 2 * 8)) + piece % 2;
    to[0] = even, to[2] = odd;
  }
  __device__ void put(uint32_t row, uint32_t piece, float4 v) const {
    put_bytes(row, piece, __byte_perm(whole(v.x), whole(v.z), 0x0040), __byte_perm(whole(v.y), whole(v.w), 0x0040));
  }
  // A row of zeros has codes of zero.
  __device__ float put_largest(uint32_t row, float largest) const {
    scales()[row] = largest / (127.f * TERNARY_UNIT);
    return largest > 0.f ? 127.f / largest : 0.f;
  }
  // A row of bf16, k being a multiple of 8.
  __device__ bool take(const char* x, uint32_t row, uint32_t k, const ThreadGroup& group, float* scratch) const {
    // All of it on its way at once, without registers; a thread reads back what it has loaded itself.
    uint4* owned = reinterpret_cast<uint4*>(raw() + row * (k / 4));
    const uint32_t to = shared_address(owned);
    for (uint32_t i = group.rank(); i < k / 8; i += group.size()) copy_async(to + 16 * i, x + 16 * i);
    await_copies();
    uint32_t both = 0;
#pragma unroll 2
    for (uint32_t i = group.rank(); i < k / 8; i += group.size()) {
      const uint4 v = owned[i];
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) both = __vmaxu2(both, words[w] & 0x7fff7fffu);
    }
    const uint32_t largest = max(both << 16, both & 0xffff0000u);
    const float by = put_largest(row, __uint_as_float(group.max(largest, scratch)));
#pragma unroll 2
    for (uint32_t i = group.rank(); i < k / 8; i += group.size()) {
      const uint4 v = owned[i];
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
      uint32_t even[4], odd[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        even[w] = whole(__fmul_rn(__uint_as_float(words[w] << 16), by));
        odd[w] = whole(__fmul_rn(__uint_as_float(words[w] & 0xffff0000u), by));
      }
      *reinterpret_cast<uint2*>(place(row, 8 * i)) = make_uint2(low_bytes(even), low_bytes(odd));
    }
    return true;
  }
  static __device__ __forceinline__ uint32_t low_bytes(const uint32_t (&v)[4]) {
    return __byte_perm(__byte_perm(v[0], v[1], 0x0040), __byte_perm(v[2], v[3], 0x0040), 0x5410);
  }
  __device__ void clear_tail(uint32_t m, uint32_t k) const {
    const uint32_t first = k / 4, tail = k_blocks * (K_BLOCK / 4) - first;
    for (uint32_t i = threadIdx.x; i < m * tail; i += blockDim.x) put_bytes(i / tail, first + i % tail, 0, 0);
  }

  // Those of 8 values, the even ones first.
  using Eight = uint2;
  __device__ __forceinline__ Eight eight(uint32_t row, uint32_t value) const {
    return *reinterpret_cast<const uint2*>(place(row, value));
  }

  // What lane t of a column of operand B meets in a K block.
  struct KBlock {
    uint4 halves[2];

    __device__ __forceinline__ uint2 block(int e, uint32_t) const {
      const uint4& v = halves[e / 2];
      return e % 2 == 0 ? make_uint2(v.x, v.y) : make_uint2(v.z, v.w);
    }
  };
  // Sums of columns that are no row's are not used: those have any row's values.
  __device__ __forceinline__ KBlock k_block(uint32_t column, uint32_t t, uint32_t k_block) const {
    const uint32_t from = shared_address(at) + min(column / 2, m - 1) * pitch() + k_block * K_BLOCK + 32 * t;
    return {load_shared(from), load_shared(from + 16)};
  }
};

}  // namespace fused
