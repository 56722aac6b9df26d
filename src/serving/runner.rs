//! What runs the steps: candle's tensors, or on a GPU chains of kernels.

use super::eager::Eager;
use super::schedule::Batch;
use super::sequence::Sequence;
use super::{OP, Options};
use crate::fusion::fallback;
use crate::models::decoder::{Decoder, DecoderCache};
use crate::ops::{PageLayout, PagePool};
use candle_core::{Device, Result, Tensor, bail};

pub(super) enum Runner {
    Eager(Box<Eager>),
}

/// Bytes that there are for keys and values.
pub(super) fn room(device: &Device, on_cpu: usize) -> Result<usize> {
    #[cfg(feature = "cuda")]
    if device.is_cuda() {
        let (free, _) = candle_core::cuda_backend::cudarc::driver::result::mem_get_info()
            .map_err(candle_core::Error::wrap)?;
        return Ok(free / 5 * 4);
    }
    let _ = device;
    Ok(on_cpu)
}

impl Runner {
    /// With `pages` pages, for sequences of up to so many positions.
    pub fn new(
        decoder: &Decoder,
        kind: &mut DecoderCache,
        [pages, positions]: [usize; 2],
        options: &Options,
    ) -> Result<Self> {
        if let Some(why) = fallback(kind.device()) {
            bail!("{OP}: {why}, expected the CPU or a CUDA device");
        }
        for (i, block) in decoder.stack.blocks.iter().enumerate() {
            if !block.attention.is_fused() {
                bail!("{OP}: attention of layer {i} is not fused, which keys in pages need");
            }
        }
        let pools = pools(decoder, kind, pages, options.page)?;
        kind.rotaries(positions)?;
        Ok(Self::Eager(Box::new(Eager::new(decoder, kind, pools))))
    }

    /// Steps that may be under way while the next one is launched.
    pub fn ahead(&self) -> usize {
        match self {
            Runner::Eager(_) => 0,
        }
    }

    /// Launches a step of the sequences in `slots`.
    pub fn launch(&mut self, batch: &Batch, slots: &[Option<Sequence>]) -> Result<()> {
        match self {
            Runner::Eager(eager) => eager.launch(batch, slots),
        }
    }

    /// What the oldest step under way has drawn, of which there are `count`; none where logits were no numbers.
    pub fn receive(&mut self, count: usize) -> Result<Vec<Option<u32>>> {
        match self {
            Runner::Eager(eager) => eager.receive(count),
        }
    }

    /// Says that nobody is in a slot any more.
    pub fn vacate(&mut self, slot: usize) -> Result<()> {
        match self {
            Runner::Eager(_) => {
                let _ = slot;
                Ok(())
            }
        }
    }

    /// Forgets what is under way.
    pub fn reset(&mut self) {
        match self {
            Runner::Eager(eager) => eager.reset(),
        }
    }

    pub fn refusal(&self) -> Option<&str> {
        match self {
            Runner::Eager(_) => None,
        }
    }
}

/// Pages of every layer, keys and values of a page one behind the other.
fn pools(
    decoder: &Decoder,
    kind: &DecoderCache,
    pages: usize,
    page: usize,
) -> Result<Vec<PagePool>> {
    let pool = |config: crate::nn::AttentionConfig| {
        let shape = (pages, 2, page, config.kv_heads, config.head_dim);
        let all = Tensor::zeros(shape, kind.dtype(), kind.device())?;
        PagePool::combined(&all, PageLayout::Nhd)
    };
    let blocks = decoder.stack.blocks.iter();
    blocks
        .map(|block| pool(block.attention.config()))
        .collect::<Result<_>>()
        .map_err(|e| {
            e.context(format!(
                "{OP}: no room for {pages} pages of {page} tokens could be made"
            ))
        })
}
