//! Qwen3-0.6B, or any other Qwen2, Qwen2.5 or Qwen3 model, generating text.
//!
//! ```text
//! cargo run --release --example qwen
//! cargo run --release --example qwen -- --model Qwen/Qwen2.5-0.5B-Instruct --chat
//! cargo run --release --example qwen -- --model qwen3-0.6b-q8_0.gguf --compare
//! ```

use std::process::ExitCode;

use common::app::{self, Defaults};
use common::report;

fn main() -> ExitCode {
    report::run_main(|| {
        app::run(&Defaults {
            model: "Qwen/Qwen3-0.6B",
            package: None,
            prompt: app::QUESTION,
        })
    })
}
