// Attention of the newest tokens of many sequences over keys and values in pages, in one launch.
//
// q [B, T, heads, D] by its strides, pools by theirs, y [B, T, heads, D]. The rows of a key/value head are the queries
// of the heads that read it, T (heads / kv_heads); a warp takes up to ROWS of them together, so each key is read once
// for them. Keys are shared out in equal parts over the warps of a grid that follows from shapes (paged_share.cuh). A
// warp goes through its share stretch by stretch: one head of one sequence. Of a head whose keys are all in one stretch
// it writes y, otherwise it leaves sums in shared memory. The block brings those of its warps together when all are
// done, and leaves in turn what others have a part of; the last of those (an atomic counter, which it resets) merges
// them in the order of the keys.
//
// Bytes moved: the keys and values that are seen, once for ROWS queries.
#pragma once

#include "attention/decode.cuh"
#include "attention/paged_share.cuh"
#include "attention/paged_warp.cuh"

namespace fused {

// What a warp has left of a stretch.
struct PagedRecord {
  Stretch s;
  bool there;
};

// A block's shared memory. Of each warp the first and the last stretch may be incomplete.
template <class Core> struct PagedShared {
  static constexpr int RECORDS = 2 * Core::WARPS;

  char* memory;
  int bytes;             // of a warp's queries
  int rows;              // that a record has
  float* partials;       // [RECORDS]: tops [rows], weights [rows], sums [rows][stride]
  int stride;

  __device__ PagedShared(char* memory, const PagedAttentionParams& p, int head_dim) : memory(memory) {
    bytes = Core::DIM ? Core::QUERIES : 4 * Core::ROWS * head_dim;
    rows = min(Core::ROWS, int(p.queries * (p.heads / p.kv_heads) + 1) / 2 * 2);
    stride = head_dim + head_dim % 2 + 2;
    partials = reinterpret_cast<float*>(memory + Core::WARPS * (bytes + Core::ROWS * sizeof(Sight)));
  }

  __device__ PagedQueries queries(int warp) const {
    char* own = memory + warp * bytes;
    Sight* sights = reinterpret_cast<Sight*>(memory + Core::WARPS * bytes) + warp * Core::ROWS;
    return {own, reinterpret_cast<float*>(own), sights};
  }
  __device__ PagedPartial partial(int record) const {
    float* own = partials + record * rows * (2 + stride);
    return {own, own + rows, own + 2 * rows, stride};
  }
};

// The rows of a stretch: queries of the heads that read a key/value head.
struct PagedRows {
  uint32_t group, first;
  int count;

  __device__ PagedRows(const PagedAttentionParams& p, uint32_t part, int most) {
    group = p.heads / p.kv_heads;
    first = part * most;
    count = min(int(p.queries * group - first), most);
  }
  __device__ uint32_t query(int row) const { return (first + row) / group; }
  __device__ uint32_t head(uint32_t kv, int row) const { return kv * group + (first + row) % group; }
};

// Where row r's result begins.
__device__ __forceinline__ uint64_t result_at(const PagedAttentionParams& p, const Stretch& s, const PagedRows& rows,
                                              int r, int head_dim) {
  return ((uint64_t(s.b) * p.queries + rows.query(r)) * p.heads + rows.head(s.kv, r)) * head_dim;
}

// A warp's queries, in whole packs of the pools' type, or of 16 bits if those are codes: all loads are on their way before
// one is waited for.
template <class Core>
__device__ __forceinline__ void stage_packs(const PagedAttentionParams& p, const PagedQueries& queries,
                                            const Stretch& s, const PagedRows& rows) {
  constexpr int PACKS = Core::DIM / 8, AT_ONCE = WARP / PACKS, TURNS = (Core::ROWS + AT_ONCE - 1) / AT_ONCE;
  const int lane = threadIdx.x % WARP, own = lane / PACKS, d = lane % PACKS * 8;
  const uint16_t* q = static_cast<const uint16_t*>(p.q) + s.b * p.q_sequence + d;
  uint4 raw[TURNS];
#pragma unroll
  for (int j = 0; j < TURNS; ++j) {
    const int r = min(own + j * AT_ONCE, rows.count - 1);
    raw[j] = __ldcg(reinterpret_cast<const uint4*>(q + rows.query(r) * p.q_token + rows.head(s.kv, r) * p.q_head));
  }
#pragma unroll
  for (int j = 0; j < TURNS; ++j) {
    const int r = own + j * AT_ONCE;
    if (own >= AT_ONCE || r >= rows.count) continue;
    uint32_t words[4] = {raw[j].x, raw[j].y, raw[j].z, raw[j].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (Core::CODES) {
        const float2 pair = unpack2<__nv_bfloat16>(words[i]);
        if (p.dtype == BF16) words[i] = pack2<__half>(pair.x, pair.y);
      }
      Core::put_pair(queries.operands, r, d + 2 * i, words[i]);
    }
  }
}

// The same of any type, element by element.
template <class Core>
__device__ __forceinline__ void stage_elements(const PagedAttentionParams& p, const PagedQueries& queries,
                                               const Stretch& s, const PagedRows& rows, int head_dim) {
  constexpr int LANE = (Core::WIDEST + WARP - 1) / WARP;
  const int lane = threadIdx.x % WARP;
#pragma unroll 1
  for (int r = 0; r < rows.count; ++r) {
    const uint64_t from = s.b * p.q_sequence + rows.query(r) * p.q_token + rows.head(s.kv, r) * p.q_head;
    uint32_t raw[LANE] = {};
    if (p.dtype == F32) {
#pragma unroll
      for (int e = 0; e < LANE; ++e)
        if (lane + e * WARP < head_dim) raw[e] = read_raw(p.q, F32, from + lane + e * WARP);
    } else {
#pragma unroll
      for (int e = 0; e < LANE; ++e)
        if (lane + e * WARP < head_dim) raw[e] = read_raw(p.q, F16, from + lane + e * WARP);
    }
#pragma unroll
    for (int e = 0; e < LANE; ++e) {
      const int d = lane + e * WARP;
      if (d >= head_dim) continue;
      const float q = widen_raw(raw[e], p.dtype);
      if constexpr (Core::DIM) Core::put(queries.operands, r, d, q);
      else queries.q[r * head_dim + d] = q;
    }
  }
}

// A warp's queries and what they see.
template <class Core>
__device__ __forceinline__ void stage_queries(const PagedAttentionParams& p, const PagedQueries& queries,
                                              const Stretch& s, int head_dim) {
  const PagedRows rows(p, s.part, Core::ROWS);
  const int lane = threadIdx.x % WARP;
  bool staged = false;
  if constexpr (Core::DIM != 0) {
    staged = p.packs;
    if (staged) stage_packs<Core>(p, queries, s, rows);
  }
  if (!staged) stage_elements<Core>(p, queries, s, rows, head_dim);
  if (lane < Core::ROWS) {
    const int r = min(lane, rows.count - 1), at = int(s.length) - int(p.queries) + int(rows.query(r));
    const float slope = p.slopes ? LOG2E * __ldg(p.slopes + rows.head(s.kv, r)) : 0.f;
    queries.sights[lane] = {at, p.window ? at + 1 - int(p.window) : INT32_MIN, slope};
  }
  __syncwarp();
}

// Neighbours that another block has written.
template <int N> __device__ __forceinline__ Pack<float, N> load_cached(const float* p) {
  if constexpr (N == 1) {
    return {__ldcg(p)};
  } else {
    const float4 v = __ldcg(reinterpret_cast<const float4*>(p));
    return {v.x, v.y, v.z, v.w};
  }
}

// Results of the blocks `first` .. `last` as y: each left its part of these keys first in its share, but for `first`,
// which had others before it if `behind`.
template <class Core>
__device__ __forceinline__ void merge_paged_blocks(const PagedAttentionParams& p, const Stretch& s,
                                                   const PagedRows& rows, uint32_t first, uint32_t last, bool behind,
                                                   int head_dim) {
  constexpr int ROWS = Core::ROWS, THREADS = Core::WARPS * WARP, BATCH = 16, WIDTH = Core::DIM ? 4 : 1;
  // Of each row: what is taken off the scores, and what the sums are multiplied with.
  __shared__ float origins[ROWS], factors[ROWS];
  const int lane = threadIdx.x % WARP;
  const auto slot = [&](uint32_t b) { return 2 * b * ROWS + (behind && b == first ? ROWS : 0); };
#pragma unroll 1
  for (int r = threadIdx.x / WARP; r < rows.count; r += Core::WARPS) {
    float top = -INFINITY, total = 0.f;
#pragma unroll 1
    for (uint32_t b = first + lane; b <= last; b += WARP) {
      const float own = __ldcg(p.tops + slot(b) + r), higher = fmaxf(top, own), off = origin(higher);
      total = total * exp2_fast(top - off) + exp2_fast(own - off);
      top = higher;
    }
    const float off = origin(warp_max(top));
    total = warp_sum(total * exp2_fast(top - off));
    if (lane == 0) origins[r] = off, factors[r] = total == 0.f ? 0.f : __fdividef(1.f, total);
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x * WIDTH; i < rows.count * head_dim; i += THREADS * WIDTH) {
    const int r = i / head_dim;
    const float off = origins[r];
    Pack<float, WIDTH> sum = {};
#pragma unroll 1
    for (uint32_t from = first; from <= last; from += BATCH) {
      Pack<float, WIDTH> means[BATCH];
      float tops[BATCH];
#pragma unroll
      for (int u = 0; u < BATCH; ++u) {
        const uint32_t at = slot(min(from + u, last));
        tops[u] = __ldcg(p.tops + at + r);
        means[u] = load_cached<WIDTH>(p.means + uint64_t(at) * head_dim + i);
      }
#pragma unroll
      for (int u = 0; u < BATCH; ++u) {
        const float share = from + u <= last ? exp2_fast(tops[u] - off) : 0.f;
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) sum.v[e] = fmaf(share, means[u].v[e], sum.v[e]);
      }
    }
    const uint64_t at = result_at(p, s, rows, r, head_dim) + i % head_dim;
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) write(p.y, p.dtype, at + e, sum.v[e] * factors[r]);
  }
}

// Brings the records of one head, a bit of `members` each, together as stretch `s`, and then the blocks. Loads from
// shared memory are for all records at once, there or not.
template <class Core>
__device__ __forceinline__ void merge_paged_records(const PagedAttentionParams& p, const PagedShared<Core>& shared,
                                                    uint32_t members, const Share& share, const Stretch& s,
                                                    int head_dim) {
  constexpr int ROWS = Core::ROWS, THREADS = Core::WARPS * WARP, RECORDS = PagedShared<Core>::RECORDS;
  constexpr int WIDTH = Core::DIM ? 2 : 1;
  const PagedRows rows(p, s.part, ROWS);
  const uint32_t slot = (2 * blockIdx.x + (s.begin == share.begin ? 0 : 1)) * ROWS;
  const bool whole = s.whole();
  const auto there = [&](int i) { return members >> i & 1; };
  // What each record counts for.
  if (threadIdx.x < rows.count) {
    const int r = threadIdx.x;
    float shares[RECORDS], top = -INFINITY, weight = 0.f;
#pragma unroll
    for (int i = 0; i < RECORDS; ++i) {
      shares[i] = there(i) ? shared.partial(i).tops[r] : -INFINITY;
      top = fmaxf(top, shares[i]);
    }
    const float off = origin(top);
#pragma unroll
    for (int i = 0; i < RECORDS; ++i) {
      shares[i] = exp2_fast(shares[i] - off);
      if (there(i)) weight = fmaf(shares[i], shared.partial(i).weights[r], weight);
    }
    const float by = weight == 0.f ? 0.f : __fdividef(1.f, weight);
#pragma unroll
    for (int i = 0; i < RECORDS; ++i)
      if (there(i)) shared.partial(i).weights[r] = shares[i] * by;
    if (!whole) p.tops[slot + r] = top + __log2f(weight);
  }
  __syncthreads();
#pragma unroll 1
  for (int i = WIDTH * threadIdx.x; i < rows.count * head_dim; i += WIDTH * THREADS) {
    const int r = i / head_dim, d = i % head_dim;
    Pack<float, WIDTH> mean = {};
#pragma unroll
    for (int j = 0; j < RECORDS; ++j) {
      if (!there(j)) continue;
      const PagedPartial partial = shared.partial(j);
      const auto sum = load<float, WIDTH>(partial.sums + r * partial.stride + d);
#pragma unroll
      for (int e = 0; e < WIDTH; ++e) mean.v[e] = fmaf(partial.weights[r], sum.v[e], mean.v[e]);
    }
    if (!whole) {
      store(p.means + uint64_t(slot) * head_dim + i, mean);
      continue;
    }
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) write(p.y, p.dtype, result_at(p, s, rows, r, head_dim) + d + e, mean.v[e]);
  }
  if (whole) return;
  const uint32_t first = share.owner(s.first), last = share.owner(s.last);
  if (is_last(p.counters + s.counter(p), last - first + 1))
    merge_paged_blocks<Core>(p, s, rows, first, last, share.begin_of(first) != s.first, head_dim);
}

__device__ __forceinline__ PagedKeys keys_of(const PagedAttentionParams& p, const Stretch& s, int head_dim) {
  const Pages& pages = p.pages;
  const uint32_t size = size_of(pages.dtype);
  PagedKeys keys;
  keys.k = static_cast<const char*>(pages.k) + s.kv * pages.k_head * size;
  keys.v = static_cast<const char*>(pages.v) + s.kv * pages.v_head * size;
  keys.entries = s.entries;
  keys.k_page = pages.k_page, keys.k_token = pages.k_token;
  keys.v_page = pages.v_page, keys.v_token = pages.v_token;
  keys.page = pages.page, keys.pages = pages.pages;
  keys.from = s.from, keys.to = s.to;
  keys.k_scales = pages.k_scales, keys.v_scales = pages.v_scales, keys.kv = s.kv;
  keys.k_scale_page = pages.k_scale_strides[0], keys.k_scale_head = pages.k_scale_strides[1];
  keys.v_scale_page = pages.v_scale_strides[0], keys.v_scale_head = pages.v_scale_strides[1];
  keys.form = {nullptr, nullptr, 0, 0, head_dim, pages.dtype, p.softcap > 0.f ? p.scale : p.scale * LOG2E, p.softcap};
  return keys;
}

// The results of a stretch with all keys, from what the warp has left in `partial`.
__device__ __forceinline__ void write_results(const PagedAttentionParams& p, const Stretch& s, const PagedRows& rows,
                                              const PagedPartial& partial, int head_dim) {
  __syncwarp();
#pragma unroll 1
  for (int r = 0; r < rows.count; ++r) {
    const float by = partial.weights[r] == 0.f ? 0.f : __fdividef(1.f, partial.weights[r]);
    const uint64_t at = result_at(p, s, rows, r, head_dim);
#pragma unroll 1
    for (int d = threadIdx.x % WARP; d < head_dim; d += WARP)
      write(p.y, p.dtype, at + d, partial.sums[r * partial.stride + d] * by);
  }
}

// A warp's share. While a stretch ends, the first tile of the next is on its way.
template <class Core>
__device__ __forceinline__ void paged_warp(const PagedAttentionParams& p, const PagedShared<Core>& shared,
                                           PagedRecord* records, const Share& share, const Start& start, int head_dim) {
  const int warp = threadIdx.x / WARP;
  const PagedQueries queries = shared.queries(warp);
  Walk<Core::KEYS> walk(p, share.begin_of(warp, Core::WARPS), share.begin_of(warp + 1, Core::WARPS), start);
  if (!walk.more()) return;
  Core core;
  Stretch s = walk.next(p);
  core.look(keys_of(p, s, head_dim));
#pragma unroll 1
  for (int ended = 0;; ++ended) {
    stage_queries<Core>(p, queries, s, head_dim);
    // Behind the queries: all warps begin at once, and whoever asks later waits for all their keys.
    if (ended == 0) core.begin(keys_of(p, s, head_dim));
    const bool more = walk.more();
    Stretch upcoming = s;
    upcoming.from = upcoming.to = 0;
    if (more) upcoming = walk.next(p);
    const PagedRows rows(p, s.part, Core::ROWS);
    core.start(queries.sights);
    core.run(keys_of(p, s, head_dim), keys_of(p, upcoming, head_dim), queries, rows.count);
    bool written = false;
    if constexpr (Core::DIM != 0) {
      written = p.packs && s.whole();
      if (written) core.finish(p.y, p.dtype, [&](int r) { return result_at(p, s, rows, r, head_dim); }, rows.count);
    }
    if (!written) {
      // The second is free until the last stretch.
      const int record = 2 * warp + (ended > 0 || s.whole());
      core.store(shared.partial(record), rows.count, head_dim);
      if (s.whole()) write_results(p, s, rows, shared.partial(record), head_dim);
      else if (threadIdx.x % WARP == 0) records[record] = {s, true};
    }
    if (!more) return;
    s = upcoming;
    __syncwarp();
  }
}

template <class Core> __device__ __forceinline__ void paged_attention(const PagedAttentionParams& p) {
  extern __shared__ uint4 memory[];
  constexpr int RECORDS = PagedShared<Core>::RECORDS;
  __shared__ PagedRecord records[RECORDS];
  pdl_launch();
  pdl_wait();
  const int head_dim = Core::DIM ? Core::DIM : int(p.head_dim);
  const PagedShared<Core> shared(reinterpret_cast<char*>(memory), p, head_dim);
  Start start;
  if (threadIdx.x < RECORDS) records[threadIdx.x].there = false;
  const Share share = share_of_block<Core::KEYS, Core::WARPS>(p, p.kv_heads * p.parts, start);
  if (blockIdx.x >= share.blocks) return;
  paged_warp(p, shared, records, share, start, head_dim);
  __syncthreads();
#pragma unroll 1
  for (int from = 0, to; from < RECORDS; from = to) {
    to = from + 1;
    if (!records[from].there) continue;
    Stretch s = records[from].s;
    uint32_t members = 1u << from;
#pragma unroll 1
    for (; to < RECORDS && (!records[to].there || records[to].s.first == s.first); ++to)
      if (records[to].there) s.end = records[to].s.end, members |= 1u << to;
    merge_paged_records(p, shared, members, share, s, head_dim);
  }
}

}  // namespace fused
