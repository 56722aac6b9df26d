//! Language models with candle-transformers' names and signatures.

pub(crate) mod decoder;
pub mod llama;
