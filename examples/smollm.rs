//! SmolLM2-135M-Instruct, or any other model of the llama architecture, generating text.
//!
//! ```text
//! cargo run --release --example smollm
//! cargo run --release --example smollm -- --chat
//! cargo run --release --example smollm -- --prompt "Once upon a time" --temperature 0.8 --stock
//! ```

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail, ensure};
use candle_core::Device;

mod common;

use common::args::{self, Args, ModelArgs};
use common::comparison::{CompareReport, JsonFile};
use common::generate::{Generator, TextModel};
use common::session::{self, Session};
use common::source::{self, SourceOptions};
use common::tokenizer::Text;
use common::weights::{self, Weights};
use common::{report, stock, trace_file};

/// Asked when there is no prompt: short, and within reach of a small model.
const QUESTION: &str = "Give me three tips for better sleep.";

fn main() -> ExitCode {
    report::run_main(run)
}

fn run() -> Result<()> {
    let args: Args = args::parse(std::env::args_os())?;
    args::set_threads(args.model.threads);
    ensure!(
        args.json.is_none() || args.compare,
        "--json writes what --compare finds; add --compare"
    );
    let json = args.json.as_deref().map(JsonFile::create).transpose()?;
    let located = source::locate(
        args.model.model.as_deref(),
        args.model.revision.as_deref(),
        &SourceOptions::from_env(),
    )?;
    let _trace = trace_file::begin(args.tracing)?;

    let begun = Instant::now();
    let (weights, text) = weights::open(&located.files)?;
    report::say(format_args!(
        "{} ({}, {})",
        located.name,
        weights.stored_as(),
        located.origin
    ));
    let device = args.model.device()?;
    if args.compare {
        let report = compare(&args, &located.name, weights, &text, &device)?;
        report::write_text(&mut std::io::stdout().lock(), &report.to_string())?;
        return json.map_or(Ok(()), |file| file.write(&report));
    }
    let model = load(&args.model, weights, &device)?;
    let load_time = begun.elapsed();

    let generator = Generator::new(model, &args.sampling, text.end_ids());
    let mut session = Session::new(&text, generator, std::io::stdout().lock());
    match (&args.prompt, args.chat) {
        (Some(prompt), false) => session.complete(prompt)?,
        (Some(question), true) => session.answer(question)?,
        (None, true) => session.converse(std::io::stdin().lock(), session::at_a_terminal())?,
        (None, false) if text.has_chat_template() => {
            report::say(format_args!("> {QUESTION}"));
            session.answer(QUESTION)?;
        }
        (None, false) => session.complete(QUESTION)?,
    }
    report::say(format_args!("\n{}", session.table(load_time)));
    Ok(())
}

fn load(args: &ModelArgs, weights: Weights, device: &Device) -> Result<Box<dyn TextModel>> {
    if args.stock {
        return stock::load(weights, args.dtype, device);
    }
    bail!("the fused model is not wired in yet; run it with --stock")
}

fn compare(
    args: &Args,
    name: &str,
    weights: Weights,
    text: &Text,
    device: &Device,
) -> Result<CompareReport> {
    let _ = (args, name, weights, text, device);
    bail!("--compare is not wired in yet")
}
