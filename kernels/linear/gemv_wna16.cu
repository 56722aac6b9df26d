// The linear family for 1 to 4 rows of x and weights in INT8, INT4 or ternary codes, of one format in a
// launch.
#include "linear/gemv_wna16.cuh"

using namespace fused;

FUSED_FEW_ROWS(gemv_wna16_int8, 2, CodeRows<Int8Rows>)
FUSED_FEW_ROWS(gemv_wna16_int4_g128, 2, CodeRows<Int4Rows<ONE_GROUP>>)
FUSED_FEW_ROWS(gemv_wna16_int4, 2, CodeRows<Int4Rows<SOME_GROUPS>>)
FUSED_FEW_ROWS(gemv_wna16_int4_g32, 2, CodeRows<Int4Rows<FOUR_GROUPS>>)
FUSED_FEW_ROWS(gemv_wna16_ternary_rows, 2, CodeRows<TernaryRows<ROW_SCALES>>)
FUSED_FEW_ROWS(gemv_wna16_ternary_g128, 2, CodeRows<TernaryRows<ONE_GROUP>>)
FUSED_FEW_ROWS(gemv_wna16_ternary, 2, CodeRows<TernaryRows<SOME_GROUPS>>)
