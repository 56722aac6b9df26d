//! What an existing candle model gains by adopting the crate, in two steps: single ops, then layers.
//!
//! ```text
//! cargo run --release --example adopt
//! ```
//!
//! The model stands in `adopt/plain.rs`, after the first step in `adopt/ops.rs`, after the second in
//! `adopt/layers.rs`. All three get the same random weights and have to give the same output.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use candle_fused::trace;
use clap::Parser;
use common::distance::Distance;

#[path = "adopt/mod.rs"]
mod adopt;

use adopt::{Config, Model, layers, likeliest, ops, plain, weights};
use common::args::{self, ModelArgs, set_threads};
use common::comparison::median;
use common::{gpu, report};

/// Runs one model in three forms, in turns: plain candle, with fused ops, with fused layers.
#[derive(Parser, Debug)]
struct Args {
    /// Run on the CPU even if there is a GPU.
    #[arg(long)]
    cpu: bool,
    /// f32, f16 or bf16 [default: f32, then bf16].
    #[arg(long, value_parser = args::dtype)]
    dtype: Option<DType>,
    /// Threads on the CPU [default: all cores].
    #[arg(long, value_parser = args::threads)]
    threads: Option<usize>,
    /// Width of the model, a multiple of 64.
    #[arg(long, default_value_t = 512)]
    hidden: usize,
    /// Layers.
    #[arg(long, default_value_t = 8)]
    layers: usize,
    /// Tokens of the prompt.
    #[arg(long, default_value_t = 256)]
    prompt: usize,
    /// Tokens to generate.
    #[arg(short = 'n', long, default_value_t = 32)]
    sample_len: usize,
    /// Rounds in which every form takes a turn.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
}

impl Args {
    /// A Llama of that width, with heads of 64 and four query heads for each key head where they
    /// divide.
    fn config(&self) -> Result<Config> {
        let heads = self.hidden / 64;
        ensure!(
            heads > 0 && self.hidden.is_multiple_of(64),
            "--hidden is {}, expected a multiple of 64",
            self.hidden
        );
        for (name, value) in [
            ("--layers", self.layers),
            ("--prompt", self.prompt),
            ("--rounds", self.rounds),
        ] {
            ensure!(value > 0, "{name} is 0, expected at least 1");
        }
        ensure!(
            self.sample_len > 1,
            "--sample-len is {}, expected at least 2",
            self.sample_len
        );
        Ok(Config {
            vocab: 16_384,
            hidden: self.hidden,
            inner: self.hidden * 11 / 4,
            layers: self.layers,
            heads,
            kv_heads: if heads.is_multiple_of(4) {
                heads / 4
            } else {
                heads
            },
            eps: 1e-5,
            theta: 1e4,
            positions: self.prompt + self.sample_len,
        })
    }

    fn dtypes(&self) -> Result<Vec<DType>> {
        match self.dtype {
            None => Ok(vec![DType::F32, DType::BF16]),
            Some(dtype @ (DType::F32 | DType::F16 | DType::BF16)) => Ok(vec![dtype]),
            Some(other) => bail!("--dtype is {}, expected f32, f16 or bf16", other.as_str()),
        }
    }
}

/// What a greedy generation took.
struct Run {
    prefill: Duration,
    /// One for each token after the first.
    steps: Vec<Duration>,
}

fn main() -> ExitCode {
    report::run_main(run)
}

fn run() -> Result<()> {
    let args = Args::parse();
    let config = args.config()?;
    set_threads(args.threads);
    let choice = ModelArgs {
        cpu: args.cpu,
        ..Default::default()
    };
    let device = choice.device()?;
    gpu::tune(&device, true)?;
    let prompt: Vec<u32> = (0..args.prompt as u32)
        .map(|i| i * 37 % config.vocab as u32)
        .collect();
    println!(
        "{} wide, {} layers on {}, {} threads: prompt of {}, {} tokens, medians of {} rounds",
        config.hidden,
        config.layers,
        gpu::name(&device),
        candle_fused::cpu::pool::threads(),
        args.prompt,
        args.sample_len,
        args.rounds
    );
    let expected = expected(&args, &config, &prompt, &device)?;
    for dtype in args.dtypes()? {
        compare(&args, &config, dtype, &prompt, &expected, &device)?;
    }
    Ok(())
}

/// What plain candle makes of the prompt in f32.
struct Expected {
    tokens: Vec<u32>,
    /// Behind the prompt and behind each of the tokens but the last.
    logits: Vec<Tensor>,
}

fn expected(args: &Args, config: &Config, prompt: &[u32], device: &Device) -> Result<Expected> {
    let vb = weights(config, DType::F32, device)?;
    let mut model = plain::Model::new(config, vb)?;
    let (mut tokens, mut logits) = (Vec::new(), Vec::new());
    let mut ids = Tensor::new(prompt, device)?.unsqueeze(0)?;
    let mut position = 0;
    while tokens.len() < args.sample_len {
        let row = model.forward(&ids, position)?;
        position += ids.dim(1)?;
        let token = likeliest(&row)?;
        ids = Tensor::new(&[[token]], device)?;
        tokens.push(token);
        logits.push(row);
    }
    Ok(Expected { tokens, logits })
}

/// Runs the three forms in turns and prints what each is worth.
fn compare(
    args: &Args,
    config: &Config,
    dtype: DType,
    prompt: &[u32],
    expected: &Expected,
    device: &Device,
) -> Result<()> {
    let vb = weights(config, dtype, device)?;
    let mut forms: [(&str, Box<dyn Model>); 3] = [
        (
            "plain candle",
            Box::new(plain::Model::new(config, vb.clone())?),
        ),
        (
            "step 1: ops",
            Box::new(ops::Model::new(config, vb.clone())?),
        ),
        ("step 2: layers", Box::new(layers::Model::new(config, vb)?)),
    ];
    let mut runs: [Vec<Run>; 3] = Default::default();
    for round in 0..args.rounds {
        let name = dtype.as_str();
        report::say(format_args!(
            "{name}, round {} of {}",
            round + 1,
            args.rounds
        ));
        for ((_, model), runs) in forms.iter_mut().zip(&mut runs) {
            runs.push(generate(model.as_mut(), prompt, args.sample_len, device)?);
        }
    }
    let decode = |runs: &[Run]| {
        let steps = runs.iter().flat_map(|run| &run.steps);
        1. / median(steps.map(Duration::as_secs_f64).collect())
    };
    let mut table = report::Table::default();
    for (i, (name, model)) in forms.iter_mut().enumerate() {
        let prefill = runs[i].iter().map(|run| run.prefill.as_secs_f64());
        let gain = match i {
            0 => String::new(),
            _ => format!("{:.2}x, ", decode(&runs[i]) / decode(&runs[0])),
        };
        let prefill = report::seconds(Duration::from_secs_f64(median(prefill.collect())));
        let output = deviation(model.as_mut(), prompt, expected, device)?;
        table.row(
            name,
            format!("{:.1} tok/s", decode(&runs[i])),
            format!("{gain}prompt in {prefill}; {output}"),
        );
    }
    let (_, layers) = &mut forms[2];
    let ids = Tensor::new(&expected.tokens[..1], device)?.unsqueeze(0)?;
    let (result, calls) = trace::capture(|| layers.forward(&ids, prompt.len()));
    result?;
    println!("\n{}\n{table}", dtype.as_str());
    println!("\nfused calls of one token after step 2\n{calls}");
    Ok(())
}

/// Reads the prompt and chooses `count` tokens.
fn generate(model: &mut dyn Model, prompt: &[u32], count: usize, device: &Device) -> Result<Run> {
    model.clear();
    let begun = Instant::now();
    let ids = Tensor::new(prompt, device)?.unsqueeze(0)?;
    let mut token = likeliest(&model.forward(&ids, 0)?)?;
    let prefill = begun.elapsed();
    let mut steps = Vec::with_capacity(count);
    for i in 1..count {
        let begun = Instant::now();
        let ids = Tensor::new(&[[token]], device)?;
        token = likeliest(&model.forward(&ids, prompt.len() + i - 1)?)?;
        steps.push(begun.elapsed());
    }
    Ok(Run { prefill, steps })
}

/// How far the logits are from plain candle's in f32 when they follow the same tokens, and how many
/// of these tokens they would have chosen.
fn deviation(
    model: &mut dyn Model,
    prompt: &[u32],
    expected: &Expected,
    device: &Device,
) -> Result<String> {
    model.clear();
    let (mut largest, mut same) = (0f64, 0);
    let mut ids = Tensor::new(prompt, device)?.unsqueeze(0)?;
    let mut position = 0;
    for (token, logits) in expected.tokens.iter().zip(&expected.logits) {
        let got = model.forward(&ids, position)?;
        position += ids.dim(1)?;
        largest = largest.max(Distance::between(&got, logits)?.largest);
        same += usize::from(likeliest(&got)? == *token);
        ids = Tensor::new(&[[*token]], device)?;
    }
    let all = expected.tokens.len();
    Ok(format!(
        "logits within {largest:.1e} of plain f32, {same} of {all} tokens the same"
    ))
}
