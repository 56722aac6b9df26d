//! Log-probabilities in the forms of OpenAI's API.

use std::sync::Arc;

use candle_fused::serving::TokenLogprobs;
use serde_json::{Map, Value, json};

use crate::response::Kind;
use crate::vocabulary::Vocabulary;

/// What stands for a probability of 0, which JSON has no logarithm of; vLLM has the same.
const LEAST: f32 = -9999.;

/// A token of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Chosen {
    /// Its id.
    pub token: u32,
    /// What was said in its place.
    pub logprobs: TokenLogprobs,
}

/// Writes them, for one answer from its begin to its end.
#[derive(Clone)]
pub struct Listing {
    kind: Kind,
    vocabulary: Arc<Vocabulary>,
    /// Characters of the tokens so far.
    offset: usize,
}

impl Listing {
    /// Of an answer that begins.
    pub fn new(kind: Kind, vocabulary: Arc<Vocabulary>) -> Self {
        Self {
            kind,
            vocabulary,
            offset: 0,
        }
    }

    /// The field `logprobs` for the tokens that come next.
    pub fn write(&mut self, chosen: &[Chosen]) -> Value {
        match self.kind {
            Kind::Chat => {
                let content: Vec<_> = chosen.iter().map(|one| self.entry(one)).collect();
                json!({ "content": content, "refusal": null })
            }
            Kind::Text => self.lists(chosen),
        }
    }

    fn text(&self, token: u32) -> String {
        String::from_utf8_lossy(self.vocabulary.bytes(token)).into_owned()
    }

    /// A token of a chat.
    fn entry(&self, chosen: &Chosen) -> Value {
        let one = |token: u32, logprob: f32| {
            json!({
                "token": self.text(token),
                "logprob": logprob.max(LEAST),
                "bytes": self.vocabulary.bytes(token),
            })
        };
        let mut entry = one(chosen.token, chosen.logprobs.logprob);
        let top = chosen.logprobs.top.iter();
        entry["top_logprobs"] = top.map(|(token, logprob)| one(*token, *logprob)).collect();
        entry
    }

    /// The tokens of a completion. Where the likeliest are listed, the chosen one is among them, in the place of another
    /// of the same text.
    fn lists(&mut self, chosen: &[Chosen]) -> Value {
        let (mut offsets, mut tops) = (Vec::new(), Vec::new());
        let mut tokens = Vec::new();
        for Chosen { token, logprobs } in chosen {
            let text = self.text(*token);
            offsets.push(self.offset);
            self.offset += text.chars().count();
            let mut top = Map::new();
            // Of tokens with the same text the likeliest stays.
            for (token, logprob) in &logprobs.top {
                let text = self.text(*token);
                top.entry(text).or_insert_with(|| json!(logprob.max(LEAST)));
            }
            if !top.is_empty() {
                top.insert(text.clone(), json!(logprobs.logprob.max(LEAST)));
            }
            tops.push(match top.is_empty() {
                true => Value::Null,
                false => Value::Object(top),
            });
            tokens.push(text);
        }
        let logprobs = chosen.iter().map(|one| one.logprobs.logprob.max(LEAST));
        json!({
            "tokens": tokens,
            "token_logprobs": logprobs.collect::<Vec<_>>(),
            "top_logprobs": match tops.iter().all(Value::is_null) {
                true => Value::Null,
                false => Value::Array(tops),
            },
            "text_offset": offsets,
        })
    }
}
