// Attention of the newest tokens of many sequences over keys and values in pages, in one launch.
//
// q [B, T, heads, D] by its strides, pools by theirs, y [B, T, heads, D]. The rows of a key/value head are the queries
// of the heads that read it, T (heads / kv_heads); a block takes up to ROWS of them together, so each key is read once
// for them. Keys are shared out in equal parts over the grid, which follows from shapes (paged_share.cuh). A block goes
// through its share stretch by stretch: one head of one sequence, whose keys its warps take in tiles in turn. Where a
// head's keys are all in one stretch the block writes y, otherwise it leaves a partial result; the last of those who
// have a part of the head (an atomic counter, which it resets) merges them in the order of the keys.
//
// Bytes moved: the keys and values that are seen, once for ROWS queries.
#pragma once

#include "attention/decode.cuh"
#include "attention/paged_share.cuh"
#include "attention/paged_warp.cuh"

namespace fused {

// A block's shared memory. `stride`: from row to row of the sums, in floats.
template <class Core> struct PagedShared {
  char* memory;
  int bytes;       // of queries
  float* tops;     // [WARPS][ROWS]
  float* weights;
  float* sums;     // [WARPS][ROWS][stride]
  int stride;

  __device__ PagedShared(char* memory, int head_dim) : memory(memory) {
    bytes = Core::DIM ? Core::QUERIES : 4 * Core::ROWS * head_dim;
    tops = reinterpret_cast<float*>(memory + 2 * bytes + 2 * Core::ROWS * sizeof(Sight));
    weights = tops + Core::WARPS * Core::ROWS;
    sums = weights + Core::WARPS * Core::ROWS;
    stride = head_dim + head_dim % 2 + 2;
  }

  __device__ PagedSide side(int i) const {
    char* queries = memory + i * bytes;
    return {queries, reinterpret_cast<float*>(queries), reinterpret_cast<Sight*>(memory + 2 * bytes) + i * Core::ROWS};
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

// Queries and what they see, for the warps. All loads are on their way before one is waited for.
template <class Core>
__device__ __forceinline__ void stage_queries(const PagedAttentionParams& p, const PagedSide& side, const Stretch& s,
                                              int head_dim) {
  constexpr int EACH = (Core::ROWS + Core::WARPS - 1) / Core::WARPS, LANE = (Core::WIDEST + WARP - 1) / WARP;
  const PagedRows rows(p, s.part, Core::ROWS);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  uint32_t raw[EACH][LANE];
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const int r = min(warp + j * Core::WARPS, rows.count - 1);
    const uint64_t from = s.b * p.q_sequence + rows.query(r) * p.q_token + rows.head(s.kv, r) * p.q_head;
#pragma unroll
    for (int e = 0; e < LANE; ++e)
      if (lane + e * WARP < head_dim) raw[j][e] = read_raw(p.q, p.dtype, from + lane + e * WARP);
  }
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const int r = warp + j * Core::WARPS;
#pragma unroll
    for (int e = 0; e < LANE; ++e) {
      const int d = lane + e * WARP;
      if (r >= rows.count || d >= head_dim) continue;
      const float q = widen_raw(raw[j][e], p.dtype);
      if constexpr (Core::DIM) Core::put(side.queries, r, d, q);
      else side.q[r * head_dim + d] = q;
    }
  }
  if (threadIdx.x < Core::ROWS) {
    const int r = min(int(threadIdx.x), rows.count - 1), at = int(s.length) - int(p.queries) + int(rows.query(r));
    const float slope = p.slopes ? LOG2E * __ldg(p.slopes + rows.head(s.kv, r)) : 0.f;
    side.sights[threadIdx.x] = {at, p.window ? at + 1 - int(p.window) : INT32_MIN, slope};
  }
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
// which had others before it if `behind`. The blocks' shares of each row come first, so that what is left are sums of
// products whose loads wait for nothing.
template <class Core>
__device__ __forceinline__ void merge_paged_blocks(const PagedAttentionParams& p, const Stretch& s,
                                                   const PagedRows& rows, uint32_t first, uint32_t last, bool behind,
                                                   int head_dim) {
  constexpr int ROWS = Core::ROWS, THREADS = Core::WARPS * WARP, CHUNK = 64, WIDTH = Core::DIM ? 4 : 1;
  constexpr int ITEMS = (ROWS * Core::WIDEST / WIDTH + THREADS - 1) / THREADS;
  __shared__ float shares[CHUNK][ROWS], tops[ROWS], totals[ROWS], fades[ROWS];
  const int lane = threadIdx.x % WARP;
  const auto slot = [&](uint32_t b) { return 2 * b * ROWS + (behind && b == first ? ROWS : 0); };
  Pack<float, WIDTH> sums[ITEMS] = {};
  if (threadIdx.x < ROWS) tops[threadIdx.x] = -INFINITY, totals[threadIdx.x] = 0.f;
  for (uint32_t from = first; from <= last; from += CHUNK) {
    const int count = min(last + 1 - from, uint32_t(CHUNK));
    __syncthreads();
    for (int i = threadIdx.x; i < count * ROWS; i += THREADS)
      shares[i / ROWS][i % ROWS] = i % ROWS < rows.count ? __ldcg(p.tops + slot(from + i / ROWS) + i % ROWS) : 0.f;
    __syncthreads();
    for (int r = threadIdx.x / WARP; r < rows.count; r += Core::WARPS) {
      float top = tops[r], total = 0.f;
      for (int c = lane; c < count; c += WARP) top = fmaxf(top, shares[c][r]);
      top = warp_max(top);
      const float off = origin(top), fade = exp2_fast(tops[r] - off);
      for (int c = lane; c < count; c += WARP) total += shares[c][r] = exp2_fast(shares[c][r] - off);
      total = warp_sum(total) + fade * totals[r];
      if (lane == 0) tops[r] = top, totals[r] = total, fades[r] = fade;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
      const int i = (threadIdx.x + j * THREADS) * WIDTH, r = i / head_dim;
      if (r >= rows.count) break;
      const float* means = p.means + i;
#pragma unroll
      for (int e = 0; e < WIDTH; ++e) sums[j].v[e] *= fades[r];
#pragma unroll 8
      for (int c = 0; c < count; ++c) {
        const auto mean = load_cached<WIDTH>(means + uint64_t(slot(from + c)) * head_dim);
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) sums[j].v[e] = fmaf(shares[c][r], mean.v[e], sums[j].v[e]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < ITEMS; ++j) {
    const int i = (threadIdx.x + j * THREADS) * WIDTH, r = i / head_dim;
    if (r >= rows.count) break;
    const float by = totals[r] == 0.f ? 0.f : __fdividef(1.f, totals[r]);
    const uint64_t at = result_at(p, s, rows, r, head_dim) + i % head_dim;
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) write(p.y, p.dtype, at + e, sums[j].v[e] * by);
  }
}

// Brings the block's first `warps` warps together, and then the blocks.
template <class Core>
__device__ __forceinline__ void paged_epilogue(const PagedAttentionParams& p, const PagedShared<Core>& shared,
                                               const Share& share, const Stretch& s, int warps, int head_dim) {
  constexpr int ROWS = Core::ROWS, WARPS = Core::WARPS;
  const PagedRows rows(p, s.part, ROWS);
  const uint32_t slot = (2 * blockIdx.x + (s.begins_share ? 0 : 1)) * ROWS;
  // What each warp's sums count for.
  if (threadIdx.x < rows.count) {
    const int r = threadIdx.x;
    float top = -INFINITY, weight = 0.f;
    for (int w = 0; w < warps; ++w) top = fmaxf(top, shared.tops[w * ROWS + r]);
    const float off = origin(top);
    for (int w = 0; w < warps; ++w) weight += exp2_fast(shared.tops[w * ROWS + r] - off) * shared.weights[w * ROWS + r];
    const float by = weight == 0.f ? 0.f : __fdividef(1.f, weight);
    for (int w = 0; w < warps; ++w) shared.weights[w * ROWS + r] = exp2_fast(shared.tops[w * ROWS + r] - off) * by;
    if (!s.whole) p.tops[slot + r] = top + __log2f(weight);
  }
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < rows.count * head_dim; i += WARPS * WARP) {
    const int r = i / head_dim, d = i % head_dim;
    float mean = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w)
      if (w < warps) mean = fmaf(shared.weights[w * ROWS + r], shared.sums[(w * ROWS + r) * shared.stride + d], mean);
    if (s.whole) write(p.y, p.dtype, result_at(p, s, rows, r, head_dim) + d, mean);
    else p.means[uint64_t(slot) * head_dim + i] = mean;
  }
  if (s.whole) return;
  const uint32_t first = share.owner(s.first), last = share.owner(s.last);
  if (is_last(p.counters + s.counter(p), last - first + 1))
    merge_paged_blocks<Core>(p, s, rows, first, last, share.begin_of(first) != s.first, head_dim);
}

__device__ __forceinline__ PagedKeys keys_of(const PagedAttentionParams& p, const Stretch& s, int head_dim) {
  const Pages& pages = p.pages;
  const uint32_t size = pages.dtype == F32 ? 4 : 2;
  PagedKeys keys;
  keys.k = static_cast<const char*>(pages.k) + s.kv * pages.k_head * size;
  keys.v = static_cast<const char*>(pages.v) + s.kv * pages.v_head * size;
  keys.entries = s.entries;
  keys.k_page = pages.k_page, keys.k_token = pages.k_token;
  keys.v_page = pages.v_page, keys.v_token = pages.v_token;
  keys.page = pages.page, keys.pages = pages.pages;
  keys.from = s.from, keys.to = s.to;
  keys.form = {nullptr, nullptr, 0, 0, head_dim, pages.dtype, p.softcap > 0.f ? p.scale : p.scale * LOG2E, p.softcap};
  return keys;
}

// While a stretch is brought together, the first tiles and the queries of the next are on their way, and it is known
// where the one behind that begins.
template <class Core> __device__ __forceinline__ void paged_attention(const PagedAttentionParams& p) {
  constexpr int UNIT = Core::KEYS, WARPS = Core::WARPS;
  extern __shared__ uint4 memory[];
  pdl_launch();
  pdl_wait();
  const int head_dim = Core::DIM ? Core::DIM : int(p.head_dim), warp = threadIdx.x / WARP;
  const PagedShared<Core> shared(reinterpret_cast<char*>(memory), head_dim);
  const Share share = share_of_block<UNIT, WARPS * WARP>(p, p.kv_heads * p.parts);
  if (blockIdx.x >= share.blocks) return;
  Walk<UNIT> walk(p, share);
  Core core;
  Stretch s = walk.next(p, share), upcoming = s;
  core.look(keys_of(p, s, head_dim), warp);
  bool more = true;
  // Begins `upcoming`, and finds what comes behind it.
  const auto advance = [&](int side) {
    s = upcoming;
    const PagedKeys keys = keys_of(p, s, head_dim);
    core.fetch(keys, warp, WARPS);
    stage_queries<Core>(p, shared.side(side), s, head_dim);
    more = walk.unit < share.end;
    if (more) upcoming = walk.next(p, share);
  };
  advance(0);
  __syncthreads();
  for (int side = 0;; side ^= 1) {
    const PagedSide own = shared.side(side);
    const int rows = PagedRows(p, s.part, Core::ROWS).count, tiles = (s.to - s.from + Core::KEYS - 1) / Core::KEYS;
    if (warp < tiles) {
      core.start(own.sights);
      core.run(keys_of(p, s, head_dim), warp, WARPS, tiles, keys_of(p, upcoming, head_dim), own, rows);
      core.store(shared.sums + warp * Core::ROWS * shared.stride, shared.stride, shared.tops + warp * Core::ROWS,
                 shared.weights + warp * Core::ROWS, rows, head_dim);
    } else {
      core.look(keys_of(p, upcoming, head_dim), warp);
    }
    const Stretch done = s;
    const bool again = more;
    if (again) advance(side ^ 1);
    __syncthreads();
    paged_epilogue(p, shared, share, done, min(tiles, WARPS), head_dim);
    if (!again) return;
    __syncthreads();
  }
}

}  // namespace fused
