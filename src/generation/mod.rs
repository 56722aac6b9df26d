//! The token loop: prompts in, one token after the other out.
//!
//! On the CPU a step is a forward pass of one token of each sequence, which reads the weights once, and a draw
//! for each. On CUDA the whole step, from token id to next token, is one chain of kernels that is recorded once
//! as a CUDA graph and replayed: position, token and sampling state live on the device, and the host reads
//! tokens from page-locked memory, a few steps behind.
//!
//! ```no_run
//! use candle_fused::generation::{Generation, Options};
//! # fn run(model: &candle_fused::models::llama::Llama, prompt: &[u32]) -> candle_core::Result<()> {
//! let options = Options { stop: vec![2], ..Default::default() };
//! let mut generation = Generation::new(model, &options)?;
//! let mut tokens = vec![generation.extend(0, prompt)?];
//! while tokens.len() < 100 && let Some(token) = generation.step()?[0] {
//!     tokens.push(token);
//! }
//! # Ok(()) }
//! ```
//!
//! # Several sequences
//! A sequence has begun when [`Generation::extend`] has drawn its first token. From then on every
//! [`Generation::step`] gives it a token, until it draws a stop id or is parked. A slot is one of
//! [`Options::sequences`] places:
//!
//! - To **park** a sequence, truncate it to what it holds: [`Generation::step`] gives it `None`, and its
//!   keys and values stay. Extending it by the token that was drawn last goes on where it was.
//! - To **reuse** its slot for another text, truncate it to 0, and extend it by the new prompt.
//!
//! ```no_run
//! # use candle_fused::generation::{Generation, Options};
//! # fn run(generation: &mut Generation, prompt: &[u32], other: &[u32]) -> candle_core::Result<()> {
//! // Parks sequence 1, and later goes on with it.
//! let (held, last) = (generation.ids(1).len(), generation.pending(1));
//! generation.truncate(1, held)?;
//! let token = generation.extend(1, &[last.expect("a token that was drawn")])?;
//! // Puts another text in the place of sequence 0.
//! generation.truncate(0, 0)?;
//! let token = generation.extend(0, other)?;
//! # Ok(()) }
//! ```

#[cfg(feature = "cuda")]
pub(crate) mod chain;
#[cfg(feature = "cuda")]
mod device;
mod eager;
pub(crate) mod paged;
#[cfg(feature = "cuda")]
mod pages;
#[cfg(feature = "cuda")]
pub(crate) mod plan;
#[cfg(feature = "cuda")]
pub(crate) mod prefill;
#[cfg(feature = "cuda")]
mod prefill_graph;
#[cfg(feature = "cuda")]
pub(crate) mod prefill_paged;
#[cfg(feature = "cuda")]
pub(crate) mod refusal;
mod sequence;
#[cfg(feature = "cuda")]
mod state;
#[cfg(feature = "cuda")]
mod writer;

use crate::models::decoder::{Decoder, DecoderCache};
use crate::models::parts::Parts;
use crate::nn::KvCache;
#[doc(inline)]
pub use crate::ops::sample::SamplingParams;
use crate::quant::KvCacheType;
use candle_core::{Result, bail};
use paged::PagedCache;
use sequence::{Mark, Sequence, buffers, sequence};

/// How a [`Generation`] is set up.
///
/// ```
/// use candle_fused::generation::{Options, SamplingParams};
/// let defaults = Options::default();
/// assert_eq!((defaults.sequences, defaults.positions), (1, None));
/// assert_eq!(defaults.sampling, SamplingParams::default());
/// assert!(defaults.stop.is_empty() && defaults.graph && defaults.ahead == 2);
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    /// Sequences that are generated side by side, 1 to 8; 1 by default.
    pub sequences: usize,
    /// Positions that each sequence has room for, prompt included; by default 2048, or the model's context
    /// length if that is less. Keys and values take their memory at once.
    pub positions: Option<usize>,
    /// What keys and values are kept in; as the model has them by default.
    pub kv_cache: KvCacheType,
    /// How tokens are chosen, by default the likeliest; [`Generation::set_sampling`] sets it for one
    /// sequence.
    pub sampling: SamplingParams,
    /// Ids that end a sequence: it gives the id, and then none any more; no ids by default.
    pub stop: Vec<u32>,
    /// On CUDA, record the step as a graph, and on Hopper the prompts of small models that are read a second time, which
    /// are filled up to 16, 32, 63 or a multiple of 64 rows for it; true by default.
    pub graph: bool,
    /// On CUDA, the steps that the GPU may be ahead of the tokens that were read, 63 at most; 2 by default.
    pub ahead: usize,
}

/// Positions where nothing is said.
const DEFAULT_POSITIONS: usize = 2048;

impl Default for Options {
    fn default() -> Self {
        Self {
            sequences: 1,
            positions: None,
            kv_cache: KvCacheType::Auto,
            sampling: SamplingParams::default(),
            stop: Vec::new(),
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

/// Several sequences in the making, with keys and values of their own; the weights are shared with
/// the model. With CUDA it stays on the thread that made it: candle's stream is the thread's own.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_fused::generation::{Generation, Options, SamplingParams};
/// use candle_fused::models::llama::{Config, Llama};
/// # let config = Config {
/// #     hidden_size: 64, intermediate_size: 96, vocab_size: 32, num_hidden_layers: 1,
/// #     num_attention_heads: 4, num_key_value_heads: 2, ..Config::config_7b_v2(false)
/// # };
/// # let vb = candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let model = Llama::load(vb, &config)?;
/// let mut generation = Generation::new(&model, &Options { positions: Some(64), ..Default::default() })?;
/// // All logits are equal, since weights are zeros here: the first token of the vocabulary is taken.
/// assert_eq!(generation.extend(0, &[1, 2, 3])?, 0);
/// assert_eq!(generation.step()?, [Some(0)]);
/// assert_eq!((generation.ids(0), generation.pending(0)), (&[1, 2, 3, 0][..], Some(0)));
/// // Without the last two, and with tokens by chance from here on.
/// generation.truncate(0, 2)?;
/// generation.set_sampling(0, SamplingParams { temperature: 0.8, seed: 7, ..Default::default() })?;
/// assert!(generation.extend(0, &[3])? < 32 && !generation.is_finished(0));
/// // On the CPU there is no graph.
/// assert_eq!((generation.kernels_per_step(), generation.profile(1)?.len()), (0, 0));
/// println!("{:?}", generation.graph_refusal());
/// # Ok::<(), candle_core::Error>(())
/// ```
pub struct Generation {
    sequences: Vec<Sequence>,
    stop: Vec<u32>,
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
        let most = decoder.stack.max_positions;
        let positions = options.positions.unwrap_or(DEFAULT_POSITIONS.min(most));
        if positions == 0 || positions > most {
            bail!(
                "generation: {positions} positions, expected 1 to the model's context length of {most}"
            );
        }
        options.sampling.check()?;
        let vocab = decoder.stack.embedding.vocab_size();
        if let Some(id) = options.stop.iter().find(|id| **id as usize >= vocab) {
            bail!("generation: stop id {id} is out of the vocabulary of {vocab}");
        }
        let mut kind = model.empty_cache()?;
        kind.rotaries(positions)?;
        let held = Held::new(decoder, &kind, positions, options)?;
        let sequences = (0..options.sequences)
            .map(|index| sequence(held.caches(), &kind, index, positions, &options.sampling))
            .collect::<Result<Vec<_>>>()?;
        Ok(Self {
            sequences,
            stop: options.stop.clone(),
            engine: Engine::new(decoder, &mut kind, held, positions, options)?,
        })
    }

    /// How the tokens of sequence `index` are chosen from now on.
    ///
    /// # Errors
    /// If there is no such sequence, or a value is out of range.
    pub fn set_sampling(&mut self, index: usize, sampling: SamplingParams) -> Result<()> {
        self.check(index)?;
        sampling.check()?;
        #[cfg(feature = "cuda")]
        if let Engine::Device(device) = &mut self.engine {
            device.drain()?;
        }
        self.sequences[index].sampling = sampling;
        Ok(())
    }

    /// Appends `ids` to what sequence `index` holds, and draws the token to follow. The token that
    /// was drawn last belongs to `ids` if it is to stay, a stop id too.
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
        match token {
            Ok(_) => self.sequences[index].end_at(&self.stop),
            Err(_) => self.sequences[index].restore(mark),
        }
        token
    }

    /// The next token of every sequence: each takes in the token that was drawn last. Sequences that
    /// have not begun, are parked or have drawn a stop id give `None`.
    ///
    /// # Errors
    /// If no sequence has begun, one is full, or the logits of one are no numbers. All sequences then
    /// are as they were.
    pub fn step(&mut self) -> Result<Vec<Option<u32>>> {
        let mut begun = self
            .sequences
            .iter()
            .filter(|s| s.pending.is_some())
            .peekable();
        if begun.peek().is_none() {
            if self.sequences.iter().any(|s| s.finished) {
                return Ok(vec![None; self.sequences.len()]);
            }
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
        let all = self.sequences.iter_mut().zip(marks);
        match tokens {
            Ok(()) => {
                let step = |(sequence, mark): (&mut Sequence, Mark)| {
                    mark.pending?;
                    let token = sequence.pending;
                    sequence.end_at(&self.stop);
                    token
                };
                Ok(all.map(step).collect())
            }
            Err(error) => {
                all.for_each(|(sequence, mark)| sequence.restore(mark));
                Err(error)
            }
        }
    }

    /// Forgets what sequence `index` holds from `len` on, and the token that was drawn last.
    ///
    /// # Errors
    /// If there is no such sequence.
    pub fn truncate(&mut self, index: usize, len: usize) -> Result<()> {
        self.check(index)?;
        #[cfg(feature = "cuda")]
        if let Engine::Device(device) = &mut self.engine {
            device.drain()?;
        }
        let sequence = &mut self.sequences[index];
        sequence.ids.truncate(len);
        (sequence.pending, sequence.finished) = (None, false);
        Ok(())
    }

    /// Whether sequence `index` has drawn a stop id, and nothing has been done with it since.
    pub fn is_finished(&self, index: usize) -> bool {
        self.sequences.get(index).is_some_and(|s| s.finished)
    }

    /// The tokens of sequence `index` whose keys and values are held.
    pub fn ids(&self, index: usize) -> &[u32] {
        self.sequences.get(index).map_or(&[], |s| &s.ids)
    }

    /// The token of sequence `index` that was drawn last and the next step takes in.
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
                "generation: sequence index {index}, expected below {}",
                self.sequences.len()
            );
        }
        Ok(())
    }
}

/// Keys and values of all sequences, in every layer.
enum Held {
    /// In buffers.
    Caches(Vec<KvCache>),
    /// In pages, if they are quantized.
    Pages(Box<PagedCache>),
}

impl Held {
    fn new(
        decoder: &Decoder,
        kind: &DecoderCache,
        positions: usize,
        options: &Options,
    ) -> Result<Self> {
        let (count, kv_cache) = (options.sequences, options.kv_cache);
        if kv_cache.format().is_some() {
            let sizes = [count, positions];
            let pages = PagedCache::new(decoder, kind, sizes, kv_cache)?;
            return Ok(Self::Pages(Box::new(pages)));
        }
        let dtype = kv_cache.dtype(kind.dtype());
        buffers(decoder, kind.device(), dtype, [count, positions]).map(Self::Caches)
    }

    /// The buffers; none for pages.
    fn caches(&self) -> &[KvCache] {
        match self {
            Self::Caches(caches) => caches,
            Self::Pages(_) => &[],
        }
    }

    fn pages(self) -> Option<Box<PagedCache>> {
        match self {
            Self::Caches(_) => None,
            Self::Pages(pages) => Some(pages),
        }
    }
}

impl Engine {
    /// The chain of kernels where the model and its device allow it.
    fn new(
        decoder: &Decoder,
        kind: &mut DecoderCache,
        held: Held,
        positions: usize,
        options: &Options,
    ) -> Result<Self> {
        #[cfg(feature = "cuda")]
        let refusal = if let candle_core::Device::Cuda(device) = kind.device().clone() {
            match device::OnDevice::new(&device, decoder, kind, &held, positions, options) {
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
        let _ = (kind, positions, options);
        Ok(Engine::Eager(Box::new(eager::Eager {
            decoder: decoder.clone(),
            pages: held.pages(),
            refusal,
        })))
    }
}
