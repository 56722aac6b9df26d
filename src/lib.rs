//! Fused CPU and CUDA kernels for language models on [candle](candle_core): norms, GEMM with prologue and epilogue,
//! attention, quantized weights, and the decode step as one CUDA graph.
//!
//! | You have | Call |
//! |---|---|
//! | a Llama, Mistral, Qwen2, Qwen3, Phi-3, SmolLM3 or GPT-NeoX model from candle-transformers | the same names in [`models`]: change the import |
//! | a GGUF file | `from_gguf` of [`models::quantized_llama::ModelWeights`] and of its relatives in [`models`] |
//! | a checkpoint in GPTQ, AWQ, compressed-tensors or FP8 | [`models::Checkpoint`] opens it for the models' own loaders |
//! | a model that should be smaller | [`quant::Recipe`] with `load_quantized`, or [`models::save_quantized`] |
//! | a token loop | [`generation::Generation`]: on CUDA each step is one graph |
//! | many requests at once | [`serving::Engine`]: continuous batching over pages of keys and values |
//! | layers from candle_nn | the same names in [`nn`]; [`nn::Projection`] joins what shares an input |
//! | `candle_nn::Linear` after a norm, before an activation or a residual | [`ops::rms_norm_linear()`], [`ops::layer_norm_linear()`], [`ops::linear()`] |
//! | `candle_core::quantized::QMatMul` | [`ops::quant_linear()`] over an [`ops::Weight`] |
//! | softmax attention, with or without a cache | [`ops::flash_attention()`], [`ops::flash_decoding()`] |
//! | candle-flash-attn | the same names in [`flash_attn`](mod@flash_attn) and [`flash_attn_v3`], or a line below `[patch.crates-io]` |
//! | sequences of different lengths in one batch | [`ops::flash_attention_varlen()`] |
//! | many sequences whose keys and values lie in pages | [`ops::paged_attention()`], [`ops::paged_append()`] |
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
//! prologue (a norm), a weight format (f32, f16, bf16, GGUF blocks, INT8, FP8, NVFP4, NF4, INT4, ternary) and an
//! epilogue (bias, activation, gating, residual). [`cpu`] has the cores, with SIMD chosen at run time,
//! and the thread pool.
//!
//! # Features
//! - `cuda`: CUDA kernels for every op, the module `cuda` (a GPU's settings, memory and kernels), and decode steps of
//!   [`generation`] and [`serving`] as CUDA graphs. It needs nvcc to build. These pages are built without it.
//! - `nvtx`: `cuda`, and names of launches in Nsight's timelines.
//! - `mkl`, `accelerate`: candle's own, for its unfused products on the CPU.
//! - `metal`: candle's own. On a Metal device models and layers run candle's operations, and single ops are an error.
//!
//! # What is absent
//! Kernels for Metal, stop strings, training (there is no backward pass). Models take batches of prompts of one length,
//! without padding; sequences of different lengths side by side are [`generation::Generation`]'s and
//! [`serving::Engine`]'s, and attention of padded batches is [`ops::flash_attention_padded()`].

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod flash_attn;
pub mod flash_attn_v3;
mod fusion;
pub mod generation;
pub mod models;
pub mod nn;
pub mod ops;
mod pool;
pub mod serving;
pub mod trace;

pub use fusion::{Fusion, with_fallback};
pub use models::quantized_var_builder;
pub use quant::ActivationBits;

pub mod quant {
    //! Quantized weights: the block formats of GGUF files, and the schemes INT8, FP8, NVFP4, NF4, INT4 and ternary.
    //!
    //! [`BlockFormat`] describes a format of GGUF, [`dequantize`] is the plain way from a file's bytes to
    //! floats; [`quantize`] makes [`Codes`] of weights by a [`Scheme`], and [`Codes::dequantize`] floats
    //! of them. These plain ways are what every kernel is held against; the products themselves are in
    //! [`ops`](crate::ops).
    //!
    //! [`KvFormat`] is for keys and values, which are quantized as they are written
    //! ([`PagePool`](crate::ops::PagePool)).
    //!
    //! A model is quantized while it loads by a [`Recipe`] (`Llama::load_quantized`,
    //! `CausalLm::new_quantized`), or once for all by
    //! [`save_quantized`](crate::models::save_quantized) into a [`QuantizedFile`], which has the byte
    //! layout; single layers of other models by [`quantize_linear`] and [`while_loading`].
    //! [`calibrate`](crate::models::calibrate()) rounds a model's INT4 and INT8 matrices by what a text makes of them;
    //! [`gptq`] does that for single matrices.

    mod activation_bits;
    mod block;
    mod codes;
    pub(crate) mod e2m1;
    pub(crate) mod e4m3;
    mod format;
    mod kv_format;
    pub(crate) mod nf4;
    mod scheme;
    pub(crate) mod search;
    mod unpack;
    mod widen;
    pub(crate) mod words;

    pub use activation_bits::ActivationBits;
    pub use block::{BlockFormat, Scaling, supports};
    pub use codes::Codes;
    pub(crate) use codes::{MIDDLE, ZERO_STEP};
    pub use format::Format;
    pub use kv_format::{KvCacheType, KvFormat};
    pub(crate) use scheme::{FP8_BLOCK, NF4_GROUP, NVFP4_GROUP};
    pub use scheme::{Scheme, TernaryScale};
    pub(crate) use unpack::SubBlock;
    pub use unpack::dequantize;
    pub(crate) use widen::widened;

    // What works with formats lives in modules above them; users find it here.
    pub use crate::cpu::quantize::quantize;
    pub use crate::models::quantized::QuantizedFile;
    pub use crate::nn::gptq;
    pub use crate::nn::quantize::{quantize_linear, while_loading};
    pub use crate::nn::recipe::{Progress, Quantization, Recipe};
    pub use crate::nn::rounded::Rounded;
}

/// The README's examples, compiled as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
