// Attention of the newest tokens of many sequences over keys and values in pages, in one launch.
//
// q [B, T, heads, D] by its strides, pools by theirs, y [B, T, heads, D]. The rows of a key/value head are the queries
// of the heads that read it, T (heads / kv_heads); a warp takes up to ROWS of them together, so each key is read once
// for them. Keys are shared out in equal parts over the warps of a grid that follows from shapes (paged_share.cuh). A
// warp goes through its share stretch by stretch: one head of one sequence. Of a head whose keys are all in one stretch
// it writes y, otherwise it leaves sums in shared memory, which are merged when all warps are done (paged_merge.cuh).
//
// Bytes moved: the keys and values that are seen, once for ROWS queries.
#pragma once

#include <type_traits>

#include "attention/paged_fixed_split.cuh"
#include "attention/paged_merge.cuh"

namespace fused {

// A warp's queries, in whole packs of the pools' type, or of 16 bits if those are codes: all loads are on their way
// before one is waited for.
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
    queries.visible[lane] = {at, p.window ? at + 1 - int(p.window) : INT32_MIN, slope};
  }
  __syncwarp();
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

// The results of a stretch with all keys, from what the warp has left in `partial`. Sums are 0, not -0, as where splits
// are merged.
__device__ __forceinline__ void write_results(const PagedAttentionParams& p, const Stretch& s, const PagedRows& rows,
                                              const PagedPartial& partial, int head_dim) {
  __syncwarp();
#pragma unroll 1
  for (int r = 0; r < rows.count; ++r) {
    const float by = partial.weights[r] == 0.f ? 0.f : __fdividef(1.f, partial.weights[r]);
    const uint64_t at = result_at(p, s, rows, r, head_dim);
#pragma unroll 1
    for (int d = threadIdx.x % WARP; d < head_dim; d += WARP)
      write(p.y, p.dtype, at + d, (partial.sums[r * partial.stride + d] + 0.f) * by);
  }
}

// A warp's share. While a stretch ends, the first tile of the next is on its way. Splits of a fixed size need no records.
template <class Core>
__device__ __forceinline__ void paged_warp(const PagedAttentionParams& p, const PagedShared<Core>& shared,
                                           PagedRecord* records, const Share& share, const Start& start, int head_dim) {
  const int warp = threadIdx.x / WARP;
  const PagedQueries queries = shared.queries(warp);
  using Way = typename std::conditional<Core::FIXED, SplitWalk<Core>, Walk<Core>>::type;
  Way walk(p, share.begin_of(warp, shared.warps), share.begin_of(warp + 1, shared.warps), start);
  Stretch s;
  if (!walk.next(p, s)) return;
  Core core;
  core.look(keys_of(p, s, head_dim));
#pragma unroll 1
  for (int ended = 0;; ++ended) {
    stage_queries<Core>(p, queries, s, head_dim);
    // Behind the queries: all warps begin at once, and whoever asks later waits for all their keys.
    if (ended == 0) core.begin(keys_of(p, s, head_dim));
    Stretch upcoming = s;
    const bool more = walk.next(p, upcoming);
    if (!more) upcoming.from = upcoming.to = 0;
    const PagedRows rows(p, s.part, Core::ROWS);
    core.start(queries.visible);
    core.run(keys_of(p, s, head_dim), keys_of(p, upcoming, head_dim), queries, rows.count);
    bool written = false;
    if constexpr (Core::DIM != 0) {
      written = p.packs && s.whole();
      if (written) core.finish(p.y, p.dtype, [&](int r) { return result_at(p, s, rows, r, head_dim); }, rows.count);
    }
    if (!written) {
      // The second is free until the last stretch.
      const int record = 2 * warp + (ended > 0 || s.whole());
      PagedPartial partial;
      if constexpr (Core::FIXED) partial = split_partial(p, s, rows, head_dim);
      else partial = shared.partial(record);
      core.store(partial, rows.count, head_dim);
      if (s.whole()) write_results(p, s, rows, partial, head_dim);
      else if (!Core::FIXED && threadIdx.x % WARP == 0) records[record] = {s, true};
    }
    if (!more) return;
    s = upcoming;
    __syncwarp();
  }
}

template <class Core> __device__ __forceinline__ void paged_attention(const PagedAttentionParams& p) {
  extern __shared__ uint4 memory[];
  __shared__ PagedRecord records[2 * Core::WARPS];
  const int head_dim = Core::DIM ? Core::DIM : int(p.head_dim);
  const PagedShared<Core> shared(reinterpret_cast<char*>(memory), p, head_dim);
  if (threadIdx.x < shared.records()) records[threadIdx.x].there = false;
  pdl_launch();
  pdl_wait();
  Start start;
  const Share share = share_of_block<Core>(p, p.kv_heads * p.parts, shared.plan(), start);
  if (blockIdx.x >= share.blocks) return;
  paged_warp(p, shared, records, share, start, head_dim);
  __syncthreads();
  merge_paged(p, shared, records, share, head_dim);
}

// With splits of a fixed size, to be merged by merge_splits.
template <class Core> __device__ __forceinline__ void paged_attention_splits(const PagedAttentionParams& p) {
  extern __shared__ uint4 memory[];
  const int head_dim = Core::DIM ? Core::DIM : int(p.head_dim);
  const PagedShared<Core> shared(reinterpret_cast<char*>(memory), p, head_dim);
  pdl_launch();
  pdl_wait();
  Start start;
  const Share share = share_of_block<Core>(p, p.kv_heads * p.parts, shared.plan(), start);
  if (blockIdx.x < share.blocks) paged_warp(p, shared, nullptr, share, start, head_dim);
}

}  // namespace fused
