//! The tokenizer inside a GGUF file.
//!
//! A GGUF file names its way of splitting text before byte-pair encoding (`tokenizer.ggml.pre`) but
//! does not spell it out; the names and patterns are those of llama.cpp's vocabulary loader and of
//! the models' own tokenizer.json. A name that is not known here is an error: another model's
//! splitting gives tokens that look right and are not.

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_core::quantized::gguf_file::{Content, Value};
use std::collections::HashMap;
use tokenizers::decoders::byte_level::ByteLevel as ByteLevelDecoder;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::{AddedToken, PreTokenizerWrapper, Tokenizer};

/// Kinds of token, as GGUF numbers them.
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

/// Contractions, words, digits three at a time, punctuation, line breaks and blanks, each apart.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with digits one by one.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// What llama.cpp does with files that name no way, or `default`: each pattern splits what those before
/// it left. Punctuation, GPT-2's words, numbers apart from their blanks, digits three at a time.
const DEFAULT: [&str; 4] = [
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
];

/// How text is split before byte-pair encoding.
struct Splitting {
    pre_tokenizer: PreTokenizerWrapper,
    /// Characters are put into Unicode's composed form first.
    composed: bool,
    /// A word that is a token is taken whole, whatever the merges say.
    whole_words: bool,
    /// Whether a text begins with the first token of the vocabulary's own accord.
    begins: bool,
}

impl Splitting {
    fn named(name: &str) -> Result<Self> {
        let plain = |pre_tokenizer| Self {
            pre_tokenizer,
            composed: false,
            whole_words: false,
            begins: false,
        };
        let gpt2 = ByteLevel::new(false, true, true);
        Ok(match name {
            "default" => plain(by_patterns(&DEFAULT)?),
            "gpt-2" | "gpt2" | "mpt" | "phi-2" | "jina-es" | "jina-de" | "granite" => {
                plain(gpt2.into())
            }
            "olmo" | "gptneox" | "gpt-neox" => Self {
                composed: true,
                ..plain(gpt2.into())
            },
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "minerva-7b" => {
                plain(Sequence::new(vec![Digits::new(true).into(), gpt2.into()]).into())
            }
            "llama-bpe" | "llama3" | "llama-v3" | "falcon3" => Self {
                whole_words: true,
                begins: true,
                ..plain(by_patterns(&[LLAMA3])?)
            },
            "smaug-bpe" | "dbrx" => plain(by_patterns(&[LLAMA3])?),
            "qwen2" | "deepseek-r1-qwen" | "stablelm2" => Self {
                composed: true,
                ..plain(by_patterns(&[QWEN2])?)
            },
            other => bail!("its way of splitting text ('{other}') is not known"),
        })
    }
}

/// Splits at the matches of each pattern in turn.
fn by_patterns(patterns: &[&str]) -> Result<PreTokenizerWrapper> {
    let mut steps = Vec::with_capacity(patterns.len() + 1);
    for pattern in patterns {
        let pattern = SplitPattern::Regex((*pattern).to_owned());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
        steps.push(split.map_err(|error| anyhow!(error))?.into());
    }
    steps.push(ByteLevel::new(false, true, false).into());
    Ok(Sequence::new(steps).into())
}

/// Takes what a GGUF file says of its tokenizer out of its metadata, so that it can be read while the
/// weights are.
pub fn take(content: &mut Content) -> Content {
    let of_tokenizer = |key: &String, _: &mut Value| key.starts_with("tokenizer.");
    Content {
        magic: content.magic,
        metadata: content.metadata.extract_if(of_tokenizer).collect(),
        tensor_infos: HashMap::new(),
        tensor_data_offset: content.tensor_data_offset,
    }
}

/// Builds the tokenizer that a GGUF file describes.
pub fn tokenizer(content: &Content) -> Result<Tokenizer> {
    let model = text(content, "tokenizer.ggml.model").context("it has no tokenizer")?;
    ensure!(
        model == "gpt2",
        "its vocabulary is of the kind '{model}', and only byte-level BPE ('gpt2') is read"
    );
    let tokens = texts(content, "tokenizer.ggml.tokens")?;
    let splitting = Splitting::named(text(content, "tokenizer.ggml.pre").unwrap_or("default"))?;
    let vocab: Vocab = tokens
        .iter()
        .enumerate()
        .map(|(id, token)| ((*token).to_owned(), id as u32))
        .collect();
    let merges = texts(content, "tokenizer.ggml.merges")?
        .into_iter()
        .map(|merge| {
            let (left, right) = merge
                .split_once(' ')
                .with_context(|| format!("its merge '{merge}' is no pair"))?;
            // Tokenizers panics at one that is longer than all tokens.
            let joined = [left, right].concat();
            ensure!(
                vocab.contains_key(&joined),
                "its merges do not fit its tokens: '{joined}' is none"
            );
            Ok((left.to_owned(), right.to_owned()))
        })
        .collect::<Result<Vec<_>>>()?;
    let bpe = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .ignore_merges(splitting.whole_words)
        .build()
        .map_err(|error| anyhow!("its merges do not fit its tokens ({error})"))?;
    let mut tokenizer = Tokenizer::new(bpe);
    if splitting.composed {
        tokenizer
            .with_normalizer(Some(NFC))
            .map_err(|error| anyhow!(error))?;
    }
    tokenizer.with_pre_tokenizer(Some(splitting.pre_tokenizer));
    tokenizer.with_decoder(Some(ByteLevelDecoder::default()));
    add_tokens(content, &tokens, &mut tokenizer)?;
    add_ends(content, &tokens, splitting.begins, &mut tokenizer)?;
    Ok(tokenizer)
}

/// Declares the tokens that are found in text as they stand, before it is split.
fn add_tokens(content: &Content, tokens: &[&str], tokenizer: &mut Tokenizer) -> Result<()> {
    let Some(Value::Array(kinds)) = content.metadata.get("tokenizer.ggml.token_type") else {
        return Ok(());
    };
    let mut added = Vec::new();
    for (token, kind) in tokens.iter().zip(kinds) {
        match integer(kind) {
            Some(UNKNOWN | CONTROL) => added.push(AddedToken::from(*token, true)),
            Some(USER_DEFINED) => added.push(AddedToken::from(*token, false).normalized(false)),
            Some(_) => {}
            None => bail!("its token types are no numbers"),
        }
    }
    tokenizer
        .add_tokens(added)
        .map_err(|error| anyhow!(error))?;
    Ok(())
}

/// Declares the tokens that begin and end every text.
fn add_ends(
    content: &Content,
    tokens: &[&str],
    begins: bool,
    tokenizer: &mut Tokenizer,
) -> Result<()> {
    let wanted = |key: &str, default: bool| match content.metadata.get(key) {
        Some(Value::Bool(on)) => *on,
        _ => default,
    };
    let end = |on: bool, key: &str| {
        let id = on
            .then(|| content.metadata.get(key).and_then(integer))
            .flatten()?;
        Some(((*tokens.get(id as usize)?).to_owned(), id as u32))
    };
    let first = end(
        wanted("tokenizer.ggml.add_bos_token", begins),
        "tokenizer.ggml.bos_token_id",
    );
    let last = end(
        wanted("tokenizer.ggml.add_eos_token", false),
        "tokenizer.ggml.eos_token_id",
    );
    if first.is_none() && last.is_none() {
        return Ok(());
    }
    let pieces = |body: &[&str]| -> Vec<String> {
        let name = |end: &Option<(String, u32)>| end.as_ref().map(|(token, _)| token.clone());
        let body = body.iter().map(|piece| (*piece).to_owned());
        name(&first)
            .into_iter()
            .chain(body)
            .chain(name(&last))
            .collect()
    };
    let template = TemplateProcessing::builder()
        .try_single(pieces(&["$A"]))
        .and_then(|builder| builder.try_pair(pieces(&["$A", "$B:1"])))
        .map_err(|error| anyhow!("its first or last token cannot be used ({error})"))?
        .special_tokens(first.iter().chain(&last).cloned().collect::<Vec<_>>())
        .build()
        .map_err(|error| anyhow!("its first or last token cannot be used ({error})"))?;
    tokenizer.with_post_processor(Some(template));
    Ok(())
}

/// A string of the metadata.
pub fn text<'a>(content: &'a Content, key: &str) -> Option<&'a str> {
    match content.metadata.get(key)? {
        Value::String(text) => Some(text),
        _ => None,
    }
}

/// A number of the metadata that is not negative.
pub fn number(content: &Content, key: &str) -> Option<u64> {
    integer(content.metadata.get(key)?)
}

fn texts<'a>(content: &'a Content, key: &str) -> Result<Vec<&'a str>> {
    let Some(Value::Array(values)) = content.metadata.get(key) else {
        bail!("it has no {key}");
    };
    values
        .iter()
        .map(|value| match value {
            Value::String(text) => Ok(text.as_str()),
            _ => bail!("its {key} are not all texts"),
        })
        .collect()
}

fn integer(value: &Value) -> Option<u64> {
    match *value {
        Value::U8(v) => Some(v.into()),
        Value::U16(v) => Some(v.into()),
        Value::U32(v) => Some(v.into()),
        Value::U64(v) => Some(v),
        Value::I8(v) => u64::try_from(v).ok(),
        Value::I16(v) => u64::try_from(v).ok(),
        Value::I32(v) => u64::try_from(v).ok(),
        Value::I64(v) => u64::try_from(v).ok(),
        _ => None,
    }
}
