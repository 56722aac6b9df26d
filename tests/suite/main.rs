//! The integration tests: one binary, a module per op and per model.

mod golden;
mod llama;
mod gguf_file;
mod linear;
mod llama_gguf;
mod support;
mod flash_attention;
mod app;
mod smollm2;

#[path = "../../examples/common/mod.rs"]
#[allow(dead_code, reason = "the tests use parts of what the examples share")]
mod common;
