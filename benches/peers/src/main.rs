//! candle-fused beside llama.cpp on the CPU: the same file, prompt tokens and number of threads.
//!
//! ```text
//! cargo run --release -- --threads 2 --model SmolLM2-135M-Instruct.Q4_1.gguf
//! ```
//! Each side is a process of its own (this program once more, with the subcommand `serve`), and they
//! take turns, so that a machine that slows down slows down all of them. README.md says more.

mod child;
mod count;
mod fused;
#[path = "../../../examples/common/gguf_vocab.rs"]
#[allow(dead_code, reason = "the examples use more of it")]
mod gguf_vocab;
mod llama;
mod plan;
mod report;
mod serve;

use anyhow::{Result, ensure};
use clap::{Parser, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Measures candle-fused and llama.cpp in turns.
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    args: Args,
}

#[derive(Subcommand)]
enum Command {
    /// One side, driven over its standard input.
    #[command(hide = true)]
    Serve(serve::Side),
    /// One side in this process, for a program that counts its instructions (count.sh).
    #[command(hide = true)]
    Count(count::Count),
}

#[derive(clap::Args)]
struct Args {
    /// A GGUF file; may be given several times.
    #[arg(long = "model", value_name = "FILE")]
    models: Vec<PathBuf>,
    /// Threads of each side.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    threads: u32,
    /// Times that everything is measured.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Tokens of a decode measurement.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=47))]
    steps: u32,
    /// What to measure; all of it if it is left out.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Measure>,
    /// Threads that do nothing but take time away meanwhile.
    #[arg(long, default_value_t = 0)]
    busy: u32,
    /// The report's path without its extension: .md and .json are written.
    #[arg(long, default_value = "../runs/peers")]
    out: PathBuf,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Measure {
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

/// What is measured against what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Peer {
    /// candle-fused.
    Fused,
    /// llama.cpp with flash attention.
    LlamaFlash,
    /// llama.cpp without.
    LlamaPlain,
}

impl Peer {
    const ALL: [Self; 3] = [Self::Fused, Self::LlamaFlash, Self::LlamaPlain];

    fn name(self) -> &'static str {
        match self {
            Self::Fused => "candle-fused",
            Self::LlamaFlash => "llama.cpp, flash attention",
            Self::LlamaPlain => "llama.cpp, without",
        }
    }
}

fn main() -> Result<()> {
    let Cli { command, args } = Cli::parse();
    match command {
        Some(Command::Serve(side)) => return side.serve(),
        Some(Command::Count(count)) => return count.run(),
        None => {}
    }
    ensure!(
        !args.models.is_empty(),
        "--model is missing, expected a GGUF file"
    );
    let mut wanted = args.only.clone();
    if wanted.is_empty() {
        wanted = Measure::value_variants().to_vec();
    }
    let load = plan::Load::start(args.busy);
    let mut results = Vec::new();
    for model in &args.models {
        let plan = plan::Plan {
            model,
            threads: args.threads,
            rounds: args.rounds as usize,
            steps: args.steps as usize,
            wanted: &wanted,
        };
        results.push(plan.measure()?);
    }
    drop(load);
    let report = report::Report::new(&args, results);
    print!("{}", report.markdown());
    report.write(&args.out)
}
