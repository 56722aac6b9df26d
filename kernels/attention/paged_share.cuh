// What each warp of attention over pages works on, worked out by its block from the sequences' lengths (Stream-K: equal
// parts of all the work, wherever sequences begin and end).
//
// Work is counted in units of a tile's keys of one part (rows of queries) of one key/value head of one sequence, and one
// more unit in front of each head, without keys, for the time that a warp takes to begin with another head. Units are
// in order of sequence, head, part, key. Where splits have a fixed size (paged_fixed_split.cuh), a unit has PAGED_UNIT
// keys, the unit without keys is in front of each split, and a warp has the splits that begin in its share.
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
  __device__ Sequence(const PagedAttentionParams& p, uint32_t b, const TableEntry& entry) {
    const TableRow row = table_row(p.pages, b, entry);
    entries = row.entries, length = row.length;
    const uint32_t seen = p.window + p.queries - 1;
    first = p.window && length > seen ? length - seen : 0;
  }
  __device__ Sequence(const PagedAttentionParams& p, uint32_t b)
      : Sequence(p, b, TableEntry::read(p.pages, p.lengths, b)) {}

  template <class Core> __device__ uint32_t units() const {
    if constexpr (Core::FIXED) return length ? unit_of(length - 1) + 2 - unit_of(first) : 0;
    else return 1 + (length - first + Core::KEYS - 1) / Core::KEYS;
  }

  // Of a fixed size, from the one with the first key that is seen.
  __device__ uint32_t splits() const { return (length + PAGED_SPLIT - 1) / PAGED_SPLIT - first / PAGED_SPLIT; }
  // The unit in front of the one that has a key, counted from the sequence's first token; of the first key that is seen,
  // where the first split begins.
  __device__ static uint32_t unit_of(uint32_t key) {
    return key / PAGED_SPLIT * PAGED_SPLIT_UNITS + key % PAGED_SPLIT / PAGED_UNIT;
  }
  // Units of a head in front of a split. The first split has none for keys that are not seen.
  __device__ uint32_t units_before(uint32_t split) const {
    return split ? split * PAGED_SPLIT_UNITS - first % PAGED_SPLIT / PAGED_UNIT : 0;
  }
  // The first split that begins with unit `unit` of a head or behind it, if there are so many.
  __device__ uint32_t split_from(uint32_t unit) const {
    return unit ? (unit + first % PAGED_SPLIT / PAGED_UNIT + PAGED_SPLIT_UNITS - 1) / PAGED_SPLIT_UNITS : 0;
  }
};

// The sum over the lanes up to this one.
__device__ __forceinline__ uint32_t warp_scan(uint32_t v) {
#pragma unroll
  for (int offset = 1; offset < WARP; offset *= 2) {
    const uint32_t left = __shfl_up_sync(FULL, v, offset);
    if (threadIdx.x % WARP >= offset) v += left;
  }
  return v;
}

// The units begin .. end of a block: of `total` each of `blocks` has `each`, and the first `more` of them one more;
// there are so few blocks that each has `least`. The host has seen to it that 32 bits count all units.
struct Share {
  uint32_t blocks, each, more;
  uint32_t begin, end;

  __device__ Share(uint32_t total, uint32_t least) {
    blocks = min(gridDim.x, max(total / least, 1u));
    each = total / blocks;
    more = total - each * blocks;
    begin = begin_of(blockIdx.x);
    end = begin_of(blockIdx.x + 1);
  }
  // The block that has a unit.
  __device__ uint32_t owner(uint32_t unit) const {
    const uint32_t larger = more * (each + 1);
    return unit < larger ? unit / (each + 1) : more + (unit - larger) / each;
  }
  __device__ uint32_t begin_of(uint32_t block) const { return block * each + min(block, more); }
  __device__ uint32_t begin_of(uint32_t warp, uint32_t warps) const { return begin + warp * (end - begin) / warps; }
  // Whether a block has units of others in front of a head whose keys begin at unit `first`.
  __device__ bool is_behind(uint32_t block, uint32_t first) const { return begin_of(block) + 1 < first; }
};

// Where a warp's share begins: its sequence, and the units of the sequences before that.
struct Start {
  uint32_t b, before;
  Sequence sequence;
};

// What a thread has of the sequences when a block works out its share: the first of its own, and the units of those up
// to its last, counted from its warp's first.
struct SharePlan {
  Sequence sequence;
  uint32_t upto;
};

// All threads of the block; `heads`: key/value heads times parts; `plan`: [threads] of shared memory.
template <class Core>
__device__ __forceinline__ Share share_of_block(const PagedAttentionParams& p, uint32_t heads, SharePlan* plan,
                                                Start& start) {
  __shared__ uint32_t sums[WARP];
  const uint32_t threads = blockDim.x, warps = threads / WARP, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const uint32_t count = p.pages.sequences, each = (count + threads - 1) / threads;
  const uint32_t from = min(threadIdx.x * each, count), to = min(from + each, count);
  const Sequence first(p, min(from, count - 1));
  uint32_t upto = from < to ? first.units<Core>() : 0;
#pragma unroll 1
  for (uint32_t b = from + 1; b < to; ++b) upto += Sequence(p, b).units<Core>();
  upto = warp_scan(upto);
  if (lane == WARP - 1) sums[warp] = upto;
  plan[threadIdx.x] = {first, upto};
  __syncthreads();
  const uint32_t in_warps = warp_scan(lane < warps ? sums[lane] : 0);
  const uint32_t total = __shfl_sync(FULL, in_warps, WARP - 1) * heads;
  // A split of a fixed size is so much work that it may have a block of its own; other blocks of small problems have none,
  // since each split begins in one share.
  const Share share(total, Core::FIXED ? 1 : warps);
  const uint32_t unit = share.begin_of(warp, warps) / heads;
  // The thread whose sequences have the unit. Where ranges of a table overlap until 32 bits do not count the units,
  // there may be none, and the search ends at the last.
  const int part = min(__popc(__ballot_sync(FULL, in_warps <= unit)), int(warps) - 1);
  uint32_t before = part ? __shfl_sync(FULL, in_warps, max(part - 1, 0)) : 0;
  const int place = min(__popc(__ballot_sync(FULL, before + plan[part * WARP + lane].upto <= unit)), WARP - 1);
  const SharePlan* found = plan + part * WARP + place;
  if (place) before += found[-1].upto;
  uint32_t b = min((part * WARP + place) * each, count - 1);
  Sequence sequence = found->sequence;
#pragma unroll 1
  for (uint32_t units; b + 1 < count && before + (units = sequence.units<Core>()) <= unit; sequence = Sequence(p, ++b))
    before += units;
  start = {b, before * heads, sequence};
  // Other things lie there from now on.
  __syncthreads();
  return share;
}

// Keys of one part of one head of one sequence, as many as a warp has of them in a row.
struct Stretch {
  const uint32_t* entries;
  uint32_t length;        // of the sequence
  uint32_t b, kv, part;
  uint32_t from, to;      // keys
  uint32_t first, last;   // units of the part with keys; of a head without keys the one in front; or splits of a fixed size
  uint32_t begin, end;    // those of the stretch

  __device__ bool whole() const { return begin == first && end == last + 1; }
  __device__ uint32_t counter(const PagedAttentionParams& p) const { return (b * p.kv_heads + kv) * p.parts + part; }
};

// Where a warp is in its share.
struct Progress {
  uint32_t unit;      // that comes next
  uint32_t end;
  uint32_t before;    // units of the sequences before this one
  uint32_t b;
  Sequence sequence;
  TableEntry ahead;   // of the one behind it, so that nobody has to wait for its length

  __device__ Progress(const PagedAttentionParams& p, uint32_t begin, uint32_t end, const Start& start)
      : unit(begin), end(end), before(start.before), b(start.b), sequence(start.sequence),
        ahead(TableEntry::read(p.pages, p.lengths, behind(p))) {}

  __device__ uint32_t behind(const PagedAttentionParams& p) const { return min(b + 1, p.pages.sequences - 1); }

  __device__ void next_sequence(const PagedAttentionParams& p) {
    before = unit;
    b = behind(p);
    sequence = Sequence(p, b, ahead);
    ahead = TableEntry::read(p.pages, p.lengths, behind(p));
  }
};

// A warp's way through its share.
template <class Core> struct Walk : Progress {
  using Progress::Progress;

  // The next stretch, if there is one.
  __device__ bool next(const PagedAttentionParams& p, Stretch& s) {
    const uint32_t heads = p.kv_heads * p.parts;
    while (unit < end) {
      uint32_t units = sequence.units<Core>();
      if (unit == before + units * heads) {
        next_sequence(p);
        units = sequence.units<Core>();
      }
      const uint32_t in_sequence = unit - before, head = min(in_sequence / units, heads - 1);
      const uint32_t from = in_sequence % units, to = min(units, from + end - unit), keyless = min(units - 1, 1u);
      s.first = unit - from + keyless, s.last = unit - from + units - 1;
      s.begin = max(unit, s.first), s.end = unit - from + to;
      unit = s.end;
      // The end of a share may leave no more than the unit in front of the keys.
      if (s.begin >= s.end) continue;
      s.entries = sequence.entries, s.length = sequence.length;
      s.b = b, s.kv = head / p.parts, s.part = head % p.parts;
      s.from = sequence.first + (s.begin - s.first) * Core::KEYS;
      s.to = min(sequence.length, sequence.first + (s.end - s.first) * Core::KEYS);
      return true;
    }
    return false;
  }
};

}  // namespace fused
