//! Language models with candle-transformers' names and signatures.

mod decoder;
pub mod llama;
