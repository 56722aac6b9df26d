// How one warp of decode.cuh works through its keys: on tensor cores, or lane by lane.
//
// Keys are taken in tiles of KEYS. A core keeps, for up to MAX_HEADS query heads that share the keys, the highest
// score so far (in units of log 2), the sum of the softmax weights, and the weighted sum of the values.
#pragma once

#include <type_traits>

#include "abi/attention.cuh"
#include "attention/row_operands.cuh"
#include "common/mma.cuh"

namespace fused {

// A value as it is after being stored.
__device__ __forceinline__ float rounded_to(int dtype, float v) {
  return dtype == F32 ? v : dtype == F16 ? rounded<__half>(v) : rounded<__nv_bfloat16>(v);
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

// The same in pages of a power of two of tokens, eight at least.
struct KeysInPages : Keys {
  const uint32_t* row;  // the sequence's pages
  uint64_t k_page, k_token, v_page, v_token;
  uint32_t page_bits, pages;
  uint32_t low;         // keys before this are not seen
  // Of codes: the head's scales, and those from page to page.
  const float* k_scales;
  const float* v_scales;
  uint64_t k_scale_page, v_scale_page;

  __device__ uint32_t entry(uint32_t key) const { return key < end ? __ldcg(row + (key >> page_bits)) : UINT32_MAX; }
  __device__ uint32_t slot(uint32_t key) const { return key & ((1u << page_bits) - 1); }
};

constexpr float LOG2E = 1.4426950408889634f;

// 2^x by the special function unit, to 2 units in the last place; 0 below 2^-126.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// What is taken off scores whose maximum is `top`: where all of them are -inf nothing, so that their
// weights are 0 and not e^(inf - inf).
__device__ __forceinline__ float origin(float top) { return top == -INFINITY ? 0.f : top; }

__device__ __forceinline__ float score(const Keys& keys, float product) {
  const float s = product * keys.scale;
  if (keys.softcap == 0.f) return s;
  // tanh(x) = 1 - 2 / (e^2x + 1): the cancellation at 0 costs the score 1e-7 of the cap.
  const float tanh = 1.f - __fdividef(2.f, exp2_fast(2.f * LOG2E / keys.softcap * s) + 1.f);
  return keys.softcap * LOG2E * tanh;
}

template <typename C> __device__ __forceinline__ uint32_t pack(C a, C b) {
  Pack<C, 2> both = {{a, b}};
  return *reinterpret_cast<uint32_t*>(&both);
}

// A number as an operand of C, and 4 bytes behind it what rounding has left over.
template <typename C> __device__ __forceinline__ void put_in_two(char* at, float value) {
  const C high = from_float<C>(value);
  *reinterpret_cast<C*>(at) = high;
  *reinterpret_cast<C*>(at + 4) = from_float<C>(value - to_float(high));
}

// Online softmax: takes the running sums of a head, `l` and `o`, from the maximum `m` so far to that of `top` over the
// four lanes that share the head's scores. Returns what is taken off scores from here on.
template <int STEPS>
__device__ __forceinline__ float rescale(float top, float& m, float& l, float (&o)[STEPS][4]) {
  const int t = threadIdx.x % 4;
  top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
  top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
  const float off = origin(top), fade = exp2_fast(m - off);
  m = top;
  l *= fade;
  // Heads are rows of the scores and columns of o.
  const float fade0 = __shfl_sync(FULL, fade, 8 * t), fade1 = __shfl_sync(FULL, fade, 8 * t + 4);
#pragma unroll
  for (int r = 0; r < STEPS; ++r) o[r][0] *= fade0, o[r][1] *= fade1, o[r][2] *= fade0, o[r][3] *= fade1;
  return off;
}

// Scores are Q K^T with the heads as rows: rows 0-7 are the queries rounded to C, rows 8-15 what the rounding left over,
// so a product is as exact as in f32. Outputs are V^T P^T with the heads as columns, P again in two parts. A page holds a
// multiple of 8 keys, so the page table is read once for every 8 keys, a tile ahead.
//
// If C is a code, products are of the codes themselves. Scales of keys multiply the scores. Logarithms of the scales of
// values are added to the exponents of P, so that P is at most 1 whatever the scales are.
template <typename C, int D, int W, int SUB, bool PAGED = false> struct TensorCore {
  using From = std::conditional_t<PAGED, KeysInPages, Keys>;
  using Operand = typename Stored<C>::Operand;
  using Key = KeyRow<C, D>;
  using Value = ValueRow<C, D>;
  static constexpr bool IN_PAGES = PAGED, CODES = Stored<C>::CODES;
  static_assert(PAGED || !CODES);
  static constexpr int DIM = D, WARPS = W, STEPS = D / 16, KEYS = 16 * SUB, MAX_CORE_HEADS = MAX_HEADS;
  // Elements of a head that a lane of 32 can have.
  static constexpr int LANE = (D + 31) / 32;
  // Bytes of the queries as operands.
  static constexpr int QUERIES = STEPS * WARP * 16;

  uint32_t k[SUB][2][Key::REGISTERS];
  uint32_t v[SUB][4][Value::REGISTERS];
  // Of codes: the scales of this lane's keys and values.
  float k_scale[CODES ? 2 * SUB : 1][2], v_scale[CODES ? 2 * SUB : 1][2];
  float o[STEPS][4];
  float m, l;
  uint32_t page[2 * SUB], ahead[2 * SUB];  // of eight keys each: of the tile on its way, and of the one behind it

  __device__ static int dtype(int given) {
    return CODES ? given : std::is_same<C, __half>::value ? F16 : BF16;
  }
  __device__ static bool coded(int) { return CODES; }

  // A query's element, and 4 bytes behind it what rounding has left over.
  __device__ static void put(char* queries, int head, int d, float q) {
    put_in_two<Operand>(queries + Key::place(head, d), q);
  }

  // The first tile, and where the one `stride` keys behind it is.
  __device__ void begin(const From& keys, uint32_t first, uint32_t stride) {
    look(keys, first);
    advance_page();
    fetch_keys(keys, first);
    fetch_values(keys, first);
    look(keys, first + stride);
  }

  __device__ void look(const From& keys, uint32_t first) {
    if constexpr (PAGED) {
#pragma unroll
      for (int j = 0; j < 2 * SUB; ++j) ahead[j] = keys.entry(first + 8 * j);
    }
  }

  __device__ void advance_page() {
    if constexpr (PAGED) {
#pragma unroll
      for (int j = 0; j < 2 * SUB; ++j) page[j] = ahead[j];
    }
  }

  // Whether a key of the tile on its way is seen; it is in the page of eights `j`.
  __device__ bool there(const From& keys, uint32_t key, int j) const {
    if constexpr (PAGED) return key < keys.end && key >= keys.low && page[j] < keys.pages;
    else return key < keys.end;
  }

  __device__ const C* k_row(const From& keys, uint32_t key, int j) const {
    const C* first = static_cast<const C*>(keys.k) + keys.first;
    if constexpr (PAGED) return first + page[j] * keys.k_page + keys.slot(key) * keys.k_token;
    else return first + uint64_t(key) * D;
  }

  __device__ const C* v_row(const From& keys, uint32_t key, int j) const {
    const C* first = static_cast<const C*>(keys.v) + keys.first;
    if constexpr (PAGED) return first + page[j] * keys.v_page + keys.slot(key) * keys.v_token;
    else return first + uint64_t(key) * D;
  }

  // The scales of the keys that this lane has scores of.
  __device__ void fetch_scales(const From& keys, uint32_t first, const float* scales, uint64_t of_page,
                               float (&to)[2 * SUB][2]) {
#pragma unroll
    for (int j = 0; j < 2 * SUB; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t key = first + j * 8 + 2 * (threadIdx.x % 4) + i;
        to[j][i] = fetch_scale(scales + page[j] * of_page + keys.slot(key), there(keys, key, j));
      }
    }
  }

  __device__ void fetch_keys(const From& keys, uint32_t first) {
    const int g = threadIdx.x % WARP / 4;
#pragma unroll
    for (int j = 0; j < 2 * SUB; ++j) {
      const uint32_t key = first + j * 8 + g;
      Key::fetch(k[j / 2][j % 2], k_row(keys, key, j), there(keys, key, j));
    }
    if constexpr (CODES) fetch_scales(keys, first, keys.k_scales, keys.k_scale_page, k_scale);
  }

  __device__ void fetch_values(const From& keys, uint32_t first) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 4 * SUB; ++j) {
      const uint32_t key = first + 2 * t + j % 2 + j / 2 * 8;
      Value::fetch(v[j / 4][j % 4], v_row(keys, key, j / 2), there(keys, key, j / 2));
    }
    if constexpr (CODES) fetch_scales(keys, first, keys.v_scales, keys.v_scale_page, v_scale);
  }

  __device__ void start() {
    m = -INFINITY, l = 0.f;
#pragma unroll
    for (int r = 0; r < STEPS; ++r) o[r][0] = o[r][1] = o[r][2] = o[r][3] = 0.f;
  }

  // The tile that was fetched; then `next`, if it is before `tiles`, is on its way.
  __device__ void step(const From& keys, uint32_t start, uint32_t tile, uint32_t next,
                       uint32_t tiles, const char* queries, const float*, int) {
    const int lane = threadIdx.x % WARP, t = lane % 4;
    float s[2 * SUB][4] = {};
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const uint4 row = *reinterpret_cast<const uint4*>(queries + (i * WARP + lane) * 16);
      const uint32_t q[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
      for (int j = 0; j < 2 * SUB; ++j)
        mma<Operand>(s[j], q, Key::first(k[j / 2][j % 2], i), Key::second(k[j / 2][j % 2], i));
    }
    if constexpr (CODES) {
#pragma unroll
      for (int j = 0; j < 2 * SUB; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[j][i] *= k_scale[j][i % 2];
    }
    if (next < tiles) {
      advance_page();
      fetch_keys(keys, start + next * KEYS);
    }
    // Exponents of the weights, and what the values' scales add to them; `top` is the largest sum.
    float p[2 * SUB][2], more[CODES ? 2 * SUB : 1][2], top = m;
#pragma unroll
    for (int j = 0; j < 2 * SUB; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t key = start + tile * KEYS + j * 8 + 2 * t + i;
        bool seen = key < keys.end;
        if constexpr (PAGED) seen = seen && key >= keys.low;
        p[j][i] = seen ? score(keys, s[j][i] + s[j][i + 2]) : -INFINITY;
        if constexpr (CODES) {
          more[j][i] = seen ? __log2f(v_scale[j][i]) : 0.f;
          top = fmaxf(top, p[j][i] + more[j][i]);
        } else {
          top = fmaxf(top, p[j][i]);
        }
      }
    }
    const float off = rescale(top, m, l, o);
    uint32_t high[2 * SUB], low[2 * SUB];
#pragma unroll
    for (int j = 0; j < 2 * SUB; ++j) {
      float p0 = exp2_fast(p[j][0] - off), p1 = exp2_fast(p[j][1] - off);
      l += p0 + p1;
      if constexpr (CODES) p0 = exp2_fast(p[j][0] + more[j][0] - off), p1 = exp2_fast(p[j][1] + more[j][1] - off);
      const Operand h0 = from_float<Operand>(p0), h1 = from_float<Operand>(p1);
      high[j] = pack(h0, h1);
      low[j] = pack(from_float<Operand>(p0 - to_float(h0)), from_float<Operand>(p1 - to_float(h1)));
    }
#pragma unroll
    for (int u = 0; u < SUB; ++u) {
#pragma unroll
      for (int r = 0; r < STEPS; ++r) {
        uint32_t a[4];
        Value::operand(v[u], r, a);
        mma<Operand>(o[r], a, high[2 * u], high[2 * u + 1]);
        mma<Operand>(o[r], a, low[2 * u], low[2 * u + 1]);
      }
    }
    if (next < tiles) {
      fetch_values(keys, start + next * KEYS);
      look(keys, start + (2 * next - tile) * KEYS);
    }
  }

  // The results, `stride` floats from head to head.
  __device__ void store(float* sums, int stride, float* tops, float* weights, int heads, int) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    l += __shfl_xor_sync(FULL, l, 1);
    l += __shfl_xor_sync(FULL, l, 2);
    if (t == 0) tops[g] = m, weights[g] = l;
#pragma unroll
    for (int r = 0; r < STEPS; ++r) {
      float* at = sums + 2 * t * stride + Value::dimension(r);
      if (2 * t < heads) *reinterpret_cast<float2*>(at) = make_float2(o[r][0], o[r][2]);
      if (2 * t + 1 < heads) *reinterpret_cast<float2*>(at + stride) = make_float2(o[r][1], o[r][3]);
    }
  }
};

// Any head dimension up to 8 N, any type, any alignment, W warps: 8 lanes share a key, of which lane
// c has dimensions c, c + 8, ...; each eighth of a warp has sums of its own until the end.
template <int N, int W, bool PAGED = false> struct LaneCore {
  using From = std::conditional_t<PAGED, KeysInPages, Keys>;
  static constexpr bool IN_PAGES = PAGED, CODES = PAGED;  // CODES: there may be some
  static constexpr int DIM = 0, WARPS = W, LANE = N / 4, QUERIES = 0, KEYS = DECODING_LANES_KEYS;
  static constexpr int MAX_CORE_HEADS = N > 16 ? 2 : 4;
  // Turns of 4 keys whose loads are under way together.
  static constexpr int TURNS = N > 8 ? 1 : 2;

  float o[MAX_CORE_HEADS][N];
  float m[MAX_CORE_HEADS], l[MAX_CORE_HEADS];

  __device__ static int dtype(int given) { return given; }
  __device__ static bool coded(int dtype) { return PAGED && is_coded(dtype); }
  __device__ static void put(char*, int, int, float) {}
  __device__ void begin(const From&, uint32_t, uint32_t) {}

  __device__ void start() {
#pragma unroll
    for (int h = 0; h < MAX_CORE_HEADS; ++h) {
      m[h] = -INFINITY, l[h] = 0.f;
#pragma unroll
      for (int e = 0; e < N; ++e) o[h][e] = 0.f;
    }
  }

  // By its bits: CUDA's own load of a 16-bit float is plain asm to the compiler, which may move it past
  // a test or a wait.
  template <typename C> __device__ static float element(const C* p) {
    if constexpr (sizeof(C) == 4) return __ldcg(p);
    else if constexpr (sizeof(C) == 1) return code_value(__ldcg(&p->bits), std::is_same<C, CodeInt8>::value ? INT8 : E4M3);
    else return widen_raw<C>(__ldcg(reinterpret_cast<const uint16_t*>(p)));
  }

  template <typename C>
  __device__ static void rows(float (&k)[TURNS][N], float (&v)[TURNS][N], const From& keys, uint32_t key) {
    const int c = threadIdx.x % 8;
#pragma unroll
    for (int j = 0; j < TURNS; ++j) {
      const uint32_t own = key + 4 * j;
      bool there = own < keys.end;
      uint64_t k_at = keys.first + uint64_t(own) * keys.head_dim, v_at = k_at;
      float k_scale = 1.f, v_scale = 1.f;
      if constexpr (PAGED) {
        const uint32_t page = keys.entry(own), slot = keys.slot(own);
        there = there && own >= keys.low && page < keys.pages;
        k_at = page * keys.k_page + slot * keys.k_token;
        v_at = page * keys.v_page + slot * keys.v_token;
        if constexpr (Stored<C>::CODES) {
          k_scale = fetch_scale(keys.k_scales + page * keys.k_scale_page + slot, there);
          v_scale = fetch_scale(keys.v_scales + page * keys.v_scale_page + slot, there);
        }
      }
      const C* k_row = static_cast<const C*>(keys.k) + k_at + c;
      const C* v_row = static_cast<const C*>(keys.v) + v_at + c;
      const int width = there ? keys.head_dim - c : 0;
#pragma unroll
      for (int e = 0; e < N; ++e) {
        k[j][e] = 8 * e < width ? element(k_row + 8 * e) * k_scale : 0.f;
        v[j][e] = 8 * e < width ? element(v_row + 8 * e) * v_scale : 0.f;
      }
    }
  }

  __device__ void step(const From& keys, uint32_t start, uint32_t tile, uint32_t, uint32_t,
                       const char*, const float* q, int heads) {
    const int c = threadIdx.x % 8;
    const uint32_t last = min(start + (tile + 1) * KEYS, keys.end);
    for (uint32_t first = start + tile * KEYS; first < last; first += 4 * TURNS) {
      const uint32_t key = first + threadIdx.x % WARP / 8;
      float k[TURNS][N], v[TURNS][N];
      // One branch on the type, so that the loads are issued together.
      if (PAGED && keys.dtype == E4M3) rows<CodeFp8>(k, v, keys, key);
      else if (PAGED && keys.dtype == INT8) rows<CodeInt8>(k, v, keys, key);
      else if (keys.dtype == F32) rows<float>(k, v, keys, key);
      else if (keys.dtype == F16) rows<__half>(k, v, keys, key);
      else rows<__nv_bfloat16>(k, v, keys, key);
#pragma unroll
      for (int h = 0; h < MAX_CORE_HEADS; ++h) {
        if (h >= heads) break;
        float p[TURNS] = {}, top = m[h];
#pragma unroll
        for (int e = 0; e < N; ++e) {
          const float x = 8 * e < keys.head_dim - c ? q[h * keys.head_dim + c + 8 * e] : 0.f;
#pragma unroll
          for (int j = 0; j < TURNS; ++j) p[j] += x * k[j][e];
        }
#pragma unroll
        for (int j = 0; j < TURNS; ++j) {
#pragma unroll
          for (int offset = 4; offset > 0; offset /= 2) p[j] += __shfl_xor_sync(FULL, p[j], offset);
          bool seen = key + 4 * j < keys.end;
          if constexpr (PAGED) seen = seen && key + 4 * j >= keys.low;
          p[j] = seen ? score(keys, p[j]) : -INFINITY;
          top = fmaxf(top, p[j]);
        }
        const float off = origin(top), fade = exp2_fast(m[h] - off);
        m[h] = top;
        l[h] *= fade;
#pragma unroll
        for (int e = 0; e < N; ++e) o[h][e] *= fade;
#pragma unroll
        for (int j = 0; j < TURNS; ++j) {
          const float weight = exp2_fast(p[j] - off);
          l[h] += weight;
#pragma unroll
          for (int e = 0; e < N; ++e) o[h][e] += weight * v[j][e];
        }
      }
    }
  }

  __device__ void store(float* sums, int stride, float* tops, float* weights, int heads,
                        int head_dim) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int h = 0; h < MAX_CORE_HEADS; ++h) {
      if (h >= heads) break;
      float top = fmaxf(m[h], __shfl_xor_sync(FULL, m[h], 8));
      top = fmaxf(top, __shfl_xor_sync(FULL, top, 16));
      const float share = exp2_fast(m[h] - origin(top)), weight = quarters(share * l[h]);
      if (lane == 0) tops[h] = top, weights[h] = weight;
#pragma unroll
      for (int e = 0; e < N; ++e) {
        const float sum = quarters(share * o[h][e]);
        if (lane < 8 && lane + 8 * e < head_dim) sums[h * stride + lane + 8 * e] = sum;
      }
    }
  }

  // The sum over the four parts of a warp.
  __device__ static float quarters(float v) {
    v += __shfl_xor_sync(FULL, v, 8);
    return v + __shfl_xor_sync(FULL, v, 16);
  }
};

}  // namespace fused
