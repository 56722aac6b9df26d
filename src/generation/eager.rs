//! By way of candle's tensors: on the CPU, and wherever a step cannot be written down as a chain of kernels. Prompts are
//! read one after the other; the tokens of a step go through the layers together, so that weights are read once.

use super::Sequence;
use super::paged::{PagedCache, Run};
use crate::models::decoder::Decoder;
use crate::ops::SamplingParams;
use crate::ops::sample::{SampleOptions, sample_as};
use candle_core::{DType, Result, Tensor, bail};

pub(super) struct Eager {
    pub decoder: Decoder,
    /// Where keys and values are, if not in the sequences' caches.
    pub pages: Option<Box<PagedCache>>,
    /// Why a GPU does not run steps as a chain of kernels.
    pub refusal: Option<String>,
}

impl Eager {
    /// Appends `ids` to what the sequence holds and draws the token to follow.
    pub fn extend(&self, index: usize, sequence: &mut Sequence, ids: &[u32]) -> Result<u32> {
        let decoder = &self.decoder;
        let logits = sequence.read(decoder, ids, |cache, position| {
            let x = match &self.pages {
                Some(pages) => {
                    let tokens = ids.len();
                    let run = Run {
                        index,
                        position,
                        tokens,
                    };
                    pages.forward(decoder, ids, &[run], usize::from(tokens == 1))?
                }
                None => {
                    cache.set_len(position);
                    let input = Tensor::new(ids, cache.device())?.unsqueeze(0)?;
                    let embedded = decoder.stack.embedding.rows(&input)?;
                    decoder.stack.forward(&embedded, position, cache)?
                }
            };
            decoder.last_logits(&x)?.to_dtype(DType::F32)
        })?;
        let token = sample_one(&logits, index, &sequence.sampling, &sequence.ids)?;
        sequence.pending = Some(token);
        Ok(token)
    }

    /// Takes in the pending token of every sequence that has one, and draws the next.
    pub fn step(&self, sequences: &mut [Sequence]) -> Result<()> {
        let mut waiting: Vec<_> = sequences
            .iter_mut()
            .enumerate()
            .filter_map(|(index, sequence)| Some((index, sequence.pending?, sequence)))
            .collect();
        if let [(index, token, sequence)] = &mut waiting[..] {
            self.extend(*index, sequence, &[*token])?;
            return Ok(());
        }
        self.step_together(&mut waiting)
    }

    /// The step of several sequences, each with its number and pending token.
    fn step_together(&self, waiting: &mut [(usize, u32, &mut Sequence)]) -> Result<()> {
        let decoder = &self.decoder;
        let (mut tokens, mut runs) = (Vec::new(), Vec::new());
        for (index, token, sequence) in waiting.iter_mut() {
            sequence.check(decoder, &[*token])?;
            sequence.cache.set_len(sequence.ids.len());
            tokens.push(*token);
            runs.push(Run {
                index: *index,
                position: sequence.ids.len(),
                tokens: 1,
            });
        }
        let x = match &self.pages {
            Some(pages) => pages.forward(decoder, &tokens, &runs, runs.len())?,
            None => self.forward_each(&tokens, &runs, waiting)?,
        };
        let logits = decoder.logits(&x.flatten(0, 1)?)?.to_dtype(DType::F32)?;
        for (row, (index, token, sequence)) in waiting.iter_mut().enumerate() {
            sequence.ids.push(*token);
            let logits = logits.narrow(0, row, 1)?;
            let next = sample_one(&logits, *index, &sequence.sampling, &sequence.ids)?;
            sequence.pending = Some(next);
        }
        Ok(())
    }
}

impl Eager {
    /// A token of each sequence through all layers, `[S, 1, H]`, over their own caches.
    fn forward_each(
        &self,
        tokens: &[u32],
        runs: &[Run],
        waiting: &mut [(usize, u32, &mut Sequence)],
    ) -> Result<Tensor> {
        let stack = &self.decoder.stack;
        let mut caches: Vec<_> = waiting.iter_mut().map(|(_, _, s)| &mut s.cache).collect();
        let Some(first) = caches.first() else {
            bail!("generation: no sequence takes a step");
        };
        let input = Tensor::new(tokens, first.device())?.unsqueeze(1)?;
        let embedded = stack.embedding.rows(&input)?;
        let positions: Vec<_> = runs.iter().map(|run| run.position).collect();
        stack.forward_each(&embedded, &positions, &mut caches)
    }
}

/// The token of sequence `index` that follows `history`, from logits `[1, V]`.
fn sample_one(
    logits: &Tensor,
    index: usize,
    params: &SamplingParams,
    history: &[u32],
) -> Result<u32> {
    let (params, options) = (std::slice::from_ref(params), SampleOptions::default());
    let sampled = sample_as(logits, params, &[history], index, &options)?;
    sampled.tokens.squeeze(0)?.to_scalar()
}
