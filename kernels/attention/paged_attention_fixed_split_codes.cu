// Attention over codes in pages with splits of a fixed size (paged_fixed_split.cuh): a kernel for each head dimension with
// 8 rows and each format, and others for everything else.
#include "attention/paged.cuh"

using namespace fused;

#define PAGED(NAME, ...)                                                                                \
  extern "C" __global__ void __launch_bounds__(__VA_ARGS__::WARPS* WARP, 1)                             \
      paged_attention_fixed_split_codes_##NAME(const __grid_constant__ fused::PagedAttentionParams p) { \
    paged_attention_splits<__VA_ARGS__>(p);                                                             \
  }

#define PAGED_16(D, KEYS)
#define PAGED_8(D, KEYS)                                                          \
  PAGED(d##D##_fp8, PagedTensorCore<CodeFp8, D, PAGED_WARPS, KEYS / 16, 8, true>) \
  PAGED(d##D##_int8, PagedTensorCore<CodeInt8, D, PAGED_WARPS, KEYS / 16, 8, true>)
#define PAGED_DIM(D, KEYS, ROWS) PAGED_##ROWS(D, KEYS)
#define PAGED_ANY(D, ROWS) PAGED(any##D, PagedLaneCore<D / 8, PAGED_WARPS, true, true>)

FUSED_PAGED_CODES(PAGED_DIM)
FUSED_PAGED_PLAIN(PAGED_ANY)
