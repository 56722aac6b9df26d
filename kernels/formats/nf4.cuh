// NF4 as packed.cuh lays it out: codes of 4 bits that stand for the values of a table, and how a pair of them becomes bf16.
//
// Of a word, codes 0 to 3 of the 8 (`half` 0) and 4 to 7 lie apart. Bits 0 to 2 of code i of a half are at 16 half + 4i, as
// selectors of byte permutations, and its bit 3 is the top bit of byte i, or 4 below it for half 1, so that a permutation
// spreads it over a byte. Codes are stored with bits 0 to 2 inverted, so that padding with zeros has the value zero.
//
// A byte permutation (`prmt`) selects 4 of 8 bytes by 3 bits each. For four codes it takes two for the low bytes of the
// bf16 values, two for the high bytes, a selection by bit 3 for either, and one for each pair to join its bytes. That is 21 instructions for
// 8 codes, of which INT4 takes 11. A table of the 256 pairs in shared memory takes 3 instructions for a pair, but 3 to 4
// passes of a load whose lanes meet banks at random, or 32 KB with a copy for each bank, of which all kernels for few rows
// would have less for stages and x.
#pragma once

#include "abi/formats.cuh"
#include "common/base.cuh"

namespace fused {

// The values of stored codes: bitsandbytes', in the order of packed.cuh.
static __device__ const float NF4_VALUES[16] = {
    0.f,         -0.091050036f, -0.18477343f, -0.28444138f, -0.3949175f, -0.52507305f, -0.6961928f,  -1.f,
    1.f,         0.72295684f,   0.562617f,    0.44070983f,  0.33791524f, 0.2461123f,   0.1609302f,   0.0795803f,
};

// The bytes that the selector's nibbles name, of a and then b; those whose nibble has its top bit set are the sign of theirs.
__device__ __forceinline__ uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
  return out;
}

// Codes 2j and 2j + 1 of a word as two bf16. What pairs of a half share is computed once.
__device__ __forceinline__ uint32_t nf4_pair(uint32_t word, int j) {
  const uint32_t all = word & 0x77777777u, selector = j < 2 ? all : all >> 16;
  const uint32_t mask = permuted(j < 2 ? word : word << 4, 0, 0xba98);
  // Those of stored codes 0 to 3, 4 to 7 and so on.
  const auto bytes = [&](uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return (permuted(a, b, selector) & ~mask) | (permuted(c, d, selector) & mask);
  };
  const uint32_t low = bytes(0x923dba00u, 0x803206cau, 0xe2103980u, 0xa3257cadu);
  const uint32_t high = bytes(0xbebebd00u, 0xbfbfbfbeu, 0x3e3f3f3fu, 0x3d3e3e3eu);
  return permuted(low, high, j % 2 == 0 ? 0x5140 : 0x7362);
}

struct Nf4 {
  static constexpr uint32_t BYTES = 16, SCALES = 8;  // of a lane; of a row and a K block

  static __device__ __forceinline__ uint32_t at_selector(uint32_t c) { return 16 * (c / 4) + 4 * (c % 4); }
  static __device__ __forceinline__ uint32_t at_top(uint32_t c) { return 8 * (c % 4) + (c < 4 ? 7 : 3); }

  static __device__ __forceinline__ void put(uint32_t* words, uint32_t b, uint32_t c, uint32_t code) {
    const uint32_t stored = code ^ 7;
    words[b] |= (stored & 7) << at_selector(c) | (stored >> 3 & 1) << at_top(c);
  }
  static __device__ __forceinline__ float value(uint32_t word, uint32_t c) {
    return NF4_VALUES[(word >> at_selector(c) & 7) | (word >> at_top(c) & 1) << 3];
  }
};

}  // namespace fused
