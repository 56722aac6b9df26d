//! Many requests at once.

use crate::stats::Times;
use serde::{Deserialize, Serialize};

/// How requests come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Arrivals {
    /// All at once, all of one length.
    Offline,
    /// At random times, of random lengths.
    Poisson,
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
    /// Prompt tokens of all requests, and of those the ones that a shared beginning saved.
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    /// Tokens that were generated of a second: offline while all sequences are under way, else from the first arrival
    /// to the last token.
    pub tokens_per_second: f64,
    /// Prompt tokens read of a second, offline.
    pub prompts_per_second: Option<f64>,
    /// Steps with a token of every sequence, offline.
    pub step_p50: Option<f64>,
    pub step_p99: Option<f64>,
    /// What the host does in such a step, without waiting for the GPU.
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
    /// Requests of a second that arrive.
    pub rate: Option<f64>,
    /// The parts of a step in a graph, offline: name, launches, seconds, bytes.
    #[serde(default)]
    pub parts: Vec<(String, usize, f64, u64)>,
    /// Why steps are no graphs.
    pub refusal: Option<String>,
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
