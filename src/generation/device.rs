//! The token loop on a GPU: every step is the same chain of kernels over the same addresses, and
//! the host only reads what it leaves behind.

use super::chain::{Keys, PagedKeys};
use super::paged::PagedCache;
use super::plan::Plan;
use super::prefill;
use super::prefill_graph::PromptGraphs;
use super::prefill_paged::Rows;
use super::refusal::Refusal;
use super::state::{MAIL_SLOTS, State};
use super::{Held, Options, PartTime, Sequence};
use crate::cuda::{Graph, Launcher, address_of, nvtx};
use crate::models::decoder::{Decoder, DecoderCache, Rotaries};
use crate::nn::KvCache;
use crate::ops::sample::NONE;
use candle_core::{CudaDevice, Device, Result, Tensor, bail};
use std::marker::PhantomData;

/// Tokens of a prompt that go through the layers together: what lies between the steps of a layer
/// grows with them.
const MAX_TOKENS: usize = 4096;

/// Steps of a graph where the GPU may be ahead of the host by as many: between two graphs it pauses for some
/// microseconds.
const TOGETHER: usize = 2;

/// Chains of kernels for one model, its caches and its sequences.
pub(super) struct OnDevice {
    decoder: Decoder,
    device: CudaDevice,
    plan: Plan,
    state: State,
    rotaries: Rotaries,
    keys: SequenceKeys,
    graph: Recorded,
    prompts: PromptGraphs,
    ahead: usize,
    positions: usize,
    /// Candle's default stream is that of the calling thread: on another thread nothing would wait
    /// for the steps that are under way.
    _thread: PhantomData<*const ()>,
}

/// Where the sequences' keys and values are.
enum SequenceKeys {
    /// For each sequence, its part of every layer.
    Caches(Vec<Vec<prefill::Cache>>),
    /// And u32 `[sequences, width]`, their table on the GPU.
    Pages(Box<PagedCache>, Tensor),
}

impl SequenceKeys {
    fn new(device: &CudaDevice, held: &Held, sequences: usize) -> Result<Self> {
        match held {
            Held::Caches(caches) => {
                let of = |index| caches.iter().map(|b| part(b, index)).collect();
                (0..sequences)
                    .map(of)
                    .collect::<Result<_>>()
                    .map(Self::Caches)
            }
            Held::Pages(pages) => {
                let table = Tensor::new(&pages.table[..], &Device::Cuda(device.clone()))?;
                Ok(Self::Pages(pages.clone(), table))
            }
        }
    }
}

/// What has come of the recording.
enum Recorded {
    /// Not wanted.
    Unwanted,
    /// To be done before the next step.
    Due,
    Done(Graph),
    /// Refused, and why.
    Refused(String),
}

impl OnDevice {
    /// # Errors
    /// If the model's layers are not all fused, so that there is no chain to write down, or memory is short.
    pub fn new(
        device: &CudaDevice,
        decoder: &Decoder,
        kind: &mut DecoderCache,
        held: &Held,
        positions: usize,
        options: &Options,
    ) -> std::result::Result<Self, Refusal> {
        let vocab = decoder.stack.embedding.vocab_size();
        let state = State::new(device, vocab, options.sequences)?;
        let rotaries = kind.rotaries(positions)?;
        let keys = SequenceKeys::new(device, held, options.sequences)?;
        let of_plan = match &keys {
            SequenceKeys::Caches(_) => Keys::Caches(held.caches()),
            SequenceKeys::Pages(pages, table) => Keys::Pages(PagedKeys {
                pools: &pages.pools,
                table: address_of(table)?,
                width: pages.width,
            }),
        };
        let plan = Plan::new(device, decoder, &of_plan, rotaries, &state.io())?;
        Ok(Self {
            decoder: decoder.clone(),
            device: device.clone(),
            plan,
            state,
            rotaries: rotaries.clone(),
            keys,
            graph: if options.graph {
                Recorded::Due
            } else {
                Recorded::Unwanted
            },
            prompts: PromptGraphs::new(options.graph),
            ahead: options.ahead.min(MAIL_SLOTS - 1),
            positions,
            _thread: PhantomData,
        })
    }

    pub fn refusal(&self) -> Option<&str> {
        match &self.graph {
            Recorded::Refused(why) => Some(why),
            _ => None,
        }
    }

    /// Steps that the graph has in a row.
    fn steps_per_graph(&self) -> usize {
        self.ahead.clamp(1, TOGETHER)
    }

    pub fn kernels_per_step(&self) -> usize {
        match &self.graph {
            Recorded::Done(graph) => graph.kernels() / self.steps_per_graph(),
            _ => self.plan.len(),
        }
    }

    /// Reads `ids` into sequence `index` and draws the token to follow.
    pub fn extend(&mut self, sequences: &mut [Sequence], index: usize, ids: &[u32]) -> Result<u32> {
        let _named = nvtx::range("prefill");
        self.drain()?;
        sequences[index].check(&self.decoder, ids)?;
        let position = sequences[index].ids.len();
        let logits = self.read_parts(index, ids, position)?;
        sequences[index].took(ids);
        let token = self.state.draw(&logits, index, &sequences[index])?;
        sequences[index].pending = Some(token);
        Ok(token)
    }

    /// The logits behind a prompt, which is read in parts.
    fn read_parts(&mut self, index: usize, ids: &[u32], position: usize) -> Result<Tensor> {
        let end = position + ids.len();
        let mut first = position;
        let mut rest = ids;
        while rest.len() > MAX_TOKENS {
            let (some, others) = rest.split_at(MAX_TOKENS);
            self.read(index, some, first, end)?;
            (first, rest) = (first + some.len(), others);
        }
        self.read(index, rest, first, end)
    }

    /// The logits behind a part of a prompt that reaches to `end`.
    fn read(&mut self, index: usize, ids: &[u32], position: usize, end: usize) -> Result<Tensor> {
        let (decoder, rotaries) = (&self.decoder, &self.rotaries);
        match &self.keys {
            SequenceKeys::Caches(caches) => {
                let model = prefill::Model {
                    decoder,
                    rotaries,
                    caches: &caches[index],
                    end,
                };
                let bucket = match position == 0 && end == ids.len() {
                    true => self.prompts.bucket(&self.device, &model, ids.len()),
                    false => None,
                };
                match bucket {
                    Some(rows) => {
                        let place = (index, rows);
                        self.prompts.read(&self.device, &model, place, ids)
                    }
                    None => prefill::read(&self.device, &model, ids, position),
                }
            }
            SequenceKeys::Pages(pages, _) => {
                let mut rows = Rows::new(pages.width);
                rows.add(ids, position, pages.of(index), true);
                match rows.read(&self.device, decoder, rotaries, &pages.pools)? {
                    Some(logits) => Ok(logits),
                    None => bail!("generation: a prompt leaves no logits"),
                }
            }
        }
    }

    /// Takes in the pending token of every sequence that has one, and draws the next.
    pub fn step(&mut self, sequences: &mut [Sequence]) -> Result<()> {
        let _named = nvtx::range("decode step");
        let tokens = match self.next(sequences) {
            Ok(tokens) => tokens,
            Err(e) => {
                // The GPU may be a part of a step ahead: the next one begins from what the host knows.
                // Of two errors the first is the one to tell.
                let _ = self.drain();
                return Err(e);
            }
        };
        let all = sequences.iter_mut().zip(tokens);
        all.for_each(|(sequence, token)| sequence.advance(token));
        Ok(())
    }

    /// The tokens of the next step, one for each sequence; nothing of the host's changes.
    fn next(&mut self, sequences: &[Sequence]) -> Result<Vec<u32>> {
        let begun = sequences.iter().filter(|s| s.pending.is_some());
        let longest = begun.map(|s| s.ids.len()).max().unwrap_or(0);
        let room = self.positions - longest;
        if !self.state.is_current() {
            self.state.upload(sequences)?;
        }
        let most = room.min(1 + self.ahead);
        while self.state.in_flight() + self.steps_per_graph() <= most {
            self.launch()?;
            self.state.launched(self.steps_per_graph());
        }
        if self.state.in_flight() == 0 {
            // There is no room for as many as the graph has.
            self.plan.launch(&Launcher::new(&self.device)?)?;
            self.state.launched(1);
        }
        let tokens = self.state.receive()?;
        let mut begun = sequences
            .iter()
            .zip(&tokens)
            .filter(|(s, _)| s.pending.is_some());
        if begun.any(|(_, token)| *token == NONE) {
            bail!("generation: the logits are not numbers, the weights may be damaged");
        }
        Ok(tokens)
    }

    /// Waits for the steps that are under way and forgets what they gave.
    pub fn drain(&mut self) -> Result<()> {
        self.state.drain()
    }

    /// What each part of a step takes, at the sequences' positions.
    pub fn profile(&mut self, sequences: &[Sequence], rounds: usize) -> Result<Vec<PartTime>> {
        self.drain()?;
        let positions: Vec<_> = sequences.iter().map(|s| s.ids.len()).collect();
        let state = &mut self.state;
        let times = self
            .plan
            .profile(&self.device, &positions, rounds, || state.upload(sequences))?;
        self.drain()?;
        Ok(times)
    }

    /// As many steps as the graph has.
    fn launch(&mut self) -> Result<()> {
        let launcher = Launcher::new(&self.device)?;
        let (plan, count) = (&self.plan, self.steps_per_graph());
        let steps = |launcher: &Launcher| (0..count).try_for_each(|_| plan.launch(launcher));
        if let Recorded::Due = self.graph {
            self.graph = match Graph::capture(launcher.gpu, steps) {
                Ok(graph) => Recorded::Done(graph),
                Err(error) => {
                    let why = error.to_string();
                    tracing::warn!("decoding without a CUDA graph: {why}");
                    Recorded::Refused(why)
                }
            };
        }
        match &mut self.graph {
            // SAFETY: the plan owns or shares every buffer whose address was recorded, and is
            // dropped behind the stream's work.
            Recorded::Done(graph) => unsafe { graph.launch(launcher.stream) },
            _ => steps(&launcher),
        }
    }
}

/// The keys and values of sequence `index` in a layer.
fn part(cache: &KvCache, index: usize) -> Result<prefill::Cache> {
    let (k, v) = cache.buffers()?;
    Ok((k.narrow(0, index, 1)?, v.narrow(0, index, 1)?))
}

impl Drop for OnDevice {
    fn drop(&mut self) {
        // The GPU still writes to the host's memory until the last step is through.
        let _ = self.drain();
    }
}
