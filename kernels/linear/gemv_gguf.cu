// The linear family for 1 to 4 rows of x and weights in GGUF blocks, of one format in a launch.
#include "linear/gemv_gguf.cuh"

using namespace fused;

FUSED_FEW_ROWS(quant_linear_q4_0, 2, BlockRows<Q4_0, 2>)
FUSED_FEW_ROWS(quant_linear_q4_1, 2, BlockRows<Q4_1, 2>)
FUSED_FEW_ROWS(quant_linear_q5_0, 2, BlockRows<Q5_0, 2>)
FUSED_FEW_ROWS(quant_linear_q5_1, 2, BlockRows<Q5_1, 2>)
FUSED_FEW_ROWS(quant_linear_q8_0, 2, BlockRows<Q8_0, 1>)
FUSED_FEW_ROWS(quant_linear_q4_k, 2, BlockRows<Q4_K, 2>)
FUSED_FEW_ROWS(quant_linear_q5_k, 2, BlockRows<Q5_K, 2>)
FUSED_FEW_ROWS(quant_linear_q6_k, 2, BlockRows<Q6_K, 1>)
