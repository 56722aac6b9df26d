// Attention over codes in pages (paged.cuh): a kernel for each head dimension, number of rows and
// format, and others for everything else.
#include "attention/paged.cuh"

using namespace fused;

#define PAGED(NAME, ...)                                                                    \
  extern "C" __global__ void __launch_bounds__(__VA_ARGS__::WARPS* WARP, 1)                 \
      paged_attention_codes_##NAME(const __grid_constant__ fused::PagedAttentionParams p) { \
    paged_attention<__VA_ARGS__>(p);                                                        \
  }

#define PAGED_DIM(D, KEYS, ROWS)                                                               \
  PAGED(d##D##_r##ROWS##_fp8, PagedTensorCore<CodeFp8, D, PAGED_WARPS, KEYS / 16, ROWS>)       \
  PAGED(d##D##_r##ROWS##_int8, PagedTensorCore<CodeInt8, D, PAGED_WARPS, KEYS / 16, ROWS>)

#define PAGED_ANY(D, ROWS) PAGED(any##D, PagedLaneCore<D / 8, PAGED_WARPS, true>)

FUSED_PAGED_CODES(PAGED_DIM)
FUSED_PAGED_PLAIN(PAGED_ANY)
