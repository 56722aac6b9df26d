//! One answer: tokens from the engine become text, up to a stop string, an end, or the time limit.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use candle_fused::serving::{Constraint, FinishReason, Request, StopStrings};
use common::report;
use common::token_stream::TokenStream;
use common::tokenizer::Text;
use tokio::sync::mpsc;

use crate::error::ApiError;
use crate::logprobs::Chosen;
use crate::metrics::{Metrics, Outcome};
use crate::worker::{Drawn, Tokens};

/// Tokens that are taken from the engine at a time, if the client reads more slowly than they come.
const AT_A_TIME: usize = 64;

/// What is asked of the engine for one answer.
pub struct Job {
    /// The engine's part.
    pub request: Request,
    /// What its tokens are held to.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Texts that end the answer.
    pub stops: Vec<String>,
}

/// How an answer has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By a stop string or an end token.
    Stop,
    /// It may not be longer.
    Length,
}

impl End {
    /// In OpenAI's words.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// News of one of a call's answers.
#[derive(Debug)]
pub struct Update {
    /// Which.
    pub index: usize,
    /// Text that has come.
    pub text: String,
    /// Tokens since the last event that was sent, if the request wants log-probabilities: all but a token that ends it.
    pub chosen: Vec<Chosen>,
    /// Tokens so far.
    pub tokens: usize,
    /// How it has ended, if it has.
    pub end: Option<Result<End, ApiError>>,
}

/// Where an answer's text goes, and what it is made with.
pub struct Writer {
    /// Of the answer.
    pub index: usize,
    /// The model's tokenizer.
    pub text: Arc<Text>,
    /// Counts how it ends.
    pub metrics: Arc<Metrics>,
    /// When it has to end at the latest.
    pub deadline: Instant,
    /// Where news go; if nobody reads them, the request is cancelled.
    pub updates: mpsc::Sender<Update>,
}

impl Writer {
    /// Writes what comes, to the end.
    pub async fn write(self, tokens: Tokens, job_stops: Vec<String>) {
        let writing = self.text(tokens, job_stops);
        let ended = tokio::time::timeout_at(self.deadline.into(), writing).await;
        let (outcome, error) = match ended {
            Ok(Ok(outcome)) => (outcome, None),
            Ok(Err(error)) => (Outcome::Failed, Some(error)),
            Err(_) => (Outcome::Timeout, Some(ApiError::timeout())),
        };
        self.metrics.finish(outcome);
        if let Some(error) = error {
            let update = Update {
                index: self.index,
                text: String::new(),
                chosen: Vec::new(),
                tokens: 0,
                end: Some(Err(error)),
            };
            // Who does not read what is there already does not miss this: the end of the channel says it too.
            let _ = self.updates.try_send(update);
        }
    }

    async fn text(&self, mut tokens: Tokens, stops: Vec<String>) -> Result<Outcome, ApiError> {
        let strings = stops.into_iter().map(String::into_bytes);
        let mut stops = StopStrings::new(strings.collect());
        let mut stream = TokenStream::new(self.text.tokenizer());
        let (mut count, mut drawn, mut chosen) = (0, Vec::new(), Vec::new());
        loop {
            tokio::select! {
                biased;
                () = self.updates.closed() => return Ok(Outcome::Cancelled),
                n = tokens.recv_many(&mut drawn, AT_A_TIME) => if n == 0 {
                    return Err(ApiError::stopped());
                },
            }
            let (text, end) = take(&mut drawn, &mut stream, &mut stops, &mut count, &mut chosen)?;
            if text.is_empty() && end.is_none() {
                continue;
            }
            let update = Update {
                index: self.index,
                text,
                chosen: std::mem::take(&mut chosen),
                tokens: count,
                end: end.map(Ok),
            };
            if self.updates.send(update).await.is_err() {
                return Ok(Outcome::Cancelled);
            }
            match end {
                Some(End::Stop) => return Ok(Outcome::Stop),
                Some(End::Length) => return Ok(Outcome::Length),
                None => {}
            }
        }
    }
}

/// The text of `drawn`, and the answer's end if it is there; `chosen` gets its tokens with their log-probabilities.
fn take(
    drawn: &mut Vec<Drawn>,
    stream: &mut TokenStream<'_>,
    stops: &mut StopStrings,
    count: &mut usize,
    chosen: &mut Vec<Chosen>,
) -> Result<(String, Option<End>), ApiError> {
    let undecodable = |error: anyhow::Error| ApiError::internal(report::one_line(&error));
    let mut text = String::new();
    for drawn in drawn.drain(..) {
        let Drawn {
            token,
            logprobs,
            finish,
        } = drawn;
        *count += usize::from(token.is_some());
        // The id that ends a text is none of it.
        if let Some(token) = token.filter(|_| finish != Some(FinishReason::Stop)) {
            chosen.extend(logprobs.map(|logprobs| Chosen { token, logprobs }));
            let piece = stream.push(token).map_err(undecodable)?;
            if show(&mut text, stops.push(piece.as_bytes())) {
                return Ok((text, Some(End::Stop)));
            }
        }
        let end = match finish {
            None => continue,
            Some(FinishReason::Stop | FinishReason::StopString | FinishReason::Complete) => {
                End::Stop
            }
            Some(FinishReason::Length) => End::Length,
            Some(FinishReason::Failed) => {
                let message = "the model's logits are no numbers; its weights may be damaged";
                return Err(ApiError::internal(message));
            }
            Some(FinishReason::Rejected) => {
                let message = "no token of the model fits the response_format from here on";
                return Err(ApiError::internal(message));
            }
        };
        let piece = stream.finish().map_err(undecodable)?;
        let stopped =
            show(&mut text, stops.push(piece.as_bytes())) || show(&mut text, stops.finish());
        return Ok((text, Some(if stopped { End::Stop } else { end })));
    }
    Ok((text, None))
}

/// Adds what can be shown, which is whole characters since the pieces and the stop strings are; whether a stop string
/// came behind it.
fn show(text: &mut String, (shown, stopped): (Vec<u8>, bool)) -> bool {
    text.push_str(&String::from_utf8_lossy(&shown));
    stopped
}
