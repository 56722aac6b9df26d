//! candle-fused beside llama.cpp, and ik_llama.cpp, on the CPU: the same file, prompt tokens and number of threads.
//!
//! ```text
//! cargo run --release -- --threads 2 --model SmolLM2-135M-Instruct.Q4_1.gguf
//! ```
//! Each side is a process of its own (this program once more, with the subcommand `serve`), and they
//! take turns, so that a machine that slows down slows down all of them. README.md says more.

mod args;
mod child;
mod count;
mod fused;
#[path = "../../../examples/common/gguf_vocab.rs"]
#[allow(dead_code, reason = "the examples use more of it")]
mod gguf_vocab;
mod ik;
mod llama;
mod model;
mod peer;
mod plan;
mod report;
mod serve;

use anyhow::{Result, ensure};
use args::{Args, Measure};
use clap::{Parser, Subcommand, ValueEnum};

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
            ik: args.ik.as_deref(),
        };
        results.push(plan.measure()?);
    }
    drop(load);
    let report = report::Report::new(&args, results);
    print!("{}", report.markdown());
    report.write(&args.out)
}
