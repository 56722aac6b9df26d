// The linear family for 1 to 4 rows of x and weights in INT8, INT4 or ternary codes, of one format in a
// launch.
#include "code_rows.cuh"

using namespace fused;

FUSED_FEW_ROWS(quant_codes_int8, 2, CodeRows<Int8Rows>)
FUSED_FEW_ROWS(quant_codes_int4_g128, 2, CodeRows<Int4Rows<1>>)
FUSED_FEW_ROWS(quant_codes_int4_g64, 2, CodeRows<Int4Rows<2>>)
FUSED_FEW_ROWS(quant_codes_int4_g32, 2, CodeRows<Int4Rows<4>>)
FUSED_FEW_ROWS(quant_codes_ternary, 2, CodeRows<TernaryRows<0>>)
FUSED_FEW_ROWS(quant_codes_ternary_g128, 2, CodeRows<TernaryRows<1>>)
FUSED_FEW_ROWS(quant_codes_ternary_g64, 2, CodeRows<TernaryRows<2>>)
FUSED_FEW_ROWS(quant_codes_ternary_g32, 2, CodeRows<TernaryRows<4>>)
