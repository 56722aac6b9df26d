//! candle-fused's side.

use crate::gguf_vocab;
use crate::model::{Model, Sequence};
use anyhow::{Result, anyhow, bail, ensure};
use candle_core::Device;
use candle_core::quantized::gguf_file::{Content, Value};
use candle_fused::cpu::pool;
use candle_fused::generation::{self, Generation, Options};
use candle_fused::models::{Architecture, GgufModel, gpt_neox, llama, qwen2, qwen3};
use memmap2::Mmap;
use std::fs::File;
use std::io::{BufReader, Cursor};
use std::panic::resume_unwind;
use std::path::Path;
use std::thread;
use tokenizers::Tokenizer;

/// Loads a model with every fusion on.
pub fn load(path: &Path, threads: u32) -> Result<Box<dyn Model>> {
    ensure!(
        pool::set_threads(threads as usize),
        "the thread pool has another size already"
    );
    let file = File::open(path)?;
    // SAFETY: the map is read here only, and nobody changes the files that are measured.
    let map = unsafe { Mmap::map(&file) }?;
    // candle asks for the position at every string, which of a file is a system call.
    let content = Content::read(&mut Cursor::new(&map))?;
    drop(map);
    let reader = BufReader::new(file);
    match content.metadata.get("general.architecture") {
        Some(Value::String(name)) if name == "llama" => of::<llama::Config>(content, reader),
        Some(Value::String(name)) if name == "qwen2" => of::<qwen2::Config>(content, reader),
        Some(Value::String(name)) if name == "qwen3" => of::<qwen3::Config>(content, reader),
        Some(Value::String(name)) if name == "gptneox" => of::<gpt_neox::Config>(content, reader),
        other => {
            bail!("general.architecture is {other:?}, expected llama, qwen2, qwen3 or gptneox")
        }
    }
}

fn of<C: Architecture + 'static>(
    mut content: Content,
    mut reader: BufReader<File>,
) -> Result<Box<dyn Model>> {
    let vocabulary = gguf_vocab::take(&mut content);
    let tokenizer = thread::spawn(move || gguf_vocab::tokenizer(&vocabulary));
    let model = GgufModel::<C>::from_gguf(content, &mut reader, &Device::Cpu)?;
    let tokenizer = tokenizer
        .join()
        .unwrap_or_else(|panic| resume_unwind(panic))?;
    Ok(Box::new(Fused { model, tokenizer }))
}

struct Fused<M> {
    model: M,
    tokenizer: Tokenizer,
}

impl<M: generation::Model> Model for Fused<M> {
    fn tokens(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.tokenizer.encode(text, true).map_err(|e| anyhow!(e))?;
        Ok(encoding.get_ids().to_vec())
    }

    fn open(&self, positions: usize) -> Result<Box<dyn Sequence + '_>> {
        let options = Options {
            positions: Some(positions),
            ..Default::default()
        };
        Ok(Box::new(Generation::new(&self.model, &options)?))
    }
}

impl Sequence for Generation {
    fn read(&mut self, position: usize, ids: &[u32]) -> Result<u32> {
        self.truncate(0, position)?;
        Ok(self.extend(0, ids)?)
    }
}
