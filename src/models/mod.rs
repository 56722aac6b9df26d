//! Language models with candle-transformers' names and signatures; modules say where a type is this crate's own.
//!
//! | | safetensors | GGUF |
//! |---|---|---|
//! | Llama 2 and 3, SmolLM2 | [`llama::Llama`] | [`llama::ModelWeights`] |
//! | Qwen2, Qwen2.5 | [`qwen2::ModelForCausalLM`] | [`qwen2::ModelWeights`] |
//! | Qwen3 | [`qwen3::ModelForCausalLM`] | [`qwen3::ModelWeights`] |
//! | Mistral | [`mistral::Model`] | [`mistral::ModelWeights`] |
//! | Phi-3, Phi-3.5, Phi-4-mini | [`phi3::Model`] | [`phi3::ModelWeights`] |
//! | SmolLM3 | [`smol::smollm3::ModelForCausalLM`] | [`smol::smollm3::ModelWeights`] |
//! | BitNet b1.58 2B4T | [`bitnet::ModelForCausalLM`] | |
//! | Pythia, GPT-NeoX-20B | [`gpt_neox::ModelForCausalLM`] | [`gpt_neox::ModelWeights`] |
//!
//! [`Checkpoint`] opens checkpoints that are already quantized: GPTQ, AWQ, compressed-tensors, FP8, NVFP4,
//! bitsandbytes' NF4 and BitNet keep their codes.
//!
//! Dense weights can be quantized while they load (`load_quantized`, `new_quantized`), saved in that form
//! ([`save_quantized`]), and used where the file is mapped (`from_quantized`). [`calibrate()`] is GPTQ: it rounds them so
//! that the layers' outputs on a text change least.
//!
//! candle-transformers' modules for GGUF files have the same names here: [`quantized_llama`], [`quantized_mistral`],
//! [`quantized_qwen2`], [`quantized_qwen3`], [`quantized_phi3`] and [`smol::quantized_smollm3`].
//!
//! All models are one decoder with different shapes. A model that is loaded with
//! [`Fusion::none`](crate::Fusion::none) runs candle's own operations throughout.

mod balance;
pub mod bitnet;
mod calibrate;
mod causal_lm;
pub(crate) mod checkpoint;
mod config;
pub(crate) mod decoder;
mod gguf;
pub mod gpt_neox;
pub mod llama;
pub mod mistral;
mod modules;
mod names;
pub(crate) mod parts;
pub mod phi3;
pub(crate) mod quantized;
pub mod quantized_llama;
pub mod quantized_mistral;
pub mod quantized_phi3;
pub mod quantized_qwen2;
pub mod quantized_qwen3;
pub mod quantized_var_builder;
mod qwen;
pub mod qwen2;
pub mod qwen3;
mod rotary_tables;
mod safetensors;
pub(crate) mod shape;
pub mod smol;
mod weights;

pub use calibrate::{Calibration, CalibrationProgress, calibrate};
pub use causal_lm::{BaseModel, CausalLm};
pub use checkpoint::Checkpoint;
pub use gguf::GgufModel;
pub use quantized::{save_compressed_tensors, save_quantized};

/// A configuration that a model can be loaded with.
pub trait Architecture: shape::Describe {}

impl<C: shape::Describe> Architecture for C {}
