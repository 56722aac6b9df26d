// The linear family for 1 to 4 rows of x and weights in INT8, INT4 or ternary codes, of one format in a
// launch; and for one row of x on Hopper.
#include "linear/gemv_wna16.cuh"
#include "linear/gemv_wna16_sm90.cuh"

using namespace fused;

FUSED_FEW_ROWS(quant_codes_int8, 2, CodeRows<Int8Rows>)
FUSED_FEW_ROWS(quant_codes_int4_g128, 2, CodeRows<Int4Rows<ONE_GROUP>>)
FUSED_FEW_ROWS(quant_codes_int4, 2, CodeRows<Int4Rows<SOME_GROUPS>>)
FUSED_FEW_ROWS(quant_codes_int4_g32, 2, CodeRows<Int4Rows<FOUR_GROUPS>>)
FUSED_FEW_ROWS(quant_codes_ternary_rows, 2, CodeRows<TernaryRows<ROW_SCALES>>)
FUSED_FEW_ROWS(quant_codes_ternary_g128, 2, CodeRows<TernaryRows<ONE_GROUP>>)
FUSED_FEW_ROWS(quant_codes_ternary, 2, CodeRows<TernaryRows<SOME_GROUPS>>)

FUSED_CODE_STREAM(quant_codes_stream_int4_g128, Int4Stream)
FUSED_CODE_STREAM(quant_codes_stream_ternary_rows, TernaryStream)
