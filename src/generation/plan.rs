//! A decode step written down: which kernels run over which addresses, from token ids to next
//! tokens. Five launches a layer: q, k, v behind the norm; attention with rotation and append; the
//! output projection with the residual; gate and up behind the norm; down with the residual.

use super::state::State;
use crate::cuda::{Address, Launcher, address, address_of, alloc};
use crate::models::decoder::{Block, Decoder};
use crate::nn::{KvCache, Linear, RmsNorm, RotaryEmbedding};
use crate::ops::embedding::cuda as embedding;
use crate::ops::flash_decoding::cuda as flash_decoding;
use crate::ops::linear::cuda::{self as linear, FewRows};
use crate::ops::sample::cuda as sample;
use crate::ops::{Activation, RopeStyle, Weight};
use candle_core::{CudaDevice, CudaStorage, DType, Layout, Result, Tensor};

/// One launch.
pub(super) enum Work {
    Embedding(embedding::Lookup),
    Linear(linear::Few),
    Attention(flash_decoding::Step),
    Sample(sample::Step),
}

/// A launch with the name of its part of the model.
pub(super) struct Launch {
    pub part: &'static str,
    pub work: Work,
}

/// The launches of a step, in order, and what they work on.
pub(super) struct Plan {
    pub launches: Vec<Launch>,
    sequences: u32,
    /// Whose addresses stand in the launches, beside those of the state.
    _held: Held,
}

struct Held {
    _decoder: Decoder,
    _caches: Vec<(Tensor, Tensor)>,
    _tables: (Tensor, Tensor),
    _buffers: Vec<CudaStorage>,
}

impl Plan {
    /// `None` if a layer is not fused throughout, so that there is no such chain.
    pub fn new(
        device: &CudaDevice,
        decoder: &Decoder,
        caches: &[KvCache],
        rotary: &RotaryEmbedding,
        state: &State,
    ) -> Result<Option<Self>> {
        let Some(dtype) = decoder.residual_dtype() else {
            return Ok(None);
        };
        let mut writer = Writer::new(device, decoder, dtype, state)?;
        writer.embed(decoder, state)?;
        for (block, cache) in decoder.blocks.iter().zip(caches) {
            if writer.block(block, cache, rotary, state)?.is_none() {
                return Ok(None);
            }
        }
        if writer.head(decoder, state)?.is_none() {
            return Ok(None);
        }
        let tables = rotary.tables();
        Ok(Some(Self {
            launches: writer.launches,
            sequences: state.sequences() as u32,
            _held: Held {
                _decoder: decoder.clone(),
                _caches: caches
                    .iter()
                    .map(|c| (c.buffers().0.clone(), c.buffers().1.clone()))
                    .collect(),
                _tables: (tables.0.clone(), tables.1.clone()),
                _buffers: writer.buffers,
            },
        }))
    }

    /// Launches the whole step.
    pub fn launch(&self, launcher: &Launcher) -> Result<()> {
        self.launches
            .iter()
            .try_for_each(|l| self.launch_one(launcher, l))
    }

    /// Launches one part of it.
    pub fn launch_one(&self, launcher: &Launcher, launch: &Launch) -> Result<()> {
        // SAFETY: every address stands for a buffer that `_held` or the state keeps, in the size
        // that the step asks for; all of it is used on candle's stream alone.
        unsafe {
            match &launch.work {
                Work::Embedding(lookup) => embedding::launch(launcher, lookup),
                Work::Linear(few) => linear::few(launcher, few),
                Work::Attention(step) => flash_decoding::launch(launcher, step),
                Work::Sample(step) => sample::launch(launcher, self.sequences, *step),
            }
        }
    }

    /// Launches of a step.
    pub fn kernels(&self) -> usize {
        self.launches.len()
    }
}

/// Writes a plan; holds the buffers between the launches.
struct Writer<'a> {
    device: &'a CudaDevice,
    launches: Vec<Launch>,
    buffers: Vec<CudaStorage>,
    sequences: usize,
    dtype: DType,
    hidden: usize,
    /// The residual stream, `[sequences, hidden]`.
    x: Address,
    qkv: Address,
    attended: Address,
    gated: Address,
    logits: Address,
    scratch: Address,
}
