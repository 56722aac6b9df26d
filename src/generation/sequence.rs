//! A sequence in the making, and the buffers of its keys and values.

use crate::models::decoder::{Decoder, DecoderCache};
use crate::nn::KvCache;
use crate::ops::sample::SamplingParams;
use candle_core::{DType, Device, Result, Tensor, bail};

/// One sequence.
pub(super) struct Sequence {
    /// The tokens whose keys and values are in the cache.
    pub ids: Vec<u32>,
    /// The token that was drawn last and is not in the cache yet.
    pub pending: Option<u32>,
    /// This sequence's part of the buffers.
    pub cache: DecoderCache,
    /// Whether a stop id was drawn last.
    pub finished: bool,
    /// Positions that there is room for.
    pub room: usize,
    /// How its tokens are chosen.
    pub sampling: SamplingParams,
}

/// How far a sequence is.
pub(super) struct Mark {
    pub len: usize,
    pub pending: Option<u32>,
    pub finished: bool,
}

impl Sequence {
    /// Reads `ids` through `forward`, which takes the cache and the position of the first, and gives
    /// its logits `[1, V]` behind the last of them.
    pub fn read(
        &mut self,
        decoder: &Decoder,
        ids: &[u32],
        forward: impl FnOnce(&mut DecoderCache, usize) -> Result<Tensor>,
    ) -> Result<Tensor> {
        self.check(decoder, ids)?;
        let logits = forward(&mut self.cache, self.ids.len())?;
        self.took(ids);
        Ok(logits)
    }

    /// Counts `ids`, whose keys and values are held now.
    pub fn took(&mut self, ids: &[u32]) {
        self.ids.extend_from_slice(ids);
        self.pending = None;
    }

    /// Whether `ids` can be appended to what is held.
    pub fn check(&self, decoder: &Decoder, ids: &[u32]) -> Result<()> {
        let position = self.ids.len();
        if ids.is_empty() {
            bail!("generation: no ids, expected at least one");
        }
        if position + ids.len() > self.room {
            bail!(
                "generation: {position} tokens and {} more are past the {} positions that there is \
                 room for",
                ids.len(),
                self.room
            );
        }
        // Here, where the ids are, so that nothing has to be read back from the device.
        decoder.stack.embedding.check(ids)
    }

    /// What a call that fails comes back to. Keys and values behind it are written over.
    pub fn mark(&self) -> Mark {
        Mark {
            len: self.ids.len(),
            pending: self.pending,
            finished: self.finished,
        }
    }

    /// Ends if the token that was drawn last is one of `stop`.
    pub fn end_at(&mut self, stop: &[u32]) {
        self.finished = self.pending.is_some_and(|token| stop.contains(&token));
        if self.finished {
            self.pending = None;
        }
    }

    pub fn restore(&mut self, mark: Mark) {
        self.ids.truncate(mark.len);
        self.pending = mark.pending;
        self.finished = mark.finished;
    }

    /// Counts the pending token as read and `next` as pending, if the sequence has begun.
    #[cfg(feature = "cuda")]
    pub fn advance(&mut self, next: u32) {
        if let Some(token) = self.pending.replace(next) {
            self.ids.push(token);
        } else {
            self.pending = None;
        }
    }
}

/// Keys and values of every layer, for all sequences.
pub(super) fn buffers(
    decoder: &Decoder,
    device: &Device,
    dtype: DType,
    [sequences, positions]: [usize; 2],
) -> Result<Vec<KvCache>> {
    decoder
        .stack
        .blocks
        .iter()
        .map(|block| {
            let config = block.attention.config();
            let shape = (sequences, config.kv_heads, config.head_dim);
            KvCache::preallocated(shape, positions, dtype, device)
        })
        .collect::<Result<_>>()
        .map_err(|e| {
            e.context(format!(
                "generation: no room for the keys and values of {positions} positions of \
                 {sequences} sequences could be made"
            ))
        })
}

pub(super) fn sequence(
    buffers: &[KvCache],
    kind: &DecoderCache,
    index: usize,
    room: usize,
    sampling: &SamplingParams,
) -> Result<Sequence> {
    let layers = buffers
        .iter()
        .map(|b| b.sequence(index))
        .collect::<Result<_>>()?;
    Ok(Sequence {
        ids: Vec::new(),
        pending: None,
        finished: false,
        cache: kind.over(layers),
        room,
        sampling: sampling.clone(),
    })
}
