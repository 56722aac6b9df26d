use std::collections::HashMap;
use std::path::Path;

use candle_core::quantized::gguf_file::{Content, Value, VersionedMagic};
use proptest::prelude::*;
use serde_json::json;

use super::tiny;
use crate::common::chat::Message;
use crate::common::gguf_vocab;
use crate::common::report::one_line;
use crate::common::source::{ModelFiles, SourceOptions, locate};
use crate::common::tokenizer::Text;
use crate::common::weights;
use crate::smollm2;

fn content(changes: &[(&str, Option<Value>)]) -> Content {
    let mut metadata: HashMap<String, Value> = tiny::metadata()
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    for (name, value) in changes {
        match value {
            Some(value) => metadata.insert((*name).to_owned(), value.clone()),
            None => metadata.remove(*name),
        };
    }
    Content {
        magic: VersionedMagic::GgufV3,
        metadata,
        tensor_infos: HashMap::new(),
        tensor_data_offset: 0,
    }
}

fn text(value: &str) -> Option<Value> {
    Some(Value::String(value.to_owned()))
}

fn from_gguf(content: &Content) -> Result<Text, String> {
    Text::from_gguf(content, Path::new("m.gguf"), None).map_err(|error| one_line(&error))
}

/// Made with Hugging Face tokenizers 0.23 in Python: byte-pair encoding of this file's vocabulary
/// and merges behind Sequence[Digits(individual_digits=True), ByteLevel(add_prefix_space=False)],
/// as SmolLM2's tokenizer.json has it.
#[rustfmt::skip]
const SMOLLM2_IDS: [(&str, &[u32]); 10] = [
    ("Hello world", &[19556, 905]),
    ("In 2024, 12345 + 67890 = 80235.", &[788, 216, 34, 32, 34, 36, 28, 216, 33, 34, 35, 36, 37, 1232, 216, 38, 39, 40, 41, 32, 446, 216, 40, 32, 34, 35, 37, 30]),
    ("I'm you're we've they'll he'd it's", &[57, 5248, 346, 2316, 392, 3543, 502, 3060, 384, 6737, 357, 506]),
    ("line one\n\nline  two\n\tindented\r\n", &[1311, 582, 198, 198, 1311, 216, 827, 198, 197, 526, 6574, 2738]),
    (" leading and trailing ", &[2899, 284, 35079, 216]),
    ("emoji 😀👩‍👩‍👧 and 日本語 текст", &[391, 33777, 40303, 218, 10813, 235, 119, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117, 284, 17097, 241, 115, 40993, 179, 120, 248, 38106, 6643, 13760, 24674]),
    ("<|im_start|>user\nHi 42<|im_end|>\n", &[1, 4093, 198, 26843, 216, 36, 34, 2, 198]),
    ("a  b   c    d", &[81, 216, 278, 256, 265, 333, 287]),
    ("x=1;y=22;z=333", &[104, 45, 33, 43, 105, 45, 34, 34, 43, 106, 45, 35, 35, 35]),
    ("naïve café — “quotes”", &[3546, 46494, 37366, 1841, 619, 385, 2346, 573]),
];

#[test]
fn smollm2_tokenizes_as_transformers_does() {
    let file = smollm2::gguf();
    let weights = weights::open(&ModelFiles::Gguf {
        file,
        tokenizer: None,
        mapped: false,
    });
    let text = weights.unwrap().text().unwrap();
    for (sentence, ids) in SMOLLM2_IDS {
        assert_eq!(text.encode_prompt(sentence).unwrap(), ids, "{sentence}");
        assert_eq!(text.tokenizer().decode(ids, false).unwrap(), sentence);
    }
    assert_eq!(text.end_ids(), [2]);
    let asked = text
        .chat_template()
        .unwrap()
        .render(&[Message::user("Hi")], true)
        .unwrap();
    assert_eq!(
        asked,
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
         <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
}

/// The words that a way of splitting makes of a text, told by a vocabulary that has every byte and
/// joins nothing but what it may.
fn digits(pre: Option<&str>, number: &str) -> Vec<u32> {
    let tokens = ["0", "1", "2", "3", "12", "123", "1230"]
        .map(|token| Value::String(token.into()))
        .to_vec();
    let merges = ["1 2", "12 3", "123 0"]
        .map(|merge| Value::String(merge.into()))
        .to_vec();
    let content = content(&[
        ("tokenizer.ggml.pre", pre.and_then(text)),
        ("tokenizer.ggml.tokens", Some(Value::Array(tokens))),
        ("tokenizer.ggml.merges", Some(Value::Array(merges))),
        ("tokenizer.ggml.token_type", None),
        ("tokenizer.ggml.add_bos_token", Some(Value::Bool(false))),
    ]);
    from_gguf(&content).unwrap().encode_prompt(number).unwrap()
}

#[test]
fn each_way_of_splitting_groups_digits_its_own_way() {
    for pre in ["gpt-2", "olmo"] {
        assert_eq!(digits(Some(pre), "1230"), [6], "{pre}");
    }
    for pre in ["smollm", "starcoder", "qwen2"] {
        assert_eq!(digits(Some(pre), "1230"), [1, 2, 3, 0], "{pre}");
    }
    for pre in [Some("llama-bpe"), Some("smaug-bpe"), Some("default"), None] {
        assert_eq!(digits(pre, "1230"), [5, 0], "{pre:?}");
    }
}

/// The words that llama.cpp makes where a file names no way of splitting, by its four patterns.
#[test]
fn a_file_that_names_no_way_is_split_as_llama_cpp_does() {
    let text = from_gguf(&content(&[("tokenizer.ggml.pre", None)])).unwrap();
    let splitter = text.tokenizer().get_pre_tokenizer().unwrap();
    let words = |sentence: &str| -> Vec<String> {
        use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};
        let mut split = PreTokenizedString::from(sentence);
        splitter.pre_tokenize(&mut split).unwrap();
        let parts = split.get_splits(OffsetReferential::Original, OffsetType::Byte);
        let words = parts
            .into_iter()
            .map(|(_, (from, to), _)| &sentence[from..to]);
        words.map(str::to_owned).collect()
    };
    assert_eq!(
        words("It costs 12345$!"),
        ["It", " costs", " ", "123", "45", "$!"]
    );
    // The apostrophe is punctuation before it is a contraction.
    assert_eq!(words("don't"), ["don", "'", "t"]);
    assert_eq!(words("a  b\n\n c"), ["a", " ", " b", "\n\n", " c"]);
    assert_eq!(words("x<=y ²½"), ["x", "<=", "y", " ", "²½"]);
}

#[test]
fn texts_begin_with_the_first_token_where_the_file_or_the_model_says_so() {
    let begin = |changes: &[(&str, Option<Value>)]| {
        from_gguf(&content(changes))
            .unwrap()
            .encode_prompt("a")
            .unwrap()[0]
            == 1
    };
    assert!(!begin(&[]));
    assert!(begin(&[(
        "tokenizer.ggml.add_bos_token",
        Some(Value::Bool(true))
    )]));
    assert!(begin(&[("tokenizer.ggml.pre", text("llama-bpe"))]));
    assert!(!begin(&[
        ("tokenizer.ggml.pre", text("llama-bpe")),
        ("tokenizer.ggml.add_bos_token", Some(Value::Bool(false)))
    ]));
    let with_first = from_gguf(&content(&[(
        "tokenizer.ggml.add_bos_token",
        Some(Value::Bool(true)),
    )]))
    .unwrap();
    assert_ne!(
        with_first.encode_chat("a").unwrap()[0],
        1,
        "a chat template writes its own"
    );
}

#[test]
fn vocabularies_that_cannot_be_read_are_named() {
    let says = |changes: &[(&str, Option<Value>)], wanted: &str| {
        let Err(said) = from_gguf(&content(changes)) else {
            panic!("{wanted}: taken")
        };
        assert!(
            said.contains(wanted) && said.contains("tokenizer.json"),
            "{said}"
        );
    };
    says(
        &[("tokenizer.ggml.model", text("llama"))],
        "of the kind 'llama'",
    );
    says(&[("tokenizer.ggml.model", None)], "no tokenizer");
    says(&[("tokenizer.ggml.pre", text("mystery"))], "'mystery'");
    says(&[("tokenizer.ggml.tokens", None)], "tokenizer.ggml.tokens");
    says(
        &[(
            "tokenizer.ggml.merges",
            Some(Value::Array(vec![Value::String("alone".into())])),
        )],
        "'alone'",
    );
    says(
        &[(
            "tokenizer.ggml.merges",
            Some(Value::Array(vec![Value::String("no token".into())])),
        )],
        "merges",
    );
    says(
        &[(
            "tokenizer.ggml.tokens",
            Some(Value::Array(vec![Value::U8(1)])),
        )],
        "not all texts",
    );
}

#[test]
fn a_tokenizer_beside_the_file_stands_in() {
    let folder = tempfile::tempdir().unwrap();
    tiny::save(folder.path()).unwrap();
    let beside = folder.path().join("tokenizer.json");
    let unreadable = content(&[("tokenizer.ggml.model", text("llama"))]);
    let text = Text::from_gguf(&unreadable, Path::new("m.gguf"), Some(&beside)).unwrap();
    assert_eq!(
        text.encode_prompt("the").unwrap(),
        tiny::tokenizer().encode("the", true).unwrap().get_ids()
    );
    assert_eq!(
        gguf_vocab::text(&unreadable, "general.architecture"),
        Some("llama")
    );
}

/// Opens the tiny model with some of its files changed.
fn from_folder(changes: &[(&str, String)]) -> Result<Text, String> {
    let folder = tempfile::tempdir().unwrap();
    tiny::save(folder.path()).unwrap();
    for (name, content) in changes {
        std::fs::write(folder.path().join(name), content).unwrap();
    }
    let located = locate(folder.path().to_str(), None, &SourceOptions::from_env());
    located
        .and_then(|located| weights::open(&located.files))
        .and_then(|weights| weights.text())
        .map_err(|error| one_line(&error))
}

#[test]
fn the_end_of_a_text_is_read_from_every_file_that_names_it() {
    let config = |eos: serde_json::Value| {
        (
            "config.json",
            json!({"model_type": "llama", "eos_token_id": eos}).to_string(),
        )
    };
    let settings = |eos: serde_json::Value| {
        (
            "tokenizer_config.json",
            json!({"eos_token": eos}).to_string(),
        )
    };
    let ends =
        |changes: &[(&str, String)]| from_folder(changes).map(|text| text.end_ids().to_vec());
    assert_eq!(
        ends(&[config(json!(7)), settings(json!(null))]).unwrap(),
        [7]
    );
    assert_eq!(
        ends(&[config(json!([9, 7])), settings(json!("<|im_end|>"))]).unwrap(),
        [2, 7, 9]
    );
    assert_eq!(
        ends(&[
            config(json!(null)),
            settings(json!({"content": "<|endoftext|>"}))
        ])
        .unwrap(),
        [0]
    );
    let generation = (
        "generation_config.json",
        json!({"eos_token_id": [2, 5]}).to_string(),
    );
    assert_eq!(ends(&[config(json!(2)), generation]).unwrap(), [2, 5]);
    assert!(
        ends(&[config(json!("two"))])
            .unwrap_err()
            .contains("eos_token_id")
    );
    assert!(
        ends(&[config(json!(-1))])
            .unwrap_err()
            .contains("eos_token_id")
    );
}

#[test]
fn chat_templates_are_found_wherever_they_are() {
    let settings = |template: serde_json::Value| {
        (
            "tokenizer_config.json",
            json!({"chat_template": template}).to_string(),
        )
    };
    let says = |changes: &[(&str, String)]| {
        let text = from_folder(changes)?;
        let template = text.chat_template().map_err(|error| one_line(&error))?;
        template
            .render(&[Message::user("x")], true)
            .map_err(|error| one_line(&error))
    };
    assert_eq!(says(&[settings(json!("one"))]).unwrap(), "one");
    let named = json!([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]);
    assert_eq!(says(&[settings(named)]).unwrap(), "usual");
    assert_eq!(
        says(&[
            settings(json!("one")),
            ("chat_template.jinja", "beside".into())
        ])
        .unwrap(),
        "beside"
    );
    assert!(
        says(&[settings(json!(null))])
            .unwrap_err()
            .contains("without --chat")
    );
    assert!(
        says(&[settings(json!("{% if %}"))])
            .unwrap_err()
            .contains("without --chat")
    );
}

/// Opens a GGUF file of these bytes.
fn open(bytes: &[u8]) -> Result<Text, String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    let file = file.path().to_owned();
    weights::open(&ModelFiles::Gguf {
        file,
        tokenizer: None,
        mapped: false,
    })
    .and_then(|weights| weights.text())
    .map_err(|error| one_line(&error))
}

proptest! {
    #[test]
    fn damaged_files_are_errors_and_never_panics(
        changes in proptest::collection::vec((0usize..9000, any::<u8>()), 0..4),
        cut in proptest::option::of(0usize..9000),
    ) {
        let mut bytes = tiny::gguf().unwrap();
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        bytes.truncate(cut.unwrap_or(bytes.len()));
        match open(&bytes) {
            Ok(text) => {
                let _ = text.encode_prompt("the 123 é");
                let _ = text.chat_template();
            }
            Err(said) => prop_assert!(!said.contains('\n')),
        }
    }
}

#[test]
fn empty_prompts_and_damaged_files_are_errors() {
    let text = from_folder(&[]).unwrap();
    assert!(one_line(&text.encode_prompt("").unwrap_err()).contains("prompt is empty"));
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "config.json",
        "generation_config.json",
    ] {
        let Err(said) = from_folder(&[(name, "{".into())]) else {
            panic!("{name}: taken")
        };
        assert!(
            said.contains(name) && said.contains("fetch it again"),
            "{said}"
        );
    }
}
