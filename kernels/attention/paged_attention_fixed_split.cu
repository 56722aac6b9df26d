// Attention over pages with splits of a fixed size (paged_fixed_split.cuh): a kernel for each head dimension with 8 rows,
// others for everything else, and the one that merges what all of these leave.
#include "attention/paged.cuh"

using namespace fused;

// From an architecture on.
#define PAGED(NAME, FROM, ...)                                                                    \
  extern "C" __global__ void __launch_bounds__(__VA_ARGS__::WARPS* WARP, 1)                       \
      paged_attention_fixed_split_##NAME(const __grid_constant__ fused::PagedAttentionParams p) { \
    if constexpr (COMPILED_FOR >= FROM) paged_attention_splits<__VA_ARGS__>(p);                   \
  }

// Weights that are rounded to the pools' dtype, as with 16 rows, are for those who count the rows.
#define PAGED_16(D, KEYS)
#define PAGED_8(D, KEYS)                                                              \
  PAGED(d##D##_f16, 750, PagedTensorCore<__half, D, PAGED_WARPS, KEYS / 16, 8, true>) \
  PAGED(d##D##_bf16, 800, PagedTensorCore<__nv_bfloat16, D, PAGED_WARPS, KEYS / 16, 8, true>)
#define PAGED_DIM(D, KEYS, ROWS) PAGED_##ROWS(D, KEYS)
#define PAGED_ANY(D, ROWS) PAGED(any##D, 750, PagedLaneCore<D / 8, PAGED_WARPS, false, true>)

FUSED_PAGED_MMA(PAGED_DIM)
FUSED_PAGED_PLAIN(PAGED_ANY)

extern "C" __global__ void __launch_bounds__(PAGED_WARPS* WARP, PAGED_MERGE_BLOCKS)
    paged_attention_fixed_split_merge(const __grid_constant__ fused::PagedAttentionParams p) {
  merge_splits(p);
}
