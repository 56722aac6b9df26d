//! What the model's tokens stand for, byte by byte.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use candle_fused::serving::Constraint;
use common::tokenizer::Text;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory, token_bytes_from_tokenizer_json};
use serde_json::{Value, json};

/// The bytes of each token, and the grammars that are made of them.
pub struct Vocabulary {
    bytes: Vec<Vec<u8>>,
    /// None where the model names no token that ends a text.
    grammars: Option<ParserFactory>,
}

impl Vocabulary {
    /// That of a model.
    ///
    /// # Errors
    /// If the tokenizer is of a kind whose tokens have no bytes of their own.
    pub fn new(text: &Text) -> Result<Self> {
        let tokenizer = serde_json::to_value(text.tokenizer())?;
        let mut bytes = token_bytes_from_tokenizer_json(&tokenizer)
            .context("this model's tokenizer does not say which bytes a token stands for")?;
        let ends = text.end_ids().iter().copied();
        let ends: Vec<u32> = ends.filter(|id| (*id as usize) < bytes.len()).collect();
        let grammars = match ends.first() {
            None => None,
            Some(end) => {
                let info = TokRxInfo::new(bytes.len() as u32, *end);
                let trie = TokTrie::from(&info, &bytes).with_eos_tokens(&ends);
                let tokens: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
                let mut grammars = ParserFactory::new_simple(&tokens)?;
                grammars.quiet();
                Some(grammars)
            }
        };
        // The mark of special tokens is for grammars; the token of that byte alone has none.
        for bytes in bytes.iter_mut().filter(|bytes| bytes.len() > 1) {
            if bytes[0] == TokTrie::SPECIAL_TOKEN_MARKER {
                bytes.remove(0);
            }
        }
        Ok(Self { bytes, grammars })
    }

    /// The bytes of a token; none past the vocabulary.
    pub fn bytes(&self, token: u32) -> &[u8] {
        self.bytes.get(token as usize).map_or(&[], Vec::as_slice)
    }

    /// What holds an answer to a JSON schema.
    ///
    /// # Errors
    /// If the schema is none, or has what cannot be held to.
    pub fn json(&self, schema: &Value) -> Result<Guide> {
        let Some(grammars) = &self.grammars else {
            bail!("this model names no token that ends a text");
        };
        let mut schema = schema.clone();
        if let Value::Object(schema) = &mut schema {
            // On one line, as Python's json.dumps writes it: small models lose themselves in white space.
            schema.entry("x-guidance").or_insert_with(|| {
                json!({ "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": " })
            });
        }
        let grammar = TopLevelGrammar::from_json_schema(schema);
        let matcher = Matcher::new(grammars.create_parser(grammar));
        match matcher.get_error() {
            Some(error) => bail!(error),
            None => Ok(Guide(matcher)),
        }
    }
}

/// How far an answer has come in a grammar.
#[derive(Clone)]
pub struct Guide(Matcher);

impl Constraint for Guide {
    fn mask(&mut self, mask: &mut [u32]) -> candle_core::Result<()> {
        let allowed = self.0.compute_mask_or_eos().map_err(wrapped)?;
        for (word, allowed) in mask.iter_mut().zip(allowed.as_slice()) {
            *word = *allowed;
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> candle_core::Result<bool> {
        self.0.consume_token(token).map_err(wrapped)?;
        Ok(self.0.is_stopped())
    }
}

fn wrapped(error: anyhow::Error) -> candle_core::Error {
    candle_core::Error::msg(format!("{error:#}"))
}
