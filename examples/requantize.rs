//! Writes a GGUF file again with its matrices in another block type.
//!
//! ```text
//! cargo run --release --example requantize -- SmolLM2-135M-Instruct.Q4_1.gguf q8_0 out.gguf
//! ```
//! The token embedding keeps its type, and so do matrices whose width does not divide by the block.
//! From weights that are quantized already this gives files to measure speed with, not quality.

use anyhow::{Context, Result, bail};
use candle_core::Device;
use candle_core::quantized::gguf_file::{self, Content};
use candle_core::quantized::{GgmlDType, QTensor};
use clap::Parser;
use std::fs::File;
use std::io::{BufReader, BufWriter};
use std::path::PathBuf;

/// Writes a GGUF file again with its matrices in another block type.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// The file to read.
    input: PathBuf,
    /// q4_0, q4_1, q5_0, q5_1, q8_0, q4k, q5k or q6k.
    #[arg(value_parser = block_type)]
    dtype: GgmlDType,
    /// The file to write.
    output: PathBuf,
}

fn block_type(name: &str) -> Result<GgmlDType, String> {
    Ok(match name {
        "q4_0" => GgmlDType::Q4_0,
        "q4_1" => GgmlDType::Q4_1,
        "q5_0" => GgmlDType::Q5_0,
        "q5_1" => GgmlDType::Q5_1,
        "q8_0" => GgmlDType::Q8_0,
        "q4k" => GgmlDType::Q4K,
        "q5k" => GgmlDType::Q5K,
        "q6k" => GgmlDType::Q6K,
        _ => return Err("not a block type that is known here".into()),
    })
}

fn main() -> Result<()> {
    let args = Args::parse();
    if args.input.canonicalize().ok() == args.output.canonicalize().ok() && args.output.exists() {
        bail!(
            "{} cannot be read and written at once",
            args.input.display()
        );
    }
    let device = Device::Cpu;
    let file = File::open(&args.input).with_context(|| args.input.display().to_string())?;
    let mut reader = BufReader::new(file);
    let content = Content::read(&mut reader)?;
    let mut tensors = Vec::new();
    for name in content.tensor_infos.keys() {
        let tensor = content.tensor(&mut reader, name, &device)?;
        let width = *tensor.shape().dims().last().unwrap_or(&0);
        let matrix = tensor.rank() == 2 && name != "token_embd.weight";
        let tensor = if matrix && width.is_multiple_of(args.dtype.block_size()) {
            let dense = tensor.dequantize(&device)?;
            QTensor::quantize(&dense, args.dtype)?
        } else {
            tensor
        };
        tensors.push((name.as_str(), tensor));
    }
    tensors.sort_by_key(|(name, _)| *name);
    let metadata: Vec<_> = content
        .metadata
        .iter()
        .map(|(k, v)| (k.as_str(), v))
        .collect();
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, tensor)| (*name, tensor))
        .collect();
    let file = File::create(&args.output).with_context(|| args.output.display().to_string())?;
    let mut writer = BufWriter::new(file);
    gguf_file::write(&mut writer, &metadata, &tensors)?;
    Ok(())
}
