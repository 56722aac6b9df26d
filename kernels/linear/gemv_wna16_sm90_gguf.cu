// GEMV for one row of x on Hopper: GGUF blocks.
#include "linear/gemv_wna16_sm90.cuh"
#include "linear/gemv_wna16_sm90_nibbles.cuh"

using namespace fused;

FUSED_GEMV_SM90(gemv_wna16_sm90_gguf_q4_0, 18432, NibbleProducts<GgufNibbles<Q4_0>>)
FUSED_GEMV_SM90(gemv_wna16_sm90_gguf_q4_1, 20480, NibbleProducts<GgufNibbles<Q4_1>>)
FUSED_GEMV_SM90(gemv_wna16_sm90_gguf_q5_0, 22528, PartProducts<StreamedGguf<Q5_0>>)
FUSED_GEMV_SM90(gemv_wna16_sm90_gguf_q5_1, 24576, PartProducts<StreamedGguf<Q5_1>>)
FUSED_GEMV_SM90(gemv_wna16_sm90_gguf_q8_0, 34816, PartProducts<StreamedGguf<Q8_0>>)
FUSED_GEMV_SM90(gemv_wna16_sm90_gguf_q2_k, 10752, PartProducts<StreamedGguf<Q2_K>>)
FUSED_GEMV_SM90(gemv_wna16_sm90_gguf_q3_k, 14592, PartProducts<StreamedGguf<Q3_K>>)
FUSED_GEMV_SM90(gemv_wna16_sm90_gguf_q4_k, 18944, NibbleProducts<GgufNibbles<Q4_K>>)
FUSED_GEMV_SM90(gemv_wna16_sm90_gguf_q5_k, 23040, PartProducts<StreamedGguf<Q5_K>>)
FUSED_GEMV_SM90(gemv_wna16_sm90_gguf_q6_k, 26880, PartProducts<StreamedGguf<Q6_K>>)
