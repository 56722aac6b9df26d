// GEMM for up to 16 rows of x on Hopper: INT8, INT4, ternary weights with a scale per row, FP8, NVFP4 and NF4.
#include "linear/gemm_wna16_skinny_sm90.cuh"

using namespace fused;

FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_int4_g128, StreamedInt4<1, false>)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_int4_g64, StreamedInt4<2, false>)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_int4_g32, StreamedInt4<4, false>)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_int4_g128_z, StreamedInt4<1, true>)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_int4_g64_z, StreamedInt4<2, true>)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_int4_g32_z, StreamedInt4<4, true>)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_int8, StreamedInt8)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_ternary_rows, StreamedTernary)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_fp8, StreamedFp8<FP8_ROWS>)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_fp8_block, StreamedFp8<FP8_BLOCKS>)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_nvfp4, StreamedNvfp4)
FUSED_GEMM_SKINNY(gemm_wna16_skinny_sm90_nf4, StreamedNf4)
