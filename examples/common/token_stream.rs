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
            Kind::Bytes { pending, added } => {
                match added.get(&token) {
                    Some(content) => pending.extend(content.iter().flat_map(|text| text.bytes())),
                    None => {
                        let piece = self.tokenizer.id_to_token(token).unwrap_or_default();
                        for c in piece.chars() {
                            match byte_of(c) {
                                Some(byte) => pending.push(byte),
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

/// The byte that a byte-level vocabulary writes as this character. Bytes are written as themselves where they are
/// printable in Latin-1, else as the characters from U+0100 on, in order (GPT-2's `bytes_to_unicode`).
fn byte_of(c: char) -> Option<u8> {
    // U+0100 stands for byte 0, and so on: the first 33 bytes, then 127 to 160, then 173.
    match u32::from(c) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => u8::try_from(code).ok(),
        code @ 0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        code @ 0x121..=0x142 => u8::try_from(code - 0x121 + 0x7f).ok(),
        0x143 => Some(0xad),
        _ => None,
    }
}
