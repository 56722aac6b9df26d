//! Many requests at once: continuous batching over pages of keys and values.
//!
//! Requests join and leave between steps. Each [`Engine::step`] processes one token of every running request, and
//! chunks of new prompts up to a budget of tokens, so that a long prompt does not stall the others (chunked prefill).
//! Keys and values are in pages, which are allocated as they are needed. Full pages are cached by their tokens, so that
//! requests with the same prefix compute it once.
//!
//! ```no_run
//! use candle_fused::serving::{Engine, Options, Request};
//! # fn run(model: &candle_fused::models::llama::Llama, prompts: Vec<Vec<u32>>) -> candle_core::Result<()> {
//! let mut engine = Engine::new(model, &Options::default())?;
//! for prompt in prompts {
//!     engine.submit(Request { max_tokens: 100, stop: vec![2], ..Request::new(prompt) })?;
//! }
//! while !engine.is_idle() {
//!     for output in engine.step()? {
//!         println!("{}: {:?} {:?}", output.id, output.token, output.finish);
//!     }
//! }
//! # Ok(()) }
//! ```
//!
//! Where a token is drawn, it is the one that [`Generation`](crate::generation::Generation) draws: a request's tokens
//! depend on its own logits, seed and positions, not on its neighbours. Logits themselves may differ in the last bits
//! with the number of rows that run together, since products choose their kernels by it; with
//! [`Options::batch_invariant`] they do not.
//!
//! Sources: Orca (Yu et al. 2022) for batching by steps; vLLM (Kwon et al. 2023) for pages and preemption;
//! Sarathi-Serve (Agrawal et al. 2024) for chunks of prompts; SGLang (Zheng et al. 2024) for shared prefixes.

mod buckets;
mod constraint;
#[cfg(feature = "cuda")]
mod device;
mod eager;
mod options;
mod pages;
mod request;
mod runner;
mod schedule;
mod sequence;
#[cfg(feature = "cuda")]
mod slots;
mod stop;

use crate::generation::PartTime;
use crate::models::decoder::DecoderCache;
use crate::models::parts::Parts;
use crate::ops::logprobs::MAX_TOP;
use buckets::Move;
use candle_core::{Result, bail};
use constraint::Constrained;
use pages::Pages;
use runner::Runner;
use schedule::Schedule;
use sequence::Sequence;
use std::collections::VecDeque;
use std::sync::Arc;
use stop::{Stopping, Vocabulary};

pub use crate::generation::Model;
pub use constraint::Constraint;
pub use options::Options;
pub use request::{FinishReason, Output, Request, RequestId, Stats, TokenLogprobs};
pub use stop::StopStrings;

const OP: &str = "serving";

/// Bytes of keys and values on the CPU where nothing is said.
const CPU_BYTES: usize = 1 << 30;

/// A step that is under way: whose draws it brings.
struct UnderWay {
    draws: Vec<(usize, RequestId, u32)>,
}

/// A model that answers many requests at once. With CUDA it stays on the thread that made it: candle's stream is the
/// thread's own.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_fused::models::llama::{Config, Llama};
/// use candle_fused::serving::{Engine, FinishReason, Options, Request};
/// # let config = Config {
/// #     hidden_size: 64, intermediate_size: 96, vocab_size: 32, num_hidden_layers: 1,
/// #     num_attention_heads: 4, num_key_value_heads: 2, ..Config::config_7b_v2(false)
/// # };
/// # let vb = candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let model = Llama::load(vb, &config)?;
/// let options = Options { sequences: 4, positions: Some(64), ..Default::default() };
/// let mut engine = Engine::new(&model, &options)?;
/// assert_eq!((engine.positions(), engine.vocab_size()), (64, 32));
/// let first = engine.submit(Request { max_tokens: 3, ..Request::new([1, 2, 3]) })?;
/// let second = engine.submit(Request { max_tokens: 60, ..Request::new([4, 5]) })?;
/// let (mut tokens, mut finish) = (0, None);
/// while finish.is_none() {
///     for output in engine.step()?.into_iter().filter(|output| output.id == first) {
///         tokens += usize::from(output.token.is_some());
///         finish = output.finish;
///     }
/// }
/// assert_eq!((tokens, finish), (3, Some(FinishReason::Length)));
/// assert!(engine.cancel(second) && engine.is_idle() && engine.stats().running == 0);
/// // On the CPU steps are no chain of kernels.
/// assert!(engine.profile(1)?.is_empty());
/// println!("{:?}", engine.graph_refusal());
/// # Ok::<(), candle_core::Error>(())
/// ```
pub struct Engine {
    schedule: Schedule,
    runner: Runner,
    under_way: VecDeque<UnderWay>,
    /// What requests were given since the last step that was successful.
    brought: Vec<Output>,
    positions: usize,
    vocab: usize,
    /// Where stop strings are looked for.
    vocabulary: Option<Vocabulary>,
    submitted: u64,
}

impl Engine {
    /// An engine without requests. Keys and values take their memory at once.
    ///
    /// # Errors
    /// If an option is out of range, the model's attention is not fused, or memory is short.
    pub fn new<M: Model>(model: &M, options: &Options) -> Result<Self> {
        let decoder = Parts::decoder(model);
        let mut kind: DecoderCache = model.empty_cache()?;
        let most = decoder.stack.max_positions;
        let positions = options.positions(most, kind.even_positions())?;
        kind.fix_frequencies(positions)?;
        let room = runner::room(kind.device(), CPU_BYTES)?;
        let of_page = decoder.stack.blocks.iter().map(|block| {
            let config = block.attention.config();
            let row = options.kv_cache.row_bytes(config.head_dim, kind.dtype());
            2 * options.page * config.kv_heads * row
        });
        let count = options.count(positions, of_page.sum(), room)?;
        let runner = Runner::new(decoder, &mut kind, [count, positions], options)?;
        let pages = Pages::new(count, options.page, options.share_prefixes);
        Ok(Self {
            schedule: Schedule::new(
                options.sequences,
                pages,
                [positions, options.prompt_budget],
                options.chunk_tokens(),
            ),
            runner,
            under_way: VecDeque::new(),
            brought: Vec::new(),
            positions,
            vocab: decoder.stack.embedding.vocab_size(),
            vocabulary: None,
            submitted: 0,
        })
    }

    /// Says which bytes each token stands for, which [`Request::stop_strings`] are looked for in. A token past the end
    /// of `bytes` stands for none.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Result};
    /// # use candle_fused::models::llama::{Config, Llama};
    /// # use candle_fused::serving::{Engine, FinishReason, Options, Request};
    /// # let config = Config {
    /// #     hidden_size: 64, intermediate_size: 96, vocab_size: 32, num_hidden_layers: 1,
    /// #     num_attention_heads: 4, num_key_value_heads: 2, ..Config::config_7b_v2(false)
    /// # };
    /// # let model = Llama::load(candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu), &config)?;
    /// # let options = Options { positions: Some(64), ..Default::default() };
    /// let bytes: Vec<Box<[u8]>> = vec![b"ab".as_slice().into(), b"c".as_slice().into()];
    /// let mut engine = Engine::new(&model, &options)?.with_vocabulary(bytes.into());
    /// engine.submit(Request { stop_strings: vec![b"ba".to_vec()], ..Request::new([1]) })?;
    /// let mut outputs = Vec::new();
    /// while !engine.is_idle() {
    ///     outputs.extend(engine.step()?);
    /// }
    /// // Its weights are zero, so that token 0 is the likeliest: the text is "abab".
    /// assert_eq!(outputs.len(), 2);
    /// assert_eq!(outputs[1].finish, Some(FinishReason::StopString));
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    #[must_use]
    pub fn with_vocabulary(self, bytes: Arc<[Box<[u8]>]>) -> Self {
        Self {
            vocabulary: Some(bytes),
            ..self
        }
    }

    /// Positions of a request at most, prompt included.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Token ids are below this.
    pub fn vocab_size(&self) -> usize {
        self.vocab
    }

    /// Queues a request after those that wait.
    ///
    /// # Errors
    /// If its prompt is empty or too long, an id is out of the vocabulary, a parameter is out of range, or it has stop
    /// strings and the engine no [vocabulary](Self::with_vocabulary).
    pub fn submit(&mut self, request: Request) -> Result<RequestId> {
        self.enqueue(request, None)
    }

    /// [`submit`](Self::submit) of a request whose tokens a constraint chooses from. While one runs, the host reads
    /// each step's tokens before it launches the next one, also on a GPU.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    ///
    /// ```
    /// # use candle_core::{DType, Device, Result};
    /// # use candle_fused::models::llama::{Config, Llama};
    /// # use candle_fused::serving::{Constraint, Engine, FinishReason, Options, Request};
    /// # let config = Config {
    /// #     hidden_size: 64, intermediate_size: 96, vocab_size: 32, num_hidden_layers: 1,
    /// #     num_attention_heads: 4, num_key_value_heads: 2, ..Config::config_7b_v2(false)
    /// # };
    /// # let model = Llama::load(candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu), &config)?;
    /// /// Counts down to 0.
    /// struct Down(u32);
    /// impl Constraint for Down {
    ///     fn mask(&mut self, mask: &mut [u32]) -> Result<()> {
    ///         mask[0] = 1 << self.0;
    ///         Ok(())
    ///     }
    ///     fn accept(&mut self, token: u32) -> Result<bool> {
    ///         self.0 = token.saturating_sub(1);
    ///         Ok(token == 0)
    ///     }
    /// }
    /// let options = Options { positions: Some(64), ..Default::default() };
    /// let mut engine = Engine::new(&model, &options)?;
    /// engine.submit_constrained(Request::new([1, 2]), Box::new(Down(2)))?;
    /// let mut outputs = Vec::new();
    /// while !engine.is_idle() {
    ///     outputs.extend(engine.step()?);
    /// }
    /// let tokens: Vec<_> = outputs.iter().filter_map(|output| output.token).collect();
    /// assert_eq!(tokens, [2, 1, 0]);
    /// assert_eq!(outputs[2].finish, Some(FinishReason::Complete));
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn submit_constrained(
        &mut self,
        request: Request,
        constraint: Box<dyn Constraint>,
    ) -> Result<RequestId> {
        self.enqueue(request, Some(Constrained::new(constraint, self.vocab)))
    }

    fn enqueue(&mut self, request: Request, constrained: Option<Constrained>) -> Result<RequestId> {
        request.sampling.check()?;
        let (tokens, pages) = (request.prompt.len(), &self.schedule.pages);
        let room = self.positions.min(pages.count() * pages.size());
        if tokens == 0 {
            bail!("{OP}: the prompt is empty, expected at least one token");
        }
        if tokens > room {
            bail!("{OP}: the prompt has {tokens} tokens, expected at most {room}");
        }
        if request.max_tokens == 0 {
            bail!("{OP}: max_tokens is 0, expected at least 1");
        }
        let most = MAX_TOP.min(self.vocab);
        if let Some(top) = request.logprobs.filter(|top| *top > most) {
            bail!("{OP}: logprobs is {top}, expected 0 to {most}");
        }
        for (name, ids) in [("prompt", &request.prompt), ("stop", &request.stop)] {
            if let Some(id) = ids.iter().find(|id| **id as usize >= self.vocab) {
                bail!(
                    "{OP}: {name}: token {id} is out of the vocabulary of {}",
                    self.vocab
                );
            }
        }
        let stopping = self.stopping(&request.stop_strings)?;
        let id = RequestId(self.submitted);
        self.submitted += 1;
        let sequence = Sequence::new(id, request, constrained, stopping);
        self.schedule.submit(sequence);
        Ok(id)
    }

    fn stopping(&self, strings: &[Vec<u8>]) -> Result<Option<Stopping>> {
        if strings.is_empty() {
            return Ok(None);
        }
        if strings.iter().any(Vec::is_empty) {
            bail!("{OP}: stop_strings: one is empty, expected at least one byte");
        }
        match &self.vocabulary {
            Some(vocabulary) => Ok(Some(Stopping::new(strings, vocabulary))),
            None => bail!(
                "{OP}: stop_strings: the engine has no vocabulary, expected Engine::with_vocabulary"
            ),
        }
    }

    /// Forgets a request, whose pages others may have at once; whether there was such a request. It gets no more
    /// output.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        self.brought.retain(|output| output.id != id);
        self.schedule.cancel(id)
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.schedule.is_idle() && self.brought.is_empty()
    }

    /// Takes a step further, and gives what has become of requests: on a GPU that is what the step before brought,
    /// since the host works while the GPU does.
    ///
    /// # Errors
    /// If a step cannot be launched or read. Requests that were under way then begin anew with the next step, with
    /// the tokens that they have; what they were given before the failure comes with that step.
    pub fn step(&mut self) -> Result<Vec<Output>> {
        match self.try_step() {
            Ok(()) => Ok(std::mem::take(&mut self.brought)),
            Err(error) => {
                self.begin_anew();
                // What the step was to write may be missing.
                let pages = 0..self.schedule.pages.count() as u32;
                self.schedule.pages.withdraw(pages);
                Err(error)
            }
        }
    }

    fn try_step(&mut self) -> Result<()> {
        let batch = self.schedule.next();
        for slot in self.schedule.take_left() {
            self.runner.vacate(slot)?;
        }
        for of in &batch.moves {
            self.relocate(*of)?;
        }
        self.brought.extend(self.schedule.take_ended());
        let idle = batch.is_empty();
        if !idle {
            self.schedule.update_masks(&batch);
            self.runner.launch(&batch, &self.schedule.slots)?;
            let slots = &self.schedule.slots;
            let draw = |slot: usize| slots[slot].as_ref().map(|s| (slot, s.id, s.beginning));
            self.under_way.push_back(UnderWay {
                draws: batch.draws().filter_map(draw).collect(),
            });
        }
        let ahead = match idle || self.schedule.is_constrained() {
            true => 0,
            false => self.runner.ahead(),
        };
        while self.under_way.len() > ahead
            && let Some(step) = self.under_way.pop_front()
        {
            let drawn = self.runner.receive(step.draws.len())?;
            for ((slot, id, beginning), drawn) in step.draws.into_iter().zip(drawn) {
                let output = self.schedule.draw(slot, id, beginning, drawn);
                self.brought.extend(output);
            }
        }
        Ok(())
    }

    /// Moves a sequence to a slot that nobody is in, with what is under way for it.
    fn relocate(&mut self, Move { from, to }: Move) -> Result<()> {
        self.runner.relocate(from, to)?;
        let draws = self.under_way.iter_mut().flat_map(|step| &mut step.draws);
        for (slot, ..) in draws.filter(|(slot, ..)| *slot == from) {
            *slot = to;
        }
        Ok(())
    }

    /// How busy it is.
    pub fn stats(&self) -> Stats {
        let schedule = &self.schedule;
        let (pages, free) = (schedule.pages.count(), schedule.pages.available());
        let held = schedule.running().map(|s| s.pages.len()).sum::<usize>();
        Stats {
            waiting: schedule.waiting(),
            running: schedule.running().count(),
            bucket: schedule.bucket,
            pages,
            pages_free: free,
            slots_held: held * schedule.pages.size(),
            slots_used: schedule.running().map(|s| s.written).sum(),
            prompt_tokens: schedule.prompt_tokens,
            cached_tokens: schedule.cached_tokens,
            preemptions: schedule.preemptions,
            waited: self.runner.waited(),
        }
    }

    /// What each part of a step of those that are under way takes on the GPU, each measured alone, where nothing runs
    /// beside it; empty where steps are no chain of kernels. Requests then begin anew, with the tokens that they have.
    ///
    /// # Errors
    /// If a part cannot be recorded.
    pub fn profile(&mut self, rounds: usize) -> Result<Vec<PartTime>> {
        let slots = self.schedule.slots.iter().enumerate();
        let used = slots.filter(|(_, s)| s.as_ref().is_some_and(|s| s.active));
        let used = used.map(|(slot, _)| slot + 1).max().unwrap_or(0);
        if used == 0 {
            return Ok(Vec::new());
        }
        let position = |slot: &Option<Sequence>| slot.as_ref().map_or(0, |s| s.written);
        let positions: Vec<_> = self.schedule.slots[..used].iter().map(position).collect();
        let times = self.runner.profile(&positions, rounds);
        self.begin_anew();
        times
    }

    /// Sends all that are under way back to wait.
    fn begin_anew(&mut self) {
        for slot in 0..self.schedule.slots.len() {
            self.schedule.preempt(slot);
        }
        self.under_way.clear();
        self.runner.reset();
    }

    /// Why steps are no graphs on a GPU, if they are none.
    pub fn graph_refusal(&self) -> Option<&str> {
        self.runner.refusal()
    }
}
