// What the attention kernels for many queries share: a row's place, and the keys that it sees.
#pragma once

#include "abi/attention.cuh"
#include "attention/page_table.cuh"
#include "common/dtype.cuh"

namespace fused {

constexpr float LOG2E = 1.4426950408889634f;
constexpr float NEVER = -INFINITY;

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// How the sequences of a batch lie in the tensors.
enum class Batch {
  DENSE,   // all have as many queries and as many keys
  RAGGED,  // one behind the other, by cumulative lengths or as many rows apart
  PAGED,   // queries one behind the other, keys and values in pages
};

// The rows of a sequence among those of the tensors.
struct Sequence {
  int first_query, first_key, queries, keys;  // the first ones are 0 where sequences do not share a dimension
  const uint32_t* pages;                      // its entries of the table, if keys are in pages
};

// Of what the lengths say, what is there: they may be anything.
__device__ __forceinline__ int2 between(const uint32_t* lengths, int batch, int total) {
  const uint32_t from = min(lengths[batch], uint32_t(total)), to = min(lengths[batch + 1], uint32_t(total));
  return {int(from), to > from ? int(to - from) : 0};
}

// Of a padded batch, the rows of a sequence that are tokens.
template <typename Params> __device__ __forceinline__ int padded_length(const Params& p, int batch) {
  return min(p.cu_q[batch], uint32_t(p.pitch));
}

template <Batch B, typename Params> __device__ __forceinline__ Sequence sequence(const Params& p, int batch) {
  if constexpr (B == Batch::DENSE) {
    return {0, 0, p.queries, p.keys, nullptr};
  } else {
    if (B == Batch::RAGGED && p.pitch) {
      const int first = batch * p.pitch, tokens = padded_length(p, batch);
      return {first, first, tokens, tokens, nullptr};
    }
    const int2 q = between(p.cu_q, batch, p.total_q);
    if constexpr (B == Batch::PAGED) {
      const TableRow row = table_row(p.pages, p.pages.lengths, batch);
      return {q.x, 0, q.y, int(row.length), row.entries};
    } else {
      const int2 k = between(p.cu_k, batch, p.total_k);
      return {q.x, k.x, q.y, k.y, nullptr};
    }
  }
}

// The row of y that a query's is.
template <Batch B, typename Params>
__device__ __forceinline__ int64_t output_row(const Params& p, const Sequence& of, int batch, int query) {
  return B == Batch::DENSE ? int64_t(batch) * p.queries + query : int64_t(of.first_query + query);
}

// Elements before the first row of a sequence in a tensor of batch, head, token, dim.
template <Batch B>
__device__ __forceinline__ int64_t start_of(const int64_t (&strides)[4], int batch, int first_row) {
  return B == Batch::DENSE ? batch * strides[0] : first_row * strides[2];
}

// The threads of each block that write zeros into rows of y that no sequence has.
struct Zeroing {
  uint32_t thread, threads;
  static __device__ __forceinline__ Zeroing all() { return {threadIdx.x, blockDim.x}; }
};

// Rows of y that no sequence has. The constructor loads the cumulative lengths that say whether there are any, and `each`
// uses them: loads that stand between the two overlap with these.
template <Batch B, typename Params> struct LeftOver {
  const Params& p;
  const int sequences, dim;
  uint32_t first, last;  // the rows that sequences have, if they are one behind the other

  __device__ __forceinline__ LeftOver(const Params& p, int sequences, int dim)
      : p(p), sequences(sequences), dim(dim), first(0), last(0) {
    if (B != Batch::DENSE && !is_padded()) first = p.cu_q[0], last = p.cu_q[sequences];
  }
  __device__ __forceinline__ bool is_padded() const { return B == Batch::RAGGED && p.pitch; }

  // Calls `zero` with each element: the blocks share them out.
  template <typename F> __device__ __forceinline__ void each(Zeroing by, F zero) const {
    if (B == Batch::DENSE) return;
    if (is_padded()) return each_padding(by, zero);
    const uint32_t total = p.total_q, from = min(first, total), to = max(min(last, total), from);
    if (to - from == total) return;
    const int64_t width = int64_t(p.heads) * dim, before = from * width, gap = (to - from) * width;
    const int64_t block = (int64_t(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const int64_t step = int64_t(gridDim.x) * gridDim.y * gridDim.z * by.threads;
    for (int64_t i = block * by.threads + by.thread; i < total * width - gap; i += step)
      zero(i < before ? i : i + gap);
  }

 private:
  // Of a padded batch, the rows behind each sequence.
  template <typename F> __device__ __forceinline__ void each_padding(Zeroing by, F zero) const {
    const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const int blocks = gridDim.x * gridDim.y * gridDim.z, share = max(blocks / sequences, 1), groups = blocks / share;
    if (block / share >= groups) return;
    const int64_t width = int64_t(p.heads) * dim;
    for (int batch = block / share; batch < sequences; batch += groups) {
      const int tokens = padded_length(p, batch);
      const int64_t from = (int64_t(batch) * p.pitch + tokens) * width, count = (p.pitch - tokens) * width;
      for (int64_t i = block % share * by.threads + by.thread; i < count; i += share * by.threads) zero(from + i);
    }
  }
};

// Elements from the first page to a token of a sequence in `row`, or -1 where the pool has no such page.
__device__ __forceinline__ int64_t in_pages(const KeyPages& pages, const uint32_t* row, const int64_t (&strides)[4],
                                            uint32_t token) {
  const uint32_t place = token / pages.page, page = row[place];
  return page < pages.pages ? page * strides[0] + (token - place * pages.page) * strides[2] : -1;
}

// The place of a scale of codes.
__device__ __forceinline__ uint64_t scale_at(const uint64_t (&strides)[2], uint64_t page, uint32_t kv_head, uint32_t slot) {
  return page * strides[0] + kv_head * strides[1] + slot;
}

// The same of a token of a sequence in `row`, whose page is there.
__device__ __forceinline__ uint64_t scale_in_pages(const KeyPages& pages, const uint32_t* row,
                                                   const uint64_t (&strides)[2], uint32_t kv_head, uint32_t token) {
  return scale_at(strides, row[token / pages.page], kv_head, token % pages.page);
}

// The keys that a query sees: from..to.
struct Range {
  int from, to;
};

__device__ __forceinline__ Range visible(const AttentionParams& p, const Sequence& of, int query) {
  const int position = of.keys - of.queries + query;
  Range r = {0, of.keys};
  // Counted from the last query, which may see all keys, so that nothing overflows.
  if (p.right >= 0) r.to -= max(of.queries - 1 - query - p.right, 0);
  if (p.window) r.from = max(r.from, position - p.window + 1);
  return r;
}

// softcap * tanh(s / softcap); off by up to a few millionths of the cap.
__device__ __forceinline__ float capped(float s, float cap, float twice_inverse) {
  const float e = exp2_approx(s * twice_inverse);
  return cap - __fdividef(2.f * cap, 1.f + e);
}

// The query and the head that a row stands for.
struct Place {
  int query, head;
};

__device__ __forceinline__ Place place(const AttentionParams& p, int kv_head, int row) {
  uint32_t query = row;
  if (p.group_magic) {
    query = __umulhi(row, p.group_magic);
    if (query * p.group > uint32_t(row)) --query;  // the rounding of the factor may carry
  }
  return {int(query), int(kv_head * p.group + row - query * p.group)};
}

// What is taken off a score, in units of log2, for each position between its query and its key.
struct Slope {
  float each;
  int position;
};

__device__ __forceinline__ Slope slope(const AttentionParams& p, const Sequence& of, Place at) {
  return {p.alibi[at.head] * LOG2E, of.keys - of.queries + at.query};
}

__device__ __forceinline__ const float* mask_row(const AttentionParams& p, int batch, Place at) {
  if (!p.mask) return nullptr;
  return p.mask + batch * p.mask_strides[0] + at.head * p.mask_strides[1] +
         at.query * p.mask_strides[2];
}

}  // namespace fused
