//! The token loop: prompt in, one token after the other out, with the time each took.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use candle_core::{Device, Tensor};
use candle_fused::generation::{Generation, Options};
use candle_fused::ops::{self, SamplingParams};
use candle_fused::quant::KvCacheType;
use candle_fused::serving::{self, Engine};

use super::args::SamplingArgs;
use super::comparison::Round;
use super::report;

/// A language model with its key-value cache.
pub trait TextModel {
    /// Reads `tokens`, the first of them at `position`; returns the logits after the last, `[vocab]`.
    fn forward(&mut self, tokens: &[u32], position: usize) -> Result<Tensor>;
    /// Empties the cache.
    fn clear(&mut self) -> Result<()>;
    /// Tokens have ids below this.
    fn vocab_size(&self) -> usize;
    /// The cache holds this many tokens.
    fn context_length(&self) -> usize;
    /// Where it runs.
    fn device(&self) -> Device {
        Device::Cpu
    }
    /// Whether the model has its token loop on the device, as `generation` gives it.
    fn chooses_tokens(&self) -> bool {
        false
    }
    /// The same model with a cache of its own that holds the same, if it can be copied.
    fn fork(&self) -> Option<Box<dyn TextModel>> {
        None
    }
    /// The token loop on the device.
    fn generation(&self, _options: &Options) -> Result<Generation> {
        bail!("this model has no token loop of its own")
    }
    /// The model answering many requests at once.
    fn engine(&self, _options: &serving::Options) -> Result<Engine> {
        bail!("this model answers one request at a time")
    }
    /// What leaves the embedding and each layer for `ids` `[B, T]` (`[B, T, hidden]` each, the last
    /// one behind the final norm) and the logits of every position, if the model shows them. Empties
    /// the cache first.
    fn hidden_states(&mut self, _ids: &Tensor) -> Result<Option<(Vec<Tensor>, Tensor)>> {
        Ok(None)
    }
    /// The bytes of weights that a decode step reads, if that is known.
    fn bytes_per_step(&self) -> Option<u64> {
        None
    }
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The model ended its text.
    End,
    /// As many tokens as were asked for.
    Length,
    /// The context is full.
    Context,
}

/// One generation.
#[derive(Clone, Debug)]
pub struct Generated {
    pub stop: Stop,
    /// Prompt tokens that had to be read; those in the cache from earlier turns do not count.
    pub prompt_tokens: usize,
    pub round: Round,
}

/// A model with its way of choosing tokens.
pub struct Generator {
    model: Box<dyn TextModel>,
    chooser: Chooser,
    sampling: SamplingArgs,
    end_ids: Vec<u32>,
    /// The tokens in the cache.
    cached: Vec<u32>,
}

/// Where tokens are chosen.
enum Chooser {
    Host(SamplingParams),
    Device(Box<DeviceLoop>),
}

/// The model's own token loop, made when it is known how long the text may become.
struct DeviceLoop {
    graph: bool,
    kv_cache: KvCacheType,
    generation: Option<Generation>,
    /// Positions that it has room for.
    room: usize,
}

impl Generator {
    /// `end_ids` end a text; `graph` lets a GPU record its step; `kv_cache` other than as the model has it is for the
    /// model's own token loop.
    pub fn new(
        model: Box<dyn TextModel>,
        sampling: &SamplingArgs,
        end_ids: &[u32],
        graph: bool,
        kv_cache: KvCacheType,
    ) -> Self {
        let chooser = if model.chooses_tokens() || kv_cache != KvCacheType::Auto {
            Chooser::Device(Box::new(DeviceLoop {
                graph,
                kv_cache,
                generation: None,
                room: 0,
            }))
        } else {
            Chooser::Host(sampling.params())
        };
        Self {
            model,
            chooser,
            sampling: sampling.clone(),
            end_ids: end_ids.to_vec(),
            cached: Vec::new(),
        }
    }

    /// Continues `prompt`, handing each token to `on_token`. What the cache holds of the prompt
    /// from earlier calls is not read again.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        mut on_token: impl FnMut(u32) -> Result<()>,
    ) -> Result<Generated> {
        self.check(prompt)?;
        let begun = Instant::now();
        if !prompt.starts_with(&self.cached) || prompt.len() == self.cached.len() {
            self.model.clear()?;
            self.cached.clear();
        }
        let prompt_tokens = prompt.len() - self.cached.len();
        let mut all = prompt.to_vec();
        let mut next = self.step(&all)?;
        let prefill = begun.elapsed();
        let (mut steps, mut first) = (Vec::new(), None);
        let stop = loop {
            if self.end_ids.contains(&next) {
                break Stop::End;
            }
            all.push(next);
            on_token(next)?;
            first.get_or_insert_with(|| begun.elapsed());
            if all.len() - prompt.len() == self.sampling.sample_len {
                break Stop::Length;
            }
            if all.len() == self.model.context_length() {
                break Stop::Context;
            }
            let step = Instant::now();
            next = self.step(&all)?;
            steps.push(step.elapsed());
        };
        let round = Round {
            first_token: first.unwrap_or(prefill),
            prefill,
            steps,
        };
        Ok(Generated {
            stop,
            prompt_tokens,
            round,
        })
    }

    /// Whether [`generate`](Self::generate) can begin with this prompt.
    pub fn check(&self, prompt: &[u32]) -> Result<()> {
        ensure!(
            !prompt.is_empty(),
            "the prompt is empty; give --prompt some text"
        );
        let (vocab, context) = (self.model.vocab_size(), self.model.context_length());
        if let Some(id) = prompt.iter().find(|id| **id as usize >= vocab) {
            bail!(
                "the tokenizer gives token {id}, and the model knows only {vocab}; they do not belong together"
            );
        }
        ensure!(
            prompt.len() < context,
            "the text has {} tokens and the model's context holds {context}; make it shorter",
            prompt.len()
        );
        Ok(())
    }

    /// Reads what the cache lacks of `tokens` and chooses the one to follow.
    fn step(&mut self, tokens: &[u32]) -> Result<u32> {
        let position = self.cached.len();
        let new = &tokens[position..];
        let next = match &mut self.chooser {
            Chooser::Device(device) => {
                device.step(self.model.as_ref(), &self.sampling, tokens, position)?
            }
            Chooser::Host(params) => choose(params, &self.model.forward(new, position)?, tokens)?,
        };
        self.cached.extend_from_slice(new);
        Ok(next)
    }
}

impl DeviceLoop {
    fn step(
        &mut self,
        model: &dyn TextModel,
        sampling: &SamplingArgs,
        tokens: &[u32],
        position: usize,
    ) -> Result<u32> {
        if tokens.len() > self.room {
            // A longer conversation: it is read again into more room.
            self.room = tokens
                .len()
                .saturating_add(sampling.sample_len)
                .max(2 * self.room)
                .min(model.context_length());
            self.generation = None;
        }
        let generation = match &mut self.generation {
            Some(generation) => generation,
            none => {
                let options = Options {
                    positions: Some(self.room),
                    sampling: sampling.params(),
                    graph: self.graph,
                    kv_cache: self.kv_cache,
                    ..Default::default()
                };
                let generation = none.insert(model.generation(&options)?);
                return Ok(generation.extend(0, tokens)?);
            }
        };
        let refused = generation.graph_refusal().is_some();
        let next = if generation.ids(0).len() == position
            && generation.pending(0) == tokens.last().copied()
            && tokens.len() == position + 1
        {
            generation.step()?[0].context("the sequence has ended")?
        } else {
            generation.truncate(0, position)?;
            generation.extend(0, &tokens[position..])?
        };
        if let (false, Some(why)) = (refused, generation.graph_refusal()) {
            report::say(format_args!("no CUDA graph: {why}"));
        }
        Ok(next)
    }
}

/// The token that follows `tokens`, drawn on the host.
fn choose(params: &SamplingParams, logits: &Tensor, tokens: &[u32]) -> Result<u32> {
    ensure!(
        logits.sum_all()?.to_scalar::<f32>()?.is_finite(),
        "the model's logits are not numbers: its weights are damaged, fetch them again"
    );
    let params = std::slice::from_ref(params);
    Ok(ops::sample(&logits.unsqueeze(0)?, params, &[tokens])?.to_vec1::<u32>()?[0])
}

/// What several generations took together.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    pub first_token: Option<Duration>,
    pub prompt_tokens: usize,
    pub prefill: Duration,
    pub steps: usize,
    pub decode: Duration,
}

impl Totals {
    /// Adds a generation.
    pub fn add(&mut self, generated: &Generated) {
        self.first_token.get_or_insert(generated.round.first_token);
        self.prompt_tokens += generated.prompt_tokens;
        self.prefill += generated.round.prefill;
        self.steps += generated.round.steps.len();
        self.decode += generated.round.steps.iter().sum::<Duration>();
    }
}
