//! The program that generates text, which the examples run with models of their own.

#[cfg(feature = "cuda")]
use std::path::Path;
use std::time::Instant;

use anyhow::{Result, bail, ensure};
use candle_core::Device;
#[cfg(feature = "cuda")]
use candle_fused::generation::Options;
use candle_fused::quant::KvCacheType;

use super::args::{self, Args};
use super::compare::Comparison;
use super::comparison::JsonFile;
use super::generate::{Generator, TextModel};
use super::pip::Package;
use super::session::{self, Session};
use super::source::{self, Located, SourceOptions};
use super::tokenizer::Text;
use super::weights::{self, Weights};
use super::{fused, report, stock, trace_file};

/// Asked when there is no prompt: short, and within reach of a small model.
pub const QUESTION: &str = "Give me three tips for better sleep.";

/// What an example runs when nothing else is said.
pub struct Defaults {
    /// A hub id.
    pub model: &'static str,
    /// A package that holds it, for those who cannot reach the hub.
    pub package: Option<Package>,
    /// What to say to a model with a chat template; others go on from here.
    pub prompt: &'static str,
}

/// Reads the command line and does what it says.
pub fn run(defaults: &Defaults) -> Result<()> {
    let args: Args = args::parse(std::env::args_os(), defaults.model)?;
    args::set_threads(args.model.threads);
    check(&args)?;
    let json = args
        .json
        .as_deref()
        .filter(|_| args.probe.is_none())
        .map(JsonFile::create)
        .transpose()?;
    let located = source::locate(
        args.model.model.as_deref(),
        args.model.revision.as_deref(),
        &SourceOptions {
            default_model: defaults.model.to_owned(),
            package: defaults.package.clone(),
            ..SourceOptions::from_env()
        },
    )?;
    let located = match args.model.mmap {
        true => located.mapped()?,
        false => located,
    };
    let _trace = trace_file::begin(args.tracing)?;
    let device = args.model.device()?;

    let begun = Instant::now();
    let weights = weights::open(&located.files)?.with_compute_dtype(args.model.compute_dtype)?;
    if args.compare {
        let prompt = prompt(&args, defaults, &weights.text()?)?;
        return compare(&args, &located, &device, &prompt, json);
    }
    report::say(format_args!(
        "{} ({}, {})",
        located.name,
        args.model
            .quantize
            .describe()
            .unwrap_or_else(|| weights.stored_as()),
        located.origin
    ));
    let text = weights.text_meanwhile();
    let model = load(&args, weights, &device)?;
    let text = text.wait()?;
    let load_time = begun.elapsed();

    if args.profile {
        return profile(&args, model.as_ref(), &prompt(&args, defaults, &text)?);
    }
    let (graph, kv_cache) = (!args.model.no_graph, args.model.kv_cache);
    let generator = Generator::new(model, &args.sampling, text.end_ids(), graph, kv_cache);
    let mut session = Session::new(&text, generator, std::io::stdout().lock());
    match (&args.prompt, args.chat) {
        (Some(prompt), false) => session.complete(prompt)?,
        (Some(question), true) => session.answer(question)?,
        (None, true) => session.converse(std::io::stdin().lock(), session::at_a_terminal())?,
        (None, false) if text.has_chat_template() => {
            report::say(format_args!("> {}", defaults.prompt));
            session.answer(defaults.prompt)?;
        }
        (None, false) => session.complete(defaults.prompt)?,
    }
    report::say(format_args!("\n{}", session.table(load_time)));
    Ok(())
}

/// Fails if flags do not go together.
fn check(args: &Args) -> Result<()> {
    ensure!(
        args.json.is_none() || args.compare,
        "--json writes what --compare finds; add --compare"
    );
    ensure!(
        !args.stock || !args.model.mmap,
        "--stock runs plain candle, which copies what it reads; leave --mmap away"
    );
    ensure!(
        !args.stock || args.model.quantize.recipe().is_none(),
        "--stock runs plain candle, which has no such formats; leave --quantize away"
    );
    ensure!(
        args.model.kv_cache == KvCacheType::Auto || !(args.stock || args.compare),
        "--kv-cache is for the fused model alone; leave --stock and --compare away"
    );
    ensure!(
        args.model.compute_dtype.is_none() || !(args.stock || args.compare),
        "--compute-dtype is for the fused model alone; leave --stock and --compare away"
    );
    Ok(())
}

fn load(args: &Args, weights: Weights, device: &Device) -> Result<Box<dyn TextModel>> {
    let dtype = args.model.dtype;
    if args.stock {
        return stock::load(weights, dtype, device);
    }
    fused::load(
        weights,
        dtype,
        device,
        args.model.fusion(),
        args.model.quantize.recipe().as_ref(),
    )
}

/// The prompt as given, or the question in the model's chat template.
fn prompt(args: &Args, defaults: &Defaults, text: &Text) -> Result<Vec<u32>> {
    match &args.prompt {
        Some(prompt) if !args.chat => text.encode_prompt(prompt),
        question => text.encode_question(question.as_deref().unwrap_or(defaults.prompt)),
    }
}

fn profile(args: &Args, model: &dyn TextModel, prompt: &[u32]) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = model.device() {
        let options = Options {
            positions: Some(prompt.len() + 2),
            graph: !args.model.no_graph,
            kv_cache: args.model.kv_cache,
            ..Default::default()
        };
        let mut generation = model.generation(&options)?;
        let file = Path::new("candle-fused-profile.json");
        return super::profile::run(&mut generation, prompt, &cuda, file);
    }
    let _ = (args, model, prompt);
    bail!("--profile needs a GPU and a build with --features cuda")
}

fn compare(
    args: &Args,
    located: &Located,
    device: &Device,
    prompt: &[u32],
    json: Option<JsonFile>,
) -> Result<()> {
    let comparison = Comparison {
        located,
        dtype: args.model.dtype,
        quantize: &args.model.quantize,
        device,
        fusion: args.model.fusion(),
        prompt,
        sample_len: args.sampling.sample_len,
        graph: !args.model.no_graph,
    };
    comparison.carry_out(args.probe, json)
}
