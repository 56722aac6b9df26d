//! Llama from GGUF files, under the names of `candle_transformers::models::quantized_llama`:
//!
//! ```no_run
//! use candle_core::quantized::gguf_file::Content;
//! use candle_core::{Device, Tensor};
//! use candle_fused::models::quantized_llama::ModelWeights;
//! let mut file = std::fs::File::open("model.gguf")?;
//! let content = Content::read(&mut file)?;
//! let mut model = ModelWeights::from_gguf(content, &mut file, &Device::Cpu)?;
//! let logits = model.forward(&Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?, 0)?;
//! # Ok::<(), candle_core::Error>(())
//! ```

pub use super::llama::ModelWeights;

/// The context length of files that do not name one.
pub const MAX_SEQ_LEN: usize = super::llama::DEFAULT_MAX_SEQ_LEN;
