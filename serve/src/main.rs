//! The program: finds a model, starts its engine, and serves it.

use std::process::ExitCode;

use candle_fused_serve::args::Args;
use candle_fused_serve::program;
use common::args;
use common::report::run_main;
use common::source::DEFAULT_MODEL;

fn main() -> ExitCode {
    run_main(|| {
        let args: Args = args::parse(std::env::args_os(), DEFAULT_MODEL)?;
        program::run(&args)
    })
}
