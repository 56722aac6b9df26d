//! Requests through an engine: when each token came, and what each step did.

use super::workload::Arrival;
use anyhow::Result;
use candle_fused::serving::{Engine, Output, RequestId, Stats};
use common::comparison::{median, percentile};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// A step of an engine.
pub struct Step {
    /// Since the step before ended, or since there was work, and of that the host's work.
    pub seconds: f64,
    pub host: f64,
    /// Tokens that were generated.
    pub tokens: usize,
    /// Whether every request had its first token before.
    begun: bool,
    /// Sequences under way, their tokens in pages, and those that the pages have room for.
    running: usize,
    keys: usize,
    held: usize,
}

/// What became of some requests.
pub struct Record {
    pub requests: usize,
    pub steps: Vec<Step>,
    /// Seconds until every request had its first token, and until the last token of all.
    pub begun: f64,
    pub seconds: f64,
    /// Tokens that were generated.
    pub generated: usize,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub preemptions: u64,
    /// Seconds from each request's arrival to its first token, and between tokens.
    first: Vec<f64>,
    between: Vec<f64>,
}

impl Record {
    pub fn first(&self, percent: f64) -> f64 {
        percentile(self.first.clone(), percent)
    }

    /// 0 where no request has two tokens.
    pub fn between(&self, percent: f64) -> f64 {
        match self.between.is_empty() {
            true => 0.,
            false => percentile(self.between.clone(), percent),
        }
    }

    /// Steps with a token of every request, behind those that read prompts, if there are any.
    pub fn full_steps(&self) -> Option<Vec<&Step>> {
        let full = |step: &&Step| step.begun && step.tokens == self.requests;
        let steps: Vec<_> = self.steps.iter().filter(full).collect();
        (!steps.is_empty()).then_some(steps)
    }

    /// The mean share of held pages' slots without a token, over the steps in which most sequences are under way.
    pub fn wasted(&self, sequences: usize) -> f64 {
        let most = self.requests.min(sequences);
        let steps = self.steps.iter().filter(|step| 2 * step.running >= most);
        let wasted = |step: &Step| 1. - step.keys as f64 / step.held.max(1) as f64;
        let wasted: Vec<_> = steps.map(wasted).collect();
        wasted.iter().sum::<f64>() / wasted.len().max(1) as f64
    }
}

/// What a step does on average.
pub struct Means {
    /// Tokens that are generated, tokens of prompts that are read, and tokens whose keys and values are.
    pub rows: f64,
    pub prompt_rows: f64,
    pub keys: f64,
    /// Seconds: the median of full steps, else the mean.
    pub step: f64,
}

impl Means {
    /// Of the full steps if they are given, else of all.
    pub fn of(record: &Record, full: Option<&[&Step]>) -> Self {
        let mean = |values: &mut dyn Iterator<Item = f64>| {
            let (count, sum) = values.fold((0usize, 0.), |(n, sum), value| (n + 1, sum + value));
            sum / count.max(1) as f64
        };
        let read = record.prompt_tokens - record.cached_tokens;
        match full {
            Some(steps) => Self {
                rows: record.requests as f64,
                prompt_rows: 0.,
                keys: mean(&mut steps.iter().map(|step| step.keys as f64)),
                step: median(steps.iter().map(|step| step.seconds).collect()),
            },
            None => Self {
                rows: mean(&mut record.steps.iter().map(|step| step.tokens as f64)),
                prompt_rows: read as f64 / record.steps.len().max(1) as f64,
                keys: mean(&mut record.steps.iter().map(|step| step.keys as f64)),
                step: mean(&mut record.steps.iter().map(|step| step.seconds)),
            },
        }
    }
}

/// When a request came and when its tokens did.
struct Story {
    arrived: Instant,
    tokens: Vec<Instant>,
}

/// What becomes of requests.
#[derive(Default)]
struct Stories {
    all: HashMap<RequestId, Story>,
    /// How many have a token.
    begun: usize,
}

impl Stories {
    /// Takes the tokens of a step, and counts them.
    fn go_on(&mut self, outputs: &[Output], now: Instant) -> usize {
        let mut tokens = 0;
        for output in outputs.iter().filter(|output| output.token.is_some()) {
            tokens += 1;
            if let Some(story) = self.all.get_mut(&output.id) {
                self.begun += usize::from(story.tokens.is_empty());
                story.tokens.push(now);
            }
        }
        tokens
    }

    /// Seconds to the first token, and between tokens.
    fn waits(&self) -> (Vec<f64>, Vec<f64>) {
        let (mut first, mut between) = (Vec::new(), Vec::new());
        let seconds = |from: Instant, to: Instant| to.duration_since(from).as_secs_f64();
        for story in self.all.values() {
            first.extend(story.tokens.first().map(|t| seconds(story.arrived, *t)));
            between.extend(story.tokens.windows(2).map(|w| seconds(w[0], w[1])));
        }
        (first, between)
    }
}

/// Submits requests when they are due, until all have ended.
pub fn drive(engine: &mut Engine, arrivals: Vec<Arrival>) -> Result<Record> {
    let (requests, before) = (arrivals.len(), engine.stats());
    let mut stories = Stories::default();
    let mut steps = Vec::new();
    let started = Instant::now();
    let (mut begun, mut last) = (Duration::ZERO, started);
    let mut coming = arrivals.into_iter().peekable();
    while coming.peek().is_some() || !engine.is_idle() {
        while let Some(Arrival { due, request }) =
            coming.next_if(|arrival| started.elapsed() >= arrival.due)
        {
            let story = Story {
                arrived: started + due,
                tokens: Vec::new(),
            };
            stories.all.insert(engine.submit(request)?, story);
        }
        if let (true, Some(next)) = (engine.is_idle(), coming.peek()) {
            std::thread::sleep(next.due.saturating_sub(started.elapsed()));
            last = Instant::now();
            continue;
        }
        let (waited, had_begun) = (engine.stats().waited, stories.begun == requests);
        let entered = Instant::now();
        let outputs = engine.step()?;
        let now = Instant::now();
        let stats = engine.stats();
        let tokens = stories.go_on(&outputs, now);
        if stories.begun == requests && !had_begun {
            begun = now - started;
        }
        steps.push(Step {
            seconds: (now - last).as_secs_f64(),
            host: host(now - entered, waited, &stats),
            tokens,
            begun: had_begun,
            running: stats.running,
            keys: stats.slots_used,
            held: stats.slots_held,
        });
        last = now;
    }
    let (first, between) = stories.waits();
    let after = engine.stats();
    Ok(Record {
        requests,
        generated: steps.iter().map(|step| step.tokens).sum(),
        steps,
        begun: begun.as_secs_f64(),
        seconds: last.duration_since(started).as_secs_f64(),
        prompt_tokens: after.prompt_tokens - before.prompt_tokens,
        cached_tokens: after.cached_tokens - before.cached_tokens,
        preemptions: after.preemptions - before.preemptions,
        first,
        between,
    })
}

/// Seconds of a step of `taken` without those that the host has waited since it had waited `before`.
fn host(taken: Duration, before: Duration, stats: &Stats) -> f64 {
    let waited = stats.waited.saturating_sub(before);
    taken.saturating_sub(waited).as_secs_f64()
}
