//! The whole of it: a GGUF file of the Llama architecture, a prompt, and tokens until the model ends.
//!
//! ```text
//! cargo run --release --example minimal -- model.gguf "The capital of France is"
//! ```

use std::fs::File;
use std::io::{BufReader, Write};

use anyhow::{Context, Error, Result};
use candle_core::Device;
use candle_core::quantized::gguf_file::Content;
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use candle_fused::generation::{Generation, Options};
use candle_fused::models::llama::ModelWeights;
use tokenizers::Tokenizer;

/// Tokens after which nothing more is generated.
const MOST: usize = 200;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let path = args.next().context("usage: minimal FILE.gguf [PROMPT]")?;
    let prompt = args.next().unwrap_or("Once upon a time".to_owned());
    let device = Device::cuda_if_available(0)?;

    let mut file = BufReader::new(File::open(&path).context(path)?);
    let header = Content::read(&mut file)?;
    let tokenizer = Tokenizer::from_gguf(&header)?;
    let end = header.metadata.get("tokenizer.ggml.eos_token_id");
    let end = end.context("the file names no end token")?.to_u32()?;
    let model = ModelWeights::from_gguf(header, &mut file, &device)?;

    let ids = tokenizer.encode(prompt, true).map_err(Error::msg)?;
    let options = Options {
        positions: Some(ids.len() + MOST),
        stop: vec![end],
        ..Default::default()
    };
    let mut generation = Generation::new(&model, &options)?;
    let mut text = tokenizer.decode_stream(true);
    let mut next = Some(generation.extend(0, ids.get_ids())?);
    while let Some(token) = next.filter(|token| *token != end) {
        if let Some(piece) = text.step(token).map_err(Error::msg)? {
            print!("{piece}");
            std::io::stdout().flush()?;
        }
        let room = generation.ids(0).len() < ids.len() + MOST;
        next = if room { generation.step()?[0] } else { None };
    }
    println!();
    Ok(())
}
