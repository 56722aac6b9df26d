//! Text as it is generated, token by token.
//!
//! A token is a piece of the text's bytes and may end inside a character, so text is held back
//! until its characters are whole. Each token is looked at once (byte-level vocabularies) or a
//! bounded number of times (others), however long the text gets.

use std::collections::HashMap;

use anyhow::{Result, anyhow};
use tokenizers::{DecoderWrapper, Tokenizer};

/// Tokens that one character can be spread over, at most: a byte each.
const LONGEST: usize = 4;

/// Turns tokens into text that only ever consists of whole characters.
pub struct TokenStream<'a> {
    tokenizer: &'a Tokenizer,
    kind: Kind,
}

enum Kind {
    /// Every token stands for bytes, written as printable characters.
    Bytes {
        pending: Vec<u8>,
        byte_of: HashMap<char, u8>,
        added: HashMap<u32, Option<String>>,
    },
    /// Any other decoder, which is asked about a short window of tokens at a time: its text for
    /// the `said` tokens at the front has been handed out.
    Window { tokens: Vec<u32>, said: usize },
}

impl<'a> TokenStream<'a> {
    /// An empty text.
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        let kind = match tokenizer.get_decoder() {
            Some(DecoderWrapper::ByteLevel(_)) => Kind::Bytes {
                pending: Vec::new(),
                byte_of: printable_bytes(),
                added: tokenizer
                    .get_added_tokens_decoder()
                    .into_iter()
                    .map(|(id, token)| (id, (!token.special).then_some(token.content)))
                    .collect(),
            },
            _ => Kind::Window {
                tokens: Vec::new(),
                said: 0,
            },
        };
        Self { tokenizer, kind }
    }

    /// Adds a token; returns the text that became whole by it, which may be empty.
    pub fn push(&mut self, token: u32) -> Result<String> {
        match &mut self.kind {
            Kind::Bytes {
                pending,
                byte_of,
                added,
            } => {
                match added.get(&token) {
                    Some(content) => pending.extend(content.iter().flat_map(|text| text.bytes())),
                    None => {
                        let piece = self.tokenizer.id_to_token(token).unwrap_or_default();
                        for c in piece.chars() {
                            match byte_of.get(&c) {
                                Some(byte) => pending.push(*byte),
                                None => pending.extend(c.encode_utf8(&mut [0; 4]).bytes()),
                            }
                        }
                    }
                }
                Ok(take_whole(pending))
            }
            Kind::Window { tokens, said } => {
                tokens.push(token);
                let before = decode(self.tokenizer, &tokens[..*said])?;
                let after = decode(self.tokenizer, tokens)?;
                let partial =
                    after.ends_with(char::REPLACEMENT_CHARACTER) || after.len() <= before.len();
                if partial && tokens.len() - *said < LONGEST {
                    return Ok(String::new());
                }
                tokens.drain(..*said);
                *said = tokens.len();
                Ok(tail(&after, &before))
            }
        }
    }

    /// Ends the text; returns what was held back, with a replacement character for a character
    /// that never became whole.
    pub fn finish(&mut self) -> Result<String> {
        match &mut self.kind {
            Kind::Bytes { pending, .. } => {
                Ok(String::from_utf8_lossy(&std::mem::take(pending)).into_owned())
            }
            Kind::Window { tokens, said } => {
                let before = decode(self.tokenizer, &tokens[..*said])?;
                let after = decode(self.tokenizer, tokens)?;
                tokens.clear();
                *said = 0;
                Ok(tail(&after, &before))
            }
        }
    }
}

fn decode(tokenizer: &Tokenizer, tokens: &[u32]) -> Result<String> {
    tokenizer
        .decode(tokens, true)
        .map_err(|error| anyhow!("tokens cannot be decoded ({error})"))
}

/// What `after` has beyond `before`. A decoder may rewrite the end of what it said earlier; the
/// cut then falls between two characters.
fn tail(after: &str, before: &str) -> String {
    let mut cut = before.len().min(after.len());
    while !after.is_char_boundary(cut) {
        cut += 1;
    }
    after[cut..].to_owned()
}

/// Takes all but an unfinished character off the front of `pending`. Bytes that can belong to no
/// character become replacement characters at once.
fn take_whole(pending: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut rest = 0;
    for chunk in pending.utf8_chunks() {
        text.push_str(chunk.valid());
        rest += chunk.valid().len();
        let broken = chunk.invalid();
        if broken.is_empty() {
            continue;
        }
        let at_end = rest + broken.len() == pending.len();
        if at_end && std::str::from_utf8(broken).is_err_and(|error| error.error_len().is_none()) {
            break;
        }
        text.push(char::REPLACEMENT_CHARACTER);
        rest += broken.len();
    }
    pending.drain(..rest);
    text
}

/// The printable characters that byte-level vocabularies write bytes as: themselves where they are
/// printable in Latin-1, else the characters from U+0100 on, in order (GPT-2's `bytes_to_unicode`).
fn printable_bytes() -> HashMap<char, u8> {
    let mut next = 0x100;
    (0..=255u8)
        .map(|byte| {
            let c = match byte {
                b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
                _ => {
                    next += 1;
                    char::from_u32(next - 1).unwrap_or_default()
                }
            };
            (c, byte)
        })
        .collect()
}
