//! The command line that the examples share. Flags follow candle's own examples; every value is
//! checked here, so that nothing is downloaded or loaded for a run that cannot succeed.

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;

use super::gpu;
use super::quantize::QuantizeArgs;
use super::report::one_line;
use anyhow::{Result, anyhow};
use candle_core::{DType, Device};
use candle_fused::ops::SamplingParams;
use candle_fused::quant::KvCacheType;
use candle_fused::{ActivationBits, Fusion};
use clap::{Args as ClapArgs, Parser, ValueEnum};

/// Generates text with a language model whose layers run as fused ops, or as plain candle.
#[derive(Parser, Clone, Debug)]
#[command(version, max_term_width = 100)]
pub struct Args {
    /// Text to continue; with --chat, what to say to the model. Without it the example asks a
    /// question of its own.
    #[arg(long, value_parser = prompt)]
    pub prompt: Option<String>,

    /// Apply the chat template of the tokenizer or GGUF file; without --prompt, talk to the model
    /// line by line.
    #[arg(long)]
    pub chat: bool,

    /// Run plain candle.
    #[arg(long, conflicts_with = "fusion")]
    pub stock: bool,

    /// Write a trace of the run that chrome://tracing and ui.perfetto.dev read.
    #[arg(long)]
    pub tracing: bool,

    /// On a GPU, show what each kernel of a prefill and each part of a decode step takes, and write
    /// the timeline to candle-fused-profile.json.
    #[arg(long, conflicts_with_all = ["stock", "compare"])]
    pub profile: bool,

    /// Run plain candle and the fused model on the same prompt, greedily and in turns, and compare
    /// tokens, hidden states, speed and memory.
    #[arg(long, conflicts_with = "stock")]
    pub compare: bool,

    /// One side's share of a comparison, run in a process of its own.
    #[arg(long, value_name = "SIDE", hide = true, requires = "compare")]
    pub probe: Option<Side>,

    /// Write what --compare finds to FILE too.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,

    #[command(flatten)]
    pub model: ModelArgs,

    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// The two sides of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Side {
    Stock,
    Settings,
    Fused,
}

/// Which model, where and how it runs.
#[derive(ClapArgs, Clone, Debug, Default)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// A GGUF file, a folder with config.json, tokenizer.json and safetensors, or the id of a model
    /// on the Hugging Face hub.
    #[arg(long)]
    pub model: Option<String>,

    /// Branch, tag or commit of the model on the hub [default: main].
    #[arg(long, value_parser = non_empty)]
    pub revision: Option<String>,

    /// Run on the CPU even if there is a GPU.
    #[arg(long)]
    pub cpu: bool,

    /// Compute in f32, f16 or bf16 [default: quantized weights as they are, others as stored].
    #[arg(long, value_parser = dtype)]
    pub dtype: Option<DType>,

    /// Keep the blocks of a GGUF file, and compute with activations in f32, f16 or bf16 [default: f32].
    /// 16 bits are faster on a GPU for prompts and for several sequences.
    #[arg(long, value_name = "DTYPE", value_parser = dtype, conflicts_with_all = ["dtype", "quantize", "mmap"])]
    pub compute_dtype: Option<DType>,

    /// Leave the blocks of a GGUF file in memory that the file is mapped to, instead of repacking
    /// them: starts at once and needs less memory, but generates more slowly. On the CPU only.
    #[arg(long, conflicts_with_all = ["dtype", "quantize"])]
    pub mmap: bool,

    /// The fused ops to use: names joined by commas, `all` or `none` [default: all].
    #[arg(long, value_name = "LIST", value_parser = fusion)]
    pub fusion: Option<Fusion>,

    /// Bits of activations in products with quantized weights: 8, 16, or auto, which is 16 up to
    /// 64 tokens at once and 8 for longer prompts. 16 bits answer as f32 does, 8 are faster.
    #[arg(long, value_name = "BITS", default_value_t, value_parser = activations)]
    pub activations: ActivationBits,

    /// What keys and values are kept in: auto (as the model has them), bf16, or 8 bits, which take
    /// half the memory: fp8 or int8.
    #[arg(long, value_name = "TYPE", default_value_t, value_parser = kv_cache)]
    pub kv_cache: KvCacheType,

    /// On a GPU, launch every kernel of a step instead of replaying a recorded CUDA graph.
    #[arg(long)]
    pub no_graph: bool,

    /// CPU threads [default: all that this process may use].
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = threads)]
    pub threads: Option<usize>,

    #[command(flatten)]
    pub quantize: QuantizeArgs,
}

/// How the next token is chosen, and how many.
#[derive(ClapArgs, Clone, Debug)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Divides the logits before sampling; 0 always takes the likeliest token [default: 0, which
    /// serves small models best and says the same every time; with --top-p or --top-k 0.8].
    #[arg(long, allow_negative_numbers = true, value_parser = temperature)]
    pub temperature: Option<f64>,

    /// Sample from the likeliest tokens whose probabilities add up to this.
    #[arg(long, allow_negative_numbers = true, value_parser = top_p)]
    pub top_p: Option<f64>,

    /// Sample from this many of the likeliest tokens.
    #[arg(long, allow_negative_numbers = true, value_parser = at_least_one)]
    pub top_k: Option<usize>,

    /// Seed of the sampling.
    #[arg(long, default_value_t = 299792458)]
    pub seed: u64,

    /// The most tokens to generate.
    #[arg(short = 'n', long, default_value_t = 200, allow_negative_numbers = true, value_parser = at_least_one)]
    pub sample_len: usize,

    /// Divides the logits of tokens seen lately, those of the question among them; 1 does not.
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true, value_parser = repeat_penalty)]
    pub repeat_penalty: f32,

    /// How many of the last tokens the penalty looks at.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub repeat_last_n: usize,
}

impl SamplingArgs {
    /// How to sample, on whatever device.
    pub fn params(&self) -> SamplingParams {
        let sampled = self.top_k.is_some() || self.top_p.is_some();
        let temperature = self.temperature.unwrap_or(if sampled { 0.8 } else { 0.0 });
        SamplingParams {
            // What candle takes for 0 as well.
            temperature: if temperature < 1e-7 { 0. } else { temperature },
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: None,
            repeat_penalty: self.repeat_penalty,
            repeat_last_n: self.repeat_last_n,
            seed: self.seed,
        }
    }
}

/// Reads a command line; `default_model` is for `--help`. Asked for help or the version, prints it
/// and ends the process; anything wrong is an error of one line.
pub fn parse<P: Parser>(
    arguments: impl IntoIterator<Item = OsString>,
    default_model: &str,
) -> Result<P> {
    let command = P::command().mut_arg("model", |arg| {
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        arg.help(format!("{help} [default: {default_model}]"))
    });
    let matches = command.try_get_matches_from(arguments);
    let parsed = matches.and_then(|mut matches| P::from_arg_matches_mut(&mut matches));
    parsed.map_err(|error| {
        if !error.use_stderr() {
            error.exit();
        }
        let text = error.to_string();
        let what = text.split("\n\n").next().unwrap_or_default();
        let what = what.split_whitespace().collect::<Vec<_>>().join(" ");
        anyhow!(
            "{}; --help lists the options",
            what.trim_start_matches("error: ").trim_end_matches('.')
        )
    })
}

impl ModelArgs {
    /// The fused ops to use, and the bits of activations.
    pub fn fusion(&self) -> Fusion {
        Fusion {
            activations: self.activations,
            ..self.fusion.unwrap_or_default()
        }
    }

    /// The device to run on: the first GPU, if this build can use one and one is there, unless `--cpu`
    /// is given.
    pub fn device(&self) -> Result<Device> {
        if self.cpu || !gpu::is_present() {
            return Ok(Device::Cpu);
        }
        Device::new_cuda(0)
            .map_err(|error| anyhow!("cannot use the GPU ({error}); --cpu does without"))
    }
}

/// Makes fused ops and plain candle use `threads` threads. Has to come before any of them starts.
pub fn set_threads(threads: Option<usize>) {
    let Some(threads) = threads else { return };
    candle_fused::cpu::pool::set_threads(threads);
    // SAFETY: called at the start of main, when no other thread exists that could read the
    // environment. candle takes its number of threads from this variable only.
    unsafe { std::env::set_var("RAYON_NUM_THREADS", threads.to_string()) };
}

fn non_empty(text: &str) -> Result<String, String> {
    if text.trim().is_empty() {
        Err("it is empty".into())
    } else {
        Ok(text.to_owned())
    }
}

/// Text that is not empty.
pub fn prompt(text: &str) -> Result<String, String> {
    if text.is_empty() {
        Err("the prompt is empty; give it some text".into())
    } else {
        Ok(text.to_owned())
    }
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| "not a number".to_owned())
}

fn temperature(text: &str) -> Result<f64, String> {
    let value = number(text)?;
    if value >= 0.0 && f64::is_finite(value) {
        Ok(value)
    } else {
        Err("must be 0 or more".into())
    }
}

fn top_p(text: &str) -> Result<f64, String> {
    let value = number(text)?;
    if value > 0.0 && value <= 1.0 {
        Ok(value)
    } else {
        Err("must be above 0 and at most 1".into())
    }
}

fn repeat_penalty(text: &str) -> Result<f32, String> {
    let value = number(text)?;
    if value > 0.0 && f32::is_finite(value) {
        Ok(value)
    } else {
        Err("must be above 0; 1 is no penalty".into())
    }
}

/// A whole number of 1 or more.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse::<i128>() {
        Ok(value) if value < 1 => Err("must be at least 1".into()),
        Ok(value) => usize::try_from(value).map_err(|_| "too large".to_owned()),
        Err(_) => Err("not a whole number".into()),
    }
}

/// More threads than any machine has cores end in a failure to start them.
pub fn threads(text: &str) -> Result<usize, String> {
    match at_least_one(text)? {
        value if value > 1024 => Err("must be at most 1024".into()),
        value => Ok(value),
    }
}

pub fn dtype(text: &str) -> Result<DType, String> {
    match text {
        "f32" => Ok(DType::F32),
        "f16" => Ok(DType::F16),
        "bf16" => Ok(DType::BF16),
        _ => Err("must be f32, f16 or bf16".into()),
    }
}

fn fusion(text: &str) -> Result<Fusion, String> {
    parsed(text)
}

/// Reads the bits of activations.
pub fn activations(text: &str) -> Result<ActivationBits, String> {
    parsed(text)
}

/// Reads what keys and values are kept in.
pub fn kv_cache(text: &str) -> Result<KvCacheType, String> {
    parsed(text)
}

fn parsed<T: FromStr<Err = candle_core::Error>>(text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|error| one_line(&anyhow::Error::new::<candle_core::Error>(error)))
}
