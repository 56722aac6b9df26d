// Attention over pages (paged.cuh) in an order of keys that depends on the sequence alone, in two launches: the same bits
// for a query whatever other sequences are in the batch, however many queries are in the step, and wherever pages lie.
//
//   of each split: top = max(s), weight = sum(2^(s - top)), sums = sum(2^(s - top) v); y = the splits merged
//
// Keys are split at multiples of PAGED_SPLIT, counted from the sequence's first token. A warp takes a split from its first
// tile to its last, for up to ROWS rows; which warp takes it, and which splits it has taken before, has no influence. What
// it leaves goes to a place of its own in global memory. The second launch merges a row's splits in an order that follows
// from their number.
//
// What a row sees nothing of adds nothing: keys behind its own or before its window have weights of 0, exactly, and splits
// without any other keys are not merged. So it does not matter what the other queries of the step see.
//
// Bytes moved: as in paged.cuh, and for each split and row a row of f32, written once and read once.
//
// Source: the fixed split size of FlashInfer and of "Defeating Nondeterminism in LLM Inference" (Thinking Machines, 2025).
#pragma once

#include "attention/paged_merge.cuh"

namespace fused {

// A warp's way through its share, split by split.
template <class Core> struct SplitWalk : Progress {
  static_assert(PAGED_SPLIT % Core::KEYS == 0);
  using Progress::Progress;

  __device__ bool next(const PagedAttentionParams& p, Stretch& s) {
    const uint32_t heads = p.kv_heads * p.parts;
    while (unit < end) {
      const uint32_t splits = sequence.units<Core>(), in_sequence = unit - before;
      if (in_sequence >= splits * heads) {
        // No more sequences: ranges of the table overlap until 32 bits do not count the splits.
        if (b + 1 >= p.pages.sequences) return false;
        next_sequence(p);
        continue;
      }
      const uint32_t head = in_sequence / splits, split = in_sequence % splits;
      s.entries = sequence.entries, s.length = sequence.length;
      s.b = b, s.kv = head / p.parts, s.part = head % p.parts;
      s.first = unit - split, s.last = s.first + splits - 1;
      s.begin = unit, s.end = ++unit;
      const uint32_t from = (sequence.first / PAGED_SPLIT + split) * PAGED_SPLIT;
      s.from = max(sequence.first, from);
      s.to = min(sequence.length, from + PAGED_SPLIT);
      return true;
    }
    return false;
  }
};

// The place of a sequence's first split. In CSR form each sequence has room for the keys of its entries.
__device__ __forceinline__ uint64_t first_split(const PagedAttentionParams& p, uint32_t b, const uint32_t* entries) {
  if (p.splits) return uint64_t(b) * p.splits;
  return uint64_t(entries - p.pages.entries) * p.pages.page / PAGED_SPLIT + b;
}

// The row of partial results of query `query` in head `head`, in a split by its place.
__device__ __forceinline__ uint64_t split_row(const PagedAttentionParams& p, uint64_t split, uint32_t query,
                                              uint32_t head) {
  const uint32_t group = p.heads / p.kv_heads;
  const uint32_t row = (head / group * p.queries + query) * group + head % group;
  return split * (uint64_t(p.queries) * p.heads) + row;
}

// What a warp has of a split. The rows of a key/value head lie in their order.
template <class Core>
__device__ __forceinline__ void store_split(const PagedAttentionParams& p, Core& core, const Stretch& s,
                                            const PagedRows& rows, int head_dim) {
  const uint64_t split = first_split(p, s.b, s.entries) + (s.begin - s.first);
  const uint64_t row = split_row(p, split, rows.query(0), rows.head(s.kv, 0));
  core.store({p.tops + row, p.weights + row, p.means + row * head_dim, head_dim}, rows.count, head_dim);
}

// A block for each row of y, `[sequences, queries, heads]`. Of a row's splits, counted from the first that it sees, warp w
// merges w, w + WARPS, w + 2 WARPS, ..., and then the block the warps.
__device__ __forceinline__ void merge_splits(const PagedAttentionParams& p) {
  constexpr int WARPS = PAGED_WARPS, WIDEST = 256, LANE = WIDEST / WARP, BATCH = 4;
  __shared__ float partial[WARPS][WIDEST], tops[WARPS], weights[WARPS];
  pdl_launch();
  pdl_wait();
  const uint32_t of_sequence = p.queries * p.heads, head_dim = p.head_dim;
  const uint32_t b = blockIdx.x / of_sequence, query = blockIdx.x % of_sequence / p.heads, head = blockIdx.x % p.heads;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const Sequence sequence(p, b);
  const int at = int(sequence.length) - int(p.queries) + int(query);
  const int low = p.window ? max(at + 1 - int(p.window), 0) : 0, first = low / int(PAGED_SPLIT);
  const int count = at < 0 ? 0 : at / int(PAGED_SPLIT) + 1 - first;
  const uint64_t place = first_split(p, b, sequence.entries) + (first - sequence.first / PAGED_SPLIT);
  PagedMean<LANE> own = {{}, -INFINITY, 0.f};
#pragma unroll 1
  for (int from = warp; from < count; from += WARPS * BATCH) {
    Pack<float, LANE> of_splits[BATCH];
    float its_tops[BATCH], its_weights[BATCH];
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
      const int split = from + u * WARPS;
      const bool there = split < count;
      const uint64_t row = split_row(p, place + split, query, head);
      its_tops[u] = there ? __ldcg(p.tops + row) : -INFINITY;
      its_weights[u] = there ? __ldcg(p.weights + row) : 0.f;
#pragma unroll
      for (int e = 0; e < LANE; ++e) {
        const uint32_t d = lane + e * WARP;
        of_splits[u].v[e] = there && d < head_dim ? __ldcg(p.means + row * head_dim + d) : 0.f;
      }
    }
    own.add(its_tops, its_weights, of_splits);
  }
  if (lane == 0) tops[warp] = own.top, weights[warp] = own.weight;
#pragma unroll
  for (int e = 0; e < LANE; ++e) partial[warp][lane + e * WARP] = own.sum.v[e];
  __syncthreads();
  PagedMean<1> all = {{}, -INFINITY, 0.f};
  float its_tops[WARPS], its_weights[WARPS];
  Pack<float, 1> of_warps[WARPS];
  const uint32_t d = threadIdx.x;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) its_tops[w] = tops[w], its_weights[w] = weights[w], of_warps[w].v[0] = partial[w][d];
  all.add(its_tops, its_weights, of_warps);
  const float by = all.weight == 0.f ? 0.f : __fdividef(1.f, all.weight);
  // Adding a product of 0 turns -0 into 0, so whether there were keys without weight would be seen in a zero's sign.
  if (d < head_dim) write(p.y, p.dtype, uint64_t(blockIdx.x) * head_dim + d, (all.sum.v[0] + 0.f) * by);
}

}  // namespace fused
