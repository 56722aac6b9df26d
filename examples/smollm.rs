//! SmolLM2-135M-Instruct, or any other model of the architectures that candle-fused has, generating
//! text.
//!
//! ```text
//! cargo run --release --example smollm
//! cargo run --release --example smollm -- --chat
//! cargo run --release --example smollm -- --prompt "Once upon a time" --temperature 0.8 --stock
//! ```

use std::process::ExitCode;

use common::app::{self, Defaults};
use common::pip::Package;
use common::report;
use common::source::DEFAULT_MODEL;

fn main() -> ExitCode {
    report::run_main(|| {
        app::run(&Defaults {
            model: DEFAULT_MODEL,
            package: Some(Package::default()),
            prompt: app::QUESTION,
        })
    })
}
