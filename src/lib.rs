//! Fused operations that make language models on [candle](candle_core) fast without leaving candle.
//!
//! | You have | Call |
//! |---|---|
//! | a Llama, Qwen2, Qwen3 or GPT-NeoX model from candle-transformers | the same names in [`models`]: change the import |
//! | a GGUF file | `from_gguf` of [`models::llama::ModelWeights`] and of its relatives in `qwen2`, `qwen3` and `gpt_neox` |
//! | a model that should be smaller | [`quant::Recipe`] with `load_quantized`, or [`models::save_quantized`] |
//! | a token loop | [`generation::Generation`]: on CUDA each step is one graph |
//! | layers from candle_nn | the same names in [`nn`]; [`nn::Projection`] joins what shares an input |
//! | `candle_nn::Linear` after a norm, before an activation or a residual | [`ops::rms_norm_linear()`], [`ops::layer_norm_linear()`], [`ops::linear()`] |
//! | `candle_core::quantized::QMatMul` | [`ops::quant_linear()`] over an [`ops::Weight`] |
//! | softmax attention, with or without a cache | [`ops::flash_attention()`], [`ops::flash_decoding()`] |
//! | rotary embeddings and a cache that grows | [`ops::rope()`], [`ops::rope_append`] |
//! | logits | [`ops::sample()`] |
//! | doubt about what ran | [`trace::capture`]; [`Fusion`] switches each fusion off |
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_fused::ops::{self, Activation, Epilogue};
//!
//! let device = Device::Cpu;
//! let x = Tensor::randn(0f32, 1., (2, 64), &device)?;
//! let norm = Tensor::ones(64, DType::F32, &device)?;
//! let gate = Tensor::randn(0f32, 0.1, (96, 64), &device)?;
//! let up = Tensor::randn(0f32, 0.1, (96, 64), &device)?;
//!
//! // silu(rms_norm(x) gateᵀ) * (rms_norm(x) upᵀ) in one step.
//! let swiglu = Epilogue { activation: Activation::SwiGlu, ..Default::default() };
//! let fused = ops::rms_norm_linear(&x, &norm, 1e-5, &[&gate, &up], &swiglu)?.remove(0);
//!
//! // The same in candle's own operations.
//! let normed = candle_nn::ops::rms_norm(&x, &norm, 1e-5)?;
//! let plain = (normed.matmul(&gate.t()?)?.silu()? * normed.matmul(&up.t()?)?)?;
//! let error = (fused - plain)?.abs()?.max_all()?.to_scalar::<f32>()?;
//! assert!(error < 1e-4);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! # How it is built
//! A decoder layer at batch 1 is a chain of a few dependent steps. Whatever touches only one row
//! between two steps belongs inside a step, as its prologue or its epilogue. So an op combines a
//! prologue (a norm), a weight format (f32, f16, bf16, GGUF blocks, INT8, INT4, ternary) and an
//! epilogue (bias, activation, gating, residual). [`cpu`] has the cores, with SIMD chosen at run time,
//! and the thread pool.
//!
//! # What is absent
//! Metal, batches of padded sequences, stop strings, training (there is no backward pass).

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
