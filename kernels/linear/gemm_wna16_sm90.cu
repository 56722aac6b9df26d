// The GEMM of gemm_wna16_sm90.cuh for INT8 and ternary weights.
// Compiled for sm_90a alone: the host launches it on no other architecture.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "linear/gemm_wna16_sm90.cuh"

using namespace fused;

FUSED_GEMM_WNA16_SM90(gemm_wna16_sm90_int8, GemmInt<Int8Weights>)
FUSED_GEMM_WNA16_SM90(gemm_wna16_sm90_ternary_rows, GemmTernary<ROW_SCALES>)
FUSED_GEMM_WNA16_SM90(gemm_wna16_sm90_ternary, GemmTernary<SOME_GROUPS>)

#endif
