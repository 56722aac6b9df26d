//! A side of the comparison, and the loop that is the same for all of them.

use anyhow::Result;
use candle_core::{Device, Tensor};
use candle_transformers::generation::{LogitsProcessor, Sampling};
use std::time::{Duration, Instant};

/// A model that keeps its own positions.
pub trait Model {
    fn restart(&mut self) -> Result<()>;

    /// The logits `[vocab]` behind the last of `ids` `[1, T]`, the first of which is at `position`.
    fn forward(&mut self, ids: &Tensor, position: usize) -> Result<Tensor>;
}

/// One of those that are compared.
pub struct Side {
    pub name: &'static str,
    pub model: Box<dyn Model>,
    pub runs: Vec<Run>,
}

impl Side {
    pub fn new(name: &'static str, model: Box<dyn Model>) -> Self {
        Self {
            name,
            model,
            runs: Vec::new(),
        }
    }
}

/// What one generation gave and took.
pub struct Run {
    pub tokens: Vec<u32>,
    pub prompt: Duration,
    pub decode: Duration,
}

impl Run {
    /// Greedy tokens, by candle's own loop.
    pub fn of(
        model: &mut dyn Model,
        prompt: &[u32],
        steps: usize,
        device: &Device,
    ) -> Result<Self> {
        let mut processor = LogitsProcessor::from_sampling(0, Sampling::ArgMax);
        model.restart()?;
        let start = Instant::now();
        let ids = Tensor::new(prompt, device)?.unsqueeze(0)?;
        let mut token = processor.sample(&model.forward(&ids, 0)?)?;
        let (prompt_time, start) = (start.elapsed(), Instant::now());
        let mut tokens = vec![token];
        for position in prompt.len()..prompt.len() + steps - 1 {
            let ids = Tensor::new(&[token], device)?.unsqueeze(0)?;
            token = processor.sample(&model.forward(&ids, position)?)?;
            tokens.push(token);
        }
        Ok(Self {
            tokens,
            prompt: prompt_time,
            decode: start.elapsed(),
        })
    }
}
