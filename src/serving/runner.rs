//! What runs the steps: candle's tensors, or on a GPU chains of kernels.

#[cfg(feature = "cuda")]
use super::device::OnDevice;
use super::eager::Eager;
use super::request::Drawn;
use super::schedule::Batch;
use super::sequence::Sequence;
use super::{OP, Options};
use crate::fusion::fallback;
use crate::generation::PartTime;
use crate::generation::paged::pools;
#[cfg(feature = "cuda")]
use crate::generation::refusal::Refusal;
use crate::models::decoder::{Decoder, DecoderCache};
use candle_core::{Device, Result, bail};
use std::time::Duration;

pub(super) enum Runner {
    /// And why a GPU does not run steps as chains of kernels.
    Eager(Box<Eager>, Option<String>),
    #[cfg(feature = "cuda")]
    Device(Box<OnDevice>),
}

/// Bytes that there are for keys and values.
pub(super) fn room(device: &Device, on_cpu: usize) -> Result<usize> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        // What loading has freed is of use too.
        crate::cuda::give_back_freed_memory(device)?;
        let (free, _) = candle_core::cuda_backend::cudarc::driver::result::mem_get_info()
            .map_err(candle_core::Error::wrap)?;
        return Ok(free / 5 * 4);
    }
    let _ = device;
    Ok(on_cpu)
}

impl Runner {
    /// With `pages` pages, for sequences of up to `positions` positions.
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
        let sizes = [pages, options.page];
        let pools = pools(decoder, kind, sizes, options.kv_cache).map_err(|e| {
            let page = options.page;
            e.context(format!(
                "{OP}: no room for {pages} pages of {page} tokens could be made"
            ))
        })?;
        let rotaries = kind.rotaries(positions)?.clone();
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = kind.device() {
            match OnDevice::new(device, decoder, &pools, &rotaries, positions, options) {
                Ok(device) => return Ok(Self::Device(Box::new(device))),
                Err(Refusal::Failed(error)) => return Err(error),
                Err(Refusal::Unfused(why)) => {
                    tracing::warn!("{OP}: steps without a chain of kernels: {why}");
                    let eager = Eager::new(decoder, kind, pools, options.batch_invariant);
                    return Ok(Self::Eager(Box::new(eager), Some(why)));
                }
            }
        }
        let _ = rotaries;
        let eager = Eager::new(decoder, kind, pools, options.batch_invariant);
        Ok(Self::Eager(Box::new(eager), None))
    }

    /// Steps that may be under way while the next one is launched.
    pub fn ahead(&self) -> usize {
        match self {
            Runner::Eager(..) => 0,
            #[cfg(feature = "cuda")]
            Runner::Device(device) => device.ahead(),
        }
    }

    /// Launches a step of the sequences in `slots`.
    pub fn launch(&mut self, batch: &Batch, slots: &[Option<Sequence>]) -> Result<()> {
        match self {
            Runner::Eager(eager, _) => eager.launch(batch, slots),
            #[cfg(feature = "cuda")]
            Runner::Device(device) => device.launch(batch, slots),
        }
    }

    /// What the oldest step under way has drawn, of which there are `count`.
    pub fn receive(&mut self, count: usize) -> Result<Vec<Drawn>> {
        match self {
            Runner::Eager(eager, _) => eager.receive(count),
            #[cfg(feature = "cuda")]
            Runner::Device(device) => device.receive(count),
        }
    }

    /// Says that nobody is in a slot any more.
    pub fn vacate(&mut self, slot: usize) -> Result<()> {
        let _ = slot;
        match self {
            Runner::Eager(..) => Ok(()),
            #[cfg(feature = "cuda")]
            Runner::Device(device) => device.vacate(slot),
        }
    }

    /// Says that who is in slot `from` is now in slot `to`, which nobody was in.
    pub fn relocate(&mut self, from: usize, to: usize) -> Result<()> {
        let _ = (from, to);
        match self {
            Runner::Eager(..) => Ok(()),
            #[cfg(feature = "cuda")]
            Runner::Device(device) => device.relocate(from, to),
        }
    }

    /// Forgets what is under way.
    pub fn reset(&mut self) {
        match self {
            Runner::Eager(eager, _) => eager.reset(),
            #[cfg(feature = "cuda")]
            Runner::Device(device) => device.reset(),
        }
    }

    /// What each part of a step of the first slots takes, at these positions; nothing where steps are no chain of
    /// kernels.
    pub fn profile(&mut self, positions: &[usize], rounds: usize) -> Result<Vec<PartTime>> {
        let _ = (positions, rounds);
        match self {
            Runner::Eager(..) => Ok(Vec::new()),
            #[cfg(feature = "cuda")]
            Runner::Device(device) => device.profile(positions, rounds),
        }
    }

    /// How long the host has waited for steps that were launched before.
    pub fn waited(&self) -> Duration {
        match self {
            Runner::Eager(..) => Duration::ZERO,
            #[cfg(feature = "cuda")]
            Runner::Device(device) => device.waited(),
        }
    }

    pub fn refusal(&self) -> Option<&str> {
        match self {
            Runner::Eager(_, why) => why.as_deref(),
            #[cfg(feature = "cuda")]
            Runner::Device(device) => device.refusal(),
        }
    }
}
