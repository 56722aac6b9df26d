// Codes in words of 32 bits, as the checkpoints of other programs have them, to a byte each: what pack.cu takes.
#include "abi/formats.cuh"
#include "common/base.cuh"

using namespace fused;

// A thread has four codes of a row.
extern "C" __global__ void __launch_bounds__(FORMAT_THREADS)
    unpack_words(const __grid_constant__ UnpackWordsParams p) {
  pdl_wait();
  const uint64_t i = blockIdx.x * uint64_t(FORMAT_THREADS) + threadIdx.x;
  const uint32_t pieces = p.k / 4, col = 4 * (i % pieces);
  const uint64_t at = i / pieces, row = p.first + at;
  if (at >= p.rows) return;
  const uint32_t row_part = row & ((1u << p.row_log) - 1), mask = (1u << p.bits) - 1;
  const uint32_t* of_row = p.words + (row >> p.row_log) * p.row_step;
  uint32_t codes = 0;
#pragma unroll
  for (uint32_t c = 0; c < 4; ++c) {
    const uint32_t k = p.order ? p.order[col + c] : col + c;
    const uint32_t within = row_part + (k & ((1u << p.col_log) - 1));
    const uint32_t word = of_row[(k >> p.col_log) * p.col_step], field = p.fields >> (4 * within) & 15;
    codes |= ((word >> (field * p.bits) & mask) ^ p.flip) << (8 * c);
  }
  *reinterpret_cast<uint32_t*>(p.codes + at * p.k + col) = codes;
}
