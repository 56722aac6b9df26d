//! Qwen2 from GGUF files, under the names of `candle_transformers::models::quantized_qwen2`.

pub use super::qwen2::ModelWeights;
