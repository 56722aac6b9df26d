//! What a quantized cache of keys and values costs: perplexity of a text that is read token by token, and needles that
//! are found in a long one.
//!
//! ```text
//! cargo run --release --example kv_cache
//! cargo run --release --example kv_cache -- --types bf16,fp8,int8 --tokens 4096 --needles 0
//! ```
//! Every token but the first of a window is taken in alone, so that it sees what the cache has kept of all before it.
//! A needle is a sentence with a number, somewhere in a text; behind the text the sentence is begun again, and the model
//! has found the needle if it goes on with the number.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, bail};
use candle_fused::Fusion;
use candle_fused::quant::KvCacheType;
use candle_fused::serving::{Constraint, Options, Request};
use clap::Parser;

use common::generate::TextModel;
use common::source::{self, DEFAULT_MODEL, SourceOptions};
use common::tokenizer::Text;
use common::{args, fused, report, weights};

/// Measures what a quantized cache costs.
#[derive(Parser, Debug)]
#[command(version, max_term_width = 100)]
struct Args {
    /// A GGUF file, a folder with config.json, tokenizer.json and safetensors, or the id of a model
    /// on the Hugging Face hub.
    #[arg(long)]
    model: Option<String>,

    /// The text [default: benches/text/around-the-world.txt].
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,

    /// Types of caches, joined by commas; the first is what the others are compared with.
    #[arg(long, value_name = "LIST", default_value = "auto,bf16,fp8,int8")]
    types: String,

    /// Compute in f32, f16 or bf16.
    #[arg(long, default_value = "f32", value_parser = args::dtype)]
    dtype: DType,

    /// Tokens to read at most, from the beginning of the text.
    #[arg(long, default_value_t = 8192, allow_negative_numbers = true, value_parser = args::at_least_one)]
    tokens: usize,

    /// Tokens of a window.
    #[arg(long, default_value_t = 512, allow_negative_numbers = true, value_parser = args::at_least_one)]
    window: usize,

    /// Needles to look for; 0 for none.
    #[arg(long, default_value_t = 30)]
    needles: usize,

    /// Tokens of the text that a needle is in.
    #[arg(long, default_value_t = 1800, allow_negative_numbers = true, value_parser = args::at_least_one)]
    haystack: usize,

    /// CPU threads [default: all that this process may use].
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = args::threads)]
    threads: Option<usize>,
}

fn main() -> ExitCode {
    report::run_main(run)
}

fn run() -> Result<()> {
    let args: Args = args::parse(std::env::args_os(), DEFAULT_MODEL)?;
    args::set_threads(args.threads);
    ensure!(args.window > 1, "--window is 1, expected 2 or more");
    let types = args.types.split(',').map(str::parse);
    let types = types.collect::<candle_core::Result<Vec<KvCacheType>>>()?;
    let located = source::locate(args.model.as_deref(), None, &SourceOptions::from_env())?;
    let path = args.text.clone().unwrap_or_else(|| {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../benches/text/around-the-world.txt")
    });
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("cannot read {}", path.display()))?;
    let weights = weights::open(&located.files)?;
    let tokenizer = weights.text()?;
    let device = Device::Cpu;
    let model = fused::load(weights, Some(args.dtype), &device, Fusion::all(), None)?;
    let ids = tokenizer.encode_prompt(&text)?;
    let windows: Vec<_> = ids[..ids.len().min(args.tokens)]
        .chunks(args.window)
        .filter(|window| window.len() > 1)
        .collect();
    ensure!(!windows.is_empty(), "--tokens {} is too few", args.tokens);
    let needles = Needles::new(&tokenizer, &ids, args.needles, args.haystack)?;
    report::say(format_args!(
        "{} in {}, {} windows of {} tokens, {} needles in {} tokens\n\n{:<8} {:>10} {:>9} {:>9} {:>9}",
        located.name,
        args.dtype.as_str(),
        windows.len(),
        args.window,
        args.needles,
        args.haystack,
        "",
        "perplexity",
        "",
        "needles",
        "seconds",
    ));
    let mut reference = None;
    for kv_cache in types {
        let began = Instant::now();
        let perplexity = perplexity(model.as_ref(), &windows, kv_cache)?;
        let found = needles.found(model.as_ref(), kv_cache)?;
        let change = 100. * (perplexity / *reference.get_or_insert(perplexity) - 1.);
        let seconds = began.elapsed().as_secs();
        report::say(format_args!(
            "{:<8} {perplexity:>10.4} {change:>+8.3}% {found:>9} {seconds:>9}",
            kv_cache.to_string()
        ));
    }
    Ok(())
}

/// Lets a request have the tokens of a text and no others.
struct Dictation {
    /// The last first.
    left: Vec<u32>,
}

impl Constraint for Dictation {
    fn mask(&mut self, mask: &mut [u32]) -> candle_core::Result<()> {
        let Some(next) = self.left.last() else {
            bail!("the text has ended");
        };
        mask[*next as usize / 32] |= 1 << (next % 32);
        Ok(())
    }

    fn accept(&mut self, _: u32) -> candle_core::Result<bool> {
        self.left.pop();
        Ok(self.left.is_empty())
    }
}

/// exp of the mean negative logarithm of each next token's probability.
fn perplexity(model: &dyn TextModel, windows: &[&[u32]], kv_cache: KvCacheType) -> Result<f64> {
    let longest = windows.iter().map(|window| window.len()).max();
    let mut engine = model.engine(&Options {
        sequences: windows.len().min(16),
        positions: longest,
        kv_cache,
        ..Default::default()
    })?;
    for window in windows {
        let request = Request {
            max_tokens: window.len() - 1,
            logprobs: Some(0),
            ..Request::new(&window[..1])
        };
        let left = window[1..].iter().rev().copied().collect();
        engine.submit_constrained(request, Box::new(Dictation { left }))?;
    }
    let (mut sum, mut count) = (0f64, 0);
    while !engine.is_idle() {
        for output in engine.step()? {
            let logprobs = output.logprobs.context("a token without its logarithm")?;
            sum -= f64::from(logprobs.logprob);
            count += 1;
        }
    }
    let expected: usize = windows.iter().map(|window| window.len() - 1).sum();
    ensure!(count == expected, "{count} tokens, expected {expected}");
    ensure!(sum.is_finite(), "the model's logits are not finite");
    Ok((sum / f64::from(count as u32)).exp())
}

/// Texts with a needle each, and what the model has to say.
struct Needles {
    prompts: Vec<(Vec<u32>, Vec<u32>)>,
}

/// Places of the needles' sentences.
const PLACES: [&str; 6] = ["Lisbon", "Oslo", "Cairo", "Lima", "Kyoto", "Vienna"];

impl Needles {
    /// `count` needles, from the beginning of the text to its end.
    fn new(tokenizer: &Text, ids: &[u32], count: usize, tokens: usize) -> Result<Self> {
        let prompt = |i: usize| -> Result<_> {
            let place = PLACES[i % PLACES.len()];
            let sentence = format!(" The secret number of {place} is");
            let number = format!(" {}", 1000 + (i * 7919 + 4817) % 9000);
            let begun = tokenizer.encode_chat(&sentence)?;
            let number = tokenizer.encode_chat(&number)?;
            let needle = [&begun[..], &number, &tokenizer.encode_chat(".\n")?].concat();
            let room = tokens.checked_sub(needle.len() + begun.len());
            let room = room.filter(|room| *room <= ids.len());
            let room =
                room.with_context(|| format!("--haystack {tokens}: the text has {}", ids.len()))?;
            let before = room * (2 * i + 1) / (2 * count);
            Ok((
                [&ids[..before], &needle, &ids[before..room], &begun].concat(),
                number,
            ))
        };
        Ok(Self {
            prompts: (0..count).map(prompt).collect::<Result<_>>()?,
        })
    }

    /// How many the model finds.
    fn found(&self, model: &dyn TextModel, kv_cache: KvCacheType) -> Result<usize> {
        if self.prompts.is_empty() {
            return Ok(0);
        }
        let mut engine = model.engine(&Options {
            sequences: 4,
            kv_cache,
            ..Default::default()
        })?;
        let mut wanted = BTreeMap::new();
        for (prompt, number) in &self.prompts {
            let request = Request {
                max_tokens: number.len(),
                ..Request::new(&prompt[..])
            };
            wanted.insert(engine.submit(request)?, (number, Vec::new()));
        }
        while !engine.is_idle() {
            for output in engine.step()? {
                if let Some((_, said)) = wanted.get_mut(&output.id) {
                    said.extend(output.token);
                }
            }
        }
        Ok(wanted
            .values()
            .filter(|(number, said)| *said == **number)
            .count())
    }
}
