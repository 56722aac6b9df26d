//! What is asked of the engine, and what it answers.

use crate::ops::SamplingParams;
use std::time::Duration;

/// A text to be continued.
///
/// ```
/// use candle_fused::serving::Request;
/// let request = Request { max_tokens: 16, stop: vec![2], ..Request::new([1, 5, 9]) };
/// assert_eq!(request.prompt, [1, 5, 9]);
/// ```
#[derive(Clone, Debug)]
pub struct Request {
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// Tokens to generate at most; 256 by default.
    pub max_tokens: usize,
    /// Ids that end the text: the id itself is the last that is given. No ids by default.
    pub stop: Vec<u32>,
    /// Bytes that end the text where they come, none of them empty: the token that completes them is the last that is
    /// given, unless another string that began earlier may still come: the first to begin counts.
    /// [`StopStrings`](super::StopStrings) tells what of the text comes before. The engine has to know the bytes of
    /// tokens, see [`Engine::with_vocabulary`](super::Engine::with_vocabulary). None by default.
    pub stop_strings: Vec<Vec<u8>>,
    /// How tokens are chosen, by default the likeliest. A draw depends on the seed, the token's position and the
    /// logits alone, not on what runs beside it.
    pub sampling: SamplingParams,
    /// Gives the log-probability of each token, and of this many of the likeliest ones in its place, 0 to
    /// [`MAX_TOP`](crate::ops::logprobs::MAX_TOP): of the logits as they are, without penalty, mask and temperature. None
    /// by default.
    pub logprobs: Option<usize>,
}

impl Request {
    /// The likeliest 256 tokens after `prompt`.
    pub fn new(prompt: impl Into<Vec<u32>>) -> Self {
        Self {
            prompt: prompt.into(),
            max_tokens: 256,
            stop: Vec::new(),
            stop_strings: Vec::new(),
            sampling: SamplingParams::default(),
            logprobs: None,
        }
    }
}

/// The number of a request, in the order in which they were submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub(super) u64);

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Why a request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// One of its stop ids was drawn.
    Stop,
    /// One of its stop strings is there with the last token.
    StopString,
    /// It has `max_tokens` tokens, or there is no room for another: the engine's positions or pages are all taken.
    Length,
    /// Its constraint says that the text is complete: the last token is a part of it.
    Complete,
    /// Its logits were not numbers: the weights may be damaged.
    Failed,
    /// Its constraint failed, or allowed no token.
    Rejected,
}

/// The log-probabilities in the place of a token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// That of the token.
    pub logprob: f32,
    /// Of the likeliest tokens, the likeliest first, as many as the request asks for.
    pub top: Vec<(u32, f32)>,
}

/// What a draw has come to.
#[derive(Clone, Debug, Default)]
pub(super) struct Drawn {
    /// None where no logit that may be drawn is a number.
    pub token: Option<u32>,
    pub logprobs: Option<TokenLogprobs>,
}

/// What a step has brought a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// Whose.
    pub id: RequestId,
    /// The token that was drawn; none where nothing was drawn.
    pub token: Option<u32>,
    /// Of that token, if the request asks for them.
    pub logprobs: Option<TokenLogprobs>,
    /// Why that was the last, if it was.
    pub finish: Option<FinishReason>,
}

/// How busy the engine is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests that wait for a place.
    pub waiting: usize,
    /// Requests that hold pages.
    pub running: usize,
    /// Slots of the last step of single tokens, 0 if that step had none. On a GPU they are what the step costs, and its
    /// graph is that of this many sequences: as many as there are up to 8, then the next power of two, and always all
    /// with [`batch_invariant`](super::Options::batch_invariant).
    pub bucket: usize,
    /// Pages of keys and values in all.
    pub pages: usize,
    /// Pages that no request holds; some of them keep what may be read again.
    pub pages_free: usize,
    /// Tokens that held pages have room for, and that are in them.
    pub slots_held: usize,
    /// Tokens of those that hold keys and values of a request.
    pub slots_used: usize,
    /// Tokens of admitted requests so far: their prompts, and what a preempted one has to read again.
    pub prompt_tokens: u64,
    /// Of these, tokens that were found in the cache of prefixes.
    pub cached_tokens: u64,
    /// Requests that had to give up their pages and begin again.
    pub preemptions: u64,
    /// How long steps have waited for the GPU; what else they take is the host's work. Zero where steps are no chain of
    /// kernels.
    pub waited: Duration,
}
