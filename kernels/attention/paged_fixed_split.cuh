// Attention over pages (paged.cuh) in an order of keys that depends on the sequence alone, in two launches: the same bits
// for a query whatever other sequences are in the batch, however many queries are in the step, and wherever pages lie.
//
//   of each split: top = max(s), weight = sum(2^(s - top)), sums = sum(2^(s - top) v); y = the splits merged
//
// Keys are split at multiples of PAGED_SPLIT, counted from the sequence's first token. A warp takes a split from its first
// tile to its last, for up to ROWS rows; which warp takes it, and which splits it has taken before, has no influence. What
// it leaves goes to a place of its own in global memory. The second launch merges a row's splits in an order that follows
// from their number. Where a sequence has one split there is nothing to merge, and the first launch writes y: merged, one
// split is itself, bit for bit (SplitSums), so it does not matter which launch writes.
//
// What a row sees nothing of adds nothing: keys behind its own or before its window have weights of 0, exactly, and splits
// without any other keys are not merged. So it does not matter what the other queries of the step see.
//
// Bytes moved: as in paged.cuh, and for each split and row of longer sequences a row of f32, written once and read once.
//
// Source: the fixed split size of FlashInfer and of "Defeating Nondeterminism in LLM Inference" (Thinking Machines, 2025).
#pragma once

#include "attention/paged_merge.cuh"

namespace fused {

// A warp's way through its share: the splits that begin in it.
template <class Core> struct SplitWalk : Progress {
  static_assert(PAGED_SPLIT % Core::KEYS == 0);
  using Progress::Progress;

  __device__ bool next(const PagedAttentionParams& p, Stretch& s) {
    const uint32_t heads = p.kv_heads * p.parts;
    while (unit < end) {
      const uint32_t units = sequence.units<Core>(), in_sequence = unit - before;
      if (in_sequence >= units * heads) {
        // No more sequences: ranges of the table overlap until 32 bits do not count the units.
        if (b + 1 >= p.pages.sequences) return false;
        next_sequence(p);
        continue;
      }
      const uint32_t head = in_sequence / units, in_head = in_sequence % units, of_head = unit - in_head;
      const uint32_t split = sequence.split_from(in_head), begin = min(sequence.units_before(split), units);
      if (begin > in_head) {
        unit = of_head + begin;
        continue;
      }
      s.entries = sequence.entries, s.length = sequence.length;
      s.b = b, s.kv = head / p.parts, s.part = head % p.parts;
      s.first = 0, s.last = sequence.splits() - 1;
      s.begin = split, s.end = split + 1;
      unit = of_head + min(sequence.units_before(split + 1), units);
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

// Where a warp's results of a split go. The rows of a key/value head lie in their order.
__device__ __forceinline__ PagedPartial split_partial(const PagedAttentionParams& p, const Stretch& s,
                                                      const PagedRows& rows, int head_dim) {
  const uint64_t split = first_split(p, s.b, s.entries) + s.begin;
  const uint64_t row = split_row(p, split, rows.query(0), rows.head(s.kv, 0));
  return {p.tops + row, p.weights + row, p.means + row * head_dim, head_dim};
}

// PAGED_MERGED outputs of a row of y, and the splits to merge for them.
struct RowPart {
  uint32_t row, d;
  int count;      // of splits, negative if there is nothing to do
  uint64_t from;  // the row's partial result of its first split
  uint32_t step;  // from split to split

  RowPart() = default;
  // Of y `[sequences, queries, heads, head_dim]`.
  __device__ RowPart(const PagedAttentionParams& p, uint32_t part) {
    const uint32_t of_row = (p.head_dim + PAGED_MERGED - 1) / PAGED_MERGED;
    row = part / of_row, d = part % of_row * PAGED_MERGED;
    step = p.queries * p.heads;
    const uint32_t b = row / step, query = row % step / p.heads, head = row % p.heads;
    count = -1, from = 0;
    if (b >= p.pages.sequences) return;
    const Sequence sequence(p, b);
    if (sequence.splits() == 1) return;
    const int at = int(sequence.length) - int(p.queries) + int(query);
    const int low = p.window ? max(at + 1 - int(p.window), 0) : 0, first = low / int(PAGED_SPLIT);
    count = at < 0 ? 0 : at / int(PAGED_SPLIT) + 1 - first;
    const uint64_t split = first_split(p, b, sequence.entries) + (first - sequence.first / PAGED_SPLIT);
    from = split_row(p, split, query, head);
  }
};

// What a warp has merged of a part of a row: sums of values with their weight, both in units of 2^top.
//
// A single split stays as it is: 0 fades, and its own share is 2^0, so the weight and the sums are multiplied with 1 and
// added to 0. That turns a sum of -0 into 0, as the first launch does for the splits that it divides itself.
struct SplitSums {
  static constexpr int LANE = PAGED_MERGED / WARP;

  float top = -INFINITY, weight = 0.f, sums[LANE] = {};

  // The output of lane's sum `i`, counted from the part's first.
  __device__ static uint32_t output(int i) { return threadIdx.x % WARP + i * WARP; }

  // Adds COUNT others in their order. Lane i has the top and the weight of the i-th, -inf and 0 behind the last.
  template <int COUNT> __device__ void add(float its_top, float its_weight, const float (&others)[COUNT][LANE]) {
    const float higher = fmaxf(top, warp_max(its_top)), off = origin(higher);
    const float fade = exp2_fast(top - off), share = exp2_fast(its_top - off);
    top = higher;
    // No multiply-add instead, which would give each lane a sum of its own.
    weight = fmaf(weight, fade, warp_sum(__fmul_rn(share, its_weight)));
#pragma unroll
    for (int i = 0; i < LANE; ++i) sums[i] *= fade;
#pragma unroll
    for (int u = 0; u < COUNT; ++u) {
      const float by = __shfl_sync(FULL, share, u);
#pragma unroll
      for (int i = 0; i < LANE; ++i) sums[i] = fmaf(by, others[u][i], sums[i]);
    }
  }

  // Adds a row's splits `first`, `first` + STEP, ..., COUNT of them or as many as there are: all loads are on their way
  // before one is waited for.
  template <int COUNT, int STEP>
  __device__ void add_splits(const PagedAttentionParams& p, const RowPart& part, int first) {
    const int own = threadIdx.x % WARP, left = part.count - first;
    const uint64_t row = part.from + uint64_t(first) * part.step, next = uint64_t(part.step) * STEP;
    const bool there = own < COUNT && own * STEP < left;
    const float its_top = there ? __ldcg(p.tops + row + own * next) : -INFINITY;
    const float its_weight = there ? __ldcg(p.weights + row + own * next) : 0.f;
    float others[COUNT][LANE];
    const float* from = p.means + row * p.head_dim + part.d;
#pragma unroll
    for (int u = 0; u < COUNT; ++u, from += next * p.head_dim) {
#pragma unroll
      for (int i = 0; i < LANE; ++i)
        others[u][i] = u * STEP < left && part.d + output(i) < p.head_dim ? __ldcg(from + output(i)) : 0.f;
    }
    add(its_top, its_weight, others);
  }

  __device__ void write_to(const PagedAttentionParams& p, const RowPart& part) const {
    const float by = weight == 0.f ? 0.f : __fdividef(1.f, weight);
#pragma unroll
    for (int i = 0; i < LANE; ++i) {
      const uint32_t d = part.d + output(i);
      // Adding a product of 0 turns -0 into 0, so whether there were keys without weight would be seen in a zero's sign.
      if (d < p.head_dim) write(p.y, p.dtype, uint64_t(part.row) * p.head_dim + d, (sums[i] + 0.f) * by);
    }
  }
};

// What the warps of a block have merged of one part of a row.
struct WarpSums {
  float tops[PAGED_WARPS], weights[PAGED_WARPS], sums[PAGED_WARPS][PAGED_MERGED];

  __device__ void put(int warp, const SplitSums& own) {
    if (threadIdx.x % WARP == 0) tops[warp] = own.top, weights[warp] = own.weight;
#pragma unroll
    for (int i = 0; i < SplitSums::LANE; ++i) sums[warp][SplitSums::output(i)] = own.sums[i];
  }
  // All of them merged.
  __device__ SplitSums merged() const {
    const int own = threadIdx.x % WARP;
    const bool there = own < PAGED_WARPS;
    float others[PAGED_WARPS][SplitSums::LANE];
#pragma unroll
    for (int w = 0; w < PAGED_WARPS; ++w)
#pragma unroll
      for (int i = 0; i < SplitSums::LANE; ++i) others[w][i] = sums[w][SplitSums::output(i)];
    SplitSums all;
    all.add(there ? tops[own] : -INFINITY, there ? weights[own] : 0.f, others);
    return all;
  }
};

// Each warp of a block has a part of a row, far from those of the others, since neighbours are of one sequence, and as long.
// Of a row's splits, counted from the first that it sees, warp w merges w, w + WARPS, w + 2 WARPS, ..., and then one warp
// what the warps have. Up to WARPS splits, where that leaves a warp no more than one, which stays as it is, one warp
// merges all of them alone; parts with more splits are merged by the block, one after the other.
__device__ __forceinline__ void merge_splits(const PagedAttentionParams& p) {
  constexpr int WARPS = PAGED_WARPS, BATCH = 16;
  __shared__ RowPart parts[WARPS];
  __shared__ WarpSums of_warps[2];
  pdl_launch();
  pdl_wait();
  const int warp = threadIdx.x / WARP;
  const RowPart own(p, blockIdx.x + warp * gridDim.x);
  if (threadIdx.x % WARP == 0) parts[warp] = own;
  if (own.count >= 0 && own.count <= WARPS) {
    SplitSums all;
    all.add_splits<WARPS, 1>(p, own, 0);
    all.write_to(p, own);
  }
  __syncthreads();
  // What one warp still reads of a part, the others do not overwrite with the next: the next but one lies there, behind
  // another barrier.
  int turn = 0;
#pragma unroll 1
  for (int w = 0; w < WARPS; ++w) {
    const RowPart& part = parts[w];
    if (part.count <= WARPS) continue;
    SplitSums sums;
#pragma unroll 1
    for (int first = warp; first < part.count; first += WARPS * BATCH) sums.add_splits<BATCH, WARPS>(p, part, first);
    of_warps[turn].put(warp, sums);
    __syncthreads();
    if (warp == w) of_warps[turn].merged().write_to(p, part);
    turn ^= 1;
  }
}

}  // namespace fused
