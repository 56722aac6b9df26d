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
pub mod quant;
pub mod trace;

pub use fusion::Fusion;

/// The README's examples, compiled as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
