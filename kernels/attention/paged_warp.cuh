// How one warp of paged.cuh works through its keys: the cores of decode_warp.cuh over rows that lie in pages, for
// several queries of a sequence.
//
// A tile's pages are looked up by the lanes, a key each, a tile before its rows are fetched: a key's place then goes to
// the lanes that need it by a shuffle.
#pragma once

#include "abi/paged.cuh"
#include "attention/decode_warp.cuh"

namespace fused {

// The keys and values of one head of a sequence, and how a product becomes a score.
struct PagedKeys {
  const char* k;            // the head's first row of the pool
  const char* v;
  const uint32_t* entries;  // the sequence's pages
  uint64_t k_page, k_token, v_page, v_token;
  uint32_t page, pages;
  uint32_t from, to;        // keys
  Keys form;                // dtype, width, scale and softcap
  // Of codes: all scales, those from page to page and head to head, and the head.
  const float* k_scales;
  const float* v_scales;
  uint64_t k_scale_page, k_scale_head, v_scale_page, v_scale_head;
  uint32_t kv;

  // These, or others of the same pools.
  __device__ PagedKeys or_else(const PagedKeys& others, bool these) const {
    PagedKeys keys = *this;
    keys.k = these ? k : others.k, keys.v = these ? v : others.v;
    keys.entries = these ? entries : others.entries;
    keys.from = these ? from : others.from, keys.to = these ? to : others.to;
    keys.kv = these ? kv : others.kv;
    return keys;
  }
  // Where tiles of TILE keys begin: at the first key, or ALIGNED at a multiple of TILE, perhaps in front of it.
  template <int TILE, bool ALIGNED> __device__ uint32_t begin() const { return ALIGNED ? from / TILE * TILE : from; }
  // The page of a key, by the table.
  template <bool ALIGNED> __device__ uint32_t entry(uint32_t key) const {
    return key < to && (!ALIGNED || key >= from) ? __ldcg(entries + key / page) : UINT32_MAX;
  }
  // The place of a key in it: the page, and the slot in the lowest 8 bits.
  __device__ uint32_t place(uint32_t key, uint32_t id) const { return id << 8 | key % page; }
  template <typename C> __device__ const C* k_row(uint32_t place) const {
    return reinterpret_cast<const C*>(k) + (place >> 8) * k_page + (place & 255) * k_token;
  }
  template <typename C> __device__ const C* v_row(uint32_t place) const {
    return reinterpret_cast<const C*>(v) + (place >> 8) * v_page + (place & 255) * v_token;
  }
  __device__ const float* k_scale(uint32_t place) const {
    return k_scales + (place >> 8) * k_scale_page + kv * k_scale_head + (place & 255);
  }
  __device__ const float* v_scale(uint32_t place) const {
    return v_scales + (place >> 8) * v_scale_page + kv * v_scale_head + (place & 255);
  }
};

// A query's own position, negative before the first key; the first that it sees; its slope in units of log 2.
struct VisibleKeys {
  int at, low;
  float slope;

  __device__ bool sees(int key) const { return key <= at && key >= low; }
  __device__ float score(const PagedKeys& keys, float product, int key) const {
    return fused::score(keys.form, product) - slope * float(at - key);
  }
};

// The queries of a stretch in a warp's shared memory. A stretch is the part of one head of one sequence that a warp has
// in its share of the keys.
struct PagedQueries {
  char* operands;  // for tensor cores
  float* q;        // [ROWS][head_dim], for lanes
  VisibleKeys* visible;  // [ROWS]
};

// A warp's partial results of a stretch, to be merged with those of others: rows `stride` floats apart, in shared memory, or
// in global memory where splits have a fixed size.
struct PagedPartial {
  float* tops;
  float* weights;
  float* sums;
  int stride;
};

// The places of a tile's keys, a lane each (the lanes behind KEYS again from the first).
template <int KEYS> struct Places {
  uint32_t at;
  uint32_t seen;  // of the tile, a bit for each key

  __device__ static uint32_t key(uint32_t first) { return first + threadIdx.x % KEYS; }
  // From the entry of each key.
  __device__ void find(const PagedKeys& keys, uint32_t first, uint32_t id) {
    const bool there = id < keys.pages;
    at = there ? keys.place(key(first), id) : 0;
    seen = __ballot_sync(FULL, there);
  }
  __device__ bool there(int i) const { return seen >> i & 1; }
  __device__ uint32_t of(int i) const { return __shfl_sync(FULL, at, i); }
};

// As TensorCore, for 8 or 16 rows of queries. 8 are as exact as there: queries and weights in two parts. With 16 the
// second half of the mma's rows are other queries, and weights are rounded to C (codes: to f16). FIXED: for splits of a
// fixed size (paged_fixed_split.cuh), tiles begin at multiples of their size.
template <typename C, int D, int W, int SUB, int ROWS_, bool FIXED_ = false> struct PagedTensorCore {
  using Tile8 = TensorCore<C, D, W, SUB, true>;
  using Operand = typename Stored<C>::Operand;
  using Key = KeyRow<C, D>;
  using Value = ValueRow<C, D>;
  static constexpr bool CODES = Stored<C>::CODES, FIXED = FIXED_;
  static constexpr int DIM = D, WARPS = W, STEPS = D / 16, KEYS = 16 * SUB, ROWS = ROWS_, HALVES = ROWS / 8;
  // Bytes of the queries as operands, and the widest head.
  static constexpr int QUERIES = Tile8::QUERIES, WIDEST = D;

  uint32_t k[SUB][2][Key::REGISTERS];
  uint32_t v[SUB][4][Value::REGISTERS];
  float k_scale, v_scale;  // of codes: of this lane's key, as `Places` has it
  float o[HALVES][STEPS][4];
  float m[HALVES], l[HALVES];
  VisibleKeys visible[HALVES];
  uint32_t seen;           // keys of the tile that was fetched
  Places<KEYS> next;       // of the one behind it
  uint32_t ahead;          // the entry of this lane's key in the one behind that

  __device__ static void put(char* queries, int row, int d, float q) {
    if constexpr (HALVES == 1) Tile8::put(queries, row, d, q);
    else *reinterpret_cast<Operand*>(queries + Key::place(row % 8, d) + row / 8 * 4) = from_float<Operand>(q);
  }

  // Two neighbours as operands, the first of them even.
  __device__ static void put_pair(char* queries, int row, int d, uint32_t pair) {
    char* at = queries + Key::place(row % 8, d);
    if constexpr (HALVES == 1) *reinterpret_cast<uint2*>(at) = make_uint2(pair, 0);
    else *reinterpret_cast<uint32_t*>(at + row / 8 * 4) = pair;
  }

  __device__ void fetch_keys(const PagedKeys& keys) {
    const int g = threadIdx.x % WARP / 4;
#pragma unroll
    for (int j = 0; j < 2 * SUB; ++j)
      Key::fetch(k[j / 2][j % 2], keys.k_row<C>(next.of(j * 8 + g)), next.there(j * 8 + g));
    if constexpr (CODES) k_scale = fetch_scale(keys.k_scale(next.at), next.there(threadIdx.x % KEYS));
  }

  __device__ void fetch_values(const PagedKeys& keys) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 4 * SUB; ++j) {
      const int key = 2 * t + j % 2 + j / 2 * 8;
      Value::fetch(v[j / 4][j % 4], keys.v_row<C>(next.of(key)), next.there(key));
    }
    if constexpr (CODES) v_scale = fetch_scale(keys.v_scale(next.at), next.there(threadIdx.x % KEYS));
  }

  __device__ void start(const VisibleKeys* of_queries) {
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      visible[h] = of_queries[h * 8 + threadIdx.x % WARP / 4];
      m[h] = -INFINITY, l[h] = 0.f;
#pragma unroll
      for (int r = 0; r < STEPS; ++r) o[h][r][0] = o[h][r][1] = o[h][r][2] = o[h][r][3] = 0.f;
    }
  }

  // Weights of the tile's keys from their products, which they replace; sums so far fade to the new maximum. `more`: of
  // codes, what the values' scales add to the exponents.
  __device__ void weigh(const PagedKeys& keys, uint32_t first, float (&s)[2 * SUB][4],
                        const float (&more)[CODES ? 2 * SUB : 1][2], int h) {
    const int t = threadIdx.x % 4;
    float top = m[h];
#pragma unroll
    for (int j = 0; j < 2 * SUB; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int in_tile = j * 8 + 2 * t + i, key = int(first) + in_tile;
        float& p = s[j][2 * h + i];
        if constexpr (HALVES == 1) p += s[j][2 + i];
        p = (seen >> in_tile & 1) && visible[h].sees(key) ? visible[h].score(keys, p, key) : -INFINITY;
        if constexpr (CODES) top = fmaxf(top, p == -INFINITY ? p : p + more[j][i]);
        else top = fmaxf(top, p);
      }
    }
    top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
    top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
    const float off = origin(top), fade = exp2_fast(m[h] - off);
    m[h] = top;
    l[h] *= fade;
    // The queries are rows here and columns there.
    const float fade0 = __shfl_sync(FULL, fade, 8 * t), fade1 = __shfl_sync(FULL, fade, 8 * t + 4);
#pragma unroll
    for (int r = 0; r < STEPS; ++r)
      o[h][r][0] *= fade0, o[h][r][1] *= fade1, o[h][r][2] *= fade0, o[h][r][3] *= fade1;
#pragma unroll
    for (int j = 0; j < 2 * SUB; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& p = s[j][2 * h + i];
        const float weight = exp2_fast(p - off);
        l[h] += weight;
        // Unseen, a scale that is no number is none.
        if constexpr (CODES) p = p == -INFINITY ? 0.f : exp2_fast(p + more[j][i] - off);
        else p = weight;
      }
    }
  }

  // Adds the values by their weights.
  __device__ void add(const float (&s)[2 * SUB][4], int h) {
    uint32_t high[2 * SUB], low[2 * SUB];
#pragma unroll
    for (int j = 0; j < 2 * SUB; ++j) {
      const float p0 = s[j][2 * h], p1 = s[j][2 * h + 1];
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
        mma<Operand>(o[h][r], a, high[2 * u], high[2 * u + 1]);
        if constexpr (HALVES == 1) mma<Operand>(o[h][r], a, low[2 * u], low[2 * u + 1]);
      }
    }
  }

  // Products of codes by the keys' scales, and the values' scales as exponents.
  __device__ void scale(float (&s)[2 * SUB][4], float (&more)[CODES ? 2 * SUB : 1][2]) const {
    const float exponent = __log2f(v_scale);
#pragma unroll
    for (int j = 0; j < 2 * SUB; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = j * 8 + 2 * (threadIdx.x % 4) + i;
        const float by = __shfl_sync(FULL, k_scale, key);
        more[j][i] = __shfl_sync(FULL, exponent, key);
        s[j][i] *= by, s[j][2 + i] *= by;
      }
    }
  }

  // A warp's very first tile: where it is, and then its keys and values. Nothing is there behind the last key.
  __device__ static uint32_t begin_of(const PagedKeys& keys) { return keys.begin<KEYS, FIXED>(); }
  __device__ void look(const PagedKeys& keys) { ahead = keys.entry<FIXED>(Places<KEYS>::key(begin_of(keys))); }
  __device__ void begin(const PagedKeys& keys) {
    next.find(keys, begin_of(keys), ahead);
    fetch_keys(keys);
    fetch_values(keys);
    ahead = keys.entry<FIXED>(Places<KEYS>::key(begin_of(keys) + KEYS));
  }

  // The page table's entry of this lane's key, `tiles` tiles after `first`; after the last tile of `keys` come those of
  // `then`.
  __device__ uint32_t entry_behind(const PagedKeys& keys, const PagedKeys& then, uint32_t first, uint32_t tiles) const {
    const bool own = first + tiles * KEYS < keys.to;
    const uint32_t behind = (keys.to - first + KEYS - 1) / KEYS;
    const uint32_t key = own ? first + tiles * KEYS : begin_of(then) + (tiles - max(behind, 1u)) * KEYS;
    return keys.or_else(then, own).entry<FIXED>(Places<KEYS>::key(key));
  }

  // Computes all tiles, at least one. The first has been fetched before the call; the first of `then` is fetched in it.
  __device__ void run(const PagedKeys& keys, const PagedKeys& then, const PagedQueries& queries, int) {
    const int lane = threadIdx.x % WARP;
    bool more = true;
    // With a stretch of one tile, the tile after it was not known when that one was fetched.
    if (begin_of(keys) + KEYS >= keys.to) ahead = then.entry<FIXED>(Places<KEYS>::key(begin_of(then)));
#pragma unroll 1
    for (uint32_t first = begin_of(keys); more; first += KEYS) {
      seen = next.seen;
      more = first + KEYS < keys.to;
      const PagedKeys from = keys.or_else(then, more);
      next.find(from, more ? first + KEYS : begin_of(then), ahead);
      ahead = entry_behind(keys, then, first, 2);
      float s[2 * SUB][4] = {};
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        const uint4 row = *reinterpret_cast<const uint4*>(queries.operands + (i * WARP + lane) * 16);
        const uint32_t q[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
        for (int j = 0; j < 2 * SUB; ++j)
          mma<Operand>(s[j], q, Key::first(k[j / 2][j % 2], i), Key::second(k[j / 2][j % 2], i));
      }
      float more[CODES ? 2 * SUB : 1][2];
      if constexpr (CODES) scale(s, more);
      fetch_keys(from);
#pragma unroll
      for (int h = 0; h < HALVES; ++h) weigh(keys, first, s, more, h);
#pragma unroll
      for (int h = 0; h < HALVES; ++h) add(s, h);
      fetch_values(from);
    }
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      l[h] += __shfl_xor_sync(FULL, l[h], 1);
      l[h] += __shfl_xor_sync(FULL, l[h], 2);
    }
  }

  // The sums, for others to go on with.
  __device__ void store(const PagedPartial& to, int rows, int) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const int row = 8 * h + 2 * t;
      if (t == 0 && 8 * h + g < rows) to.tops[8 * h + g] = m[h], to.weights[8 * h + g] = l[h];
#pragma unroll
      for (int r = 0; r < STEPS; ++r) {
        float* at = to.sums + row * to.stride + Value::dimension(r);
        if (row < rows) *reinterpret_cast<float2*>(at) = make_float2(o[h][r][0], o[h][r][2]);
        if (row + 1 < rows) *reinterpret_cast<float2*>(at + to.stride) = make_float2(o[h][r][1], o[h][r][3]);
      }
    }
  }

  // The results as C, or of codes as bf16 or f16, if these were all keys; `of` gives the place of a row.
  template <typename F> __device__ void finish(void* y, int dtype, F of, int rows) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const float by = l[h] == 0.f ? 0.f : __fdividef(1.f, l[h]);
      const float by0 = __shfl_sync(FULL, by, 8 * t), by1 = __shfl_sync(FULL, by, 8 * t + 4);
      const int row = 8 * h + 2 * t;
      if (row < rows) finish_row<0>(y, dtype, of(row), h, by0);
      if (row + 1 < rows) finish_row<1>(y, dtype, of(row + 1), h, by1);
    }
  }

  // With splits of a fixed size 0 instead of -0, as where these are merged.
  __device__ static float result(float sum, float by) { return FIXED ? (sum + 0.f) * by : sum * by; }

  // The first or second of the rows whose values this thread has: eight neighbours in each 64 dimensions.
  template <int SECOND> __device__ void finish_row(void* results, int dtype, uint64_t at, int h, float by) {
    constexpr int WHOLE = D / 64 * 4;
    uint32_t words[STEPS];
#pragma unroll
    for (int r = 0; r < STEPS; ++r) {
      const float low = result(o[h][r][SECOND], by), high = result(o[h][r][2 + SECOND], by);
      words[r] = CODES && dtype == BF16 ? pack2<__nv_bfloat16>(low, high) : pack2<Operand>(low, high);
    }
    uint16_t* y = static_cast<uint16_t*>(results) + at;
#pragma unroll
    for (int r = 0; r < WHOLE; r += 4)
      *reinterpret_cast<uint4*>(y + Value::dimension(r)) =
          make_uint4(words[r], words[r + 1], words[r + 2], words[r + 3]);
#pragma unroll
    for (int r = WHOLE; r < STEPS; ++r) *reinterpret_cast<uint32_t*>(y + Value::dimension(r)) = words[r];
  }
};

// As LaneCore: any head dimension up to 8 N, any type of floats, or of codes, any alignment; up to ROWS queries.
template <int N, int W, bool CODES = false, bool FIXED_ = false> struct PagedLaneCore {
  static constexpr bool FIXED = FIXED_;
  static constexpr int DIM = 0, WARPS = W, KEYS = PAGED_PLAIN_KEYS, ROWS = N > 16 ? 2 : 4;
  static constexpr int QUERIES = 0, WIDEST = 8 * N;

  float o[ROWS][N];
  float m[ROWS], l[ROWS];

  __device__ static void put(char*, int, int, float) {}
  __device__ void look(const PagedKeys&) {}
  __device__ void begin(const PagedKeys&) {}

  __device__ void start(const VisibleKeys*) {
#pragma unroll
    for (int h = 0; h < ROWS; ++h) {
      m[h] = -INFINITY, l[h] = 0.f;
#pragma unroll
      for (int e = 0; e < N; ++e) o[h][e] = 0.f;
    }
  }

  template <typename C>
  __device__ static void row(float (&k)[N], float (&v)[N], const PagedKeys& keys, uint32_t place, bool there) {
    const int c = threadIdx.x % 8, width = there ? keys.form.head_dim - c : 0;
    const C* k_row = keys.k_row<C>(place) + c;
    const C* v_row = keys.v_row<C>(place) + c;
    float k_scale = 1.f, v_scale = 1.f;
    if constexpr (Stored<C>::CODES)
      k_scale = fetch_scale(keys.k_scale(place), there), v_scale = fetch_scale(keys.v_scale(place), there);
#pragma unroll
    for (int e = 0; e < N; ++e) {
      k[e] = 8 * e < width ? LaneCore<N, W>::element(k_row + 8 * e) * k_scale : 0.f;
      v[e] = 8 * e < width ? LaneCore<N, W>::element(v_row + 8 * e) * v_scale : 0.f;
    }
  }

  __device__ void run(const PagedKeys& keys, const PagedKeys&, const PagedQueries& queries, int rows) {
    for (uint32_t first = keys.begin<KEYS, FIXED>(); first < keys.to; first += KEYS) {
      Places<KEYS> places;
      places.find(keys, first, keys.entry<FIXED>(places.key(first)));
#pragma unroll 1
      for (int i = threadIdx.x % WARP / 8; i < KEYS; i += 4) {
        const uint32_t place = places.of(i);
        const bool there = places.there(i);
        float k[N], v[N];
        // One branch on the type, so that the loads are issued together.
        if constexpr (CODES) {
          if (keys.form.dtype == E4M3) row<CodeFp8>(k, v, keys, place, there);
          else row<CodeInt8>(k, v, keys, place, there);
        } else if (keys.form.dtype == F32) {
          row<float>(k, v, keys, place, there);
        } else if (keys.form.dtype == F16) {
          row<__half>(k, v, keys, place, there);
        } else {
          row<__nv_bfloat16>(k, v, keys, place, there);
        }
#pragma unroll
        for (int h = 0; h < ROWS; ++h)
          if (h < rows)
            one(keys, queries.visible[h], h, queries.q + h * keys.form.head_dim, k, v, int(first) + i, there);
      }
    }
    gather(rows);
  }

  // Brings the four parts of the warp together, in each of them.
  __device__ void gather(int rows) {
#pragma unroll
    for (int h = 0; h < ROWS; ++h) {
      if (h >= rows) break;
      float top = fmaxf(m[h], __shfl_xor_sync(FULL, m[h], 8));
      top = fmaxf(top, __shfl_xor_sync(FULL, top, 16));
      const float share = exp2_fast(m[h] - origin(top));
      m[h] = top;
      l[h] = LaneCore<N, W>::quarters(share * l[h]);
#pragma unroll
      for (int e = 0; e < N; ++e) o[h][e] = LaneCore<N, W>::quarters(share * o[h][e]);
    }
  }

  // A key, and its value, for one query.
  __device__ void one(const PagedKeys& keys, const VisibleKeys& visible, int h, const float* q, const float (&k)[N],
                      const float (&v)[N], int key, bool there) {
    const int c = threadIdx.x % 8, width = keys.form.head_dim - c;
    float p = 0.f;
#pragma unroll
    for (int e = 0; e < N; ++e) p += (8 * e < width ? q[c + 8 * e] : 0.f) * k[e];
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) p += __shfl_xor_sync(FULL, p, offset);
    p = there && visible.sees(key) ? visible.score(keys, p, key) : -INFINITY;
    const float top = fmaxf(m[h], p), off = origin(top), fade = exp2_fast(m[h] - off);
    const float weight = exp2_fast(p - off);
    m[h] = top;
    l[h] = l[h] * fade + weight;
#pragma unroll
    for (int e = 0; e < N; ++e) o[h][e] = o[h][e] * fade + weight * v[e];
  }

  __device__ void store(const PagedPartial& to, int rows, int head_dim) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int h = 0; h < ROWS; ++h) {
      if (h >= rows) break;
      if (lane == 0) to.tops[h] = m[h], to.weights[h] = l[h];
#pragma unroll
      for (int e = 0; e < N; ++e)
        if (lane < 8 && lane + 8 * e < head_dim) to.sums[h * to.stride + lane + 8 * e] = o[h][e];
    }
  }
};

}  // namespace fused
