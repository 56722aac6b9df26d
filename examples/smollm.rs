//! SmolLM2-135M-Instruct, or any other model of the llama architecture, generating text.
//!
//! ```text
//! cargo run --release --example smollm
//! cargo run --release --example smollm -- --chat
//! cargo run --release --example smollm -- --prompt "Once upon a time" --temperature 0.8 --stock
//! ```

#[cfg(feature = "cuda")]
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail, ensure};
use candle_core::Device;
#[cfg(feature = "cuda")]
use candle_fused::generation::Options;

#[allow(
    dead_code,
    reason = "the examples share one module, and this one takes parts of it"
)]
mod common;

use common::args::{self, Args, ModelArgs, Side};
use common::compare::{Comparison, Form};
use common::comparison::JsonFile;
use common::generate::{Generator, TextModel};
use common::session::{self, Session};
use common::source::{self, Located, SourceOptions};
use common::tokenizer::Text;
use common::weights::{self, Weights};
use common::{fused, report, stock, trace_file};

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
    let json = args
        .json
        .as_deref()
        .filter(|_| args.probe.is_none())
        .map(JsonFile::create)
        .transpose()?;
    let located = source::locate(
        args.model.model.as_deref(),
        args.model.revision.as_deref(),
        &SourceOptions::from_env(),
    )?;
    let _trace = trace_file::begin(args.tracing)?;
    let device = args.model.device()?;
    if args.compare {
        return compare(&args, &located, &device, json);
    }

    let begun = Instant::now();
    let weights = weights::open(&located.files)?;
    let text = weights.text()?;
    report::say(format_args!(
        "{} ({}, {})",
        located.name,
        weights.stored_as(),
        located.origin
    ));
    let model = load(&args.model, weights, &device)?;
    let load_time = begun.elapsed();

    if args.profile {
        return profile_run(&args, model.as_ref(), &text, &device);
    }
    let generator = Generator::new(model, &args.sampling, text.end_ids(), !args.model.no_graph);
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
    fused::load(weights, args.dtype, device, args.fusion.unwrap_or_default())
}

/// Profiles on the prompt as given, or on the question in the model's chat template.
fn profile_run(args: &Args, model: &dyn TextModel, text: &Text, device: &Device) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = device {
        let prompt = prompt(args, text)?;
        let options = Options {
            positions: prompt.len() + 2,
            graph: !args.model.no_graph,
            ..Default::default()
        };
        let mut generation = model.generation(&options)?;
        let file = Path::new("candle-fused-profile.json");
        return common::profile::run(&mut generation, &prompt, cuda, file);
    }
    let _ = (args, model, text, device);
    bail!("--profile needs a GPU and a build with --features cuda")
}

/// The prompt as given, or the question in the model's chat template.
fn prompt(args: &Args, text: &Text) -> Result<Vec<u32>> {
    match &args.prompt {
        Some(prompt) if !args.chat => text.encode_prompt(prompt),
        question => text.encode_question(question.as_deref().unwrap_or(QUESTION)),
    }
}

/// Compares on the prompt as given, or on the question in the model's chat template.
fn compare(args: &Args, located: &Located, device: &Device, json: Option<JsonFile>) -> Result<()> {
    let text = weights::open(&located.files)?.text()?;
    let prompt = prompt(args, &text)?;
    let comparison = Comparison {
        located,
        dtype: args.model.dtype,
        device,
        fusion: args.model.fusion.unwrap_or_default(),
        prompt: &prompt,
        sample_len: args.sampling.sample_len,
        graph: !args.model.no_graph,
    };
    match args.probe {
        Some(Side::Settings) => return comparison.answer_probe(Form::Settings),
        Some(Side::Stock) => return comparison.answer_probe(Form::Stock),
        Some(Side::Fused) => return comparison.answer_probe(Form::Fused(comparison.fusion)),
        None => {}
    }
    let report = comparison.run()?;
    report::write_text(&mut std::io::stdout().lock(), &report.to_string())?;
    json.map_or(Ok(()), |file| file.write(&report))
}
