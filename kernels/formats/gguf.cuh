// The layout of repacked GGUF blocks, which repack.cu writes, and their dequantization. A code is the integer that
// stands for a weight.
//
// A row is cut into blocks of 32 values and groups of 4 blocks; the last group is padded with zeros. Codes are
// distributed to 4 lanes as operands of `mma.m16n8k16`: of each half block lane t has values 4t to 4t + 3, so 8 of a
// block. Rows lie in tiles of 8 (ROW_GROUP), the last one padded with zeros. A tile has these planes, one after the other,
// each in the order [group][row][lane]:
//
//   low      16 bytes for each group and lane, a word for each block: 4 bits of its 8 codes. For
//            8 bits 2 words for each of the blocks 0 and 1. For 2 and 3 bits 8 bytes: 2 bits of the codes
//   high     4 bytes for each group and lane for 3 and 5 bits, 8 for 6, 16 for 8: what is left
//   scales   for each block d (f16), or d and m (f16 each); in the K formats for 8 blocks
//   factors  K formats only, 2 bytes for each block: s and n (u8), or the two s of Q3_K and Q6_K (i8), or for each
//            half of Q2_K a byte, s in its low and n in its high 4 bits
//
// Planes and tiles have whole 16 bytes. Codes are unpacked from a word in pairs, one in each half of 32 bits: pair j
// of a lane's 8 is codes 2j and 2j + 1. It is
//
//   low      bits 4j and 16 + 4j of the block's word; for 2 and 3 bits, bits 2i and 16 + 2i of word b / 2 and those
//           above them, i being 4 (b % 2) + j
//   high, 5  bits 4b + j and 16 + 4b + j of the word, b being the block; for 3 bits likewise
//   high, 6  bits 2i and 16 + 2i of word b / 2, i being 4 (b % 2) + j, and those above them
//   8 bits   bytes j % 2 and 2 + j % 2 of word j / 2 of the block, two's complement
#pragma once

#include "abi/formats.cuh"
#include "common/base.cuh"

namespace fused {

// As the host numbers them.
constexpr int SYMMETRIC = 0, AFFINE = 1, SUPER = 2, SUPER_16 = 3, SUPER_SYMMETRIC = 4;

__host__ __device__ constexpr uint32_t groups_of(uint32_t k) { return (k + GROUP * BLOCK - 1) / (GROUP * BLOCK); }

__device__ __forceinline__ float half_of(uint32_t word, int i) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(word >> (16 * i))));
}

// Lanes that have a group of a tile: four for each row.
constexpr uint32_t LANES = ROW_GROUP * GROUP;

// A row: its tile, and the first of its lanes.
struct BlockRow {
  const char* tile;
  uint32_t lane;
};

template <int BITS_, int SCALING_> struct Blocks {
  static constexpr int BITS = BITS_, SCALING = SCALING_;
  static constexpr bool IS_SUPER = SCALING == SUPER || SCALING == SUPER_16 || SCALING == SUPER_SYMMETRIC;
  static constexpr bool HAS_OFFSET = SCALING == AFFINE || SCALING == SUPER || SCALING == SUPER_16;
  static constexpr int LOW_BITS = BITS < 4 ? 2 : 4, HIGH_BITS = BITS - LOW_BITS;
  static constexpr uint32_t LOW = 4 * LOW_BITS, HIGH = 4 * HIGH_BITS;  // bytes of a group and lane
  // Of a pair.
  static constexpr uint32_t LOW_MASK = 0x00010001u * ((1 << LOW_BITS) - 1);
  static constexpr uint32_t HIGH_MASK = 0x00010001u * (((1 << HIGH_BITS) - 1) << LOW_BITS);
  static constexpr uint32_t SCALE = HAS_OFFSET ? 4 : 2;
  // Of a block, one for each half; and as many offsets, if there are any.
  static constexpr int SCALES = SCALING == SUPER_16 || SCALING == SUPER_SYMMETRIC ? 2 : 1;
  static constexpr int ZERO = HAS_OFFSET || BITS == 8 ? 0 : 1 << (BITS - 1);

  // Bytes of a plane for a tile and a group. The K formats have one scale for two groups.
  static constexpr uint32_t LOW_BYTES = LANES * LOW, HIGH_BYTES = LANES * HIGH;
  static constexpr uint32_t SCALE_BYTES = IS_SUPER ? ROW_GROUP / 2 * SCALE : LANES * SCALE;
  static constexpr uint32_t FACTOR_BYTES = IS_SUPER ? LANES * 2 : 0;

  // Where planes begin within a tile of so many groups, and how long the tile is.
  static __host__ __device__ constexpr uint64_t high_at(uint32_t groups) { return uint64_t(LOW_BYTES) * groups; }
  static __host__ __device__ constexpr uint64_t scales_at(uint32_t groups) {
    return uint64_t(LOW_BYTES + HIGH_BYTES) * groups;
  }
  static __host__ __device__ constexpr uint64_t factors_at(uint32_t groups) {
    return uint64_t(LOW_BYTES + HIGH_BYTES + SCALE_BYTES) * groups;
  }
  static __host__ __device__ constexpr uint64_t tile_bytes(uint32_t groups) {
    return uint64_t(LOW_BYTES + HIGH_BYTES + SCALE_BYTES + FACTOR_BYTES) * groups;
  }
  static __device__ __forceinline__ BlockRow row(const void* data, uint64_t row, uint32_t groups) {
    const char* tile = static_cast<const char*>(data) + row / ROW_GROUP * tile_bytes(groups);
    return {tile, static_cast<uint32_t>(row % ROW_GROUP * GROUP)};
  }

  // What lane t has of a group: the codes of all blocks, and the scales of block t.
  struct Piece {
    uint32_t low[LOW_BITS];
    uint32_t high[HIGH == 0 ? 1 : HIGH / 4];
    uint32_t scale, factors;
  };

  static __device__ __forceinline__ Piece load(const BlockRow& row, uint32_t groups, uint32_t group, uint32_t t) {
    Piece p;
    const uint32_t lane = LANES * group + row.lane + t;
    const char* low = row.tile + LOW * lane;
    if constexpr (LOW_BITS == 2) {
      const uint2 v = load_u64(low);
      p.low[0] = v.x, p.low[1] = v.y;
    } else {
      const uint4 v = load_once(low);
      p.low[0] = v.x, p.low[1] = v.y, p.low[2] = v.z, p.low[3] = v.w;
    }
    const char* high = row.tile + high_at(groups) + HIGH * lane;
    p.high[0] = 0;
    if constexpr (HIGH_BITS == 1) p.high[0] = load_u32(high);
    if constexpr (HIGH_BITS == 2) {
      const uint2 v = load_u64(high);
      p.high[0] = v.x, p.high[1] = v.y;
    }
    if constexpr (HIGH_BITS == 4) {
      const uint4 v = load_once(high);
      p.high[0] = v.x, p.high[1] = v.y, p.high[2] = v.z, p.high[3] = v.w;
    }
    load_scale(row.tile, groups, lane, p.scale, p.factors);
    return p;
  }

  // The scales of one block, as they are stored: that of lane t of a row and a group, counted in lanes of the tile.
  static __device__ __forceinline__ void load_scale(const char* tile, uint32_t groups, uint32_t lane, uint32_t& scale,
                                                    uint32_t& factors) {
    const char* at = tile + scales_at(groups) + scale_place(lane) * SCALE;
    scale = SCALE == 4 ? load_u32(at) : load_u16(at);
    factors = 0;
    if constexpr (IS_SUPER) factors = load_u16(tile + factors_at(groups) + 2 * lane);
  }
  // Its scale among those of the tile.
  static __host__ __device__ constexpr uint32_t scale_place(uint32_t lane) {
    return IS_SUPER ? lane / (2 * LANES) * ROW_GROUP + lane % LANES / GROUP : lane;
  }

  // What the codes of a half of the block are multiplied by, and what is added to them then,
  // rounded as ggml rounds them.
  static __device__ __forceinline__ float multiplier(uint32_t scale, uint32_t factors, int half) {
    const float d = half_of(scale, 0);
    if constexpr (SCALING == SUPER) return d * static_cast<float>(factors & 255);
    if constexpr (SCALING == SUPER_16) return d * static_cast<float>(factors >> (8 * half) & 15);
    if constexpr (SCALING == SUPER_SYMMETRIC) return d * static_cast<float>(static_cast<int8_t>(factors >> (8 * half)));
    return d;
  }
  static __device__ __forceinline__ float offset(uint32_t scale, uint32_t factors, int half) {
    if constexpr (SCALING == AFFINE) return half_of(scale, 1);
    if constexpr (SCALING == SUPER) return -(half_of(scale, 1) * static_cast<float>(factors >> 8));
    if constexpr (SCALING == SUPER_16) return -(half_of(scale, 1) * static_cast<float>(factors >> (8 * half + 4) & 15));
    return 0.f;
  }

  // The 8 codes of a lane and a block, one for each byte of two words, 8 bits apart from their
  // neighbours so that `pair` finds codes 2j and 2j + 1.
  struct Codes {
    uint32_t low[BITS == 8 ? 2 : 1];
    uint32_t high;
    int shift;  // of the high bits of pair 0
  };

  static __device__ __forceinline__ Codes codes(const Piece& p, int b) {
    if constexpr (BITS == 8) {
      return b < 2 ? Codes{{p.low[2 * b], p.low[2 * b + 1]}, 0, 0}
                   : Codes{{p.high[2 * b - 4], p.high[2 * b - 3]}, 0, 0};
    } else {
      const uint32_t low = LOW_BITS == 2 ? p.low[b / 2] >> (8 * (b % 2)) : p.low[b];
      if constexpr (HIGH_BITS == 2) return {{low}, p.high[b / 2], 8 * (b % 2)};
      else return {{low}, p.high[0], 4 * b};
    }
  }

  // The same in a loop that is not unrolled.
  static __device__ __forceinline__ Codes codes_in_loop(const Piece& p, int b) {
    if constexpr (BITS == 8) {
      return {
          {pick(b, p.low[0], p.low[2], p.high[0], p.high[2]), pick(b, p.low[1], p.low[3], p.high[1], p.high[3])}, 0, 0};
    } else {
      uint32_t low;
      if constexpr (LOW_BITS == 2) low = (b < 2 ? p.low[0] : p.low[1]) >> (8 * (b % 2));
      else low = pick(b, p.low[0], p.low[1], p.low[2], p.low[3]);
      if constexpr (HIGH_BITS == 2) return {{low}, (b < 2 ? p.high[0] : p.high[1]) >> (8 * (b % 2)), 0};
      else return {{low}, p.high[0] >> (4 * b), 0};
    }
  }

  // The same from memory.
  static __device__ __forceinline__ Codes codes(const BlockRow& row, uint32_t groups, uint32_t block, uint32_t t) {
    const uint32_t lane = block / GROUP * LANES + row.lane + t, b = block % GROUP;
    if constexpr (BITS == 8) {
      const uint2 v = load_u64(row.tile + (b < 2 ? 0 : high_at(groups)) + 16 * lane + 8 * (b % 2));
      return {{v.x, v.y}, 0, 0};
    }
    const char* low = row.tile + LOW * lane;
    Codes c = {{LOW_BITS == 2 ? load_u32(low + 4 * (b / 2)) >> (8 * (b % 2)) : load_u32(low + 4 * b)}, 0, 0};
    const char* high = row.tile + high_at(groups) + HIGH * lane;
    if constexpr (HIGH_BITS == 1) c.high = load_u32(high), c.shift = 4 * b;
    if constexpr (HIGH_BITS == 2) c.high = load_u32(high + 4 * (b / 2)), c.shift = 8 * (b % 2);
    return c;
  }

  // The word that has the high bits of pair j where HIGH_MASK is.
  static __device__ __forceinline__ uint32_t high_word(const Codes& c, int j) {
    const int right = c.shift + HIGH_BITS * j - LOW_BITS;
    return right >= 0 ? c.high >> right : c.high << -right;
  }

  // Codes 2j and 2j + 1 in the low bits of both halves of a word, 8 bits as bytes.
  static __device__ __forceinline__ uint32_t pair(const Codes& c, int j) {
    if constexpr (BITS == 8) {
      return c.low[j / 2] >> (8 * (j % 2)) & 0x00ff00ffu;
    } else {
      const uint32_t v = c.low[0] >> (LOW_BITS * j) & LOW_MASK;
      if constexpr (HIGH_BITS == 0) return v;
      else return v | (high_word(c, j) & HIGH_MASK);
    }
  }

  // Their values before scaling.
  static __device__ __forceinline__ float2 numbers(const Codes& c, int j) {
    const uint32_t v = pair(c, j);
    int a = v & 0xffff, b = v >> 16;
    if constexpr (BITS == 8) a = static_cast<int8_t>(a), b = static_cast<int8_t>(b);
    return make_float2(a - ZERO, b - ZERO);
  }

  // The same as bf16, which holds whole numbers up to 256. A code below 128 is the low bits of the
  // mantissa of 128; the top bit of a byte, set, makes 256 of the 128 that is taken off.
  static __device__ __forceinline__ uint32_t bf16_numbers(const Codes& c, int j) {
    uint32_t biased, bias = 0x43004300u + 0x00010001u * ZERO;
    if constexpr (BITS == 8) {
      const uint32_t v = c.low[j / 2] >> (8 * (j % 2));
      biased = masked_or(v, 0x007f007fu, 0x43004300u), bias = masked_or(v, 0x00800080u, 0x43004300u);
    } else {
      biased = masked_or(c.low[0] >> (LOW_BITS * j), LOW_MASK, 0x43004300u);
      if constexpr (HIGH_BITS > 0) biased = masked_or(high_word(c, j), HIGH_MASK, biased);
    }
    uint32_t out = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(bias), "r"(0xbf80bf80u), "r"(biased));
#endif
    return out;
  }

  // Value 2j (x) and 2j + 1 (y) of a lane's 8, bit for bit those of `quant::dequantize`.
  static __device__ __forceinline__ float2 exact(const Codes& c, int j, float by, float plus) {
    float2 v = numbers(c, j);
    v.x = __fmul_rn(v.x, by), v.y = __fmul_rn(v.y, by);
    if (HAS_OFFSET) v.x = __fadd_rn(v.x, plus), v.y = __fadd_rn(v.y, plus);
    return v;
  }

  // Calls `body` with quarter t of both halves of a block: where its 4 values stand, and them.
  template <class Body>
  static __device__ __forceinline__ void quarter(const BlockRow& row, uint32_t groups, uint32_t block, uint32_t t,
                                                 Body body) {
    uint32_t scale, factors;
    load_scale(row.tile, groups, block / GROUP * LANES + row.lane + block % GROUP, scale, factors);
    const Codes c = codes(row, groups, block, t);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float by = multiplier(scale, factors, half), plus = offset(scale, factors, half);
      const float2 a = exact(c, 2 * half, by, plus), b = exact(c, 2 * half + 1, by, plus);
      body(16 * half + 4 * t, make_float4(a.x, a.y, b.x, b.y));
    }
  }
};

using Q4_0 = Blocks<4, SYMMETRIC>;
using Q4_1 = Blocks<4, AFFINE>;
using Q5_0 = Blocks<5, SYMMETRIC>;
using Q5_1 = Blocks<5, AFFINE>;
using Q8_0 = Blocks<8, SYMMETRIC>;
using Q2_K = Blocks<2, SUPER_16>;
using Q3_K = Blocks<3, SUPER_SYMMETRIC>;
using Q4_K = Blocks<4, SUPER>;
using Q5_K = Blocks<5, SUPER>;
using Q6_K = Blocks<6, SUPER_SYMMETRIC>;

// Formats that are known when a kernel runs, in the host's order.
enum FormatIndex : int { IS_Q4_0, IS_Q4_1, IS_Q5_0, IS_Q5_1, IS_Q8_0, IS_Q2_K, IS_Q3_K, IS_Q4_K, IS_Q5_K, IS_Q6_K };

// Calls `body` with a value of the format's type.
template <class Body> __device__ __forceinline__ void with_format(int format, Body body) {
  switch (format) {
    case IS_Q4_0:
      return body(Q4_0());
    case IS_Q4_1:
      return body(Q4_1());
    case IS_Q5_0:
      return body(Q5_0());
    case IS_Q5_1:
      return body(Q5_1());
    case IS_Q8_0:
      return body(Q8_0());
    case IS_Q2_K:
      return body(Q2_K());
    case IS_Q3_K:
      return body(Q3_K());
    case IS_Q4_K:
      return body(Q4_K());
    case IS_Q5_K:
      return body(Q5_K());
    default:
      return body(Q6_K());
  }
}

}  // namespace fused
