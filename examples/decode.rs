//! How fast a model's shape decodes: random weights, so that nothing is downloaded.
//!
//! ```text
//! cargo run --release --features cuda --example decode -- --shape llama-3.2-1b
//! ```

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use candle_core::{DType, Device};
use candle_fused::Fusion;
use candle_fused::generation::{Generation, Options};
use clap::Parser;

#[allow(
    dead_code,
    reason = "the examples share one module, and this one takes little of it"
)]
mod common;

use common::comparison::{median, percentile};
use common::shapes::Shape;
use common::weights::Weights;
use common::{fused, gpu, profile, report};

/// Decodes with random weights of a model's shape and reports the time of a token.
#[derive(Parser, Debug)]
struct Args {
    /// The shape.
    #[arg(long, value_enum, default_value_t = Shape::SmolLm2)]
    shape: Shape,
    /// f32, f16 or bf16.
    #[arg(long, default_value = "bf16")]
    dtype: DType,
    /// Tokens of the prompt.
    #[arg(long, default_value_t = 128)]
    prompt: usize,
    /// Tokens to generate.
    #[arg(short = 'n', long, default_value_t = 512)]
    sample_len: usize,
    /// Sequences side by side.
    #[arg(long, default_value_t = 1)]
    sequences: usize,
    /// Launch every kernel of a step instead of replaying a recorded CUDA graph.
    #[arg(long)]
    no_graph: bool,
}

fn main() -> ExitCode {
    report::run_main(run)
}

fn run() -> Result<()> {
    let args = Args::parse();
    let device = match gpu::is_present() {
        true => Device::new_cuda(0)?,
        false => Device::Cpu,
    };
    gpu::tune(&device, true)?;
    let weights = Weights::Random(args.shape);
    let model = fused::load(weights, Some(args.dtype), &device, Fusion::all())?;
    let options = Options {
        sequences: args.sequences,
        positions: args.prompt + args.sample_len,
        graph: !args.no_graph,
        ..Default::default()
    };
    let mut generation = model.generation(&options)?;
    let prompt: Vec<u32> = (0..args.prompt as u32).map(|i| i * 37 % 40_000).collect();
    let mut prefill = Vec::new();
    for _ in 0..6 {
        generation.truncate(0, 0)?;
        let begun = Instant::now();
        generation.extend(0, &prompt)?;
        prefill.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    for index in 1..args.sequences {
        generation.extend(index, &prompt)?;
    }
    // The first step records the graph.
    generation.step()?;
    let mut steps = Vec::new();
    let begun = Instant::now();
    for _ in 2..args.sample_len {
        let step = Instant::now();
        generation.step()?;
        steps.push(step.elapsed().as_secs_f64() * 1e3);
    }
    let seconds = begun.elapsed().as_secs_f64();
    println!(
        "{} {} on {}: {} sequences, positions {}-{}",
        args.shape.name(),
        args.dtype.as_str(),
        gpu::name(&device),
        args.sequences,
        args.prompt,
        args.prompt + args.sample_len
    );
    println!(
        "prefill of {}: {:.3} ms (first {:.1} ms)",
        args.prompt,
        median(prefill[1..].to_vec()),
        prefill[0]
    );
    let rate = steps.len() as f64 / seconds;
    println!(
        "decode: {rate:.0} steps/s, {:.3} ms a step (p50 {:.3}, p99 {:.3}), {} kernels a step",
        1e3 / rate,
        median(steps.clone()),
        percentile(steps, 99.),
        generation.kernels_per_step()
    );
    if let Some(why) = generation.graph_refusal() {
        println!("no CUDA graph: {why}");
    }
    let bytes = model.bytes_per_step().unwrap_or(0);
    breakdown(&mut generation, &device, bytes, rate).context("the breakdown")
}

/// Where a step's time goes, against what the memory allows.
fn breakdown(generation: &mut Generation, device: &Device, bytes: u64, rate: f64) -> Result<()> {
    let Device::Cuda(cuda) = device else {
        return Ok(());
    };
    let bandwidth = candle_fused::cuda::profile::copy_bandwidth(cuda)?;
    println!(
        "weights {:.1} MB, copy bandwidth {:.2} TB/s: {:.1} % of weights / bandwidth",
        bytes as f64 / 1e6,
        bandwidth / 1e12,
        100. * rate * bytes as f64 / bandwidth
    );
    let lines = profile::lines(&generation.profile(20)?);
    print!("{}", profile::table("decode step", &lines, bandwidth));
    Ok(())
}
