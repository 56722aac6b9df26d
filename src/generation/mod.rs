//! The token loop: prompts in, one token after the other out.
//!
//! On the CPU a step is a forward pass and a draw. On CUDA the whole step, from token id to next
//! token, is one chain of kernels that is recorded once as a CUDA graph and replayed: position,
//! token and sampling state live on the device, and the host reads tokens from page-locked memory,
//! a few steps behind.
//!
//! ```no_run
//! use candle_fused::generation::{Generation, Options};
//! # fn run(model: &candle_fused::models::llama::Llama, prompt: &[u32]) -> candle_core::Result<()> {
//! let mut generation = Generation::new(model, &Options { positions: 1024, ..Default::default() })?;
//! let mut tokens = vec![generation.extend(0, prompt)?];
//! while tokens.len() < 100 {
//!     tokens.extend(generation.step()?);
//! }
//! # Ok(()) }
//! ```

#[cfg(feature = "cuda")]
mod device;
mod eager;
#[cfg(feature = "cuda")]
mod plan;
#[cfg(feature = "cuda")]
mod prefill;
#[cfg(feature = "cuda")]
mod refusal;
#[cfg(feature = "cuda")]
mod state;

use crate::models::decoder::{Decoder, DecoderCache};
use crate::models::parts::Parts;
use crate::nn::KvCache;
#[doc(inline)]
pub use crate::ops::sample::SamplingParams;
use candle_core::{Result, Tensor, bail};

/// How a [`Generation`] is set up.
#[derive(Clone, Debug)]
pub struct Options {
    /// Sequences that are generated side by side, 1 to 8.
    pub sequences: usize,
    /// Positions that each sequence has room for, prompt included.
    pub positions: usize,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// On CUDA, record the step as a graph.
    pub graph: bool,
    /// On CUDA, the steps that the GPU may be ahead of the tokens that were read, 63 at most.
    pub ahead: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            sequences: 1,
            positions: 2048,
            sampling: SamplingParams::default(),
            graph: true,
            ahead: 2,
        }
    }
}

/// What a part of the model takes of a step on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct PartTime {
    /// `qkv`, `attention`, `output`, `gate_up` or `up`, `down`, `head`, `embedding` or `sample`; with a
    /// plus between them what runs in one launch.
    pub part: &'static str,
    /// Steps of all layers together.
    pub launches: usize,
    /// Seconds of all layers together.
    pub seconds: f64,
    /// Bytes that have to be read and written at least; 0 where nobody counted.
    pub bytes: u64,
}

/// The most sequences side by side.
const MAX_SEQUENCES: usize = 8;

/// A model that a [`Generation`] can run.
pub trait Model: Parts {}

impl<M: Parts> Model for M {}

/// One sequence.
struct Sequence {
    /// The tokens whose keys and values are in the cache.
    ids: Vec<u32>,
    /// The token that was drawn last and is not in the cache yet.
    pending: Option<u32>,
    /// This sequence's part of the buffers.
    cache: DecoderCache,
    /// Positions that there is room for.
    room: usize,
}

/// How far a sequence is.
struct Mark {
    len: usize,
    pending: Option<u32>,
}

impl Sequence {
    /// Reads `ids` through `forward`, which takes the cache and the position of the first, and gives
    /// its logits `[1, V]` behind the last of them.
    fn read(
        &mut self,
        decoder: &Decoder,
        ids: &[u32],
        forward: impl FnOnce(&mut DecoderCache, usize) -> Result<Tensor>,
    ) -> Result<Tensor> {
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
        decoder.stack.embedding.check(ids)?;
        let logits = forward(&mut self.cache, position)?;
        self.ids.extend_from_slice(ids);
        self.pending = None;
        Ok(logits)
    }

    /// What a call that fails comes back to. Keys and values behind it are written over.
    fn mark(&self) -> Mark {
        Mark {
            len: self.ids.len(),
            pending: self.pending,
        }
    }

    fn restore(&mut self, mark: Mark) {
        self.ids.truncate(mark.len);
        self.pending = mark.pending;
    }

    /// Counts the pending token as read and `next` as pending; 0 for a sequence that has not begun.
    #[cfg(feature = "cuda")]
    fn advance(&mut self, next: u32) -> u32 {
        match self.pending {
            Some(token) => {
                self.ids.push(token);
                self.pending = Some(next);
                next
            }
            None => 0,
        }
    }
}

/// Several sequences in the making, with keys and values of their own; the weights are shared with
/// the model. With CUDA it stays on the thread that made it: candle's stream is the thread's own.
pub struct Generation {
    sequences: Vec<Sequence>,
    engine: Engine,
}

enum Engine {
    Eager(Box<eager::Eager>),
    #[cfg(feature = "cuda")]
    Device(Box<device::OnDevice>),
}

impl Generation {
    /// Room for the sequences of `options`, all empty.
    ///
    /// # Errors
    /// If an option is out of range, `positions` is past the model's context, or memory is short.
    pub fn new<M: Model>(model: &M, options: &Options) -> Result<Self> {
        let decoder = model.decoder();
        if !(1..=MAX_SEQUENCES).contains(&options.sequences) {
            bail!(
                "generation: {} sequences, expected 1 to {MAX_SEQUENCES}",
                options.sequences
            );
        }
        if options.positions == 0 || options.positions > decoder.stack.max_positions {
            bail!(
                "generation: {} positions, expected 1 to the model's context length of {}",
                options.positions,
                decoder.stack.max_positions
            );
        }
        options.sampling.check()?;
        let mut kind = model.empty_cache()?;
        let buffers = buffers(decoder, &kind, options)?;
        kind.rotary(options.positions)?;
        let sequences = (0..options.sequences)
            .map(|index| sequence(&buffers, &kind, index, options.positions))
            .collect::<Result<Vec<_>>>()?;
        Ok(Self {
            sequences,
            engine: Engine::new(decoder, &mut kind, &buffers, options)?,
        })
    }

    /// Reads `ids` behind what sequence `index` holds, and draws the token to follow. The token that
    /// was drawn last belongs to `ids` if it is to stay.
    ///
    /// # Errors
    /// If there is no such sequence, an id is out of the vocabulary, there is no room, or the logits are
    /// no numbers. The sequence then is as it was.
    pub fn extend(&mut self, index: usize, ids: &[u32]) -> Result<u32> {
        self.check(index)?;
        let mark = self.sequences[index].mark();
        let token = match &mut self.engine {
            Engine::Eager(eager) => eager.extend(index, &mut self.sequences[index], ids),
            #[cfg(feature = "cuda")]
            Engine::Device(device) => device.extend(&mut self.sequences, index, ids),
        };
        if token.is_err() {
            self.sequences[index].restore(mark);
        }
        token
    }

    /// The next token of every sequence: each takes in the token that was drawn last. Sequences that
    /// have not begun give 0.
    ///
    /// # Errors
    /// If no sequence has begun, one is full, or the logits of one are no numbers. All sequences then
    /// are as they were.
    pub fn step(&mut self) -> Result<Vec<u32>> {
        let mut begun = self
            .sequences
            .iter()
            .filter(|s| s.pending.is_some())
            .peekable();
        if begun.peek().is_none() {
            bail!("generation: no sequence has begun, `extend` one first");
        }
        if let Some(full) = begun.find(|s| s.ids.len() >= s.room) {
            bail!(
                "generation: the {} positions that there is room for are full",
                full.room
            );
        }
        let marks: Vec<_> = self.sequences.iter().map(Sequence::mark).collect();
        let tokens = match &mut self.engine {
            Engine::Eager(eager) => eager.step(&mut self.sequences),
            #[cfg(feature = "cuda")]
            Engine::Device(device) => device.step(&mut self.sequences),
        };
        if tokens.is_err() {
            let all = self.sequences.iter_mut().zip(marks);
            all.for_each(|(sequence, mark)| sequence.restore(mark));
        }
        tokens
    }

    /// Forgets what sequence `index` holds from `len` on.
    ///
    /// # Errors
    /// If there is no such sequence.
    pub fn truncate(&mut self, index: usize, len: usize) -> Result<()> {
        self.check(index)?;
        if len > self.sequences[index].ids.len() {
            return Ok(());
        }
        #[cfg(feature = "cuda")]
        if let Engine::Device(device) = &mut self.engine {
            device.settle()?;
        }
        let sequence = &mut self.sequences[index];
        sequence.ids.truncate(len);
        sequence.pending = None;
        Ok(())
    }

    /// The tokens of sequence `index` whose keys and values are held.
    pub fn ids(&self, index: usize) -> &[u32] {
        self.sequences.get(index).map_or(&[], |s| &s.ids)
    }

    /// The token of sequence `index` that was drawn last.
    pub fn pending(&self, index: usize) -> Option<u32> {
        self.sequences.get(index)?.pending
    }

    /// Why the step is not replayed as a graph on a GPU: a part of the model that is not fused, which is known at
    /// once, or what the driver said when it was tried.
    pub fn graph_refusal(&self) -> Option<&str> {
        match &self.engine {
            Engine::Eager(eager) => eager.refusal.as_deref(),
            #[cfg(feature = "cuda")]
            Engine::Device(device) => device.refusal(),
        }
    }

    /// Kernels that a step launches on the GPU: the nodes of its graph once there is one, before that
    /// the steps written down, of which a product of several weight formats is one; 0 on the CPU.
    pub fn kernels_per_step(&self) -> usize {
        match &self.engine {
            Engine::Eager(_) => 0,
            #[cfg(feature = "cuda")]
            Engine::Device(device) => device.kernels_per_step(),
        }
    }

    /// What each part of a step takes on the GPU, each measured alone, where nothing runs beside it;
    /// empty where steps are no chain of kernels. Keys and values at the next position are
    /// overwritten, as the next step does in any case.
    ///
    /// # Errors
    /// If a part cannot be recorded.
    pub fn profile(&mut self, rounds: usize) -> Result<Vec<PartTime>> {
        match &mut self.engine {
            Engine::Eager(_) => {
                let _ = rounds;
                Ok(Vec::new())
            }
            #[cfg(feature = "cuda")]
            Engine::Device(device) => device.profile(&self.sequences, rounds),
        }
    }

    fn check(&self, index: usize) -> Result<()> {
        if index >= self.sequences.len() {
            bail!(
                "generation: sequence {index}, there are {}",
                self.sequences.len()
            );
        }
        Ok(())
    }
}

impl Engine {
    /// The chain of kernels where the model and its device allow it.
    fn new(
        decoder: &Decoder,
        kind: &mut DecoderCache,
        buffers: &[KvCache],
        options: &Options,
    ) -> Result<Self> {
        #[cfg(feature = "cuda")]
        let refusal = if let candle_core::Device::Cuda(device) = kind.device().clone() {
            match device::OnDevice::new(&device, decoder, kind, buffers, options) {
                Ok(engine) => return Ok(Engine::Device(Box::new(engine))),
                Err(refusal::Refusal::Failed(error)) => return Err(error),
                Err(refusal::Refusal::Unfused(why)) => {
                    tracing::warn!("decoding one sequence after the other: {why}");
                    Some(why)
                }
            }
        } else {
            None
        };
        #[cfg(not(feature = "cuda"))]
        let refusal = None;
        let _ = (kind, buffers);
        Ok(Engine::Eager(Box::new(eager::Eager {
            decoder: decoder.clone(),
            sampling: options.sampling.clone(),
            refusal,
        })))
    }
}

/// Keys and values of every layer, for all sequences.
fn buffers(decoder: &Decoder, kind: &DecoderCache, options: &Options) -> Result<Vec<KvCache>> {
    decoder
        .stack
        .blocks
        .iter()
        .map(|block| {
            let config = block.attention.config();
            let shape = (options.sequences, config.kv_heads, config.head_dim);
            KvCache::preallocated(shape, options.positions, kind.dtype(), kind.device())
        })
        .collect::<Result<_>>()
        .map_err(|e| {
            e.context(format!(
                "generation: no room for the keys and values of {} positions of {} sequences could be made",
                options.positions, options.sequences
            ))
        })
}

fn sequence(
    buffers: &[KvCache],
    kind: &DecoderCache,
    index: usize,
    room: usize,
) -> Result<Sequence> {
    let layers = buffers
        .iter()
        .map(|b| b.sequence(index))
        .collect::<Result<_>>()?;
    Ok(Sequence {
        ids: Vec::new(),
        pending: None,
        cache: kind.over(layers),
        room,
    })
}
