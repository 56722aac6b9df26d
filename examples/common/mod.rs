//! What the examples of this crate share: the command line, finding a model, tokens, chat templates,
//! the token loop and the report at the end.

pub mod app;
pub mod architecture;
pub mod args;
pub mod calibrate;
pub mod chat;
pub mod compare;
pub mod comparison;
pub mod distance;
pub mod fused;
pub mod generate;
pub mod gguf_vocab;
pub mod golden;
pub mod gpu;
pub mod hub;
pub mod measure;
pub mod pip;
#[cfg(feature = "cuda")]
pub mod profile;
pub mod progress;
pub mod quantize;
pub mod report;
pub mod requantize;
pub mod session;
pub mod shapes;
pub mod source;
pub mod stock;
pub mod token_stream;
pub mod tokenizer;
pub mod trace_file;
pub mod transfer;
pub mod validate;
pub mod weights;
