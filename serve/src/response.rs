//! The bodies of responses, in the forms of OpenAI's API.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::answer::End;

/// Which of the two forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// /v1/completions
    Text,
    /// /v1/chat/completions
    Chat,
}

/// Tokens of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Of its prompts, each once.
    pub prompt: usize,
    /// Of its answers.
    pub answers: usize,
}

impl Counts {
    fn json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.answers,
            "total_tokens": self.prompt + self.answers,
        })
    }
}

/// An answer that has ended.
#[derive(Clone, Debug)]
pub struct Answer {
    /// All of it.
    pub text: String,
    /// Of its tokens, or null.
    pub logprobs: Value,
    /// How it has ended.
    pub end: End,
}

/// What all bodies of a call have in common.
#[derive(Clone, Debug)]
pub struct Head {
    kind: Kind,
    id: String,
    created: u64,
    model: String,
}

/// Seconds since 1970.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

impl Head {
    /// A new call's.
    pub fn new(kind: Kind, model: &str) -> Self {
        let prefix = match kind {
            Kind::Text => "cmpl",
            Kind::Chat => "chatcmpl",
        };
        Self {
            kind,
            id: format!("{prefix}-{:032x}", rand::random::<u128>()),
            created: now(),
            model: model.to_owned(),
        }
    }

    fn body(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }

    /// The whole response.
    pub fn whole(&self, answers: Vec<Answer>, counts: Counts) -> Value {
        let choice = |(index, answer): (usize, Answer)| {
            let Answer {
                text,
                logprobs,
                end,
            } = answer;
            let mut choice = json!({
                "index": index,
                "logprobs": logprobs,
                "finish_reason": end.reason(),
            });
            match self.kind {
                Kind::Text => choice["text"] = text.into(),
                Kind::Chat => {
                    choice["message"] =
                        json!({ "role": "assistant", "content": text, "refusal": null });
                }
            }
            choice
        };
        let object = match self.kind {
            Kind::Text => "text_completion",
            Kind::Chat => "chat.completion",
        };
        let choices = answers.into_iter().enumerate().map(choice).collect();
        let mut body = self.body(object, choices);
        body["usage"] = counts.json();
        body
    }

    fn chunk(&self, choices: Vec<Value>) -> Value {
        match self.kind {
            Kind::Text => self.body("text_completion", choices),
            Kind::Chat => self.body("chat.completion.chunk", choices),
        }
    }

    /// What a stream says first of an answer, if it says something.
    pub fn opening(&self, index: usize) -> Option<Value> {
        let delta = json!({ "role": "assistant", "content": "" });
        let choice =
            json!({ "index": index, "delta": delta, "logprobs": null, "finish_reason": null });
        (self.kind == Kind::Chat).then(|| self.chunk(vec![choice]))
    }

    /// A piece of an answer in a stream, or its end, with the log-probabilities of its tokens.
    pub fn piece(&self, index: usize, text: &str, logprobs: Value, end: Option<End>) -> Value {
        let reason = end.map(End::reason);
        let mut choice = json!({ "index": index, "logprobs": logprobs, "finish_reason": reason });
        match self.kind {
            Kind::Text => choice["text"] = text.into(),
            Kind::Chat if text.is_empty() => choice["delta"] = json!({}),
            Kind::Chat => choice["delta"] = json!({ "content": text }),
        }
        self.chunk(vec![choice])
    }

    /// What a stream says last, if it was asked to.
    pub fn usage(&self, counts: Counts) -> Value {
        let mut body = self.chunk(Vec::new());
        body["usage"] = counts.json();
        body
    }
}

/// A model, as /v1/models lists it.
pub fn model(name: &str, created: u64, room: usize) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "candle-fused",
        "max_model_len": room,
    })
}
