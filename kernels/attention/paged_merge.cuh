// How attention over pages merges the partial results of a head (paged.cuh): first those of a block's warps, which are
// records in shared memory, a row of the head to a warp; then, for heads whose keys several blocks share, those that
// these blocks have stored in global memory, by the block that is last (an atomic counter, which it resets).
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
  // Floats of a thread's partial result when blocks are merged: sums of values, their maximum score, and their weight.
  static constexpr int WIDTH = Core::DIM ? 4 : 1, LEFT = WIDTH + 2;

  char* memory;
  int warps;
  int bytes;           // of a warp's queries
  int rows;            // that a record has
  float* partials;     // [records]: tops [rows], weights [rows], sums [rows][stride]
  int stride;

  __device__ PagedShared(char* memory, const PagedAttentionParams& p, int head_dim)
      : memory(memory), warps(blockDim.x / WARP) {
    bytes = Core::DIM ? Core::QUERIES : 4 * Core::ROWS * head_dim;
    rows = min(Core::ROWS, int(p.queries * (p.heads / p.kv_heads) + 1) / 2 * 2);
    stride = head_dim + head_dim % 2 + 2;
    partials = reinterpret_cast<float*>(memory + warps * (bytes + Core::ROWS * sizeof(VisibleKeys)));
  }

  __device__ int records() const { return 2 * warps; }
  __device__ PagedQueries queries(int warp) const {
    char* own = memory + warp * bytes;
    VisibleKeys* visible = reinterpret_cast<VisibleKeys*>(memory + warps * bytes) + warp * Core::ROWS;
    return {own, reinterpret_cast<float*>(own), visible};
  }
  __device__ PagedPartial partial(int record) const {
    float* own = partials + record * rows * (2 + stride);
    return {own, own + rows, own + 2 * rows, stride};
  }
  // In the memory of the records, `[threads]` each: the plan before there are records, partial results behind them.
  __device__ SharePlan* plan() const { return reinterpret_cast<SharePlan*>(partials); }
  __device__ float* left(int thread) const { return partials + LEFT * thread; }
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

// The heads of which a block's warps have left records: those of a head follow one another.
struct PagedHeads {
  uint32_t there, firsts;  // a bit for each record

  // All lanes of a warp.
  __device__ PagedHeads(const PagedRecord* records, int count) {
    const int lane = threadIdx.x % WARP;
    const bool own = lane < count && records[lane].there;
    there = __ballot_sync(FULL, own);
    const uint32_t before = there & ((1u << lane) - 1);
    const bool first = own && (!before || records[31 - __clz(before)].s.first != records[lane].s.first);
    firsts = __ballot_sync(FULL, first);
  }

  __device__ int count() const { return __popc(firsts); }
  // The records of head `i`.
  __device__ uint32_t members(int i) const {
    uint32_t from = firsts;
    for (; i > 0; --i) from &= from - 1;
    const uint32_t next = from & (from - 1);
    // The bits from the first of the head on, without those from the first of the next on.
    return there & -(from & -from) & ((next & -next) - 1);
  }
  // All keys that the block has of it.
  __device__ static Stretch stretch(const PagedRecord* records, uint32_t members) {
    Stretch s = records[__ffs(members) - 1].s;
    s.end = records[31 - __clz(members)].s.end;
    return s;
  }
};

// Neighbours that another block has written.
template <int N> __device__ __forceinline__ Pack<float, N> load_cached(const float* p) {
  if constexpr (N == 1) {
    return {__ldcg(p)};
  } else {
    const float4 v = __ldcg(reinterpret_cast<const float4*>(p));
    return {v.x, v.y, v.z, v.w};
  }
}

// Where a block stores its partial result of a head: it has one of two heads at most, the first and the last.
template <class Core> __device__ __forceinline__ uint32_t slot_of(uint32_t block, bool behind) {
  return (2 * block + behind) * Core::ROWS;
}

// A part of an output: means, each counted 2^top times.
template <int WIDTH> struct PagedMean {
  Pack<float, WIDTH> sum;
  float top, weight;

  // Adds COUNT others, which count 2^tops times, or `weights` times as often. One maximum for all of them: nothing else
  // goes from one to the next but sums.
  template <int COUNT>
  __device__ void add(const float (&tops)[COUNT], const float (&weights)[COUNT],
                      const Pack<float, WIDTH> (&sums)[COUNT]) {
    float higher = top;
#pragma unroll
    for (int u = 0; u < COUNT; ++u) higher = fmaxf(higher, tops[u]);
    const float off = origin(higher), fade = exp2_fast(top - off);
    top = higher;
    weight *= fade;
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) sum.v[e] *= fade;
#pragma unroll
    for (int u = 0; u < COUNT; ++u) {
      const float share = exp2_fast(tops[u] - off);
      weight = fmaf(share, weights[u], weight);
#pragma unroll
      for (int e = 0; e < WIDTH; ++e) sum.v[e] = fmaf(share, sums[u].v[e], sum.v[e]);
    }
  }
};

// y from the partial results of the blocks `first` .. `last`. The head is the first of each block's share, but of block
// `first` it is the last if `behind`. Where there are more threads than outputs, several share the blocks of an output.
template <class Core>
__device__ __forceinline__ void merge_paged_blocks(const PagedAttentionParams& p, const PagedShared<Core>& shared,
                                                   const Stretch& s, const PagedRows& rows, uint32_t first,
                                                   uint32_t last, bool behind, int head_dim) {
  constexpr int BATCH = 16, WIDTH = PagedShared<Core>::WIDTH;
  const uint32_t outputs = rows.count * head_dim / WIDTH, threads = min(outputs, blockDim.x);
  const uint32_t parts = blockDim.x / threads, part = threadIdx.x / threads;
  // Of several turns, where there are more outputs than threads, none has several parts.
#pragma unroll 1
  for (uint32_t i = threadIdx.x % threads; i < outputs; i += threads) {
    const int r = i * WIDTH / head_dim;
    PagedMean<WIDTH> own = {{}, -INFINITY, 0.f};
#pragma unroll 1
    for (uint32_t from = first + part; from <= last; from += parts * BATCH) {
      Pack<float, WIDTH> means[BATCH];
      float tops[BATCH], once[BATCH];
#pragma unroll
      for (int u = 0; u < BATCH; ++u) {
        const uint32_t b = min(from + u * parts, last), slot = slot_of<Core>(b, behind && b == first);
        tops[u] = __ldcg(p.tops + slot + r);
        means[u] = load_cached<WIDTH>(p.means + uint64_t(slot) * head_dim + i * WIDTH);
      }
#pragma unroll
      for (int u = 0; u < BATCH; ++u) {
        if (from + u * parts > last) tops[u] = -INFINITY;
        once[u] = 1.f;
      }
      own.add(tops, once, means);
    }
    if (parts > 1) {
      if (part < parts) {
        float* left = shared.left(threadIdx.x);
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) left[e] = own.sum.v[e];
        left[WIDTH] = own.top, left[WIDTH + 1] = own.weight;
      }
      __syncthreads();
      for (uint32_t q = 1; part == 0 && q < parts; ++q) {
        const float* left = shared.left(q * threads + i);
        Pack<float, WIDTH> sums[1];
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) sums[0].v[e] = left[e];
        const float tops[1] = {left[WIDTH]}, weights[1] = {left[WIDTH + 1]};
        own.add(tops, weights, sums);
      }
    }
    // Neither do threads write that are more than whole sets of outputs.
    if (part > 0) break;
    const float by = own.weight == 0.f ? 0.f : __fdividef(1.f, own.weight);
    const uint64_t at = result_at(p, s, rows, r, head_dim) + i * WIDTH % head_dim;
    if constexpr (WIDTH == 4) {
      write4(p.y, p.dtype, at, make_float4(own.sum.v[0] * by, own.sum.v[1] * by, own.sum.v[2] * by, own.sum.v[3] * by));
    } else {
      write(p.y, p.dtype, at, own.sum.v[0] * by);
    }
  }
}

// Releases what the block has written before its last barrier, and acquires what others have released there.
__device__ __forceinline__ uint32_t add_acq_rel(uint32_t* at, uint32_t v) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(v) : "memory");
  return before;
}

// A warp merges row r of a head's `members` into y, or into the block's partial result if other blocks have keys of it.
template <class Core>
__device__ __forceinline__ void merge_paged_row(const PagedAttentionParams& p, const PagedShared<Core>& shared,
                                                uint32_t members, const Stretch& s, bool behind, int r, int head_dim) {
  constexpr int WIDTH = Core::DIM ? 2 : 1, LANE = (Core::WIDEST + WARP * WIDTH - 1) / (WARP * WIDTH);
  const PagedRows rows(p, s.part, Core::ROWS);
  if (r >= rows.count) return;
  const int lane = threadIdx.x % WARP;
  const bool own = members >> lane & 1;
  const float top = own ? shared.partial(lane).tops[r] : -INFINITY, off = origin(warp_max(top));
  float share = exp2_fast(top - off);
  const float weight = warp_sum(own ? share * shared.partial(lane).weights[r] : 0.f);
  share *= weight == 0.f ? 0.f : __fdividef(1.f, weight);
  float mean[LANE][WIDTH] = {};
#pragma unroll 4
  for (uint32_t left = members; left; left &= left - 1) {
    const int i = __ffs(left) - 1;
    const PagedPartial partial = shared.partial(i);
    const float by = __shfl_sync(FULL, share, i);
#pragma unroll
    for (int e = 0; e < LANE; ++e) {
      const int d = WIDTH * (lane + e * WARP);
      if (d >= head_dim) break;
      const auto sum = load<float, WIDTH>(partial.sums + r * partial.stride + d);
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) mean[e][j] = fmaf(by, sum.v[j], mean[e][j]);
    }
  }
  const bool whole = s.whole();
  const uint32_t slot = slot_of<Core>(blockIdx.x, behind) + r;
  if (!whole && lane == 0) p.tops[slot] = off + __log2f(weight);
#pragma unroll
  for (int e = 0; e < LANE; ++e) {
    const int d = WIDTH * (lane + e * WARP);
    if (d >= head_dim) break;
    if (whole) {
      const uint64_t at = result_at(p, s, rows, r, head_dim) + d;
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) write(p.y, p.dtype, at + j, mean[e][j]);
    } else {
      Pack<float, WIDTH> pack;
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) pack.v[j] = mean[e][j];
      store(p.means + uint64_t(slot) * head_dim + d, pack);
    }
  }
}

// Merges the records of the block's warps, and then, where it is the last block of a head, those of the blocks.
template <class Core>
__device__ __forceinline__ void merge_paged(const PagedAttentionParams& p, const PagedShared<Core>& shared,
                                            const PagedRecord* records, const Share& share, int head_dim) {
  // Whether the block is the last of its first head, and of its last.
  __shared__ uint32_t is_last_of[2];
  const PagedHeads heads(records, shared.records());
  const int jobs = heads.count() * shared.rows;
#pragma unroll 1
  for (int job = threadIdx.x / WARP; job < jobs; job += shared.warps) {
    const uint32_t members = heads.members(job / shared.rows);
    const Stretch s = PagedHeads::stretch(records, members);
    merge_paged_row(p, shared, members, s, share.is_behind(blockIdx.x, s.first), job % shared.rows, head_dim);
  }
  // The first head and the last may have keys elsewhere, and no other.
  const int ends[2] = {0, heads.count() - 1}, count = min(heads.count(), 2);
  __syncthreads();
  if (threadIdx.x < count) {
    const Stretch s = PagedHeads::stretch(records, heads.members(ends[threadIdx.x]));
    bool last = false;
    if (!s.whole()) {
      uint32_t* counter = p.counters + s.counter(p);
      last = add_acq_rel(counter, 1) == share.owner(s.last) - share.owner(s.first);
      if (last) *counter = 0;
    }
    is_last_of[threadIdx.x] = last;
  }
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    if (!is_last_of[i]) continue;
    const Stretch s = PagedHeads::stretch(records, heads.members(ends[i]));
    const uint32_t first = share.owner(s.first), last = share.owner(s.last);
    merge_paged_blocks(p, shared, s, PagedRows(p, s.part, Core::ROWS), first, last, share.is_behind(first, s.first),
                       head_dim);
    __syncthreads();
  }
}

}  // namespace fused
