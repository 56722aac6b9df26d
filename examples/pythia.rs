//! Pythia-160M, or any other GPT-NeoX model, continuing text.
//!
//! ```text
//! cargo run --release --example pythia
//! cargo run --release --example pythia -- --model EleutherAI/pythia-2.8b --dtype bf16
//! cargo run --release --example pythia -- --prompt "Once upon a time" --stock
//! ```
//! candle-transformers has no such model: `--stock` is the same definition in candle's own operations.

use std::process::ExitCode;

use common::app::{self, Defaults};
use common::report;

fn main() -> ExitCode {
    report::run_main(|| {
        app::run(&Defaults {
            model: "EleutherAI/pythia-160m",
            package: None,
            // These models were never taught to answer.
            prompt: "To sleep better at night, it helps to",
        })
    })
}
