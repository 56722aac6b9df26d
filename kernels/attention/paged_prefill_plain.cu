// Attention in f32 arithmetic of a ragged batch, keys and values in pages.
#include "attention/prefill_plain.cuh"

using namespace fused;

#define PLAIN(D, ROWS, KEYS)                                        \
  extern "C" __global__ void __launch_bounds__(THREADS)             \
      paged_prefill_plain_##D(const __grid_constant__ Params p) { \
    attend<Shape<D, ROWS / SIDE, KEYS>, Batch::PAGED>(p);                  \
  }

FUSED_ATTENTION_PLAIN(PLAIN)
