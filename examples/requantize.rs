//! Writes a GGUF file again with its matrices in another block type.
//!
//! ```text
//! cargo run --release --example requantize -- SmolLM2-135M-Instruct.Q4_1.gguf q8_0 out.gguf
//! ```
//! The token embedding keeps its type, and so do matrices whose width does not divide by the block. `f32` dequantizes
//! all of them: the file by which others of the same numbers are judged.
//! `q4_k_m` is llama.cpp's mix of the same name: Q4_K, with Q6_K for the value and down matrices of
//! the first and last eighth of the layers and every third between them, and for the table that gives
//! the logits. A matrix whose width does not divide by 256 is Q5_0 in place of Q4_K and Q8_0 in place
//! of Q6_K there; in SmolLM2-135M, 576 wide, that is all of them but the down matrices.
//! From weights that are quantized already this gives files to measure speed with, not quality.

use anyhow::{Result, bail};
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Content;
use candle_fused::quant::Quantization;
use clap::Parser;
use common::requantize::{fallback, requantize};
use std::path::PathBuf;

/// Writes a GGUF file again with its matrices in another block type.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// The file to read.
    input: PathBuf,
    /// q4_0, q4_1, q5_0, q5_1, q8_0, q2k, q3k, q4k, q5k, q6k, q4_k_m or f32.
    #[arg(value_parser = target)]
    target: Target,
    /// The file to write.
    output: PathBuf,
}

/// What the matrices become.
#[derive(Clone, Copy)]
enum Target {
    /// All of them this type.
    One(GgmlDType),
    /// No blocks, in the embedding neither.
    Dequantized,
    /// llama.cpp's Q4_K_M.
    Q4KM,
}

fn target(name: &str) -> Result<Target, String> {
    match (name, name.parse()) {
        ("q4_k_m", _) => Ok(Target::Q4KM),
        ("f32", _) => Ok(Target::Dequantized),
        (_, Ok(Quantization::Gguf(dtype))) => Ok(Target::One(dtype)),
        _ => Err("not a block type that is known here".into()),
    }
}

impl Target {
    /// The type of the matrix `name`, `width` wide; `None` to leave it as it is.
    fn dtype(self, name: &str, width: usize, content: &Content) -> Option<GgmlDType> {
        let dtype = match self {
            Target::One(_) if name == "token_embd.weight" => return None,
            Target::One(dtype) => dtype,
            Target::Dequantized => GgmlDType::F32,
            Target::Q4KM => mixed(name, width, content),
        };
        width.is_multiple_of(dtype.block_size()).then_some(dtype)
    }
}

/// llama.cpp's choice for Q4_K_M (`llama_tensor_get_type` in its llama-quant.cpp).
fn mixed(name: &str, width: usize, content: &Content) -> GgmlDType {
    let tied = !content.tensor_infos.contains_key("output.weight");
    let most = match name {
        "output.weight" => true,
        "token_embd.weight" => tied,
        _ => more_bits(name, content),
    };
    let dtype = match most {
        true => GgmlDType::Q6K,
        false if name.contains("attn_qkv") => GgmlDType::Q5K,
        false => GgmlDType::Q4K,
    };
    match width.is_multiple_of(256) {
        true => dtype,
        false => fallback(dtype),
    }
}

/// Whether `name` is a value or down matrix of a layer that gets more bits.
fn more_bits(name: &str, content: &Content) -> bool {
    let Some((layer, part)) = name
        .strip_prefix("blk.")
        .and_then(|rest| rest.split_once('.'))
    else {
        return false;
    };
    let Ok(layer) = layer.parse::<usize>() else {
        return false;
    };
    let layers = (0..)
        .take_while(|i| {
            let norm = format!("blk.{i}.attn_norm.weight");
            content.tensor_infos.contains_key(&norm)
        })
        .count();
    let eighth = layers / 8;
    let ends = layer < eighth || layer >= 7 * layers / 8;
    matches!(part, "attn_v.weight" | "ffn_down.weight") && (ends || (layer - eighth) % 3 == 2)
}

fn main() -> Result<()> {
    let args = Args::parse();
    if args.input.canonicalize().ok() == args.output.canonicalize().ok() && args.output.exists() {
        bail!(
            "{} cannot be read and written at once",
            args.input.display()
        );
    }
    requantize(&args.input, &args.output, |name, width, content| {
        args.target.dtype(name, width, content)
    })
}
