// How one warp of flash_decoding.cu works through its keys: on tensor cores, or lane by lane.
//
// Keys are taken in tiles of KEYS. A core keeps, for up to HEADS query heads that share the
// keys, the highest score so far (in units of log 2), the sum of the weights, and the weighted sum
// of the values.
#pragma once

#include <type_traits>

#include "common.cuh"

namespace fused {

constexpr int HEADS = 8;  // query heads of a block: the width of an mma

// Elements whose type is known at run time: 0 f32, 1 f16, 2 bf16.
__device__ __forceinline__ float load_any(const void* p, uint64_t i, int dtype) {
  if (dtype == 0) return __ldcg(static_cast<const float*>(p) + i);
  if (dtype == 1) return to_float(__ldcg(static_cast<const __half*>(p) + i));
  return to_float(__ldcg(static_cast<const __nv_bfloat16*>(p) + i));
}

__device__ __forceinline__ void store_any(void* p, uint64_t i, int dtype, float v) {
  if (dtype == 0) static_cast<float*>(p)[i] = v;
  else if (dtype == 1) static_cast<__half*>(p)[i] = from_float<__half>(v);
  else static_cast<__nv_bfloat16*>(p)[i] = from_float<__nv_bfloat16>(v);
}

__device__ __forceinline__ float rounded_to(int dtype, float v) {
  return dtype == 0 ? v : dtype == 1 ? rounded<__half>(v) : rounded<__nv_bfloat16>(v);
}

// The keys and values of one head, and how a product becomes a score.
struct Keys {
  const void* k;
  const void* v;
  uint64_t first;   // element at which the head begins
  uint32_t end;     // keys from here on are not seen
  int head_dim, dtype;
  float scale;      // with log2(e) in it unless there is a softcap
  float softcap;    // 0: none
};

constexpr float LOG2E = 1.4426950408889634f;

// 2^x by the special function unit, to 2 units in the last place; 0 below 2^-126.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float score(const Keys& keys, float product) {
  const float s = product * keys.scale;
  if (keys.softcap == 0.f) return s;
  // tanh(x) = 1 - 2 / (e^2x + 1): the cancellation at 0 costs the score 1e-7 of the cap.
  const float tanh = 1.f - __fdividef(2.f, exp2_fast(2.f * LOG2E / keys.softcap * s) + 1.f);
  return keys.softcap * LOG2E * tanh;
}

// Loads of the caches: 16, 8 or 4 bytes, or zeros. They pass by the L1 cache, which may hold lines
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

template <typename C> __device__ __forceinline__ uint32_t pack(C a, C b) {
  Pack<C, 2> both = {{a, b}};
  return *reinterpret_cast<uint32_t*>(&both);
}

// d += a b, 16 x 8 x 16. Turing has no bf16 form (the host does not send bf16 here) and multiplies
// half as deep.
template <typename C>
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                    uint32_t a3, uint32_t b0, uint32_t b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define FUSED_MMA(TYPE)                                                                       \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, "        \
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                         \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                        \
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
  if constexpr (sizeof(C) == 2 && VEC<C> == 8) {
    if constexpr (std::is_same<C, __half>::value) FUSED_MMA("f16");
    else FUSED_MMA("bf16");
  }
#undef FUSED_MMA
#else
  if constexpr (std::is_same<C, __half>::value) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a2), "r"(a3), "r"(b1));
  }
#endif
}

// Scores are Q K^T with the heads as rows: rows 0-7 are the queries as C stores them, rows 8-15
// what that left out, so a product is as exact as in f32. Values are V^T P^T with the heads as
// columns, P again in two parts. Each thread's 16 bytes of a key are the operands of two steps:
// dimensions may be summed in any order, so they are numbered in the order in which they lie in
// memory, and neither keys nor values pass through shared memory.
template <typename C, int D, int W, int SUB> struct TensorCore {
  static constexpr int DIM = D, WARPS = W, STEPS = D / 16, KEYS = 16 * SUB;
  // Elements of a head that a lane of 32 can have.
  static constexpr int LANE = (D + 31) / 32;
  // Bytes of the queries as operands.
  static constexpr int QUERIES = STEPS * WARP * 16;

  uint32_t k[SUB][2][STEPS][2];
  uint32_t v[SUB][4][STEPS];
  float o[STEPS][4];
  float m = -INFINITY, l = 0.f;

  // Where a lane finds dimensions 2i, 2i + 1 of its part of the values.
  __device__ static int dimension(int r) {
    constexpr int WHOLE = D / 64 * 4, REST = STEPS - WHOLE;
    const int g = threadIdx.x % WARP / 4;
    return r < WHOLE ? r / 4 * 64 + 8 * g + 2 * (r % 4) : D / 64 * 64 + g * 2 * REST + 2 * (r - WHOLE);
  }

  // The place of a query's element among the operands: (high part, low part 4 bytes behind).
  __device__ static int place(int head, int d) {
    constexpr int WHOLE = D / 32 * 32;
    const bool whole = d < WHOLE;
    const int t = whole ? d / 8 % 4 : (d - WHOLE) / 4;
    const int step = whole ? d / 32 * 2 + d % 8 / 4 : D / 32 * 2;
    return step * WARP * 16 + (head * 4 + t) * 16 + d % 4 / 2 * 8 + d % 2 * 2;
  }

  __device__ static int dtype(int) { return std::is_same<C, __half>::value ? 1 : 2; }

  __device__ static void put(char* queries, int head, int d, float q) {
    const C high = from_float<C>(q);
    char* at = queries + place(head, d);
    *reinterpret_cast<C*>(at) = high;
    *reinterpret_cast<C*>(at + 4) = from_float<C>(q - to_float(high));
  }

  __device__ void fetch_keys(const Keys& keys, uint32_t first) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 2 * SUB; ++j) {
      auto& k = this->k[j / 2][j % 2];
      const uint32_t key = first + j * 8 + g;
      const C* row = static_cast<const C*>(keys.k) + keys.first + uint64_t(key) * D;
      const bool there = key < keys.end;
#pragma unroll
      for (int i = 0; i < D / 32; ++i) fetch16(k[2 * i], row + i * 32 + t * 8, there);
      if constexpr (D % 32 != 0) fetch8(k[STEPS - 1], row + D / 32 * 32 + t * 4, there);
    }
  }

  __device__ void fetch_values(const Keys& keys, uint32_t first) {
    constexpr int WHOLE = D / 64 * 4, REST = STEPS - WHOLE;
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 4 * SUB; ++j) {
      auto& v = this->v[j / 4][j % 4];
      const uint32_t key = first + 2 * t + j % 2 + j / 2 * 8;
      const C* row = static_cast<const C*>(keys.v) + keys.first + uint64_t(key) * D;
      const bool there = key < keys.end;
#pragma unroll
      for (int i = 0; i < D / 64; ++i) fetch16(&v[4 * i], row + i * 64 + g * 8, there);
      if constexpr (REST == 2) fetch8(&v[WHOLE], row + D / 64 * 64 + g * 4, there);
      if constexpr (REST == 1) fetch4(&v[WHOLE], row + D / 64 * 64 + g * 2, there);
    }
  }

  __device__ void start() {
#pragma unroll
    for (int r = 0; r < STEPS; ++r) o[r][0] = o[r][1] = o[r][2] = o[r][3] = 0.f;
  }

  // The tile that was fetched; then `next`, if it is before `tiles`, is on its way.
  __device__ void step(const Keys& keys, uint32_t start, uint32_t tile, uint32_t next,
                       uint32_t tiles, const char* queries, const float*, int) {
    const int lane = threadIdx.x % WARP, t = lane % 4;
    float s[2 * SUB][4] = {};
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const uint4 q = *reinterpret_cast<const uint4*>(queries + (i * WARP + lane) * 16);
#pragma unroll
      for (int j = 0; j < 2 * SUB; ++j)
        mma<C>(s[j], q.x, q.y, q.z, q.w, k[j / 2][j % 2][i][0], k[j / 2][j % 2][i][1]);
    }
    if (next < tiles) fetch_keys(keys, start + next * KEYS);
    float p[2 * SUB][2], top = m;
#pragma unroll
    for (int j = 0; j < 2 * SUB; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t key = start + tile * KEYS + j * 8 + 2 * t + i;
        p[j][i] = key < keys.end ? score(keys, s[j][i] + s[j][i + 2]) : -INFINITY;
        top = fmaxf(top, p[j][i]);
      }
    }
    top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
    top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
    const float fade = exp2_fast(m - top);
    m = top;
    l *= fade;
    // The heads are rows here and columns there.
    const float fade0 = __shfl_sync(FULL, fade, 8 * t), fade1 = __shfl_sync(FULL, fade, 8 * t + 4);
#pragma unroll
    for (int r = 0; r < STEPS; ++r)
      o[r][0] *= fade0, o[r][1] *= fade1, o[r][2] *= fade0, o[r][3] *= fade1;
    uint32_t high[2 * SUB], low[2 * SUB];
#pragma unroll
    for (int j = 0; j < 2 * SUB; ++j) {
      const float p0 = exp2_fast(p[j][0] - top), p1 = exp2_fast(p[j][1] - top);
      l += p0 + p1;
      const C h0 = from_float<C>(p0), h1 = from_float<C>(p1);
      high[j] = pack(h0, h1);
      low[j] = pack(from_float<C>(p0 - to_float(h0)), from_float<C>(p1 - to_float(h1)));
    }
#pragma unroll
    for (int u = 0; u < SUB; ++u) {
#pragma unroll
      for (int r = 0; r < STEPS; ++r) {
        const uint32_t a0 = __byte_perm(v[u][0][r], v[u][1][r], 0x5410);
        const uint32_t a1 = __byte_perm(v[u][0][r], v[u][1][r], 0x7632);
        const uint32_t a2 = __byte_perm(v[u][2][r], v[u][3][r], 0x5410);
        const uint32_t a3 = __byte_perm(v[u][2][r], v[u][3][r], 0x7632);
        mma<C>(o[r], a0, a1, a2, a3, high[2 * u], high[2 * u + 1]);
        mma<C>(o[r], a0, a1, a2, a3, low[2 * u], low[2 * u + 1]);
      }
    }
    if (next < tiles) fetch_values(keys, start + next * KEYS);
  }

  // The results, `stride` floats from head to head.
  __device__ void finish(float* sums, int stride, float* tops, float* weights, int heads, int) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    l += __shfl_xor_sync(FULL, l, 1);
    l += __shfl_xor_sync(FULL, l, 2);
    if (t == 0) tops[g] = m, weights[g] = l;
#pragma unroll
    for (int r = 0; r < STEPS; ++r) {
      float* at = sums + 2 * t * stride + dimension(r);
      if (2 * t < heads) *reinterpret_cast<float2*>(at) = make_float2(o[r][0], o[r][2]);
      if (2 * t + 1 < heads) *reinterpret_cast<float2*>(at + stride) = make_float2(o[r][1], o[r][3]);
    }
  }
};

// Any head dimension up to 32 N, any type, any alignment, W warps: lane i has dimensions i, i + 32, ...
template <int N, int W> struct LaneCore {
  static constexpr int DIM = 0, WARPS = W, LANE = N, QUERIES = 0, KEYS = 16, BATCH = 4;

  float o[HEADS][N];
  float m[HEADS], l[HEADS];

  __device__ static int dtype(int given) { return given; }
  __device__ static void put(char*, int, int, float) {}
  __device__ void fetch_keys(const Keys&, uint32_t) {}
  __device__ void fetch_values(const Keys&, uint32_t) {}

  __device__ void start() {
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      m[h] = -INFINITY, l[h] = 0.f;
#pragma unroll
      for (int e = 0; e < N; ++e) o[h][e] = 0.f;
    }
  }

  template <typename C>
  __device__ static void rows(float (&out)[BATCH][N], const void* p, const Keys& keys, uint32_t first) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const C* row = static_cast<const C*>(p) + keys.first + uint64_t(first + j) * keys.head_dim;
#pragma unroll
      for (int e = 0; e < N; ++e) {
        const int d = lane + 32 * e;
        out[j][e] = first + j < keys.end && d < keys.head_dim ? to_float(__ldcg(row + d)) : 0.f;
      }
    }
  }

  // The type is asked for once, so that the loads go out together.
  __device__ static void any_rows(float (&k)[BATCH][N], float (&v)[BATCH][N], const Keys& keys,
                                  uint32_t first) {
    if (keys.dtype == 0) {
      rows<float>(k, keys.k, keys, first);
      rows<float>(v, keys.v, keys, first);
    } else if (keys.dtype == 1) {
      rows<__half>(k, keys.k, keys, first);
      rows<__half>(v, keys.v, keys, first);
    } else {
      rows<__nv_bfloat16>(k, keys.k, keys, first);
      rows<__nv_bfloat16>(v, keys.v, keys, first);
    }
  }

  __device__ void step(const Keys& keys, uint32_t start, uint32_t tile, uint32_t, uint32_t,
                       const char*, const float* q, int heads) {
    const int lane = threadIdx.x % WARP, head_dim = keys.head_dim;
    for (uint32_t first = start + tile * KEYS; first < start + (tile + 1) * KEYS; first += BATCH) {
      if (first >= keys.end) break;
      float k[BATCH][N], v[BATCH][N];
      any_rows(k, v, keys, first);
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
        if (h >= heads) break;
        float p[BATCH] = {};
#pragma unroll
        for (int e = 0; e < N; ++e) {
          const int d = lane + 32 * e;
          const float x = d < head_dim ? q[h * head_dim + d] : 0.f;
#pragma unroll
          for (int j = 0; j < BATCH; ++j) p[j] += x * k[j][e];
        }
        float top = m[h];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
          p[j] = first + j < keys.end ? score(keys, warp_sum(p[j])) : -INFINITY;
          top = fmaxf(top, p[j]);
        }
        const float fade = exp2_fast(m[h] - top);
        m[h] = top;
        l[h] *= fade;
#pragma unroll
        for (int e = 0; e < N; ++e) o[h][e] *= fade;
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
          p[j] = exp2_fast(p[j] - top);
          l[h] += p[j];
#pragma unroll
          for (int e = 0; e < N; ++e) o[h][e] += p[j] * v[j][e];
        }
      }
    }
  }

  __device__ void finish(float* sums, int stride, float* tops, float* weights, int heads,
                         int head_dim) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      if (h >= heads) break;
      if (lane == 0) tops[h] = m[h], weights[h] = l[h];
#pragma unroll
      for (int e = 0; e < N; ++e)
        if (lane + 32 * e < head_dim) sums[h * stride + lane + 32 * e] = o[h][e];
    }
  }
};

}  // namespace fused
