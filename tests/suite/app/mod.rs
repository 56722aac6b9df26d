//! What the examples share: finding models, tokens, chat templates, the command line, reports.

mod architectures;
mod args;
mod chat;
mod cli;
mod comparison;
mod generate;
mod hub;
mod hub_server;
// The stand-ins for pip are shell scripts.
#[cfg(unix)]
mod pip;
mod place;
mod quantize;
mod report;
mod shapes;
mod source;
pub mod tiny;
mod token_stream;
mod tokenizer;
mod validate;
