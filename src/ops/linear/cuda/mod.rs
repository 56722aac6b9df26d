//! The CUDA form. A [`Product`] is made of operands ([`problem`]): the table ([`table`]) chooses a kernel, whose host
//! file in [`kernels`] works out a [`plan`] and launches it.

mod common_rules;
mod dispatch;
mod kernels;
mod owned;
mod plan;
mod problem;
mod product;
mod rows;
mod rule;
mod table;
#[cfg(test)]
pub(crate) mod tests;

pub use dispatch::kernels as kernel_table;
#[cfg(target_os = "linux")]
pub(crate) use kernels::cublaslt_early::choose_early;
pub(crate) use kernels::gemm_dequantized::dequantize_together;
pub(crate) use kernels::gemv::Gemv;
pub(crate) use kernels::gemv_dense_pipelined;
pub(super) use owned::Owned;
pub(crate) use problem::{Case, Fetch, NormAt, NormKind, Operands, ProductAt};
pub(crate) use product::Product;
