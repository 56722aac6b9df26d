//! One model with different numbers of threads.

use crate::stats::Times;
use serde::{Deserialize, Serialize};

/// A model's prompts and steps on some threads. Times are in seconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ThreadRun {
    pub model: String,
    pub format: String,
    pub threads: usize,
    pub prefill_tokens: usize,
    /// Of prompts that follow one another.
    pub prefill: Times,
    /// Tokens in front of the steps.
    pub prompt: usize,
    /// Of the middle step of each round.
    pub token: Times,
}
