//! What changing the import gives: one program with candle-transformers' models and with candle-fused's, in turns, and
//! with the feature `flash-attn` candle-transformers' over this repository's stand-in for candle-flash-attn.
//!
//! ```text
//! cargo run --release -- --model SmolLM2-135M-Instruct.Q4_1.gguf
//! ```
//! README.md says more.

mod compare;
mod side;

use anyhow::{Context, Result};
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Tensor};
use candle_fused::models::llama::dequantize_gguf;
use candle_nn::VarBuilder;
use clap::{Parser, ValueEnum};
use serde_json::{Value, json};
use side::{Model, Run, Side};
use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Candle's own.
mod stock {
    use super::*;
    use candle_transformers::models;

    include!("program.rs");
}

/// The same by import.
mod fused {
    use super::*;
    use candle_fused::models;

    include!("program.rs");
}

/// A program with candle-transformers' models and with candle-fused's.
#[derive(Parser)]
struct Args {
    /// A GGUF file of a Llama model.
    #[arg(long)]
    model: PathBuf,
    /// What the weights are used as.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "gguf,bf16")]
    form: Vec<Form>,
    /// Tokens that are generated.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..))]
    steps: u32,
    /// Times that each side generates them.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// The prompt's token ids; by default "Why is the sky blue?" in SmolLM2's form.
    #[arg(long, value_delimiter = ',', default_values_t = PROMPT)]
    prompt: Vec<u32>,
    /// The CPU although there is a GPU.
    #[arg(long)]
    cpu: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    /// The file's blocks, as candle's example `quantized` has them.
    Gguf,
    /// Numbers, as candle's example `llama` has them.
    Bf16,
    /// The same in f32.
    F32,
}

const PROMPT: [u32; 36] = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
    19712, 8182, 2, 198, 1, 4093, 198, 4898, 314, 260, 6376, 4461, 47, 2, 198, 1, 520, 9531, 198,
];

/// A dense checkpoint.
pub struct Checkpoint {
    /// As config.json has it.
    config: Value,
    tensors: HashMap<String, Tensor>,
    dtype: DType,
    device: Device,
}

impl Checkpoint {
    /// A GGUF file's, dequantized to `dtype`.
    fn new(path: &Path, dtype: DType, device: &Device) -> Result<Self> {
        let mut file = File::open(path).with_context(|| path.display().to_string())?;
        let content = Content::read(&mut file)?;
        let (config, tensors) = dequantize_gguf(&content, &mut file, dtype, device)?;
        let config = json!({
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.vocab_size,
            "num_hidden_layers": config.num_hidden_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": config.rope_theta,
            "max_position_embeddings": config.max_position_embeddings,
            "tie_word_embeddings": config.tie_word_embeddings,
        });
        Ok(Self {
            config,
            tensors,
            dtype,
            device: device.clone(),
        })
    }

    /// The same numbers in f32.
    fn in_f32(&self) -> Result<Self> {
        let widened = self
            .tensors
            .iter()
            .map(|(name, tensor)| Ok((name.clone(), tensor.to_dtype(DType::F32)?)));
        Ok(Self {
            config: self.config.clone(),
            tensors: widened.collect::<Result<_>>()?,
            dtype: DType::F32,
            device: self.device.clone(),
        })
    }
}

/// The sides of a form, and candle's own model of the same numbers in f32.
type Sides = (Vec<Side>, Box<dyn FnOnce() -> Result<Box<dyn Model>>>);

fn sides(args: &Args, form: Form, device: &Device) -> Result<Sides> {
    let dtype = match form {
        Form::Gguf => {
            let sides = vec![
                Side::new("stock", stock::gguf(&args.model, device)?),
                Side::new("import", fused::gguf(&args.model, device)?),
            ];
            let (path, device) = (args.model.clone(), device.clone());
            let exact = move || stock::dense(&Checkpoint::new(&path, DType::F32, &device)?, false);
            return Ok((sides, Box::new(exact)));
        }
        Form::Bf16 => DType::BF16,
        Form::F32 => DType::F32,
    };
    let checkpoint = Checkpoint::new(&args.model, dtype, device)?;
    let mut sides = vec![Side::new("stock", stock::dense(&checkpoint, false)?)];
    if cfg!(feature = "flash-attn") && device.is_cuda() {
        sides.push(Side::new(
            "stock, use_flash_attn",
            stock::dense(&checkpoint, true)?,
        ));
    }
    sides.push(Side::new("import", fused::dense(&checkpoint, false)?));
    let exact = move || stock::dense(&checkpoint.in_f32()?, false);
    Ok((sides, Box::new(exact)))
}

fn main() -> Result<()> {
    let args = Args::parse();
    let device = match args.cpu {
        true => Device::Cpu,
        false => Device::cuda_if_available(0)?,
    };
    for form in &args.form {
        println!(
            "{form:?} on {}: a prompt of {} tokens, then {} greedy ones, medians of {} rounds\n",
            if device.is_cuda() { "a GPU" } else { "the CPU" },
            args.prompt.len(),
            args.steps,
            args.rounds
        );
        let (mut sides, exact) = sides(&args, *form, &device)?;
        // The first round warms up: kernels are loaded, memory is allocated.
        for round in 0..=args.rounds as usize {
            let count = sides.len();
            for i in 0..count {
                let side = &mut sides[(i + round) % count];
                let model = &mut *side.model;
                let run = Run::of(model, &args.prompt, args.steps as usize, &device)?;
                if round > 0 {
                    side.runs.push(run);
                }
            }
        }
        compare::report(&mut sides, exact, &args.prompt, &device)?;
    }
    Ok(())
}
