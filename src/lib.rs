//! Fused operations that make language models on candle fast without leaving candle.
//!
//! A decoder layer at batch 1 is a chain of a few dependent steps; whatever touches only one row
//! between two steps belongs inside a step. So the crate is built on three axes that combine:
//! a prologue (a norm), a weight format (f32, f16, bf16, GGUF blocks, INT8, INT4, ternary) and an
//! epilogue (bias, activation, gating, residual).
//!
//! * [`models`]: Llama, Qwen2, Qwen3 and GPT-NeoX with candle-transformers' names and signatures, so
//!   that changing the import is the whole change.
//! * [`generation`]: the token loop; on CUDA the whole step inside one graph.
//! * [`nn`]: the layers that models are made of, with candle_nn's constructors for models of one's
//!   own; they choose between fused and plain.
//! * [`ops`]: the operations as functions on tensors, each a candle custom op.
//! * [`cpu`]: the cores, with SIMD chosen at run time, and the thread pool.
//! * [`quant`]: the GGUF block formats, and INT8, INT4 and ternary: quantizing weights, models while
//!   they load, and files that are used in place.
//! * [`trace`]: which op ran, how, how often, and why it was no faster form.
//!
//! [`Fusion`] switches each fusion on or off.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod fusion;
pub mod generation;
pub mod models;
pub mod nn;
pub mod ops;
pub mod trace;

pub use fusion::Fusion;

pub mod quant {
    //! Quantized weights: the block formats of GGUF files, and the schemes INT8, INT4 and ternary.
    //!
    //! [`BlockFormat`] describes a format of GGUF, [`dequantize`] is the plain way from a file's bytes to
    //! floats; [`quantize`] makes [`Codes`] of weights by a [`Scheme`], and [`Codes::dequantize`] floats
    //! of them. These plain ways are what every kernel is held against; the products themselves are in
    //! [`ops`](crate::ops).
    //!
    //! A model is quantized while it loads by a [`Recipe`] (`Llama::load_quantized`,
    //! `CausalLm::new_quantized`), or once for all by
    //! [`save_quantized`](crate::models::save_quantized) into a [`QuantizedFile`], which has the byte
    //! layout; single layers of other models by [`quantize_linear`] and [`while_loading`].

    mod block;
    mod codes;
    mod format;
    mod scheme;
    mod unpack;

    pub use block::{BlockFormat, Scaling, supports};
    pub use codes::Codes;
    pub(crate) use codes::{MIDDLE, ZERO_STEP};
    pub use format::Format;
    pub use scheme::{Scheme, TernaryScale};
    pub(crate) use unpack::SubBlock;
    pub use unpack::dequantize;

    // What works with formats lives in rooms above them; users find it here.
    pub use crate::cpu::quantize::quantize;
    pub use crate::models::quantized::QuantizedFile;
    pub use crate::nn::quantize::{quantize_linear, while_loading};
    pub use crate::nn::recipe::{Progress, Quantization, Recipe};
    pub use crate::nn::rounded::Rounded;
}

/// The README's examples, compiled as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
