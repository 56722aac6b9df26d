// The layout of packed INT8, FP8, NVFP4, NF4, INT4 and ternary weights, which pack.cu writes, and their dequantization. A code is
// the integer that stands for a weight: weight = scale (code - zero point).
//
// INT8 is row-major, a byte for each code, rows padded with zeros to a multiple of 16 bytes.
//
// FP8 is tiles of 8 rows (ROW_GROUP) by 128 columns (K_BLOCK) of e4m3 floats: the 128 bytes of a row and a K block
// together, then other rows, K blocks, row groups; padding is zero. Of each four codes the second and the third are
// swapped, so that masks and shifts of a word give pairs of neighbours (fp8_numbers of linear/gemv_wna16_weights.cuh). A
// negative scale marks a row with a NaN among the codes that share the scale: its products are NaN, and kernels need not
// test each code. Scales of blocks of 128
// rows by a K block are f32, [block of rows][K block]; in a matrix with a NaN, which has an address of zero points,
// [row][K block].
//
// INT4, NVFP4, NF4 and ternary are tiles of 8 rows (ROW_GROUP) by 128 columns (K_BLOCK), which are 4 blocks of 32: of each block
// lane t of four has values 8t to 8t + 7, operands of `mma` as they are. Together lie the codes of a lane, a row and
// a K block, then follow the other lanes, rows, K blocks and row groups; what is missing is zero.
//
//   INT4     a word for each block, codes 2j and 2j + 1 of the 8 at bits 4j and 16 + 4j
//   NVFP4    the same, where of code s e e m of pair j < 3 bit s is at 15 - 3j and e e m at 8 - 3j, and of pair 3 s at 14,
//            e e at 11 and m at 13, so that a shift and a mask give most pairs as bf16 has their bits
//   NF4      the same, as nf4.cuh has them
//   ternary  a word for each two blocks, code c of the 8 at bits 4c and 4c + 2, two's complement
//
// Scales are f32, one for each row, or f16, GROUPS for each K block, in the order of the codes: those of a row and a
// K block together, then other rows, K blocks, row groups. Zero points are bytes likewise, in sixteenths: a code less
// its zero point has 8 significant bits at most, so that bf16 holds it exactly.
//
// NF4 has f32 scales, two for each K block, in the order of the codes likewise.
//
// NVFP4 has an f32 scale for each row and, where others have zero points, 8 bytes for a row and a K block: of halves h = 0
// and 1 of its four blocks, byte 4h + b that of block b, so that a lane's four are a word. A byte is 2^(e - 10) (1 + m / 8)
// with 5 bits of exponent e above 3 of mantissa m, so that e4m3's subnormal numbers need no case of their own. No byte
// is 0: codes whose scale is 0 are 0 themselves.
#pragma once

#include "abi/formats.cuh"
#include "common/base.cuh"
#include "formats/nf4.cuh"

namespace fused {

constexpr float ZERO_STEP = 1.f / 16;

__host__ __device__ constexpr uint32_t k_blocks_of(uint32_t k) { return (k + K_BLOCK - 1) / K_BLOCK; }

// A lane's codes of a row and a K block.
__device__ __forceinline__ void load_words(uint32_t (&words)[4], const char* from) {
  const uint4 v = *reinterpret_cast<const uint4*>(from);
  words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
}
__device__ __forceinline__ void load_words(uint32_t (&words)[2], const char* from) {
  const uint2 v = *reinterpret_cast<const uint2*>(from);
  words[0] = v.x, words[1] = v.y;
}

// The place of a row and a K block among the rows and K blocks of a matrix.
__device__ __forceinline__ uint64_t place_of(uint32_t row, uint32_t k_block, uint32_t k_blocks) {
  return (uint64_t(row / ROW_GROUP) * k_blocks + k_block) * ROW_GROUP + row % ROW_GROUP;
}

// The scale of one of GROUPS groups at a place, or of the row.
template <int GROUPS>
__device__ __forceinline__ float scale_at(const PackedMatrix& m, uint32_t row, uint64_t place, uint32_t block) {
  if constexpr (GROUPS == 0) return static_cast<const float*>(m.scales)[row];
  return __half2float(static_cast<const __half*>(m.scales)[place * GROUPS + block * GROUPS / 4]);
}

// One byte for each code. The bytes of a row are those of its k, brought to a multiple of 16.
struct Int8 {
  static constexpr int GROUPS = 0;
  static constexpr bool HAS_TILES = false;

  static __host__ __device__ constexpr uint32_t pitch(uint32_t k) { return (k + 15) / 16 * 16; }

  // Values `8 * piece` and following of a row of k.
  static __device__ __forceinline__ void eight(const PackedMatrix& m, uint32_t k, uint32_t row, uint32_t piece,
                                               float (&v)[8]) {
    const uint2 word = *reinterpret_cast<const uint2*>(m.codes + uint64_t(row) * pitch(k) + 8 * piece);
    const float scale = static_cast<const float*>(m.scales)[row];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const int code = static_cast<int8_t>((c < 4 ? word.x : word.y) >> (8 * (c % 4)));
      v[c] = scale * static_cast<float>(code);
    }
  }
};

// Which of the scales of FP8's blocks is that of a row and a K block; whether rows have scales of their own.
__device__ __forceinline__ uint64_t fp8_block(uint32_t row, uint32_t k_block, uint32_t k_blocks, bool of_rows) {
  return uint64_t(of_rows ? row : row / FP8_BLOCK) * k_blocks + k_block;
}

// BLOCKS: with scales of blocks.
template <bool BLOCKS> struct Fp8 {
  static constexpr bool HAS_TILES = false;

  // Where value c of four is.
  static __host__ __device__ constexpr uint32_t place(uint32_t c) { return c % 2 * 2 + c / 2 % 2; }

  static __device__ __forceinline__ float value(uint32_t code) {
    // The bits in their places, less the difference of the exponents' biases.
    const float v = __uint_as_float((code & 0x80) << 24 | (code & 0x7f) << 20) * 0x1p120f;
    return (code & 0x7f) == 0x7f ? __uint_as_float(0x7fffffffu) : v;
  }
  static __device__ __forceinline__ void eight(const PackedMatrix& m, uint32_t k, uint32_t row, uint32_t piece,
                                               float (&v)[8]) {
    const uint64_t row_at = place_of(row, piece / 16, k_blocks_of(k)) * K_BLOCK;
    const uint2 word = *reinterpret_cast<const uint2*>(m.codes + row_at + 8 * (piece % 16));
    const uint64_t at = BLOCKS ? fp8_block(row, piece / 16, k_blocks_of(k), m.zeros != nullptr) : row;
    const float scale = fabsf(static_cast<const float*>(m.scales)[at]);
#pragma unroll
    for (int c = 0; c < 8; ++c) v[c] = scale * value((c < 4 ? word.x : word.y) >> (8 * place(c % 4)) & 255);
  }
};

template <int GROUPS_> struct Int4 {
  static constexpr int GROUPS = GROUPS_;
  static constexpr bool HAS_TILES = true;
  static constexpr uint32_t BYTES = 16;  // of a lane
  static constexpr int ZERO = 8 * 16;

  static __device__ __forceinline__ void eight(const PackedMatrix& m, uint32_t k, uint32_t row, uint32_t piece,
                                               float (&v)[8]) {
    const uint32_t block = piece % 16 / 4;
    const uint64_t place = place_of(row, piece / 16, k_blocks_of(k));
    const uint32_t word = reinterpret_cast<const uint32_t*>(m.codes + (place * ROW_LANES + piece % 4) * BYTES)[block];
    values(word, scale_at<GROUPS>(m, row, place, block), zero_at(m, place, block), v);
  }

  // What a lane has of a row and a K block, which are at `place`.
  struct Lane {
    uint32_t words[4];
    float scales[GROUPS], zeros[GROUPS];

    __device__ __forceinline__ Lane(const PackedMatrix& m, uint32_t, uint64_t place, uint32_t t) {
      load_words(words, m.codes + (place * ROW_LANES + t) * BYTES);
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        scales[g] = scale_at<GROUPS>(m, 0, place, 4 / GROUPS * g);
        zeros[g] = zero_at(m, place, 4 / GROUPS * g);
      }
    }
    // The 8 values of a block.
    __device__ __forceinline__ void eight(int block, float (&v)[8]) const {
      values(words[block], scales[block * GROUPS / 4], zeros[block * GROUPS / 4], v);
    }
  };

 private:
  static __device__ __forceinline__ float zero_at(const PackedMatrix& m, uint64_t place, uint32_t block) {
    return ZERO_STEP * (m.zeros ? m.zeros[place * GROUPS + block * GROUPS / 4] : ZERO);
  }
  static __device__ __forceinline__ void values(uint32_t word, float scale, float zero, float (&v)[8]) {
    // Codes become bits of 2^19, whose last bit is a sixteenth: conversions of integers are slow.
    zero += 0x1p19f;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const int from = 4 * (c / 2) + 16 * (c % 2);
      const uint32_t sixteenths = (from < 4 ? word << 4 : word >> (from - 4)) & 0xf0;
      v[c] = scale * (__uint_as_float(0x49000000 | sixteenths) - zero);
    }
  }
};

// Codes 2j and 2j + 1 of a word of NVFP4 as bf16 has their bits, which is less 2^126 times; those of 0.5 are subnormal.
__device__ __forceinline__ uint32_t nvfp4_pair(uint32_t word, int j) {
  if (j < 3) return word << (3 * j) & 0x81c081c0u;
  return masked_or(word << 1, 0x80008000u, masked_or(word >> 7, 0x00400040u, word >> 3 & 0x01800180u));
}

struct Nvfp4 {
  static constexpr bool HAS_TILES = true;
  static constexpr uint32_t BYTES = 16, SCALES = 8;  // of a lane; of a row and a K block

  static __device__ __forceinline__ void put(uint32_t* words, uint32_t b, uint32_t c, uint32_t code) {
    const uint32_t sign = code >> 3 & 1, rest = code & 7, j = c / 2;
    const uint32_t bits = j < 3 ? (sign << 15 | rest << 6) >> (3 * j) : sign << 14 | rest >> 1 << 10 | (rest & 1) << 13;
    words[b] |= bits << (16 * (c % 2));
  }
  static __device__ __forceinline__ float scale(uint32_t byte) { return __uint_as_float((byte << 20) + (117u << 23)); }
  static __device__ __forceinline__ void eight(const PackedMatrix& m, uint32_t k, uint32_t row, uint32_t piece,
                                               float (&v)[8]) {
    const uint32_t block = piece % 16 / 4, t = piece % 4;
    const uint64_t place = place_of(row, piece / 16, k_blocks_of(k));
    const uint32_t word = reinterpret_cast<const uint32_t*>(m.codes + (place * ROW_LANES + t) * BYTES)[block];
    values(word, static_cast<const float*>(m.scales)[row], m.zeros[place * SCALES + t / 2 * 4 + block], v);
  }

  struct Lane {
    uint32_t words[4], by;  // a byte for each block
    float of_row;

    __device__ __forceinline__ Lane(const PackedMatrix& m, uint32_t row, uint64_t place, uint32_t t)
        : by(*reinterpret_cast<const uint32_t*>(m.zeros + place * SCALES + t / 2 * 4)),
          of_row(static_cast<const float*>(m.scales)[row]) {
      load_words(words, m.codes + (place * ROW_LANES + t) * BYTES);
    }
    __device__ __forceinline__ void eight(int block, float (&v)[8]) const {
      values(words[block], of_row, by >> (8 * block) & 255, v);
    }
  };

 private:
  static __device__ __forceinline__ void values(uint32_t word, float of_row, uint32_t byte, float (&v)[8]) {
    const float by = scale(byte);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const uint32_t pair = nvfp4_pair(word, c / 2);
      v[c] = of_row * (__uint_as_float(c % 2 == 0 ? pair << 16 : pair & 0xffff0000u) * 0x1p126f * by);
    }
  }
};

// Its dequantization.
struct Nf4Values : Nf4 {
  static constexpr bool HAS_TILES = true;

  static __device__ __forceinline__ void eight(const PackedMatrix& m, uint32_t k, uint32_t row, uint32_t piece,
                                               float (&v)[8]) {
    const uint32_t block = piece % 16 / 4;
    const uint64_t place = place_of(row, piece / 16, k_blocks_of(k));
    const uint32_t word = reinterpret_cast<const uint32_t*>(m.codes + (place * ROW_LANES + piece % 4) * BYTES)[block];
    values(word, static_cast<const float*>(m.scales)[2 * place + block / 2], v);
  }

  struct Lane {
    uint32_t words[4];
    float scales[2];

    __device__ __forceinline__ Lane(const PackedMatrix& m, uint32_t, uint64_t place, uint32_t t) {
      load_words(words, m.codes + (place * ROW_LANES + t) * BYTES);
      const float2 both = static_cast<const float2*>(m.scales)[place];
      scales[0] = both.x, scales[1] = both.y;
    }
    __device__ __forceinline__ void eight(int block, float (&v)[8]) const { values(words[block], scales[block / 2], v); }
  };

 private:
  static __device__ __forceinline__ void values(uint32_t word, float scale, float (&v)[8]) {
#pragma unroll
    for (int c = 0; c < 8; ++c) v[c] = scale * value(word, c);
  }
};

template <int GROUPS_> struct Ternary {
  static constexpr int GROUPS = GROUPS_;
  static constexpr bool HAS_TILES = true;
  static constexpr uint32_t BYTES = 8;

  static __device__ __forceinline__ void eight(const PackedMatrix& m, uint32_t k, uint32_t row, uint32_t piece,
                                               float (&v)[8]) {
    const uint32_t block = piece % 16 / 4;
    const uint64_t place = place_of(row, piece / 16, k_blocks_of(k));
    const uint32_t word =
        reinterpret_cast<const uint32_t*>(m.codes + (place * ROW_LANES + piece % 4) * BYTES)[block / 2];
    values(word, block, scale_at<GROUPS>(m, row, place, block), v);
  }

  struct Lane {
    uint32_t words[2];
    float scales[4];

    __device__ __forceinline__ Lane(const PackedMatrix& m, uint32_t row, uint64_t place, uint32_t t) {
      load_words(words, m.codes + (place * ROW_LANES + t) * BYTES);
#pragma unroll
      for (int b = 0; b < 4; ++b) scales[b] = scale_at<GROUPS>(m, row, place, b);
    }
    __device__ __forceinline__ void eight(int block, float (&v)[8]) const {
      values(words[block / 2], block, scales[block], v);
    }
  };

 private:
  static __device__ __forceinline__ void values(uint32_t word, uint32_t block, float scale, float (&v)[8]) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const int code = static_cast<int>(word << (30 - 4 * c - 2 * (block % 2))) >> 30;
      v[c] = scale * static_cast<float>(code);
    }
  }
};

// In the host's order.
enum PackedFormat : int {
  IS_INT8,
  IS_INT4_128,
  IS_INT4_64,
  IS_INT4_32,
  IS_TERNARY,
  IS_TERNARY_128,
  IS_TERNARY_64,
  IS_TERNARY_32,
  IS_FP8,
  IS_FP8_BLOCK,
  IS_NVFP4,
  IS_NF4
};

// Calls `body` with a value of the format's type.
template <class Body> __device__ __forceinline__ void with_packed_format(int format, Body body) {
  switch (format) {
    case IS_INT8:
      return body(Int8());
    case IS_INT4_128:
      return body(Int4<1>());
    case IS_INT4_64:
      return body(Int4<2>());
    case IS_INT4_32:
      return body(Int4<4>());
    case IS_TERNARY:
      return body(Ternary<0>());
    case IS_TERNARY_128:
      return body(Ternary<1>());
    case IS_TERNARY_64:
      return body(Ternary<2>());
    case IS_FP8:
      return body(Fp8<false>());
    case IS_FP8_BLOCK:
      return body(Fp8<true>());
    case IS_NVFP4:
      return body(Nvfp4());
    case IS_NF4:
      return body(Nf4Values());
    default:
      return body(Ternary<4>());
  }
}

}  // namespace fused
