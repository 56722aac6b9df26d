//! A folder with a model that is loaded at once: weights of the library's tests, and a tokenizer of single bytes.

use std::collections::HashMap;
use std::path::PathBuf;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};

/// Tokens that a text may have: so many that an answer of this length takes as long as a test may want it to.
pub const POSITIONS: usize = 50_000;

/// What begins and ends a text, and a third.
const SPECIAL: [&str; 3] = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"];

/// The id of the token that ends a text.
pub const END: u32 = 1;

const TEMPLATE: &str = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + \
    '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// The special tokens, and every byte but the last three, which no UTF-8 has.
fn tokenizer() -> Tokenizer {
    let mut bytes: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    bytes.retain(|byte| !['ý', 'þ', 'ÿ'].contains(byte));
    bytes.sort_unstable();
    let tokens = SPECIAL.map(str::to_owned).into_iter();
    let tokens = tokens.chain(bytes.into_iter().map(String::from));
    let vocab: HashMap<String, u32> = tokens.zip(0..).collect();
    let vocab: Vocab = vocab.into_iter().collect();
    let model = BPE::builder().vocab_and_merges(vocab, Vec::new()).build();
    let mut tokenizer = Tokenizer::new(model.expect("a vocabulary"));
    tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    let special = SPECIAL.map(|token| AddedToken::from(token, true));
    tokenizer
        .add_special_tokens(special)
        .expect("special tokens");
    tokenizer
}

/// The tokens of a text.
pub fn ids(text: &str) -> Vec<u32> {
    let encoding = tokenizer().encode_fast(text, false).expect("tokens");
    encoding.get_ids().to_vec()
}

/// The model's folder.
pub fn save() -> TempDir {
    let goldens = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/data/goldens");
    let golden = goldens.join("llama_gqa_tied");
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str| folder.path().join(name);
    let weights = "model.safetensors";
    std::fs::copy(golden.join(weights), file(weights)).expect("the weights");
    let config = std::fs::read_to_string(golden.join("config.json")).expect("config.json");
    let mut config: Value = serde_json::from_str(&config).expect("JSON");
    config["max_position_embeddings"] = POSITIONS.into();
    let settings =
        json!({ "bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "chat_template": TEMPLATE });
    for (name, text) in [
        ("config.json", config.to_string()),
        ("tokenizer_config.json", settings.to_string()),
        (
            "tokenizer.json",
            tokenizer().to_string(false).expect("JSON"),
        ),
    ] {
        std::fs::write(file(name), text).expect("a file");
    }
    folder
}
