// NF4 as the kernels of gemv_wna16_weights.cuh take it: values of its table in bf16 as operand A, and f32 scales of 64
// values, which sums are multiplied with.
#pragma once

#include "linear/gemv_wna16_weights.cuh"

namespace fused {

// Lane t has the scales of K blocks t, 4 + t and so on.
template <int K_BLOCKS> struct TileScales<TWO_F32_GROUPS, false, K_BLOCKS> {
  static constexpr int LOADS = (K_BLOCKS + 3) / 4;
  uint2 by[LOADS];

  static __device__ __forceinline__ bool begins(const Gemv&, int e) { return e % 2 == 0; }
  static __device__ __forceinline__ bool ends(const Gemv&, int e) { return e % 2 == 1; }

  __device__ __forceinline__ void prefetch(const Gemv& p, const PackedRow& row, uint32_t k_block, uint32_t end,
                                           uint32_t t) {
    const char* scales = static_cast<const char*>(p.weights[row.which].scales);
#pragma unroll
    for (int l = 0; l < LOADS; ++l) {
      const uint32_t s = k_block + 4 * l + t;
      if (s < end && 4 * l + t < K_BLOCKS) by[l] = load_u64(scales + row.place(s, p.k) * Nf4::SCALES);
    }
  }
  __device__ __forceinline__ float scale(const Gemv&, int s, int e) const {
    return __uint_as_float(__shfl_sync(FULL, e < 2 ? by[s / 4].x : by[s / 4].y, s % 4, 4));
  }
  __device__ __forceinline__ uint32_t zero(const Gemv&, int, int) const { return 0; }
};

// In the places of INT4.
struct Nf4Weights : Int4Weights<ONE_GROUP> {
  static constexpr int GROUPS = TWO_F32_GROUPS;

  static __device__ __forceinline__ uint32_t numbers(uint32_t word, int j, uint32_t) { return nf4_pair(word, j); }
  static __device__ __forceinline__ void multiply(float (&c)[4], const Piece& a, const Piece& b, int e,
                                                  const uint32_t (&zeros)[2], uint4 x) {
    mma_both(c, word_operands<Nf4Weights>(a, b, e, zeros), x);
  }
  // The values are those of bf16 on every GPU.
  static __device__ __forceinline__ float dot(const Piece& piece, int e, uint32_t, const XRows::Eight& x) {
    const uint32_t word = pick(e, piece.words[0], piece.words[1], piece.words[2], piece.words[3]);
    float w[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const uint32_t pair = nf4_pair(word, c / 2);
      w[c] = __uint_as_float(c % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
    }
    return XRows::dot(w, x);
  }
};

}  // namespace fused
