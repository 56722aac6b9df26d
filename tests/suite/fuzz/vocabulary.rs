//! The tokenizer of a GGUF file, its metadata a line each: `token TEXT`, `merge LEFT RIGHT`, `kind N`,
//! `pre NAME`, `bos N`, `eos N`, `unk N`, `bos on`, `eos on`, and `text TEXT` to be tokenized.

use crate::common::gguf_vocab;
use candle_core::quantized::gguf_file::{Content, Value, VersionedMagic};
use std::collections::HashMap;

pub fn run(data: &[u8]) {
    let lines = String::from_utf8_lossy(data);
    let (content, texts) = content(&lines);
    let Ok(tokenizer) = gguf_vocab::tokenizer(&content) else {
        return;
    };
    for text in texts.into_iter().chain(["Hi 12 it's  \n x"]) {
        for with_ends in [false, true] {
            let Ok(encoding) = tokenizer.encode_fast(text, with_ends) else {
                continue;
            };
            let _ = tokenizer.decode(encoding.get_ids(), with_ends);
        }
    }
}

fn content(lines: &str) -> (Content, Vec<&str>) {
    let text = |text: &str| Value::String(text.to_owned());
    let number = |text: &str| match text.parse() {
        Ok(n) => Value::U64(n),
        Err(_) => Value::I64(text.parse().unwrap_or(-1)),
    };
    let mut metadata = HashMap::from([("model".to_owned(), text("gpt2"))]);
    let (mut tokens, mut merges, mut kinds) = (Vec::new(), Vec::new(), Vec::new());
    let mut texts = Vec::new();
    for line in lines.lines() {
        let (key, value) = line.split_once(' ').unwrap_or((line, ""));
        match (key, value) {
            ("token", value) => tokens.push(text(value)),
            ("merge", value) => merges.push(text(value)),
            ("kind", value) => kinds.push(number(value)),
            ("text", value) => texts.push(value),
            ("pre" | "model", value) => drop(metadata.insert(key.into(), text(value))),
            ("bos" | "eos", "on") => {
                metadata.insert(format!("add_{key}_token"), Value::Bool(true));
            }
            ("bos" | "eos" | "unk", value) => {
                metadata.insert(format!("{key}_token_id"), number(value));
            }
            _ => {}
        }
    }
    for (key, values) in [
        ("tokens", tokens),
        ("merges", merges),
        ("token_type", kinds),
    ] {
        if !values.is_empty() {
            metadata.insert(key.into(), Value::Array(values));
        }
    }
    let named = |(key, value)| (format!("tokenizer.ggml.{key}"), value);
    let content = Content {
        magic: VersionedMagic::GgufV3,
        metadata: metadata.into_iter().map(named).collect(),
        tensor_infos: HashMap::new(),
        tensor_data_offset: 0,
    };
    (content, texts)
}
