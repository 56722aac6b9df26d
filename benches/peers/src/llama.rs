//! llama.cpp's side, with the defaults of its own programs.

use crate::model::{Model, Sequence};
use anyhow::{Context, Result};
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::context::params::LlamaContextParams;
use llama_cpp_2::llama_backend::LlamaBackend;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::model::params::LlamaModelParams;
use llama_cpp_2::token::LlamaToken;
use std::num::NonZeroU32;
use std::path::Path;

/// Loads a model; its contexts have flash attention on or off.
pub fn load(path: &Path, threads: u32, flash: bool) -> Result<Box<dyn Model>> {
    let mut backend = LlamaBackend::init()?;
    backend.void_logs();
    let model = LlamaModel::load_from_file(&backend, path, &LlamaModelParams::default())?;
    Ok(Box::new(Llama {
        model,
        threads: i32::try_from(threads)?,
        flash,
        backend,
    }))
}

struct Llama {
    model: LlamaModel,
    threads: i32,
    flash: bool,
    backend: LlamaBackend,
}

impl Model for Llama {
    fn tokens(&self, text: &str) -> Result<Vec<u32>> {
        let vocab = self.model.vocab();
        let tokens = vocab.tokenize(text.as_bytes(), vocab.should_add_bos(), true);
        tokens
            .into_iter()
            .map(|token| Ok(u32::try_from(token.0)?))
            .collect()
    }

    fn open(&self, positions: usize) -> Result<Box<dyn Sequence + '_>> {
        let flash = match self.flash {
            true => llama_cpp_sys_2::LLAMA_FLASH_ATTN_TYPE_ENABLED,
            false => llama_cpp_sys_2::LLAMA_FLASH_ATTN_TYPE_DISABLED,
        };
        let positions = u32::try_from(positions)?;
        let params = LlamaContextParams::default()
            .with_n_ctx(NonZeroU32::new(positions))
            .with_n_batch(positions)
            .with_n_threads(self.threads)
            .with_n_threads_batch(self.threads)
            .with_flash_attention_policy(flash);
        Ok(Box::new(InContext {
            context: self.model.new_context(&self.backend, params)?,
            batch: LlamaBatch::new(positions as usize, 1),
            len: 0,
        }))
    }
}

struct InContext<'a> {
    context: LlamaContext<'a>,
    batch: LlamaBatch<'a>,
    /// Tokens that are held.
    len: usize,
}

impl Sequence for InContext<'_> {
    fn read(&mut self, position: usize, ids: &[u32]) -> Result<u32> {
        if position < self.len {
            let from = u32::try_from(position)?;
            self.context.kv_cache_seq_rm(0, Some(from), None)?;
        }
        self.batch.clear();
        for (i, id) in ids.iter().enumerate() {
            let token = LlamaToken(i32::try_from(*id)?);
            let at = i32::try_from(position + i)?;
            self.batch.add(token, at, &[0], i + 1 == ids.len())?;
        }
        self.context.decode(&mut self.batch)?;
        self.len = position + ids.len();
        let logits = self.context.get_logits_ith(self.batch.n_tokens() - 1);
        likeliest(logits).context("llama.cpp gave no logits")
    }
}

/// The place of the highest logit, of equal ones the first.
fn likeliest(logits: &[f32]) -> Option<u32> {
    let top = logits.iter().copied().reduce(f32::max)?;
    let place = logits.iter().position(|logit| *logit == top)?;
    u32::try_from(place).ok()
}
