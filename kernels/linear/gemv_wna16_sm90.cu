// GEMV for one row of x on Hopper: INT8, INT4, ternary weights with a scale per row, FP8, NVFP4 and NF4.
#include "linear/gemv_wna16_sm90.cuh"
#include "linear/gemv_wna16_sm90_nibbles.cuh"

using namespace fused;

FUSED_GEMV_SM90(gemv_wna16_sm90_int4_g128, 16896, NibbleProducts<Int4Codes<1, false>>)
FUSED_GEMV_SM90(gemv_wna16_sm90_int4_g64, 17408, NibbleProducts<Int4Codes<2, false>>)
FUSED_GEMV_SM90(gemv_wna16_sm90_int4_g32, 18432, NibbleProducts<Int4Codes<4, false>>)
FUSED_GEMV_SM90(gemv_wna16_sm90_int4_g128_z, 17152, NibbleProducts<Int4Codes<1, true>>)
FUSED_GEMV_SM90(gemv_wna16_sm90_int4_g64_z, 17920, NibbleProducts<Int4Codes<2, true>>)
FUSED_GEMV_SM90(gemv_wna16_sm90_int4_g32_z, 19456, NibbleProducts<Int4Codes<4, true>>)
FUSED_GEMV_SM90(gemv_wna16_sm90_int8, 33792, PartProducts<StreamedInt8>)
FUSED_GEMV_SM90(gemv_wna16_sm90_ternary_rows, 8192, TernaryProducts)
FUSED_GEMV_SM90(gemv_wna16_sm90_fp8, 32768, PartProducts<StreamedFp8<FP8_ROWS>>)
FUSED_GEMV_SM90(gemv_wna16_sm90_fp8_block, 32768, PartProducts<StreamedFp8<FP8_BLOCKS>>)
FUSED_GEMV_SM90(gemv_wna16_sm90_nvfp4, 18432, PartProducts<StreamedNvfp4>)
FUSED_GEMV_SM90(gemv_wna16_sm90_nf4, 18432, PartProducts<StreamedNf4>)
