//! A whole model in one form.

use crate::form::Form;
use crate::stats::Times;
use serde::{Deserialize, Serialize};

/// What a model's process knows at its end.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Last {
    pub load: f64,
    pub peak_rss: Option<u64>,
    pub peak_gpu: Option<u64>,
    pub launches: Option<u64>,
    /// Bytes of weights that a step reads.
    pub bytes: Option<u64>,
    /// Why there is no graph.
    pub refusal: Option<String>,
    /// The parts of a step in a graph: name, launches, seconds, bytes.
    pub parts: Vec<(String, usize, f64, u64)>,
}

/// A model in one form.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ModelRun {
    pub model: String,
    pub format: String,
    pub form: Form,
    /// Tokens of the prompt whose time `prefill` is.
    pub prefill_tokens: usize,
    /// Seconds of that prompt, with its token, read again and again.
    pub prefill: Times,
    /// The median of the first in each round, behind other prompts and other processes.
    #[serde(default)]
    pub prefill_first: Option<f64>,
    /// Tokens in front of the first step, and steps of a round.
    pub prompt: usize,
    pub steps: usize,
    /// Seconds of a token, over the rounds' means.
    pub token: Times,
    /// Seconds of single tokens over all rounds.
    pub p50: f64,
    pub p99: f64,
    pub max: f64,
    /// Leading tokens in common with the first form.
    pub agreed: usize,
    /// On a GPU, or where RAPL may be read.
    pub joules_per_token: Option<f64>,
    #[serde(flatten)]
    pub last: Last,
}

impl ModelRun {
    /// Steps of a second.
    pub fn tokens_per_second(&self) -> f64 {
        1. / self.token.median
    }
}
