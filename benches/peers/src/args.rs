//! The command line of a comparison.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// A GGUF file; may be given several times.
    #[arg(long = "model", value_name = "FILE")]
    pub models: Vec<PathBuf>,
    /// Threads of each side.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    pub threads: u32,
    /// Times that everything is measured.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Tokens of a decode measurement.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=47))]
    pub steps: u32,
    /// What to measure; all of it if it is left out.
    #[arg(long, value_enum, value_delimiter = ',')]
    pub only: Vec<Measure>,
    /// Threads that do nothing but take time away meanwhile.
    #[arg(long, default_value_t = 0)]
    pub busy: u32,
    /// A built `llama-bench` of ik_llama.cpp, which is measured beside the others.
    #[arg(long, value_name = "PATH")]
    pub ik: Option<PathBuf>,
    /// The report's path without its extension: .md and .json are written.
    #[arg(long, default_value = "../runs/peers")]
    pub out: PathBuf,
}

/// Tokens of the prompt that is measured, and behind which decoding is.
pub const PREFILL: usize = 512;
pub const NEAR: usize = 64;
pub const FAR: usize = 2000;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Measure {
    /// Tokens a second behind 64 tokens.
    #[value(name = "decode-64")]
    Decode64,
    /// Tokens a second behind 512 tokens.
    #[value(name = "decode-512")]
    Decode512,
    /// Tokens a second behind 2000 tokens.
    #[value(name = "decode-2000")]
    Decode2000,
    /// Tokens a second of a prompt of 512.
    #[value(name = "prefill-512")]
    Prefill512,
    /// Seconds from the start of the process to the first token of a short prompt, the file being
    /// in the page cache.
    FirstToken,
    /// The most memory that the process held: a prompt of 512 tokens and some steps in a context of
    /// 2048 positions.
    PeakMemory,
}
