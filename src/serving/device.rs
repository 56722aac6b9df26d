//! Steps on a GPU. The single tokens of all slots up to a bucket's size are one chain of kernels, recorded as a graph
//! for each bucket; chunks of prompts are another, launched as they come. Tokens and positions stay on the GPU, so that
//! a step is launched before the tokens of the one before are read.

use super::buckets::Buckets;
use super::request::{Drawn, TokenLogprobs};
use super::schedule::{Batch, Chunk};
use super::sequence::Sequence;
use super::slots::{LOGPROBS, Slots};
use super::{OP, Options};
use crate::cuda::profile::Event;
use crate::cuda::{Address, Gpu, Graph, Launcher, Pinned, address_of, nvtx};
use crate::generation::PartTime;
use crate::generation::chain::{Keys, PagedKeys};
use crate::generation::plan::Plan;
use crate::generation::prefill_paged::Rows;
use crate::generation::refusal::Refusal;
use crate::models::decoder::{Decoder, Rotaries};
use crate::ops::PagePool;
use crate::ops::logprobs::{MAX_TOP, cuda as logprobs};
use crate::ops::sample::{NONE, cuda as sample};
use candle_core::{CudaDevice, Result, bail};
use std::collections::{BTreeMap, VecDeque};
use std::marker::PhantomData;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Steps whose tokens the host has not read, at most.
const AHEAD: usize = 1;

/// A chain of kernels for the first slots, and what has come of recording it.
struct Step {
    graph: Option<Graph>,
    plan: Plan,
}

/// Draws that are under way.
struct UnderWay {
    passed: Event,
    /// The first word of its tokens.
    mail: usize,
    /// Each with the number of likeliest tokens that it wants to know, if it wants log-probabilities.
    slots: Vec<(usize, Option<usize>)>,
}

pub(super) struct OnDevice {
    steps: BTreeMap<usize, Step>,
    slots: Slots,
    under_way: VecDeque<UnderWay>,
    mailbox: Pinned,
    /// The log-probabilities of as many steps.
    logprobs: Pinned,
    /// Where the next tokens go.
    turn: usize,
    count: usize,
    buckets: Buckets,
    decoder: Decoder,
    device: CudaDevice,
    gpu: &'static Gpu,
    pools: Vec<PagePool>,
    rotaries: Rotaries,
    graph: bool,
    /// Whether chunks of prompts go through the layers one at a time.
    invariant: bool,
    waited: Duration,
    refusal: Option<String>,
    /// Candle's default stream is that of the calling thread.
    _thread: PhantomData<*const ()>,
}

impl OnDevice {
    /// # Errors
    /// If the model's layers are not all fused, so that there is no chain to write down, or memory is short.
    pub fn new(
        device: &CudaDevice,
        decoder: &Decoder,
        pools: &[PagePool],
        rotaries: &Rotaries,
        positions: usize,
        options: &Options,
    ) -> std::result::Result<Self, Refusal> {
        let (count, vocab) = (options.sequences, decoder.stack.embedding.vocab_size());
        let (gpu, width) = (Launcher::new(device)?.gpu, positions.div_ceil(options.page));
        let mut all = Self {
            steps: BTreeMap::new(),
            slots: Slots::new(device, [count, width], vocab, AHEAD)?,
            under_way: VecDeque::new(),
            mailbox: Pinned::new(gpu, count * (AHEAD + 1))?,
            logprobs: Pinned::new(gpu, count * LOGPROBS * (AHEAD + 1))?,
            turn: 0,
            count,
            buckets: Buckets::new(count, options.batch_invariant),
            decoder: decoder.clone(),
            device: device.clone(),
            gpu,
            pools: pools.to_vec(),
            rotaries: rotaries.clone(),
            graph: options.graph,
            invariant: options.batch_invariant,
            waited: Duration::ZERO,
            refusal: None,
            _thread: PhantomData,
        };
        // Says whether there is a chain at all.
        all.step(1)?;
        Ok(all)
    }

    pub fn ahead(&self) -> usize {
        AHEAD
    }

    /// How long the host has waited for steps.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    pub fn refusal(&self) -> Option<&str> {
        self.refusal.as_deref()
    }

    pub fn vacate(&mut self, slot: usize) -> Result<()> {
        self.slots.leave(slot)
    }

    pub fn relocate(&mut self, from: usize, to: usize) -> Result<()> {
        self.slots.relocate(from, to)
    }

    pub fn reset(&mut self) {
        let _ = self.drain();
        for slot in 0..self.count {
            let _ = self.slots.leave(slot);
        }
    }

    /// Waits for what is under way.
    fn drain(&mut self) -> Result<()> {
        self.under_way.clear();
        // Not by a `Launcher`: that fails where an earlier drop has left an error, and the GPU would go on writing to the
        // mailbox.
        // SAFETY: the stream is candle's.
        unsafe { self.gpu.wait(self.device.cuda_stream().cu_stream()) }
    }

    /// The chain for the first `count` slots.
    fn step(&mut self, count: usize) -> std::result::Result<&mut Step, Refusal> {
        if !self.steps.contains_key(&count) {
            let keys = Keys::Pages(PagedKeys {
                pools: &self.pools,
                table: self.slots.table(),
                width: self.slots.width(),
            });
            let io = self.slots.io(0, count);
            let plan = Plan::new(&self.device, &self.decoder, &keys, &self.rotaries, &io)?;
            self.steps.insert(count, Step { graph: None, plan });
        }
        match self.steps.get_mut(&count) {
            Some(step) => Ok(step),
            None => Err(Refusal::Unfused("there is no step".to_owned())),
        }
    }

    pub fn launch(&mut self, batch: &Batch, sequences: &[Option<Sequence>]) -> Result<()> {
        let _named = nvtx::range("serving step");
        for (slot, _) in &batch.singles {
            if let Some(sequence) = &sequences[*slot] {
                self.slots.set_pages(*slot, &sequence.pages);
            }
        }
        for slot in batch.draws() {
            let sequence = sequences[slot].as_ref();
            if let Some(constrained) = sequence.and_then(|s| s.constrained.as_ref()) {
                self.slots.set_mask(slot, constrained.mask())?;
            }
        }
        let top = |slot: usize| sequences[slot].as_ref().and_then(|s| s.request.logprobs);
        if let Some((last, _)) = batch.singles.last() {
            self.slots.upload()?;
            self.singles(last + 1)?;
            if batch.singles.iter().any(|(slot, _)| top(*slot).is_some()) {
                self.logprobs_of_singles(last + 1)?;
            }
        }
        let together = if self.invariant {
            1
        } else {
            batch.chunks.len()
        };
        for chunks in batch.chunks.chunks(together.max(1)) {
            self.chunks(chunks, sequences)?;
        }
        self.copy_results_to_host(batch.draws().map(|slot| (slot, top(slot))).collect())
    }

    /// The log-probabilities of what the step of the first `used` slots has drawn.
    fn logprobs_of_singles(&mut self, used: usize) -> Result<()> {
        let (launcher, bucket) = (Launcher::new(&self.device)?, self.buckets.size(used));
        let Some(logits) = self.step(bucket)?.plan.logits() else {
            bail!("{OP}: a step leaves no logits");
        };
        let step = self.slots.logprobs_of(0, logits);
        // SAFETY: the slots and the plan have the buffers, and there is a row for each slot of the bucket.
        unsafe { logprobs::launch(&launcher, used as u32, step) }
    }

    /// What each part of a step of the first slots takes that a step in `positions` needs; who is in them is to begin
    /// anew.
    pub fn profile(&mut self, positions: &[usize], rounds: usize) -> Result<Vec<PartTime>> {
        self.drain()?;
        let bucket = self.buckets.size(positions.len());
        let device = self.device.clone();
        let step = self.step(bucket)?;
        step.plan.profile(&device, positions, rounds, || Ok(()))
    }

    /// A token of each of the first `used` slots.
    fn singles(&mut self, used: usize) -> Result<()> {
        let bucket = self.buckets.size(used);
        let launcher = Launcher::new(&self.device)?;
        let wanted = self.graph && self.refusal.is_none();
        let step = self.step(bucket)?;
        if wanted && step.graph.is_none() {
            match Graph::capture(launcher.gpu, |launcher| step.plan.launch(launcher)) {
                Ok(graph) => step.graph = Some(graph),
                Err(error) => {
                    let why = error.to_string();
                    tracing::warn!("{OP}: steps without a CUDA graph: {why}");
                    step.plan.launch(&launcher)?;
                    self.refusal = Some(why);
                    return Ok(());
                }
            }
        }
        match &mut step.graph {
            // SAFETY: the plan, the pools and the slots hold every buffer whose address was recorded, and are freed in
            // the order of the stream.
            Some(graph) => unsafe { graph.launch(launcher.stream) },
            None => step.plan.launch(&launcher),
        }
    }

    /// Chunks of prompts, and the first tokens after those that end.
    fn chunks(&mut self, chunks: &[Chunk], sequences: &[Option<Sequence>]) -> Result<()> {
        let sequence = |slot: usize| match &sequences[slot] {
            Some(sequence) => Ok(sequence),
            None => bail!("{OP}: nobody is in slot {slot}"),
        };
        let ending: Vec<usize> = chunks.iter().filter(|c| c.draws).map(|c| c.slot).collect();
        for slot in &ending {
            self.slots.enter(*slot, sequence(*slot)?)?;
        }
        let mut rows = Rows::new(self.slots.width());
        for chunk in chunks {
            let sequence = sequence(chunk.slot)?;
            let tokens = &sequence.tokens[chunk.from..chunk.to];
            rows.add(tokens, chunk.from, &sequence.pages, chunk.draws);
        }
        let read = rows.read(&self.device, &self.decoder, &self.rotaries, &self.pools)?;
        let Some(logits) = read else {
            return Ok(());
        };
        let (launcher, vocab) = (Launcher::new(&self.device)?, logits.dims()[1]);
        let logits = address_of(&logits)?;
        for (row, slot) in ending.into_iter().enumerate() {
            let logits = logits + (4 * row * vocab) as Address;
            let step = sample::Step {
                logits,
                ..self.slots.io(slot, 1).sampling
            };
            // SAFETY: the addresses are those of one slot and of one row of logits, which is freed in the order of the
            // stream.
            unsafe { sample::launch(&launcher, 1, step)? };
            if sequence(slot)?.request.logprobs.is_some() {
                let step = self.slots.logprobs_of(slot, logits);
                // SAFETY: as above.
                unsafe { logprobs::launch(&launcher, 1, step)? };
            }
        }
        Ok(())
    }

    /// Sends the tokens of these slots to the host, and the log-probabilities that are wanted.
    fn copy_results_to_host(&mut self, slots: Vec<(usize, Option<usize>)>) -> Result<()> {
        let launcher = Launcher::new(&self.device)?;
        let words = slots.iter().max().map_or(0, |(last, _)| last + 1);
        let mail = self.turn * self.count;
        self.turn = (self.turn + 1) % (AHEAD + 1);
        if words > 0 {
            let tokens = self.slots.tokens();
            // SAFETY: there is a token for each slot; what is under way is waited for when the mailbox is dropped.
            unsafe {
                self.mailbox
                    .copy_from(mail, tokens, words, launcher.stream)?
            };
        }
        if slots.iter().any(|(_, top)| top.is_some()) {
            let (at, words) = (mail * LOGPROBS, self.count * LOGPROBS);
            let from = self.slots.logprobs();
            // SAFETY: as above.
            unsafe { self.logprobs.copy_from(at, from, words, launcher.stream)? };
        }
        self.under_way.push_back(UnderWay {
            passed: Event::record(launcher.stream)?,
            mail,
            slots,
        });
        Ok(())
    }

    pub fn receive(&mut self, count: usize) -> Result<Vec<Drawn>> {
        let Some(step) = self.under_way.pop_front() else {
            bail!("{OP}: no step is under way");
        };
        if step.slots.len() != count {
            bail!("{OP}: there are not {count} draws");
        }
        let started = Instant::now();
        step.passed.wait()?;
        self.waited += started.elapsed();
        let words = self.mailbox.words();
        let drawn = step.slots.iter().map(|(slot, top)| {
            let token = words[step.mail + slot].load(Ordering::Acquire);
            Drawn {
                token: (token != NONE).then_some(token),
                logprobs: top.map(|top| self.read_logprobs(step.mail, *slot, top)),
            }
        });
        Ok(drawn.collect())
    }

    /// A slot's log-probabilities in the results that begin at `mail`.
    fn read_logprobs(&self, mail: usize, slot: usize, top: usize) -> TokenLogprobs {
        let words = &self.logprobs.words()[mail * LOGPROBS..];
        let word = |at: usize| words[at].load(Ordering::Acquire);
        let (ids, tops) = (self.count, self.count * (1 + MAX_TOP));
        let one = |n: usize| {
            let at = slot * MAX_TOP + n;
            (word(ids + at), f32::from_bits(word(tops + at)))
        };
        TokenLogprobs {
            logprob: f32::from_bits(word(slot)),
            top: (0..top).map(one).collect(),
        }
    }
}

impl Drop for OnDevice {
    fn drop(&mut self) {
        // The GPU still writes to the host's memory until the last step is through.
        let _ = self.drain();
    }
}
