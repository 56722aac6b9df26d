// Attention on Hopper over the queries of a ragged batch, keys and values in pages.
// Empty for other architectures, which never run it.
#include "attention/prefill_sm90.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

using namespace fused;

#define ATTENTION(D, KIND, SUFFIX, TYPE, ...)                                                    \
  extern "C" __global__ void __launch_bounds__(Config<D, __VA_ARGS__, Batch::PAGED>::THREADS, 1)               \
      paged_prefill_sm90_##KIND##D##_##SUFFIX(const __grid_constant__ AttentionSm90Params p) { \
    attend<TYPE, Config<D, __VA_ARGS__, Batch::PAGED>>(p);                                                     \
  }

#define ATTENTIONS_false(D, ...)            \
  ATTENTION(D, d, f16, __half, __VA_ARGS__) \
  ATTENTION(D, d, bf16, __nv_bfloat16, __VA_ARGS__)
#define ATTENTIONS_true(D, ...)                    \
  ATTENTION(D, shared_d, f16, __half, __VA_ARGS__) \
  ATTENTION(D, shared_d, bf16, __nv_bfloat16, __VA_ARGS__)
#define ATTENTIONS(D, CONSUMERS, KEYS, SHARE) ATTENTIONS_##SHARE(D, CONSUMERS, KEYS, SHARE)

FUSED_ATTENTION_SM90(ATTENTIONS)

#endif
