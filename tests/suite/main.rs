//! The integration tests: one binary, a module per op and per model.

mod dense;
mod flash_attention;
mod gguf_file;
mod golden;
mod layer_norm;
mod linear;
mod llama;
mod llama_gguf;
mod residual_add;
mod rms_norm;
mod support;
