// Repacks GGUF blocks, as they lie in a file, into the layout of gguf.cuh. Run once, when a model is loaded.
#include "formats/gguf.cuh"

using namespace fused;

__device__ __forceinline__ uint32_t word16(const uint8_t* p) { return p[0] | uint32_t(p[1]) << 8; }

__device__ __forceinline__ uint32_t nibble(uint32_t byte, bool high) { return high ? byte >> 4 : byte & 15; }

// 32 values of a block: `index` counts them within it. See `quant` for the layouts.
template <int BITS, int SCALING> struct Source {
  static constexpr int BLOCKS = Blocks<BITS, SCALING>::IS_SUPER ? 8 : 1;
  static constexpr int SCALES = SCALING == AFFINE ? 4 : 2;
  static constexpr int BYTES = SCALING == SUPER_SYMMETRIC ? (BITS == 3 ? 110 : 210)
                               : SCALING == SUPER_16      ? 84
                               : SCALING == SUPER         ? (BITS == 4 ? 144 : 176)
                                                          : SCALES + 4 * BITS;

  // A byte has the bit pairs of four times 32 values.
  static __device__ __forceinline__ uint32_t bit_pair(const uint8_t* pairs, int index, int i) {
    return pairs[index / 4 * 32 + i] >> (2 * (index % 4)) & 3;
  }

  // The factor of Q3_K's 16 values j: the low 4 bits are nibbles of bytes 0 to 7, the high 2 are pairs of the others.
  static __device__ __forceinline__ uint32_t six_bits(const uint8_t* packed, int j) {
    const uint32_t low = nibble(packed[j % 8], j >= 8), high = packed[8 + j % 4] >> (2 * (j / 4)) & 3;
    return ((low | high << 4) - 32) & 255;
  }

  static __device__ __forceinline__ uint32_t code(const uint8_t* block, int index, int i) {
    if constexpr (SCALING == SUPER_16) {
      return bit_pair(block + 16, index, i);
    } else if constexpr (SCALING == SUPER_SYMMETRIC && BITS == 3) {
      return bit_pair(block + 32, index, i) | (block[i] >> index & 1) << 2;
    } else if constexpr (SCALING == SUPER_SYMMETRIC) {
      const int half = index / 4, quarter = index % 4;
      const uint32_t low = nibble(block[64 * half + quarter % 2 * 32 + i], quarter >= 2);
      return low | (block[128 + 32 * half + i] >> (2 * quarter) & 3) << 4;
    } else if constexpr (SCALING == SUPER) {
      const uint32_t low = nibble(block[BYTES - 128 + index / 2 * 32 + i], index % 2 == 1);
      return BITS == 5 ? low | (block[16 + i] >> index & 1) << 4 : low;
    } else if constexpr (BITS == 8) {
      return block[2 + i];
    } else {
      const uint32_t low = nibble(block[BYTES - 16 + i % 16], i >= 16);
      return BITS == 5 ? low | (block[SCALES + i / 8] >> (i % 8) & 1) << 4 : low;
    }
  }

  static __device__ __forceinline__ uint32_t scale(const uint8_t* block) {
    if constexpr (SCALING == SUPER_SYMMETRIC) return word16(block + BYTES - 2);
    if constexpr (SCALING == SYMMETRIC) return word16(block);
    const uint8_t* both = SCALING == SUPER_16 ? block + BYTES - 4 : block;
    return word16(both) | word16(both + 2) << 16;
  }

  static __device__ __forceinline__ uint32_t factors(const uint8_t* block, int j) {
    if constexpr (SCALING == SUPER_16) return word16(block + 2 * j);
    if constexpr (SCALING == SUPER_SYMMETRIC && BITS == 3)
      return six_bits(block + 96, 2 * j) | six_bits(block + 96, 2 * j + 1) << 8;
    if constexpr (SCALING == SUPER_SYMMETRIC) return word16(block + 192 + 2 * j);
    if constexpr (SCALING != SUPER) return 0;
    const uint8_t* packed = block + 4;
    if (j < 4) return (packed[j] & 63) | (packed[j + 4] & 63) << 8;
    const uint32_t s = (packed[j + 4] & 15) | packed[j - 4] >> 6 << 4;
    const uint32_t n = packed[j + 4] >> 4 | packed[j] >> 6 << 4;
    return s | n << 8;
  }
};

// A thread writes what a lane has of a group: zeros in rows that fill up the last tile.
template <int BITS, int SCALING> __device__ __forceinline__ void repack(const RepackParams& p) {
  using To = Blocks<BITS, SCALING>;
  using From = Source<BITS, SCALING>;
  pdl_wait();
  const uint64_t i = blockIdx.x * uint64_t(FORMAT_THREADS) + threadIdx.x;
  const uint32_t groups = groups_of(p.blocks_of_row * BLOCK);
  const uint64_t row = i / (GROUP * groups);
  if (row >= (p.rows + ROW_GROUP - 1) / ROW_GROUP * ROW_GROUP) return;
  const uint32_t block = i % (GROUP * groups), t = block % GROUP;
  const uint32_t blocks = row < p.rows ? p.blocks_of_row : 0;
  uint32_t words[BITS] = {};
#pragma unroll
  for (uint32_t b = 0; b < GROUP; ++b) {
    const uint32_t from_block = block / GROUP * GROUP + b;
    if (from_block >= blocks) break;
    const uint64_t at = row * p.blocks_of_row + from_block;
    const uint8_t* from = p.blocks + at / From::BLOCKS * From::BYTES;
#pragma unroll
    for (uint32_t c = 0; c < 8; ++c) {
      const uint32_t code = From::code(from, at % From::BLOCKS, c / 4 * 16 + 4 * t + c % 4);
      const uint32_t j = c / 2, half = 16 * (c % 2);
      if constexpr (BITS == 8) {
        words[2 * b + j / 2] |= code << (8 * (j % 2) + half);
      } else {
        constexpr int LOW = To::LOW_BITS;
        const uint32_t first = code & ((1 << LOW) - 1), rest = code >> LOW, pair = 8 * (b % 2) + 2 * j + half;
        if constexpr (LOW == 2) words[b / 2] |= first << pair;
        else words[b] |= first << (4 * j + half);
        if constexpr (To::HIGH_BITS == 1) words[LOW] |= rest << (4 * b + j + half);
        if constexpr (To::HIGH_BITS == 2) words[LOW + b / 2] |= rest << pair;
      }
    }
  }
  const BlockRow to = To::row(p.out, row, groups);
  char* const tile = p.out + (to.tile - p.out);
  const uint32_t lane = block / GROUP * LANES + to.lane + t;
  uint32_t* low = reinterpret_cast<uint32_t*>(tile + To::LOW * lane);
  uint32_t* high = reinterpret_cast<uint32_t*>(tile + To::high_at(groups) + To::HIGH * lane);
#pragma unroll
  for (int w = 0; w < BITS; ++w) (w < To::LOW_BITS ? low[w] : high[w - To::LOW_BITS]) = words[w];

  // The scales of the block whose number is the thread's.
  uint32_t scale = 0, factors = 0;
  if (block < blocks) {
    const uint64_t at = row * p.blocks_of_row + block;
    const uint8_t* from = p.blocks + at / From::BLOCKS * From::BYTES;
    scale = From::scale(from);
    factors = From::factors(from, at % From::BLOCKS);
  }
  char* scales = tile + To::scales_at(groups) + To::scale_place(lane) * To::SCALE;
  if (!To::IS_SUPER || block % 8 == 0) {
    if (To::SCALE == 4) {
      *reinterpret_cast<uint32_t*>(scales) = scale;
    } else {
      *reinterpret_cast<uint16_t*>(scales) = scale;
    }
  }
  if (To::IS_SUPER) *reinterpret_cast<uint16_t*>(tile + To::factors_at(groups) + 2 * lane) = factors;
}

#define REPACK(NAME, BITS, SCALING)                            \
  extern "C" __global__ void __launch_bounds__(FORMAT_THREADS) \
      repack_##NAME(const __grid_constant__ RepackParams p) {  \
    repack<BITS, SCALING>(p);                                  \
  }

REPACK(q4_0, 4, SYMMETRIC)
REPACK(q4_1, 4, AFFINE)
REPACK(q5_0, 5, SYMMETRIC)
REPACK(q5_1, 5, AFFINE)
REPACK(q8_0, 8, SYMMETRIC)
REPACK(q2_k, 2, SUPER_16)
REPACK(q3_k, 3, SUPER_SYMMETRIC)
REPACK(q4_k, 4, SUPER)
REPACK(q5_k, 5, SUPER)
REPACK(q6_k, 6, SUPER_SYMMETRIC)
