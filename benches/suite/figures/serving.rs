//! Many requests at once.

use super::limits::{Bound, Limits, Work};
use crate::stats::Times;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// How requests come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Arrivals {
    /// All at once.
    Offline,
    /// At random times, as a Poisson process.
    Poisson,
}

impl Arrivals {
    pub fn name(self) -> &'static str {
        match self {
            Self::Offline => "offline",
            Self::Poisson => "poisson",
        }
    }
}

/// Requests to one model. Times are in seconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ServingRun {
    pub model: String,
    pub format: String,
    pub arrivals: Arrivals,
    /// Sequences of a step at most.
    pub sequences: usize,
    pub requests: usize,
    /// Distributions of the lengths, and the prefix that prompts share, in front of their own tokens.
    #[serde(default = "prompt_lengths")]
    pub prompt_lengths: String,
    #[serde(default = "answer_lengths")]
    pub answer_lengths: String,
    #[serde(default)]
    pub shared_prefix: Option<String>,
    /// Prompt tokens of all requests, and of those the ones that the cache of prefixes had.
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    /// Tokens that were generated of a second: offline with requests of one length, a sequence for each, while all of
    /// them are under way; else from the first arrival to the last token.
    pub tokens_per_second: f64,
    /// Prompt tokens read of a second until every request has begun: offline, with a sequence for each.
    pub prompts_per_second: Option<f64>,
    /// Steps: offline with requests of one length, a sequence for each, those with a token of every sequence; else all.
    pub step_p50: Option<f64>,
    pub step_p99: Option<f64>,
    #[serde(default)]
    pub step: Option<Times>,
    /// What the host does in such a step, without waiting for the GPU; not on the CPU.
    #[serde(default)]
    pub host_p50: Option<f64>,
    /// From a request's arrival to its first token, and between its tokens.
    pub first_p50: f64,
    pub first_p99: f64,
    pub between_p50: f64,
    pub between_p99: f64,
    /// The share of held pages' slots without a token, over the steps in which most sequences are under way.
    pub wasted: f64,
    pub preemptions: u64,
    /// The share of the offline throughput at which requests arrive, and how many do in a second.
    #[serde(default)]
    pub load: Option<f64>,
    pub rate: Option<f64>,
    /// The parts of a step in a graph, offline: name, launches, seconds, bytes.
    #[serde(default)]
    pub parts: Vec<(String, usize, f64, u64)>,
    /// The least that a step could take; for named shapes.
    #[serde(default)]
    pub bound: Option<StepBound>,
    /// Why steps are no graphs.
    pub refusal: Option<String>,
}

/// Lengths of runs that do not name them.
fn prompt_lengths() -> String {
    "fixed:128".to_owned()
}

fn answer_lengths() -> String {
    "fixed:256".to_owned()
}

impl ServingRun {
    /// Whether another run has the same requests.
    pub fn is_like(&self, other: &Self) -> bool {
        let names = |run: &Self| [run.model.clone(), run.format.clone(), run.lengths()];
        let counts = |run: &Self| (run.arrivals, run.sequences, run.requests, run.load);
        names(self) == names(other) && counts(self) == counts(other)
    }

    /// The lengths of its requests, in words.
    pub fn lengths(&self) -> String {
        let prefix = self.shared_prefix.as_ref();
        let prefix = prefix.map_or_else(String::new, |p| format!(" behind a shared prefix ({p})"));
        format!(
            "prompts {}{prefix}, answers {}",
            self.prompt_lengths, self.answer_lengths
        )
    }

    /// The share of a step in which the host works.
    pub fn host_share(&self) -> Option<f64> {
        Some(self.host_p50? / self.step_p50?)
    }

    /// Prompt tokens that the cache had, over all.
    pub fn hits(&self) -> f64 {
        self.cached_tokens as f64 / self.prompt_tokens.max(1) as f64
    }

    /// What each measured part takes beyond its bound, and what the step takes beyond the parts' sum, which is less
    /// than nothing where they overlap. Seconds, the most first. Attention is measured behind more keys than the step
    /// has where requests generate while others are let in: its time counts in proportion to its bytes.
    pub fn remains(&self) -> Vec<(&str, f64)> {
        let Some(bound) = &self.bound else {
            return Vec::new();
        };
        let parts: Vec<_> = self
            .parts
            .iter()
            .map(|(name, _, seconds, bytes)| (name.as_str(), seconds * bound.scale(name, *bytes)))
            .collect();
        let mut remains: Vec<_> = parts
            .iter()
            .map(|(name, seconds)| (*name, seconds - bound.of(name)))
            .collect();
        remains.sort_by(|a, b| b.1.total_cmp(&a.1));
        if !remains.is_empty() {
            let parts: f64 = parts.iter().map(|(_, seconds)| seconds).sum();
            remains.push(("between parts", bound.step - parts));
        }
        remains
    }

    /// [`Self::remains`] in words, in us.
    pub fn remains_by_part(&self) -> String {
        let remains = self.remains();
        let parts = remains.iter();
        let parts: Vec<_> = parts
            .map(|(name, seconds)| format!("{name} {:.0}", seconds * 1e6))
            .collect();
        parts.join(", ")
    }
}

/// The least that a step could take: the sum, over the parts of the model, of the larger of bytes over bandwidth and
/// operations over peak. Bytes are weights, once, and the keys and values of live tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepBound {
    /// Of a step, on average: tokens that are generated, tokens of prompts that are read, and tokens whose keys and
    /// values are.
    pub rows: f64,
    pub prompt_rows: f64,
    pub keys: f64,
    /// Seconds that such a step took: the median where all are alike, else the mean.
    pub step: f64,
    pub parts: Vec<PartBound>,
}

/// The least that a part of a step could take, in all layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PartBound {
    pub name: String,
    pub work: Work,
    pub seconds: f64,
    pub bound: Bound,
}

impl StepBound {
    /// Seconds of a step.
    pub fn seconds(&self) -> f64 {
        self.parts.iter().map(|part| part.seconds).sum()
    }

    /// Tokens of a second.
    pub fn tokens_per_second(&self) -> f64 {
        self.rows / self.seconds()
    }

    /// How much of the bound is reached.
    pub fn share(&self) -> f64 {
        self.seconds() / self.step
    }

    /// Seconds of a measured part, whose name has a plus between parts that run in one launch.
    fn of(&self, measured: &str) -> f64 {
        let has = |part: &&PartBound| measured.split('+').any(|name| name == part.name);
        let parts = self.parts.iter().filter(has);
        parts.map(|part| part.seconds).sum()
    }

    /// What a measured part's time is multiplied by: of attention by itself, the bytes of the step over those that were
    /// measured.
    fn scale(&self, measured: &str, bytes: u64) -> f64 {
        let attention = self.parts.iter().find(|part| part.name == "attention");
        match attention {
            Some(part) if part.name == measured && bytes > 0 => part.work.bytes / bytes as f64,
            _ => 1.,
        }
    }
}

/// Counts bounds from limits that have become known since.
pub fn count_bounds(runs: &mut [ServingRun], limits: &Limits) {
    let bounds = runs.iter_mut().filter_map(|run| run.bound.as_mut());
    for part in bounds.flat_map(|bound| &mut bound.parts) {
        (part.seconds, part.bound) = limits.roof(part.work);
    }
}

/// Requests one after the other whose prompts begin with the same tokens, with a prefix cache and without.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PrefixRun {
    pub model: String,
    pub format: String,
    /// Tokens that all prompts begin with, and tokens of its own behind them.
    pub prefix: usize,
    pub suffix: usize,
    /// Prompt tokens of the measured requests with the cache, and of those the ones that it had.
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    /// From a request's arrival to its first token.
    pub cached: Times,
    pub uncached: Times,
}

impl PrefixRun {
    /// The time to a first token with the cache, over that without.
    pub fn share(&self) -> f64 {
        self.cached.median / self.uncached.median
    }
}
