//! The fused operations as functions on tensors.
//!
//! Each takes tensors on the CPU or on a CUDA device, in f32, f16 or bf16, with any strides, and gives
//! new tensors; what writes in place says so. Sums are in f32. There is no backward pass. A wrong shape
//! or dtype is an error that names the argument. The module of an op has its formula, and a plain float64
//! `reference()` to compare with.
//!
//! | op | replaces |
//! |---|---|
//! | [`residual_add()`] | `x + y`, `x + y + z` |
//! | [`rms_norm()`], [`rms_norm_residual`], [`layer_norm()`], [`layer_norm_residual`] | `candle_nn::ops::rms_norm`, `layer_norm`, with the addition before it |
//! | [`linear()`] | a `Linear` with the activation or residual after it |
//! | [`rms_norm_linear()`], [`layer_norm_linear()`] | a norm and the matrices that share its output |
//! | [`quant_linear()`] | `QMatMul`, with the norm before and the activation after it |
//! | [`rope()`], [`rope_tokens`], [`rope_append`] | rotary embedding, also with a position for each token, and the append to a cache |
//! | [`flash_attention()`], [`flash_decoding()`] | `softmax(q kᵀ) v` |
//! | [`flash_attention_varlen()`], [`flash_attention_padded`] | the same of sequences of different lengths, without padding and with |
//! | [`paged_attention()`] | the newest tokens of many sequences over keys and values in pages |
//! | [`paged_prefill()`] | the same of ragged batches: prompts, chunks of them and single tokens |
//! | [`paged_append()`], [`copy_pages`] | new keys and values into those pages, and copies of pages |
//! | [`sample()`], [`sample_with`] | the choice of a token from logits, also under a mask and with log-probabilities |
//! | [`logprobs()`] | `log_softmax` at a token, and the likeliest tokens with theirs |

#[cfg(feature = "cuda")]
pub(crate) mod embedding;
#[cfg(all(test, feature = "cuda"))]
mod kernel_tests;
pub(crate) mod pages;
pub(crate) mod view;

pub mod flash_attention;
pub mod flash_attention_varlen;
pub mod flash_decoding;
pub mod layer_norm;
pub mod layer_norm_linear;
pub mod linear;
pub mod logprobs;
pub mod paged_append;
pub mod paged_attention;
pub mod paged_prefill;
pub mod quant_linear;
pub mod residual_add;
pub mod rms_norm;
pub mod rms_norm_linear;
pub mod rope;
pub mod sample;

#[doc(inline)]
pub use flash_attention::{AttentionParams, RaggedBatch, flash_attention};
#[doc(inline)]
pub use flash_attention_varlen::{flash_attention_padded, flash_attention_varlen};
#[doc(inline)]
pub use flash_decoding::{FlashDecoding, flash_decoding};
#[doc(inline)]
pub use layer_norm::{layer_norm, layer_norm_residual};
#[doc(inline)]
pub use layer_norm_linear::layer_norm_linear;
#[doc(inline)]
pub use linear::{Activation, ActivationBits, Epilogue, Prologue, Weight, linear};
#[doc(inline)]
pub use logprobs::{Logprobs, logprobs};
#[doc(inline)]
pub use paged_append::{PagedAppend, TokenMap, copy_pages, paged_append};
#[doc(inline)]
pub use paged_attention::{PagedAttention, paged_attention};
pub use paged_prefill::{RaggedQueries, paged_prefill};
pub use pages::{PageLayout, PagePool, PageScales, PageTable};
#[doc(inline)]
pub use quant_linear::{quant_linear, quant_linear_with};
#[doc(inline)]
pub use residual_add::residual_add;
#[doc(inline)]
pub use rms_norm::{rms_norm, rms_norm_residual};
#[doc(inline)]
pub use rms_norm_linear::rms_norm_linear;
#[doc(inline)]
pub use rope::{
    HeadNorms, RopeAppend, RopeStyle, RotaryTables, Rotation, rope, rope_append, rope_tokens,
};
#[doc(inline)]
pub use sample::{SampleOptions, Sampled, SamplingParams, sample, sample_with};
pub use view::Float;

/// The kernels of every table, each table's in the order in which they are tried.
#[cfg(feature = "cuda")]
pub(crate) fn all_kernels() -> impl Iterator<Item = crate::cuda::KernelInfo> {
    let attention = flash_attention::kernel_table().chain(flash_decoding::kernel_table());
    let attention = attention.chain(paged_attention::kernel_table());
    linear::kernel_table().chain(attention)
}
