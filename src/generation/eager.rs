//! One sequence after the other by way of candle's tensors: on the CPU, and wherever a step cannot
//! be written down as a chain of kernels.

use super::Sequence;
use crate::models::decoder::Decoder;
use crate::ops::SamplingParams;
use crate::ops::sample::sample_as;
use candle_core::{DType, Result, Tensor};

pub(super) struct Eager {
    pub decoder: Decoder,
    /// Why a GPU does not run steps as a chain of kernels.
    pub refusal: Option<String>,
}

impl Eager {
    /// Reads `ids` behind what the sequence holds and draws the token to follow.
    pub fn extend(&self, index: usize, sequence: &mut Sequence, ids: &[u32]) -> Result<u32> {
        let decoder = &self.decoder;
        let logits = sequence.read(decoder, ids, |cache, position| {
            cache.set_len(position);
            let input = Tensor::new(ids, cache.device())?.unsqueeze(0)?;
            let embedded = decoder.stack.embedding.rows(&input)?;
            let x = decoder.stack.forward(&embedded, position, cache)?;
            decoder.last_logits(&x)?.to_dtype(DType::F32)
        })?;
        let token = sample_one(&logits, index, &sequence.sampling, &sequence.ids)?;
        sequence.pending = Some(token);
        Ok(token)
    }

    /// Takes in the pending token of every sequence that has one, and draws the next.
    pub fn step(&self, sequences: &mut [Sequence]) -> Result<()> {
        for (index, sequence) in sequences.iter_mut().enumerate() {
            if let Some(token) = sequence.pending {
                self.extend(index, sequence, &[token])?;
            }
        }
        Ok(())
    }
}

/// The token of sequence `index` that follows `history`, from logits `[1, V]`.
fn sample_one(
    logits: &Tensor,
    index: usize,
    params: &SamplingParams,
    history: &[u32],
) -> Result<u32> {
    let token = sample_as(logits, std::slice::from_ref(params), &[history], index)?;
    token.squeeze(0)?.to_scalar()
}
