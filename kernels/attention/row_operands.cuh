// Rows of keys and values in a warp's registers, from their loads to the operands of `mma.sync`. Dimensions may be
// summed in any order, so they are numbered in the order in which they lie in memory: each thread's 16 bytes of a key are
// the operands of two steps of 16 dimensions, or of four if they are codes, and neither keys nor values pass through
// shared memory. Codes become f16 on the way (formats/kv_codes.cuh).
#pragma once

#include "formats/kv_codes.cuh"

namespace fused {

// Loads of the caches: 16, 8, 4 or 2 bytes, or zeros. They pass by the L1 cache, which may hold lines
// from before another kernel wrote their neighbours.
__device__ __forceinline__ void fetch16(uint32_t* r, const void* p, bool there) {
  asm volatile(
      "{.reg .pred q;\nsetp.ne.u32 q, %5, 0;\n"
      "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
      "@q ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];}"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
      : "l"(p), "r"(uint32_t(there)));
}

__device__ __forceinline__ void fetch8(uint32_t* r, const void* p, bool there) {
  asm volatile(
      "{.reg .pred q;\nsetp.ne.u32 q, %3, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\n"
      "@q ld.global.cg.v2.u32 {%0, %1}, [%2];}"
      : "=r"(r[0]), "=r"(r[1])
      : "l"(p), "r"(uint32_t(there)));
}

__device__ __forceinline__ void fetch4(uint32_t* r, const void* p, bool there) {
  asm volatile(
      "{.reg .pred q;\nsetp.ne.u32 q, %2, 0;\nmov.u32 %0, 0;\n@q ld.global.cg.u32 %0, [%1];}"
      : "=r"(r[0])
      : "l"(p), "r"(uint32_t(there)));
}

__device__ __forceinline__ void fetch2(uint32_t* r, const void* p, bool there) {
  uint16_t half;
  asm volatile(
      "{.reg .pred q;\nsetp.ne.u32 q, %2, 0;\nmov.u16 %0, 0;\n@q ld.global.cg.u16 %0, [%1];}"
      : "=h"(half)
      : "l"(p), "r"(uint32_t(there)));
  r[0] = half;
}

template <int BYTES> __device__ __forceinline__ void fetch(uint32_t* r, const void* p, bool there) {
  static_assert(BYTES == 16 || BYTES == 8 || BYTES == 4 || BYTES == 2);
  if constexpr (BYTES == 16) fetch16(r, p, there);
  else if constexpr (BYTES == 8) fetch8(r, p, there);
  else if constexpr (BYTES == 4) fetch4(r, p, there);
  else fetch2(r, p, there);
}

// A scale, or 1.
__device__ __forceinline__ float fetch_scale(const float* p, bool there) { return there ? __ldcg(p) : 1.f; }

// A key of D dimensions, as the second operand of a product with queries: lane l % 4 has a quarter of it.
template <typename C, int D> struct KeyRow {
  static constexpr int SIZE = sizeof(C), STEPS = D / 16, REGISTERS = STEPS * SIZE;
  // Elements of 16 bytes; such pieces of a lane; steps that the rest is for.
  static constexpr int PIECE = 16 / SIZE, WHOLE = D / (4 * PIECE), REST = STEPS - WHOLE * PIECE / 4;

  __device__ static void fetch(uint32_t* r, const C* row, bool there) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < WHOLE; ++i) fetch16(r + 4 * i, row + (4 * i + t) * PIECE, there);
    if constexpr (REST > 0)
      fused::fetch<4 * REST * SIZE>(r + 4 * WHOLE, row + WHOLE * 4 * PIECE + t * 4 * REST, there);
  }

  // The operands of a step.
  __device__ static uint32_t first(const uint32_t* r, int step) {
    return Stored<C>::CODES ? widen_codes<C, false>(r[step]) : r[2 * step];
  }
  __device__ static uint32_t second(const uint32_t* r, int step) {
    return Stored<C>::CODES ? widen_codes<C, true>(r[step]) : r[2 * step + 1];
  }

  // The place of a query's element among the first operands, as bytes: row, dimension.
  __device__ static int place(int row, int d) {
    constexpr int IN_PIECES = WHOLE * 4 * PIECE, LEFT = REST > 0 ? 4 * REST : 1;
    const bool whole = d < IN_PIECES;
    const int t = whole ? d / PIECE % 4 : (d - IN_PIECES) / LEFT;
    const int step = whole ? d / (4 * PIECE) * (PIECE / 4) + d % PIECE / 4 : IN_PIECES / 16 + (d - IN_PIECES) % LEFT / 4;
    return step * WARP * 16 + (row * 4 + t) * 16 + d % 4 / 2 * 8 + d % 2 * 2;
  }
};

// A value of D dimensions, as a part of the first operand of V^T P^T: lane / 4 has an eighth of it, two dimensions for
// each step of 16.
template <typename C, int D> struct ValueRow {
  static constexpr int SIZE = sizeof(C), STEPS = D / 16, REGISTERS = (STEPS * SIZE + 1) / 2;
  // Steps of 16 bytes, those in such pieces, and the rest.
  static constexpr int PIECE = 8 / SIZE, WHOLE = STEPS / PIECE * PIECE, REST = STEPS - WHOLE;

  __device__ static void fetch(uint32_t* r, const C* row, bool there) {
    const int g = threadIdx.x % WARP / 4;
#pragma unroll
    for (int i = 0; i < WHOLE; i += PIECE) fetch16(r + i * SIZE / 2, row + i * 16 + g * 2 * PIECE, there);
    if constexpr ((REST & 4) != 0) part<4, WHOLE>(r, row, there);
    if constexpr ((REST & 2) != 0) part<2, WHOLE + (REST & 4)>(r, row, there);
    if constexpr ((REST & 1) != 0) part<1, WHOLE + (REST & 6)>(r, row, there);
  }

  // So many steps from one on.
  template <int COUNT, int FROM> __device__ static void part(uint32_t* r, const C* row, bool there) {
    const int g = threadIdx.x % WARP / 4;
    fused::fetch<2 * COUNT * SIZE>(r + FROM * SIZE / 2, row + FROM * 16 + g * 2 * COUNT, there);
  }

  // The first of the two dimensions of a step that this lane has.
  __device__ static int dimension(int step) {
    const int g = threadIdx.x % WARP / 4, rest = step - WHOLE;
    if (rest < 0) return step / PIECE * PIECE * 16 + 2 * PIECE * g + 2 * (step % PIECE);
    const int count = (REST & 4) != 0 && rest < 4 ? 4 : (REST & 2) != 0 && rest < (REST & 6) ? 2 : 1;
    const int from = count == 4 ? 0 : count == 2 ? REST & 4 : REST & 6;
    return (WHOLE + from) * 16 + 2 * count * g + 2 * (rest - from);
  }

  // The operand of a step, of four keys' rows.
  __device__ static void operand(const uint32_t (&v)[4][REGISTERS], int step, uint32_t (&a)[4]) {
    if constexpr (Stored<C>::CODES) {
      const int at = step / 2, both = step % 2 ? 0x7362 : 0x5140;
      const uint32_t early = __byte_perm(v[0][at], v[1][at], both), late = __byte_perm(v[2][at], v[3][at], both);
      a[0] = widen_codes<C, false>(early), a[1] = widen_codes<C, true>(early);
      a[2] = widen_codes<C, false>(late), a[3] = widen_codes<C, true>(late);
    } else {
      a[0] = __byte_perm(v[0][step], v[1][step], 0x5410), a[1] = __byte_perm(v[0][step], v[1][step], 0x7632);
      a[2] = __byte_perm(v[2][step], v[3][step], 0x5410), a[3] = __byte_perm(v[2][step], v[3][step], 0x7632);
    }
  }
};

}  // namespace fused
