//! The integration tests: one binary, a module per op and per model.

mod golden;
mod llama;
mod gguf_file;
mod linear;
mod llama_gguf;
mod support;
mod flash_attention;
