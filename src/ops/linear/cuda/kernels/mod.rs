//! A file for each family of kernels: each plans its own launches for a case, or says why it does not take it, and
//! knows no other family's.

mod cublaslt;
#[cfg(target_os = "linux")]
pub(crate) mod cublaslt_early;
#[cfg(test)]
mod dense_product_tests;
pub(super) mod gemm_dense;
pub(super) mod gemm_dense_normed_sm90;
#[cfg(test)]
mod gemm_dense_normed_sm90_tests;
pub(super) mod gemm_dense_sm90;
#[cfg(test)]
mod gemm_dense_sm90_tests;
pub(super) mod gemm_dequantized;
pub(super) mod gemm_w8a16;
pub(super) mod gemm_w8a8;
pub(super) mod gemm_w8a8_cluster;
mod gemm_wna16;
pub(super) mod gemm_wna16_latency;
pub(super) mod gemm_wna16_m16;
pub(super) mod gemm_wna16_mma;
pub(super) mod gemm_wna16_skinny;
pub(super) mod gemm_wna16_sm90;
mod gemm_wna16_tiling;
pub(super) mod gemv;
pub(super) mod gemv_dense;
pub(super) mod gemv_dense_latency;
#[cfg(test)]
mod gemv_dense_latency_tests;
pub(crate) mod gemv_dense_pipelined;
#[cfg(test)]
mod gemv_dense_tests;
pub(super) mod gemv_gguf;
pub(super) mod gemv_ternary_latency;
pub(super) mod gemv_wna16;
pub(super) mod gemv_wna16_sm90;
#[cfg(test)]
mod static_shared_tests;
mod streamed;
mod tensor_map;
mod w8a8_params;

use crate::cuda::groups_log2;

/// Output channels from which on a product is taken for a model's head.
const HEAD: usize = 40_000;

/// The place of INT4 among a source's six kernels for it: groups of 128, 64 and 32, and the same with zero points.
fn int4_form(group: usize, zero_point: bool) -> usize {
    groups_log2(group) + if zero_point { 3 } else { 0 }
}
