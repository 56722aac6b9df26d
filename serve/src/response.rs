//! The bodies of responses, in the forms of OpenAI's API.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
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

/// The body of a piece: there is one for each token, so it is written without a [`Value`] in between.
#[derive(Serialize)]
struct Piece<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: [PieceChoice<'a>; 1],
}

#[derive(Serialize)]
struct PieceChoice<'a> {
    index: usize,
    logprobs: &'a Value,
    finish_reason: Option<&'static str>,
    /// Of a completion.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    /// Of a chat.
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<Delta<'a>>,
}

#[derive(Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
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
    pub fn piece(&self, index: usize, text: &str, logprobs: &Value, end: Option<End>) -> String {
        let content = Some(text).filter(|text| !text.is_empty());
        let (object, text, delta) = match self.kind {
            Kind::Text => ("text_completion", Some(text), None),
            Kind::Chat => ("chat.completion.chunk", None, Some(Delta { content })),
        };
        let piece = Piece {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            choices: [PieceChoice {
                index,
                logprobs,
                finish_reason: end.map(End::reason),
                text,
                delta,
            }],
        };
        // It has strings and numbers only, which can always be written.
        serde_json::to_string(&piece).unwrap_or_default()
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

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(kind: Kind, text: &str, end: Option<End>) -> Value {
        let piece = Head::new(kind, "m").piece(2, text, &Value::Null, end);
        let mut piece: Value = serde_json::from_str(&piece).expect("JSON");
        assert!(piece["id"].is_string() && piece["created"].is_u64() && piece["model"] == "m");
        json!([piece["object"], piece["choices"].take()])
    }

    #[test]
    fn pieces_have_the_form_of_their_kind() {
        let choice = json!({ "index": 2, "logprobs": null, "finish_reason": null, "text": "\"\n" });
        let text = piece(Kind::Text, "\"\n", None);
        assert_eq!(text, json!(["text_completion", [choice]]));
        let end = json!({ "index": 2, "logprobs": null, "finish_reason": "stop", "text": "" });
        let text = piece(Kind::Text, "", Some(End::Stop));
        assert_eq!(text, json!(["text_completion", [end]]));

        let choice = json!({
            "index": 2, "logprobs": null, "finish_reason": null, "delta": { "content": "a" },
        });
        let chat = piece(Kind::Chat, "a", None);
        assert_eq!(chat, json!(["chat.completion.chunk", [choice]]));
        let end = json!({ "index": 2, "logprobs": null, "finish_reason": "length", "delta": {} });
        let chat = piece(Kind::Chat, "", Some(End::Length));
        assert_eq!(chat, json!(["chat.completion.chunk", [end]]));
    }
}
