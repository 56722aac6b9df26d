// One row of x and weights in INT4 or ternary codes, on Hopper.
#include "linear/gemv_wna16_sm90.cuh"

using namespace fused;

FUSED_CODE_STREAM(gemv_wna16_sm90_int4_g128, Int4Stream)
FUSED_CODE_STREAM(gemv_wna16_sm90_ternary_rows, TernaryStream)
