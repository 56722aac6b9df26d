//! The plan of a decode step: its launches in order, with their addresses, from token ids to next tokens. A layer has
//! five: norm with q, k and v; attention with rotation and append; the output projection with the residual; norm with
//! gate and up, or with up alone; down with the residual. In small models the first two are one launch. Where attention
//! and MLP run in parallel, up comes before the output projection. Keys and values are in one cache for each sequence,
//! or in pages by a table.

use super::PartTime;
use super::chain::{Keys, StepIo, StepOp};
use super::refusal::{Refusal, unfused};
use super::writer::PlanBuilder;
use crate::cuda::profile::Event;
use crate::cuda::{Address, Graph, Launcher, Preceding, Scratch, moved};
use crate::models::decoder::{Decoder, Rotaries};
use crate::ops::embedding::cuda::{self as embedding, Lookup};
use crate::ops::flash_decoding::cuda::StepShape;
use crate::ops::sample::cuda as sample;
use candle_core::{CudaDevice, CudaStorage, Result, Tensor};
use std::cell::RefCell;

/// The launches of a decode step, in order, and the memory that they use.
pub(crate) struct Plan {
    /// Each with the name of its part of the model.
    work: Vec<(&'static str, StepOp)>,
    sequences: u32,
    /// What products need between their launches; the steps of a chain take turns.
    scratch: RefCell<Scratch>,
    /// The owners of the addresses in `work`, but for those of `StepIo` and of a page table.
    _held: Held,
}

struct Held {
    _decoder: Decoder,
    _caches: Vec<Tensor>,
    _tables: Rotaries,
    _buffers: Vec<CudaStorage>,
}

impl Plan {
    /// # Errors
    /// If a part of the model is not fused, so that there is no such chain, or memory is short.
    pub fn new(
        device: &CudaDevice,
        decoder: &Decoder,
        keys: &Keys<'_>,
        rotaries: &Rotaries,
        io: &StepIo,
    ) -> std::result::Result<Self, Refusal> {
        let Some(table) = decoder.stack.embedding.table() else {
            return unfused("the embedding is not in the GPU's memory");
        };
        let lookup = Lookup::new(table, io.token, 0, io.sequences)?;
        let mut builder = PlanBuilder::new(device, lookup, io)?;
        for (i, block) in decoder.stack.blocks.iter().enumerate() {
            let written = builder.block(i, block, keys, rotaries.of(block));
            written.map_err(|refusal| refusal.within(format_args!("layer {i}")))?;
        }
        let written = builder.head(&decoder.head, &decoder.stack.norm);
        written.map_err(|refusal| refusal.within(format_args!("head")))?;
        let products = builder.work.iter().map(|(_, work)| match work {
            StepOp::Linear(product) => product.scratch(),
            _ => 0,
        });
        let scratch = Scratch::fixed("generation", device, products.max().unwrap_or(0))?;
        Ok(Self {
            work: builder.work,
            sequences: io.sequences as u32,
            scratch: RefCell::new(scratch),
            _held: Held {
                _decoder: decoder.clone(),
                _caches: keys.tensors()?,
                _tables: rotaries.clone(),
                _buffers: builder.buffers,
            },
        })
    }

    /// Where a step leaves its logits, f32 `[sequences, vocab]`, until the next one.
    pub fn logits(&self) -> Option<Address> {
        self.work.iter().find_map(|(_, work)| match work {
            StepOp::Sample(step) => Some(step.logits),
            _ => None,
        })
    }

    /// Launches the whole step.
    pub fn launch(&self, launcher: &Launcher) -> Result<()> {
        self.work
            .iter()
            .try_for_each(|(_, work)| self.launch_one(launcher, work))
    }

    /// The parts of the model that there are launches for, in the order of their first.
    fn parts(&self) -> Vec<&'static str> {
        let mut parts = Vec::new();
        for (part, _) in &self.work {
            if !parts.contains(part) {
                parts.push(*part);
            }
        }
        parts
    }

    /// Launches one part of the model in all layers, and tells how many steps that was.
    fn launch_part(&self, launcher: &Launcher, part: &str) -> Result<usize> {
        let mut count = 0;
        for (_, work) in self.work.iter().filter(|(name, _)| *name == part) {
            self.launch_one(launcher, work)?;
            count += 1;
        }
        Ok(count)
    }

    /// What each part of the model takes: its launches in all layers as a graph of their own, replayed in a row. Behind
    /// `set_back` the sequences stand at `positions`.
    pub fn profile(
        &self,
        device: &CudaDevice,
        positions: &[usize],
        rounds: usize,
        mut set_back: impl FnMut() -> Result<()>,
    ) -> Result<Vec<PartTime>> {
        /// A graph repeats its part, so that the gaps between graphs weigh little.
        const REPEATS: usize = 4;
        let launcher = Launcher::new(device)?;
        let mut times = Vec::new();
        for part in self.parts() {
            set_back()?;
            let (mut count, mut before) = (0, 0);
            let mut graph = Graph::capture(launcher.gpu, |launcher| {
                (count, before) = (0, moved());
                for _ in 0..REPEATS {
                    count += self.launch_part(launcher, part)?;
                }
                Ok(())
            })?;
            let cache = self.cache_bytes(part, positions);
            let mut replay = |times: usize| {
                // SAFETY: as in `launch_one`.
                (0..times).try_for_each(|_| unsafe { graph.launch(launcher.stream) })
            };
            replay(3)?;
            let begin = Event::record(launcher.stream)?;
            replay(rounds)?;
            let seconds = Event::record(launcher.stream)?.since(&begin)?;
            times.push(PartTime {
                part,
                launches: count / REPEATS,
                seconds: seconds / (REPEATS * rounds) as f64,
                bytes: (moved() - before) / REPEATS as u64 + cache,
            });
        }
        Ok(times)
    }

    /// Bytes of keys and values that a part of a step reads when the sequences stand at `positions`.
    fn cache_bytes(&self, part: &str, positions: &[usize]) -> u64 {
        let keys: usize = positions.iter().map(|p| p + 1).sum();
        let of = |shape: &StepShape| {
            2 * shape.kv_heads * shape.head_dim * shape.cache_dtype.size_in_bytes()
        };
        let row = |work: &StepOp| match work {
            StepOp::Attention(attention) => of(attention.shape()),
            _ => 0,
        };
        self.work
            .iter()
            .filter(|(name, _)| *name == part)
            .map(|(_, work)| (keys * row(work)) as u64)
            .sum()
    }

    fn launch_one(&self, launcher: &Launcher, work: &StepOp) -> Result<()> {
        // SAFETY: every address stands for a buffer that `_held` or the owner of `StepIo` keeps, in the size
        // that the work asks for, and all of it is used on candle's stream alone. In the chain no
        // kernel writes what a later one reads before it waits: those are weights and tables.
        unsafe {
            match work {
                StepOp::Embedding(lookup) => embedding::launch(launcher, lookup),
                StepOp::Linear(product) => {
                    let mut scratch = self.scratch.borrow_mut();
                    scratch.reset();
                    product.run(&launcher.behind(Preceding::Other), &mut scratch)
                }
                StepOp::Attention(attention) => attention.run(launcher),
                StepOp::Sample(step) => sample::launch(launcher, self.sequences, *step),
            }
        }
    }

    /// Steps of the model; a product of several weight formats may be more than one kernel.
    pub fn len(&self) -> usize {
        self.work.len()
    }
}
