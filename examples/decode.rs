//! How fast a model's shape decodes: random weights, so that nothing is downloaded.
//!
//! ```text
//! cargo run --release --features cuda --example decode -- --shape llama-3.2-1b
//! ```

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use candle_fused::generation::{Generation, Options};
use candle_fused::models::llama::{Config, Llama};
use candle_nn::VarBuilder;
use clap::{Parser, ValueEnum};
use std::collections::HashMap;

#[allow(
    dead_code,
    reason = "the examples share one module, and this one takes little of it"
)]
mod common;

use common::comparison::{median, percentile};
use common::{gpu, profile, report};

/// Decodes with random weights of a model's shape and reports the time of a token.
#[derive(Parser, Debug)]
struct Args {
    /// The shape.
    #[arg(long, value_enum, default_value_t = Shape::Smollm2)]
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

/// Shapes of the llama architecture.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Shape {
    #[value(name = "smollm2-135m")]
    Smollm2,
    #[value(name = "llama-3.2-1b")]
    Llama1b,
    #[value(name = "llama-3-8b")]
    Llama8b,
}

impl Shape {
    fn config(self) -> Config {
        let (hidden, inner, vocab, layers, heads, kv_heads, tied, theta) = match self {
            Shape::Smollm2 => (576, 1536, 49_152, 30, 9, 3, true, 1e5),
            Shape::Llama1b => (2048, 8192, 128_256, 16, 32, 8, true, 5e5),
            Shape::Llama8b => (4096, 14_336, 128_256, 32, 32, 8, false, 5e5),
        };
        Config {
            hidden_size: hidden,
            intermediate_size: inner,
            vocab_size: vocab,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            use_flash_attn: false,
            rms_norm_eps: 1e-5,
            rope_theta: theta,
            bos_token_id: None,
            eos_token_id: None,
            rope_scaling: None,
            max_position_embeddings: 8192,
            tie_word_embeddings: tied,
        }
    }
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
    let config = args.shape.config();
    let tensors = weights(&config, args.dtype, &device)?;
    let bytes: usize = tensors
        .iter()
        .filter(|(name, _)| config.tie_word_embeddings || !name.contains("embed_tokens"))
        .map(|(_, t)| t.elem_count() * t.dtype().size_in_bytes())
        .sum();
    let vb = VarBuilder::from_tensors(tensors, args.dtype, &device);
    let model = Llama::load(vb, &config)?;
    let options = Options {
        sequences: args.sequences,
        positions: args.prompt + args.sample_len,
        graph: !args.no_graph,
        ..Default::default()
    };
    let mut generation = Generation::new(&model, &options)?;
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
        "{:?} {:?} on {}: {} sequences, positions {}-{}",
        args.shape,
        args.dtype,
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
    breakdown(&mut generation, &device, bytes, rate).context("the breakdown")
}

/// Where a step's time goes, against what the memory allows.
fn breakdown(generation: &mut Generation, device: &Device, bytes: usize, rate: f64) -> Result<()> {
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

/// Normal weights, small enough that activations stay in range.
fn weights(config: &Config, dtype: DType, device: &Device) -> Result<HashMap<String, Tensor>> {
    let mut tensors = HashMap::new();
    let mut add = |name: String, dims: &[usize]| -> Result<()> {
        let tensor = match dims {
            [_] => Tensor::ones(dims, dtype, device)?,
            _ => Tensor::randn(0f32, 0.02, dims, device)?.to_dtype(dtype)?,
        };
        tensors.insert(name, tensor);
        Ok(())
    };
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let kv = hidden / config.num_attention_heads * config.num_key_value_heads;
    add(
        "model.embed_tokens.weight".into(),
        &[config.vocab_size, hidden],
    )?;
    add("model.norm.weight".into(), &[hidden])?;
    if !config.tie_word_embeddings {
        add("lm_head.weight".into(), &[config.vocab_size, hidden])?;
    }
    for layer in 0..config.num_hidden_layers {
        for (part, dims) in [
            ("self_attn.q_proj", &[hidden, hidden][..]),
            ("self_attn.k_proj", &[kv, hidden]),
            ("self_attn.v_proj", &[kv, hidden]),
            ("self_attn.o_proj", &[hidden, hidden]),
            ("mlp.gate_proj", &[inner, hidden]),
            ("mlp.up_proj", &[inner, hidden]),
            ("mlp.down_proj", &[hidden, inner]),
            ("input_layernorm", &[hidden]),
            ("post_attention_layernorm", &[hidden]),
        ] {
            add(format!("model.layers.{layer}.{part}.weight"), dims)?;
        }
    }
    Ok(tensors)
}
