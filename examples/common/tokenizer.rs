//! Text to tokens and back, and what a model's files say about both: where a text ends and how a
//! conversation is written.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_core::quantized::gguf_file::Content;
use serde_json::Value;
use tokenizers::Tokenizer;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::chat::{ChatTemplate, Message};
use super::gguf_vocab;
use super::source::SafetensorsFiles;
use super::validate;

/// A model's tokenizer with what belongs to it.
pub struct Text {
    tokenizer: Tokenizer,
    end_ids: Vec<u32>,
    bos_token: Option<String>,
    eos_token: Option<String>,
    template: Option<String>,
}

impl Text {
    /// Reads the tokenizer of a GGUF file; `beside` is a tokenizer.json for files whose own cannot
    /// be used.
    pub fn from_gguf(content: &Content, file: &Path, beside: Option<&PathBuf>) -> Result<Self> {
        let own = gguf_vocab::tokenizer(content);
        let tokenizer = match (own, beside) {
            (Ok(tokenizer), _) => tokenizer,
            (Err(_), Some(path)) => from_json(path)?,
            (Err(error), None) => {
                bail!(
                    "{}: {error}; put the model's tokenizer.json beside the file",
                    file.display()
                )
            }
        };
        let id = |name: &str| {
            gguf_vocab::number(content, &format!("tokenizer.ggml.{name}_token_id"))
                .map(|id| id as u32)
        };
        let token = |name: &str| id(name).and_then(|id| tokenizer.id_to_token(id));
        let (bos_token, eos_token) = (token("bos"), token("eos"));
        let end_ids = ["eos", "eot", "eom"].into_iter().filter_map(id).collect();
        let template = gguf_vocab::text(content, "tokenizer.chat_template").map(str::to_owned);
        Ok(Self {
            tokenizer,
            end_ids: in_order(end_ids),
            bos_token,
            eos_token,
            template,
        })
    }

    /// Reads tokenizer.json and the configurations around it.
    pub fn from_files(files: &SafetensorsFiles) -> Result<Self> {
        let path = files.tokenizer.as_deref().with_context(|| {
            format!(
                "there is no tokenizer.json beside {}; put the model's there",
                files.config.display()
            )
        })?;
        let tokenizer = from_json(path)?;
        let mut end_ids = Vec::new();
        for path in std::iter::once(&files.config).chain(&files.generation_config) {
            end_ids.extend(ids(&validate::json(path)?["eos_token_id"], path)?);
        }
        let config = files
            .tokenizer_config
            .as_deref()
            .map(validate::json)
            .transpose()?
            .unwrap_or_default();
        let bos_token = token_text(&config["bos_token"]);
        let eos_token = token_text(&config["eos_token"]);
        end_ids.extend(
            eos_token
                .as_ref()
                .and_then(|token| tokenizer.token_to_id(token)),
        );
        let template = match &files.chat_template {
            Some(path) => Some(
                std::fs::read_to_string(path)
                    .with_context(|| format!("cannot read {}", path.display()))?,
            ),
            None => template_in(&config["chat_template"]),
        };
        Ok(Self {
            tokenizer,
            end_ids: in_order(end_ids),
            bos_token,
            eos_token,
            template,
        })
    }

    /// Tokens for a model that has none of its own, `vocab` in all: the bytes, and behind them words that mean nothing.
    /// None ends a text, and a text is read byte by byte.
    pub fn made_up(vocab: usize) -> Result<Self> {
        let mut bytes: Vec<char> = ByteLevel::alphabet().into_iter().collect();
        bytes.sort_unstable();
        ensure!(
            vocab >= bytes.len(),
            "a vocabulary of {vocab} has no room for all bytes, expected at least {}",
            bytes.len()
        );
        let words = (0..vocab - bytes.len()).map(word);
        let tokens = bytes.iter().copied().map(String::from).chain(words);
        let ids: Vocab = tokens.zip(0..).collect();
        let model = BPE::builder().vocab_and_merges(ids, Vec::new()).build();
        let model = model.map_err(|error| anyhow!("no tokenizer can be made ({error})"))?;
        let mut tokenizer = Tokenizer::new(model);
        tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
        tokenizer.with_decoder(Some(ByteLevel::default()));
        Ok(Self {
            tokenizer,
            end_ids: Vec::new(),
            bos_token: None,
            eos_token: None,
            template: None,
        })
    }

    /// The tokens that end a text.
    pub fn end_ids(&self) -> &[u32] {
        &self.end_ids
    }

    /// The model's chat template, ready to use.
    pub fn chat_template(&self) -> Result<ChatTemplate> {
        let source = self
            .template
            .as_deref()
            .context("this model has no chat template; run it without --chat")?;
        ChatTemplate::new(source, self.bos_token.as_deref(), self.eos_token.as_deref())
    }

    /// Whether the model comes with a chat template.
    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// The tokens of a text to continue, begun as the model expects texts to begin.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        self.encode(text, true)
    }

    /// The tokens of a question in the chat template, or as it is where the model has none.
    pub fn encode_question(&self, question: &str) -> Result<Vec<u32>> {
        if !self.has_chat_template() {
            return self.encode_prompt(question);
        }
        self.encode_chat(
            &self
                .chat_template()?
                .render(&[Message::user(question)], true)?,
        )
    }

    /// The tokens of what a chat template made, which has its own beginning.
    pub fn encode_chat(&self, text: &str) -> Result<Vec<u32>> {
        self.encode(text, false)
    }

    fn encode(&self, text: &str, with_ends: bool) -> Result<Vec<u32>> {
        ensure!(
            !text.is_empty(),
            "the prompt is empty; give --prompt some text"
        );
        let encoding = self
            .tokenizer
            .encode_fast(text, with_ends)
            .map_err(|error| anyhow!("the prompt cannot be tokenized ({error})"))?;
        ensure!(
            !encoding.is_empty(),
            "the prompt has no tokens; give --prompt some text"
        );
        Ok(encoding.get_ids().to_vec())
    }

    /// What a tokenizer_config.json says of special tokens and the chat template.
    pub fn config(&self) -> Value {
        serde_json::json!({
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "chat_template": self.template,
        })
    }

    /// The tokenizer itself.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }
}

/// The `n`th made-up word: a space, as byte-level vocabularies write it, and at least three letters, the digits of `n`.
fn word(n: usize) -> String {
    let mut letters = Vec::new();
    let mut rest = n;
    while rest > 0 || letters.len() < 3 {
        letters.push(char::from(b'a' + (rest % 26) as u8));
        rest /= 26;
    }
    letters.push('Ġ');
    letters.iter().rev().collect()
}

fn from_json(path: &Path) -> Result<Tokenizer> {
    Tokenizer::from_file(path).map_err(|error| {
        anyhow!(
            "{} cannot be used ({error}); fetch it again",
            path.display()
        )
    })
}

/// The chat template of a tokenizer_config.json: a text, or several with names.
fn template_in(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Array(named) => {
            let default = named
                .iter()
                .find(|entry| entry["name"] == "default")
                .or(named.first())?;
            default["template"].as_str().map(str::to_owned)
        }
        _ => None,
    }
}

/// A special token of a tokenizer_config.json: its text, or an object that holds it.
fn token_text(value: &Value) -> Option<String> {
    value
        .as_str()
        .or_else(|| value["content"].as_str())
        .map(str::to_owned)
}

/// One id, several or none.
fn ids(value: &Value, path: &Path) -> Result<Vec<u32>> {
    let id = |value: &Value| {
        value
            .as_u64()
            .and_then(|id| u32::try_from(id).ok())
            .with_context(|| format!("eos_token_id in {} is no token id", path.display()))
    };
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Array(values) => values.iter().map(id).collect(),
        value => Ok(vec![id(value)?]),
    }
}

fn in_order(mut ids: Vec<u32>) -> Vec<u32> {
    ids.sort_unstable();
    ids.dedup();
    ids
}
