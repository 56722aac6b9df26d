//! Steps by way of candle's tensors: on the CPU, and wherever a step cannot be written down as a chain of kernels.

use super::OP;
use super::constraint::Constrained;
use super::request::{Drawn, TokenLogprobs};
use super::schedule::Batch;
use super::sequence::Sequence;
use crate::models::decoder::{Decoder, DecoderCache};
use crate::nn::{PagedRun, PagedTokens};
use crate::ops::sample::allows;
use crate::ops::{Logprobs, PagePool, SampleOptions, sample_with};
use candle_core::{DType, Result, Tensor, bail};
use std::collections::VecDeque;

pub(super) struct Eager {
    decoder: Decoder,
    kind: DecoderCache,
    pools: Vec<PagePool>,
    /// Whether each sequence's tokens go through the layers alone.
    apart: bool,
    drawn: VecDeque<Vec<Drawn>>,
}

/// A step's rows: single tokens first, then chunks.
#[derive(Default)]
struct Rows<'a> {
    ids: Vec<u32>,
    runs: Vec<PagedRun<'a>>,
    /// Rows after which a token is drawn, and whose.
    draws: Vec<u32>,
    drawing: Vec<usize>,
}

impl<'a> Rows<'a> {
    /// Tokens of a sequence, from position `first` on.
    fn add(&mut self, sequence: &'a Sequence, first: usize, end: usize) {
        self.ids.extend_from_slice(&sequence.tokens[first..end]);
        self.runs.push(PagedRun {
            pages: &sequence.pages,
            first,
            tokens: end - first,
        });
    }

    fn draw(&mut self, slot: usize) {
        self.draws.push(self.ids.len() as u32 - 1);
        self.drawing.push(slot);
    }
}

/// The sequence in a slot of a step, which is there.
fn at(slots: &[Option<Sequence>], slot: usize) -> Result<&Sequence> {
    match slots.get(slot).and_then(Option::as_ref) {
        Some(sequence) => Ok(sequence),
        None => bail!("{OP}: nobody is in slot {slot}"),
    }
}

impl Eager {
    pub fn new(decoder: &Decoder, kind: &DecoderCache, pools: Vec<PagePool>, apart: bool) -> Self {
        Self {
            apart,
            decoder: decoder.clone(),
            kind: kind.over(Vec::new()),
            pools,
            drawn: VecDeque::new(),
        }
    }

    pub fn reset(&mut self) {
        self.drawn.clear();
    }

    pub fn receive(&mut self, count: usize) -> Result<Vec<Drawn>> {
        match self.drawn.pop_front() {
            Some(drawn) if drawn.len() == count => Ok(drawn),
            _ => bail!("{OP}: there are not {count} draws"),
        }
    }

    pub fn launch(&mut self, batch: &Batch, slots: &[Option<Sequence>]) -> Result<()> {
        let drawn = match self.apart {
            false => self.pass(batch, slots)?,
            true => {
                let passes = batch.apart().map(|batch| self.pass(&batch, slots));
                passes.collect::<Result<Vec<_>>>()?.concat()
            }
        };
        self.drawn.push_back(drawn);
        Ok(())
    }

    /// Tokens of any sequences through all layers, and the draws after them.
    fn pass(&self, batch: &Batch, slots: &[Option<Sequence>]) -> Result<Vec<Drawn>> {
        let mut rows = Rows::default();
        for (slot, position) in &batch.singles {
            rows.add(at(slots, *slot)?, *position, *position + 1);
            rows.draw(*slot);
        }
        for chunk in &batch.chunks {
            rows.add(at(slots, chunk.slot)?, chunk.from, chunk.to);
            if chunk.draws {
                rows.draw(chunk.slot);
            }
        }
        let device = self.kind.device().clone();
        let tokens = PagedTokens::new(&rows.runs, batch.singles.len(), &device)?;
        let ids = Tensor::new(&rows.ids[..], &device)?.unsqueeze(0)?;
        let stack = &self.decoder.stack;
        let embedded = stack.embedding.rows(&ids)?;
        let x = stack.forward_paged(&embedded, &tokens, &self.kind, &self.pools)?;
        if rows.draws.is_empty() {
            return Ok(Vec::new());
        }
        let last = Tensor::new(&rows.draws[..], &device)?;
        let last = x.squeeze(0)?.index_select(&last, 0)?;
        let logits = self.decoder.logits(&last)?.to_dtype(DType::F32)?;
        let sequences = rows.drawing.iter().map(|slot| at(slots, *slot));
        let sequences = sequences.collect::<Result<Vec<_>>>()?;
        draw(&logits, &sequences)
    }
}

/// The next token of each sequence.
fn draw(logits: &Tensor, sequences: &[&Sequence]) -> Result<Vec<Drawn>> {
    let rows = sequences.iter().enumerate();
    rows.map(|(i, sequence)| draw_one(&logits.narrow(0, i, 1)?, sequence))
        .collect()
}

/// The next token of a sequence, from logits `[1, V]`.
fn draw_one(logits: &Tensor, sequence: &Sequence) -> Result<Drawn> {
    let mask = sequence.constrained.as_ref().map(Constrained::mask);
    let row = |mask: &[u32]| Tensor::new(mask, logits.device())?.unsqueeze(0);
    let options = SampleOptions {
        mask: mask.map(row).transpose()?,
        top_logprobs: sequence.request.logprobs,
    };
    let params = std::slice::from_ref(&sequence.request.sampling);
    let sampled = match sample_with(logits, params, &[&sequence.tokens], &options) {
        Ok(sampled) => sampled,
        Err(error) => {
            let row: Vec<f32> = logits.squeeze(0)?.to_vec1()?;
            let may = |token: usize| mask.is_none_or(|mask| allows(mask, token));
            let mut numbers = row.iter().enumerate().filter(|(_, logit)| !logit.is_nan());
            return match numbers.any(|(token, _)| may(token)) {
                true => Err(error),
                false => Ok(Drawn::default()),
            };
        }
    };
    let told = |of: Logprobs| -> Result<TokenLogprobs> {
        let (ids, top) = (of.top_ids.squeeze(0)?, of.top.squeeze(0)?);
        let ids = ids.to_vec1::<u32>()?.into_iter();
        Ok(TokenLogprobs {
            logprob: of.chosen.squeeze(0)?.to_scalar()?,
            top: ids.zip(top.to_vec1::<f32>()?).collect(),
        })
    };
    Ok(Drawn {
        token: Some(sampled.tokens.squeeze(0)?.to_scalar()?),
        logprobs: sampled.logprobs.map(told).transpose()?,
    })
}
