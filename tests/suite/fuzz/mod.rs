//! What untrusted input goes through, as functions of any bytes: none of them may make one panic, abort,
//! run for seconds or ask for much more memory than the input has.
//!
//! `fuzz/` includes this module and drives the functions with libFuzzer; `fuzz_replay.rs` calls them with
//! the files of `tests/data/fuzz`, a folder for each name of [`TARGETS`].

mod arguments;
mod chat_template;
mod checkpoint;
mod config;
mod gguf;
mod gguf_tensors;
mod quantized_file;
mod vocabulary;

pub use quantized_file::CONFIG;

/// What a target does with an input.
type Target = fn(&[u8]);

/// Each target by its name.
pub const TARGETS: [(&str, Target); 8] = [
    ("arguments", arguments::run),
    ("chat_template", chat_template::run),
    ("checkpoint", checkpoint::run),
    ("config", config::run),
    ("gguf", gguf::run),
    ("gguf_tensors", gguf_tensors::run),
    ("quantized_file", quantized_file::run),
    ("vocabulary", vocabulary::run),
];
