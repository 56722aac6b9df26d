//! Plain candle against candle-fused: any checkpoint, or a named shape with random weights; or a
//! checkpoint against the outputs of another implementation.
//!
//! ```text
//! cargo run --release --example compare -- --model Qwen/Qwen3-0.6B
//! cargo run --release --example compare -- --shape pythia-2.8b --json report.json
//! cargo run --release --example compare -- --shape llama-3-8b --only fused -n 512
//! cargo run --release --example compare -- --model FOLDER --golden outputs.safetensors
//! ```

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device};
use candle_fused::quant::KvCacheType;
use clap::{Parser, ValueEnum};

use common::app::QUESTION;
use common::args::{self, ModelArgs};
use common::compare::Comparison;
use common::comparison::JsonFile;
use common::golden::Golden;
use common::measure::Measurement;
use common::shapes::{self, Shape};
use common::source::{self, DEFAULT_MODEL, Located, SourceOptions};
use common::{fused, gpu, report, weights};

/// Compares plain candle and the fused model: tokens, hidden states, speed and memory.
#[derive(Parser, Debug)]
#[command(version, max_term_width = 100)]
struct Args {
    /// Random weights of this shape instead of a model.
    #[arg(long, value_enum, conflicts_with_all = ["model", "revision", "golden"])]
    shape: Option<Shape>,

    /// Text to continue [default: a question in the model's chat template].
    #[arg(long, value_parser = args::prompt)]
    prompt: Option<String>,

    /// Continue N random tokens instead of a text [default for shapes: 128].
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = args::at_least_one, conflicts_with = "prompt")]
    prompt_tokens: Option<usize>,

    /// Tokens to generate.
    #[arg(short = 'n', long, default_value_t = 200, allow_negative_numbers = true, value_parser = args::at_least_one)]
    sample_len: usize,

    /// Measure one side alone; on a GPU with a table of the parts of a step.
    #[arg(long, value_enum, conflicts_with_all = ["json", "golden"])]
    only: Option<Only>,

    /// With --only fused, sequences side by side, 1 to 8.
    #[arg(long, default_value_t = 1, allow_negative_numbers = true, value_parser = args::at_least_one, requires = "only")]
    sequences: usize,

    /// Write the report to FILE too.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Check the fused model against the outputs in FILE: safetensors with input_ids [B, T], logits
    /// [B, T, vocab], hidden_states [layers + 1, B, T, hidden] (both may be of the last positions only),
    /// greedy [B, N], and perhaps greedy_margin [B, N].
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "prompt_tokens", "json"])]
    golden: Option<PathBuf>,

    /// The largest error that --golden lets pass, relative to the largest reference value [default:
    /// 1e-4 in f32, 1e-2 in f16, 5e-2 in bf16].
    #[arg(long, allow_negative_numbers = true, value_parser = tolerance, requires = "golden")]
    tol: Option<f64>,

    /// One side's share of a comparison, run in a process of its own.
    #[arg(long, value_name = "SIDE", hide = true)]
    probe: Option<args::Side>,

    #[command(flatten)]
    model: ModelArgs,
}

/// A side to measure alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Only {
    Stock,
    Fused,
}

fn tolerance(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value >= 0. && value.is_finite() => Ok(value),
        _ => Err("must be a number of 0 or more".into()),
    }
}

fn main() -> ExitCode {
    report::run_main(run)
}

fn run() -> Result<()> {
    let args: Args = args::parse(std::env::args_os(), DEFAULT_MODEL)?;
    args::set_threads(args.model.threads);
    ensure!(
        args.model.kv_cache == KvCacheType::Auto,
        "--kv-cache: both sides are compared with caches as the model has them"
    );
    ensure!(
        args.model.compute_dtype.is_none()
            || args.golden.is_some()
            || args.only == Some(Only::Fused),
        "--compute-dtype is for the fused model alone; add --only fused"
    );
    let json = args
        .json
        .as_deref()
        .filter(|_| args.probe.is_none())
        .map(JsonFile::create)
        .transpose()?;
    let located = match args.shape {
        Some(shape) => shape.located(),
        None => source::locate(
            args.model.model.as_deref(),
            args.model.revision.as_deref(),
            &SourceOptions::from_env(),
        )?,
    };
    let located = match args.model.mmap {
        true => located.mapped()?,
        false => located,
    };
    let device = args.model.device()?;
    if let Some(file) = &args.golden {
        return check(&args, &located, &device, file);
    }
    let prompt = prompt(&args, &located)?;
    let fusion = args.model.fusion();
    if let Some(side) = args.only {
        let measurement = Measurement {
            name: &located.name,
            dtype: args.model.dtype,
            quantize: &args.model.quantize,
            device: &device,
            prompt: &prompt,
            sample_len: args.sample_len,
            sequences: args.sequences,
            graph: !args.model.no_graph,
        };
        let weights =
            weights::open(&located.files)?.with_compute_dtype(args.model.compute_dtype)?;
        return measurement.run(weights, (side == Only::Fused).then_some(fusion));
    }
    let comparison = Comparison {
        located: &located,
        dtype: args.model.dtype,
        quantize: &args.model.quantize,
        device: &device,
        fusion,
        prompt: &prompt,
        sample_len: args.sample_len,
        graph: !args.model.no_graph,
    };
    comparison.carry_out(args.probe, json)
}

/// The prompt as given, random tokens, or the question in the model's chat template.
fn prompt(args: &Args, located: &Located) -> Result<Vec<u32>> {
    let weights = weights::open(&located.files)?;
    if let Some(prompt) = &args.prompt {
        return weights.text()?.encode_prompt(prompt);
    }
    match args.prompt_tokens.or(args.shape.map(|_| 128)) {
        Some(count) => Ok(shapes::tokens(count, weights.vocab_size()?)),
        None => weights
            .text()
            .context("--prompt-tokens N does without a tokenizer")?
            .encode_question(QUESTION),
    }
}

/// Checks the model against the reference outputs in `file`.
fn check(args: &Args, located: &Located, device: &Device, file: &Path) -> Result<()> {
    let golden = Golden::open(file)?;
    let weights = weights::open(&located.files)?.with_compute_dtype(args.model.compute_dtype)?;
    let dtype = match &weights {
        weights::Weights::Gguf { .. } => args.model.dtype,
        weights => Some(weights.dtype(args.model.dtype)?),
    };
    let quantized = weights.quantized()?.is_some() || args.model.quantize.recipe().is_some();
    let tolerance = match (args.tol, dtype.filter(|_| !quantized)) {
        (Some(tolerance), _) => tolerance,
        (None, Some(DType::F32)) => 1e-4,
        (None, Some(DType::F16)) => 1e-2,
        (None, Some(DType::BF16)) => 5e-2,
        (None, _) => bail!("quantized weights have no tolerance of their own; give --tol"),
    };
    gpu::tune(device, true)?;
    let stored = weights.stored_as();
    let fusion = args.model.fusion();
    let recipe = args.model.quantize.recipe();
    let dtype_asked = args.model.dtype;
    let mut model = fused::load(weights, dtype_asked, device, fusion, recipe.as_ref())?;
    let report = golden.check(model.as_mut(), tolerance)?;
    let text = format!(
        "{} on {}, {}, against {}\n\n{report}",
        located.name,
        gpu::name(device),
        dtype.map_or(stored, |dtype| dtype.as_str().to_owned()),
        file.display()
    );
    report::write_text(&mut std::io::stdout().lock(), &text)?;
    report.verdict()
}
