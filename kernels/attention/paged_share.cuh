// What each warp of attention over pages works on, worked out by its block from the sequences' lengths (Stream-K: equal
// parts of all the work, wherever sequences begin and end).
//
// Work is counted in units of UNIT keys of one part (rows of queries) of one key/value head of one sequence; a sequence
// without keys counts as one unit, so that somebody writes its zeros. Units are in order of sequence, head, part, key.
#pragma once

#include "abi/paged.cuh"
#include "attention/page_table.cuh"
#include "common/base.cuh"

namespace fused {

// One sequence's pages, and the keys first .. length that one of its queries sees.
struct Sequence {
  const uint32_t* entries;
  uint32_t length, first;

  Sequence() = default;
  __device__ Sequence(const PagedAttentionParams& p, uint32_t b) {
    const TableRow row = table_row(p.pages, p.lengths, b);
    entries = row.entries, length = row.length;
    const uint32_t seen = p.window + p.queries - 1;
    first = p.window && length > seen ? length - seen : 0;
  }

  template <int UNIT> __device__ uint32_t units() const { return max(1u, (length - first + UNIT - 1) / UNIT); }
};

// The units begin .. end of a block: of `total` each of `blocks` has `each`, and the first `more` of them one more. The
// host has seen to it that 32 bits count all units.
struct Share {
  uint32_t blocks, each, more;
  uint32_t begin, end;

  // The block that has a unit.
  __device__ uint32_t owner(uint32_t unit) const {
    const uint32_t larger = more * (each + 1);
    return unit < larger ? unit / (each + 1) : more + (unit - larger) / each;
  }
  __device__ uint32_t begin_of(uint32_t block) const { return block * each + min(block, more); }
  __device__ uint32_t begin_of(uint32_t warp, uint32_t warps) const { return begin + warp * (end - begin) / warps; }
};

// Where a warp's share begins: its sequence, and the units of the sequences before that.
struct Start {
  uint32_t b, before;
  Sequence sequence;
};

// All threads of the block, WARPS warps of them; `heads`: key/value heads times parts.
template <int UNIT, int WARPS>
__device__ __forceinline__ Share share_of_block(const PagedAttentionParams& p, uint32_t heads, Start& start) {
  constexpr int THREADS = WARPS * WARP;
  __shared__ uint32_t sums[WARPS];
  __shared__ Start starts[WARPS];
  const uint32_t count = p.pages.sequences, each = (count + THREADS - 1) / THREADS;
  const uint32_t from = min(threadIdx.x * each, count), to = min(from + each, count);
  Sequence sequence(p, min(from, count - 1));
  uint32_t own = from < to ? sequence.units<UNIT>() : 0;
#pragma unroll 1
  for (uint32_t b = from + 1; b < to; ++b) own += Sequence(p, b).units<UNIT>();
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  uint32_t upto = own;
#pragma unroll
  for (int offset = 1; offset < WARP; offset *= 2) {
    const uint32_t left = __shfl_up_sync(FULL, upto, offset);
    if (lane >= offset) upto += left;
  }
  if (lane == WARP - 1) sums[warp] = upto;
  // Where ranges of a table overlap until 32 bits do not count the units, a share may begin nowhere.
  if (threadIdx.x == 0)
    for (int w = 0; w < WARPS; ++w) starts[w] = {0, 0, sequence};
  __syncthreads();
  uint32_t all = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    if (w < warp) upto += sums[w];
    all += sums[w];
  }
  Share share;
  const uint32_t total = all * heads;
  share.blocks = min(gridDim.x, total);
  share.each = total / share.blocks;
  share.more = total - share.each * share.blocks;
  share.begin = share.begin_of(blockIdx.x);
  share.end = share.begin_of(blockIdx.x + 1);
  uint32_t b = from, before = upto - own;
#pragma unroll 1
  for (int w = 0; w < WARPS; ++w) {
    const uint32_t unit = share.begin_of(w, WARPS) / heads;
    if (unit < before || unit >= upto) continue;
#pragma unroll 1
    for (uint32_t units; before + (units = sequence.units<UNIT>()) <= unit; sequence = Sequence(p, ++b)) before += units;
    starts[w] = {b, before * heads, sequence};
  }
  __syncthreads();
  start = starts[warp];
  return share;
}

// Keys of one part of one head of one sequence, as many as a warp has of them in a row.
struct Stretch {
  const uint32_t* entries;
  uint32_t length;        // of the sequence
  uint32_t b, kv, part;
  uint32_t from, to;      // keys
  uint32_t first, last;   // units of the part
  uint32_t begin, end;    // those of the stretch

  __device__ bool whole() const { return begin == first && end == last + 1; }
  __device__ uint32_t counter(const PagedAttentionParams& p) const { return (b * p.kv_heads + kv) * p.parts + part; }
};

// A warp's way through its share.
template <int UNIT> struct Walk {
  uint32_t unit;      // that comes next
  uint32_t end;
  uint32_t before;    // units of the sequences before this one
  uint32_t b;
  Sequence sequence;
  Sequence ahead;     // the one behind it, so that nobody has to wait for its length

  __device__ Walk(const PagedAttentionParams& p, uint32_t begin, uint32_t end, const Start& start)
      : unit(begin), end(end), before(start.before), b(start.b), sequence(start.sequence),
        ahead(p, min(b + 1, p.pages.sequences - 1)) {}

  __device__ bool more() const { return unit < end; }

  __device__ Stretch next(const PagedAttentionParams& p) {
    const uint32_t heads = p.kv_heads * p.parts;
    uint32_t units = sequence.units<UNIT>();
    if (unit == before + units * heads) {
      before = unit;
      sequence = ahead;
      b = min(b + 1, p.pages.sequences - 1);
      ahead = Sequence(p, min(b + 1, p.pages.sequences - 1));
      units = sequence.units<UNIT>();
    }
    const uint32_t in_sequence = unit - before, head = min(in_sequence / units, heads - 1);
    const uint32_t from = in_sequence % units;
    const uint32_t count = min(units - from, end - unit);
    Stretch s;
    s.entries = sequence.entries, s.length = sequence.length;
    s.b = b, s.kv = head / p.parts, s.part = head % p.parts;
    s.from = sequence.first + from * UNIT;
    s.to = min(sequence.length, s.from + count * UNIT);
    s.first = unit - from, s.last = s.first + units - 1;
    s.begin = unit, s.end = unit + count;
    unit += count;
    return s;
  }
};

}  // namespace fused
