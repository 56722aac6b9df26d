// Attention in f32 arithmetic of a ragged batch.
#include "attention/prefill_plain.cuh"

using namespace fused;

#define PLAIN(D, ROWS, KEYS)                                        \
  extern "C" __global__ void __launch_bounds__(THREADS)             \
      flash_attention_varlen_plain_##D(const __grid_constant__ Params p) { \
    attend<Shape<D, ROWS / SIDE, KEYS>, Batch::RAGGED>(p);                  \
  }

FUSED_ATTENTION_PLAIN(PLAIN)
