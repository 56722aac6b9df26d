// Attention over many queries of sequences of one length.
#include "attention/prefill_mma.cuh"

using namespace fused;

#define ATTENTION(D, SUFFIX, TYPE, SPLIT, FROM)                                        \
  extern "C" __global__ void __launch_bounds__(MAX_THREADS, !SPLIT && D < 128 ? 2 : 1) \
      flash_attention_d##D##_##SUFFIX(const __grid_constant__ Params p) {       \
    if constexpr (COMPILED_FOR >= FROM) attend<TYPE, D, SPLIT, Batch::DENSE>(p);              \
  }

// `f32` has q and y in f32 and keys and values in f16: q and the weights are taken as sums of two
// f16, which keeps the precision of f32 at twice the tensor work.
#define ATTENTIONS(D, TILE_KEYS)             \
  static_assert(Tile<D>::KEYS == TILE_KEYS); \
  ATTENTION(D, f16, __half, false, 750)      \
  ATTENTION(D, bf16, __nv_bfloat16, false, 800)

static_assert(ATTENTION_MMA_ROWS == 16);
FUSED_ATTENTION_MMA(ATTENTIONS)
ATTENTION(64, f32, __half, true, 750)
ATTENTION(80, f32, __half, true, 750)
ATTENTION(96, f32, __half, true, 750)
ATTENTION(128, f32, __half, true, 750)
