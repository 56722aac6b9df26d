//! What candle-fused gains over plain candle, and how far it is from what the machine can do.
//!
//! ```text
//! cargo bench                                     # everything, on the CPU
//! cargo bench --features cuda                     # on a GPU, if there is one
//! cargo bench -- --quick                          # few shapes, under two minutes
//! cargo bench -- --sections ops --filter rms_norm_linear,flash
//! cargo bench -- --cpu --threads 1,2,4            # prompts and decoding over the number of threads
//! cargo bench -- --export run.json --plots plots --markdown plots/README.md
//! cargo bench -- --baseline run.json --fail-on-regression
//! cargo bench --features cuda -- --tune           # is the table of kernels right?
//! cargo bench --features cuda -- --cliffs         # over the rows of x: beside cuBLAS, and where times jump
//! ```
//! Each contender's result is checked against the op's float64 `reference()` before it is timed; what
//! the memory and the library's products deliver is measured in the same run. docs/performance.md
//! says how to read the tables, benches/README.md what the export holds.

mod args;
mod baseline;
mod budget;
mod cases;
mod child;
#[cfg(feature = "cuda")]
mod cliffs;
mod export;
mod figures;
mod form;
mod goals;
mod layers;
mod lengths;
mod limits;
mod machine;
mod markdown;
mod memory;
mod models;
mod nvml;
mod ops;
mod place;
mod plots;
mod run;
mod scaling;
mod serving;
mod stats;
#[cfg(feature = "cuda")]
mod ternary;
mod threads;
mod timing;
#[cfg(feature = "cuda")]
mod tune;

use args::Args;
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args = Args::parse();
    let done = match &args.child {
        Some(job) => child::serve(job).map(|()| ExitCode::SUCCESS),
        None => run::run(&args),
    };
    done.unwrap_or_else(|error| {
        common::report::say(format_args!("error: {}", common::report::one_line(&error)));
        ExitCode::FAILURE
    })
}
