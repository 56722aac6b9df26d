// Attention over keys and values in pages (paged.cuh): a kernel for each head dimension and number of rows.
#include "attention/paged.cuh"

using namespace fused;

// From an architecture on.
#define PAGED(NAME, FROM, ...)                                                              \
  extern "C" __global__ void __launch_bounds__(__VA_ARGS__::WARPS* WARP, 1)                 \
      paged_attention_##NAME(const __grid_constant__ fused::PagedAttentionParams p) {       \
    if constexpr (COMPILED_FOR >= FROM) paged_attention<__VA_ARGS__>(p);                    \
  }

#define PAGED_DIM(D, KEYS, ROWS)                                                                 \
  PAGED(d##D##_r##ROWS##_f16, 750, PagedTensorCore<__half, D, PAGED_WARPS, KEYS / 16, ROWS>)     \
  PAGED(d##D##_r##ROWS##_bf16, 800, PagedTensorCore<__nv_bfloat16, D, PAGED_WARPS, KEYS / 16, ROWS>)
#define PAGED_ANY(D, ROWS_)                                        \
  static_assert(PagedLaneCore<D / 8, PAGED_WARPS>::ROWS == ROWS_); \
  PAGED(any##D, 750, PagedLaneCore<D / 8, PAGED_WARPS>)

FUSED_PAGED_MMA(PAGED_DIM)
FUSED_PAGED_PLAIN(PAGED_ANY)
