// Attention over the queries of a ragged batch, keys and values in pages of codes.
#include "attention/prefill_mma.cuh"

using namespace fused;

#define ATTENTION(D, SUFFIX, TYPE, FROM)                                              \
  extern "C" __global__ void __launch_bounds__(MAX_THREADS, D < 80 ? 2 : 1)           \
      paged_prefill_codes_d##D##_##SUFFIX(const __grid_constant__ Params p) {         \
    if constexpr (COMPILED_FOR >= FROM) attend<TYPE, D, false, Batch::PAGED, true>(p); \
  }

#define ATTENTIONS(D, TILE_KEYS)      \
  ATTENTION(D, f16, __half, 750)      \
  ATTENTION(D, bf16, __nv_bfloat16, 800)

FUSED_ATTENTION_MMA(ATTENTIONS)
