// The rows of a table of pages: which pages a sequence has, and how many tokens they hold.
#pragma once

#include "common/base.cuh"

namespace fused {

struct TableRow {
  const uint32_t* entries;
  uint32_t length;  // tokens
};

// What a table has of one sequence, as it is read: nothing waits for it yet.
struct TableEntry {
  uint32_t given, from, to;

  template <typename Table>
  __device__ static TableEntry read(const Table& table, const uint32_t* lengths, uint32_t b) {
    TableEntry entry = {__ldcg(lengths + b), 0, 0};
    if (table.indptr) entry.from = __ldcg(table.indptr + b), entry.to = __ldcg(table.indptr + b + 1);
    return entry;
  }
};

// The row of sequence b of a padded table or one in CSR form. Whatever the table says, entries are within it.
template <typename Table>
__device__ __forceinline__ TableRow table_row(const Table& table, uint32_t b, const TableEntry& entry) {
  if (!table.indptr) return {table.entries + uint64_t(b) * table.step, min(entry.given, table.width * table.page)};
  const uint32_t from = min(entry.from, table.width);
  const uint32_t count = min(max(entry.to, from), table.width) - from;
  return {table.entries + from, count == 0 ? 0 : (count - 1) * table.page + min(entry.given, table.page)};
}
// For kernels of prompts, where all warps of all blocks load the same entry at once: through L1, since L2 answers one warp
// after the other, which takes 0.5 us longer on an H200.
template <typename Table>
__device__ __forceinline__ TableRow table_row(const Table& table, const uint32_t* lengths, uint32_t b) {
  TableEntry entry = {lengths[b], 0, 0};
  if (table.indptr) entry.from = table.indptr[b], entry.to = table.indptr[b + 1];
  return table_row(table, b, entry);
}

}  // namespace fused
