// The rows of a table of pages: which pages a sequence has, and how many tokens they hold.
#pragma once

#include "common/base.cuh"

namespace fused {

struct TableRow {
  const uint32_t* entries;
  uint32_t length;  // tokens
};

// The row of sequence b of a padded table or one in CSR form. Whatever the table says, entries are within it.
template <typename Table>
__device__ __forceinline__ TableRow table_row(const Table& table, const uint32_t* lengths, uint32_t b) {
  const uint32_t given = __ldcg(lengths + b);
  if (!table.indptr) return {table.entries + uint64_t(b) * table.step, min(given, table.width * table.page)};
  const uint32_t from = min(__ldcg(table.indptr + b), table.width);
  const uint32_t count = min(max(__ldcg(table.indptr + b + 1), from), table.width) - from;
  return {table.entries + from, count == 0 ? 0 : (count - 1) * table.page + min(given, table.page)};
}

}  // namespace fused
