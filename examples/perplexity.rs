//! What quantization costs: perplexity of a text, and how often the likeliest token stays the same.
//!
//! ```text
//! cargo run --release --example perplexity
//! cargo run --release --example perplexity -- --formats f32,int8,int4-g32-z --tokens 2048
//! cargo run --release --example perplexity -- --model FOLDER --text book.txt
//! cargo run --release --example perplexity -- --formats f32,int4-g64,smollm2-gptq/
//! ```
//! The text is read in windows that know nothing of each other. `f32` is the model's weights turned into
//! f32; of a GGUF file these are what its blocks are worth, so a file that is quantized already is the
//! measure of all the others here, not the model that it was once made of. Head and embedding stay in
//! f32 in all formats but bf16.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use candle_fused::cpu::pool;
use candle_fused::quant::{Quantization, Recipe, TernaryScale};
use candle_fused::{ActivationBits, Fusion};
use clap::Parser;

use common::generate::TextModel;
use common::requantize::fallback;
use common::source::{self, DEFAULT_MODEL, ModelFiles, SourceOptions};
use common::{args, fused, report, weights};

/// Everything there is, f32 first.
const FORMATS: &str = "f32,bf16,int8,int8+balance,int4-g32,int4-g64,int4-g128,int4-g32-z,int4-g64-z,int4-g128-z,\
                       ternary-row,ternary-g64,q8_0,q6k,q5_1,q5_0,q5k,q4_1,q4_0,q4k,q3k,q2k";

/// Measures what quantization costs.
#[derive(Parser, Debug)]
#[command(version, max_term_width = 100)]
struct Args {
    /// A GGUF file of a llama model, a folder with config.json, tokenizer.json and safetensors, or the
    /// id of a model on the Hugging Face hub.
    #[arg(long)]
    model: Option<String>,

    /// The text [default: benches/text/around-the-world.txt].
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,

    /// Formats to measure, joined by commas; f32 is always measured. With `+balance` behind it, of
    /// matrices whose columns have been brought to like sizes. A folder is a model that `quantize` saved, with this
    /// one's tokens.
    #[arg(long, value_name = "LIST", default_value = FORMATS)]
    formats: String,

    /// Tokens to read at most, from the beginning of the text.
    #[arg(long, default_value_t = 8192, allow_negative_numbers = true, value_parser = args::at_least_one)]
    tokens: usize,

    /// Tokens of a window.
    #[arg(long, default_value_t = 512, allow_negative_numbers = true, value_parser = args::at_least_one)]
    window: usize,

    /// Quantize the weights alone: products take what they are worth in f32, and activations stay in
    /// f32.
    #[arg(long)]
    weights_only: bool,

    /// Compare each format with the same weights multiplied in f32, so that only what happens to
    /// activations shows.
    #[arg(long, conflicts_with = "weights_only")]
    same_weights: bool,

    /// Bits of activations in products with quantized weights: 8, 16, or auto, which is 8 for windows of more
    /// than 64 tokens.
    #[arg(long, value_name = "BITS", default_value_t, value_parser = args::activations)]
    activations: ActivationBits,

    /// CPU threads [default: all that this process may use].
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = args::threads)]
    threads: Option<usize>,
}

/// What a model is loaded as.
struct Format {
    name: String,
    dtype: DType,
    quantization: Option<Quantization>,
    balanced: bool,
    /// Another model's files.
    files: Option<ModelFiles>,
}

/// How a model does.
struct Score {
    /// exp of the mean negative logarithm of each next token's probability.
    perplexity: f64,
    /// The likeliest token at each position.
    top: Vec<u32>,
}

fn main() -> ExitCode {
    report::run_main(run)
}

fn run() -> Result<()> {
    let args: Args = args::parse(std::env::args_os(), DEFAULT_MODEL)?;
    args::set_threads(args.threads);
    ensure!(args.window > 1, "--window is 1, expected 2 or more");
    let mut formats = vec![Format::read("f32")?];
    for name in args.formats.split(',').filter(|name| *name != "f32") {
        formats.push(Format::read(name)?);
    }
    let located = source::locate(args.model.as_deref(), None, &SourceOptions::from_env())?;
    let path = args.text.clone().unwrap_or_else(|| {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../benches/text/around-the-world.txt")
    });
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("cannot read {}", path.display()))?;
    let mut ids = weights::open(&located.files)?
        .text()?
        .encode_prompt(&text)?;
    ids.truncate(args.tokens);
    let last = ids.len() % args.window;
    if last < 2 {
        ids.truncate(ids.len() - last);
    }
    ensure!(ids.len() > 1, "--tokens {} is too few", args.tokens);
    report::write_text(
        &mut std::io::stdout().lock(),
        &format!(
            "{}, {} tokens of {} in windows of {}\n\n{:<12} {:>10} {:>9} {:>11} {:>9}\n",
            located.name,
            ids.len(),
            path.file_name().unwrap_or_default().display(),
            args.window,
            "",
            "perplexity",
            "",
            "same top-1",
            "seconds"
        ),
    )?;
    let fusion = Fusion {
        quant_linear: !args.weights_only,
        activations: args.activations,
        ..Fusion::all()
    };
    let mut reference: Option<Score> = None;
    for format in &formats {
        let began = Instant::now();
        let (mut model, remark) = format.load(&located.files, fusion)?;
        let score = measure(model.as_mut(), &ids, args.window)?;
        drop(model);
        if args.same_weights && reference.is_some() {
            let exact = Fusion {
                quant_linear: false,
                ..fusion
            };
            let (mut model, _) = format.load(&located.files, exact)?;
            reference = Some(measure(model.as_mut(), &ids, args.window)?);
        }
        let seconds = began.elapsed().as_secs();
        let line = line(&format.name, &score, reference.as_ref(), seconds, &remark);
        report::write_text(&mut std::io::stdout().lock(), &line)?;
        reference.get_or_insert(score);
    }
    Ok(())
}

/// A line of the table; the reference is its own.
fn line(
    name: &str,
    score: &Score,
    reference: Option<&Score>,
    seconds: u64,
    remark: &str,
) -> String {
    let reference = reference.unwrap_or(score);
    let pairs = score.top.iter().zip(&reference.top);
    let same = pairs.filter(|(a, b)| a == b).count() as f64 / score.top.len() as f64;
    let change = 100. * (score.perplexity / reference.perplexity - 1.);
    format!(
        "{name:<12} {:>10.4} {change:>+8.2}% {:>10.2}% {seconds:>9}{remark}\n",
        score.perplexity,
        100. * same
    )
}

impl Format {
    fn read(name: &str) -> Result<Self> {
        let dense = |dtype| Self {
            name: name.to_owned(),
            dtype,
            quantization: None,
            balanced: false,
            files: None,
        };
        match name {
            "f32" => return Ok(dense(DType::F32)),
            "bf16" => return Ok(dense(DType::BF16)),
            _ if Path::new(name).is_dir() => {
                let located = source::locate(Some(name), None, &SourceOptions::from_env())?;
                return Ok(Self {
                    name: located.name,
                    files: Some(located.files),
                    ..dense(DType::F32)
                });
            }
            _ => {}
        }
        let (format, balanced) = match name.strip_suffix("+balance") {
            Some(format) => (format, true),
            None => (name, false),
        };
        let quantization: Quantization = match format.parse() {
            Ok(quantization) => quantization,
            Err(_) => {
                bail!(
                    "--formats: `{name}` is not f32, bf16, a format that --quantize takes or a folder"
                )
            }
        };
        Ok(Self {
            quantization: Some(quantization),
            balanced,
            ..dense(DType::F32)
        })
    }

    /// Loads the model. Where its rows do not divide by the group or block, only the MLP's last matrix,
    /// which is wider, takes this format; the remark says what the others take.
    fn load(&self, files: &ModelFiles, fusion: Fusion) -> Result<(Box<dyn TextModel>, String)> {
        let load = |recipe: Option<&Recipe>| {
            let weights = weights::open(self.files.as_ref().unwrap_or(files))?;
            fused::load(weights, Some(self.dtype), &Device::Cpu, fusion, recipe)
        };
        let new = |quantization| match self.balanced {
            true => Recipe::new(quantization).with_balance(),
            false => Recipe::new(quantization),
        };
        let recipe = self.quantization.map(new);
        match (load(recipe.as_ref()), self.quantization.and_then(narrower)) {
            (Err(_), Some(other)) => {
                let recipe = new(other).with("*.down_proj.weight", self.quantization);
                let remark = format!("  down_proj; the other matrices {other}");
                Ok((load(Some(&recipe))?, remark))
            }
            (result, _) => Ok((result?, String::new())),
        }
    }
}

/// What stands in for a format whose groups or blocks are too wide; for GGUF types as llama.cpp does it.
fn narrower(quantization: Quantization) -> Option<Quantization> {
    match quantization {
        Quantization::Int4 {
            group: 128,
            zero_point,
        } => Some(Quantization::Int4 {
            group: 64,
            zero_point,
        }),
        Quantization::Ternary {
            scale: TernaryScale::Group(128),
        } => Some(Quantization::Ternary {
            scale: TernaryScale::Group(64),
        }),
        Quantization::Gguf(dtype) => Some(fallback(dtype))
            .filter(|other| *other != dtype)
            .map(Quantization::Gguf),
        _ => None,
    }
}

/// Reads the text window by window.
fn measure(model: &mut dyn TextModel, ids: &[u32], window: usize) -> Result<Score> {
    let (mut sum, mut top) = (0f64, Vec::with_capacity(ids.len()));
    let mut predicted = 0;
    for ids in ids.chunks(window) {
        let input = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
        let (_, logits) = model
            .hidden_states(&input)?
            .context("the model does not show its logits")?;
        let vocab = logits.dim(2)?;
        let logits = logits.flatten_all()?.to_vec1::<f32>()?;
        // For each position the loss of the next token and the likeliest one.
        let mut found = vec![(0f64, 0u32); ids.len()];
        pool::for_rows(&mut found, 1, 1, |first, found| {
            for (i, found) in (first..).zip(found) {
                let row = &logits[i * vocab..][..vocab];
                *found = position(row, ids.get(i + 1).copied());
            }
        });
        for (loss, best) in found {
            sum += loss;
            top.push(best);
        }
        predicted += ids.len() - 1;
    }
    ensure!(sum.is_finite(), "the model's logits are not finite");
    Ok(Score {
        perplexity: (sum / predicted as f64).exp(),
        top,
    })
}

/// The negative logarithm of the probability of `next`, 0 without one, and the likeliest token.
fn position(logits: &[f32], next: Option<u32>) -> (f64, u32) {
    let (mut best, mut most) = (0, f32::NEG_INFINITY);
    for (id, logit) in logits.iter().enumerate() {
        if *logit > most {
            (best, most) = (id, *logit);
        }
    }
    let loss = next.map_or(0., |next| {
        let shifted = |logit: f32| f64::from(logit) - f64::from(most);
        let total: f64 = logits.iter().map(|l| shifted(*l).exp()).sum();
        total.ln() - shifted(logits[next as usize])
    });
    (loss, best as u32)
}
