//! SmolLM3, under the names of `candle_transformers::models::smol`.

pub mod quantized_smollm3;
pub mod smollm3;
