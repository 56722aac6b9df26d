//! What of Llama's GGUF files is not as in others: the row order of queries and keys, and files as
//! dense checkpoints.

use super::{Config, KIND};
use crate::cpu::pool;
use crate::models::gguf::{File, Header};
use crate::ops::RopeStyle;
use candle_core::quantized::QTensor;
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Result, Tensor, bail};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::io::{Read, Seek};
use std::sync::{Mutex, PoisonError};

/// Values of tensors that are dequantized in parallel and are in host memory together, but for one that has more.
const TOGETHER: usize = 1 << 26;

/// Hugging Face's name of a tensor, the heads whose rows are permuted, if they are, and what the file has.
type Stored = (String, Option<usize>, QTensor);

/// The configuration of a llama GGUF file and its tensors as a dense checkpoint: dequantized to
/// `dtype`, under Hugging Face's names and in its row order, so that `VarBuilder::from_tensors` and
/// any Llama implementation for safetensors can load them.
///
/// # Errors
/// As [`ModelWeights::from_gguf`](super::ModelWeights::from_gguf).
///
/// ```
/// use candle_core::quantized::gguf_file::Content;
/// use candle_core::{DType, Device};
/// use candle_fused::models::llama::{Llama, dequantize_gguf};
/// use candle_nn::VarBuilder;
/// use std::io::Cursor;
/// # mod tiny { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/gguf.rs")); }
/// # let bytes = tiny::gguf("llama", false)?;
/// // The bytes of a GGUF file of one layer.
/// let mut file = Cursor::new(&bytes);
/// let content = Content::read(&mut file)?;
/// let (config, tensors) = dequantize_gguf(&content, &mut file, DType::F32, &Device::Cpu)?;
/// assert!(tensors.contains_key("model.layers.0.self_attn.q_proj.weight"));
/// let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
/// let model = Llama::load(vb, &config)?;
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn dequantize_gguf<R: Seek + Read>(
    ct: &Content,
    reader: &mut R,
    dtype: DType,
    device: &Device,
) -> Result<(Config, HashMap<String, Tensor>)> {
    let mut file = File::new(ct, reader, device, false);
    let header = Header::read(ct, &KIND)?;
    let mut cfg = config(&header)?;
    cfg.tie_word_embeddings = !ct.tensor_infos.contains_key("output.weight");
    if ct.tensor_infos.contains_key("rope_freqs.weight") {
        bail!("gguf: scaled rotary frequencies (`rope_freqs.weight`) have no dense configuration");
    }
    // As the file says, which may be anything.
    let count = |dims: &[usize]| dims.iter().fold(1usize, |n, dim| n.saturating_mul(*dim));
    let infos = ct.tensor_infos.iter();
    let mut names: Vec<_> = infos.map(|(n, i)| (n, count(i.shape.dims()))).collect();
    // The largest first, so that none is left for one thread at the end.
    names.sort_by_key(|(name, count)| (Reverse(*count), *name));
    let mut tensors = HashMap::new();
    let mut names = names.into_iter().peekable();
    while names.peek().is_some() {
        let (mut stored, mut values) = (Vec::new(), 0usize);
        while let Some((name, count)) =
            names.next_if(|(_, more)| stored.is_empty() || values.saturating_add(*more) <= TOGETHER)
        {
            let Some((dense, heads)) = dense_name(name, &cfg) else {
                bail!("gguf: tensor `{name}` is not one of a llama model's");
            };
            let heads = heads.filter(|_| header.style == RopeStyle::Interleaved);
            stored.push((dense, heads, file.any(name, &Device::Cpu)?));
            values = values.saturating_add(count);
        }
        for ((dense, ..), tensor) in stored.iter().zip(dequantize(&stored, dtype)) {
            tensors.insert(dense.clone(), tensor?.to_device(device)?);
        }
    }
    Ok((cfg, tensors))
}

/// The numbers of tensors in the rows' order of Hugging Face, a thread for each.
fn dequantize(stored: &[Stored], dtype: DType) -> impl Iterator<Item = Result<Tensor>> {
    let done: Vec<_> = stored.iter().map(|_| Mutex::new(None)).collect();
    pool::run(stored.len(), |i| {
        let (_, heads, tensor) = &stored[i];
        let tensor = tensor
            .dequantize(&Device::Cpu)
            .and_then(|tensor| tensor.to_dtype(dtype))
            .and_then(|tensor| match heads {
                Some(heads) => half_split_rows(&tensor, *heads),
                None => Ok(tensor),
            });
        *done[i].lock().unwrap_or_else(PoisonError::into_inner) = Some(tensor);
    });
    done.into_iter().map(|tensor| {
        let tensor = tensor.into_inner().unwrap_or_else(PoisonError::into_inner);
        tensor.unwrap_or_else(|| bail!("gguf: a tensor was not dequantized"))
    })
}

/// Hugging Face's name of a GGUF tensor, and the heads whose rows are permuted, if they are.
fn dense_name(name: &str, cfg: &Config) -> Option<(String, Option<usize>)> {
    match name {
        "token_embd.weight" => return Some(("model.embed_tokens.weight".into(), None)),
        "output_norm.weight" => return Some(("model.norm.weight".into(), None)),
        "output.weight" => return Some(("lm_head.weight".into(), None)),
        _ => {}
    }
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    let (part, kind) = part.rsplit_once('.')?;
    let (part, heads) = match part {
        "attn_q" => ("self_attn.q_proj", Some(cfg.num_attention_heads)),
        "attn_k" => ("self_attn.k_proj", Some(cfg.num_key_value_heads)),
        "attn_v" => ("self_attn.v_proj", None),
        "attn_output" => ("self_attn.o_proj", None),
        "ffn_gate" => ("mlp.gate_proj", None),
        "ffn_up" => ("mlp.up_proj", None),
        "ffn_down" => ("mlp.down_proj", None),
        "attn_norm" => ("input_layernorm", None),
        "ffn_norm" => ("post_attention_layernorm", None),
        _ => return None,
    };
    Some((format!("model.layers.{layer}.{part}.{kind}"), heads))
}

/// Undoes the row order of GGUF's llama files, where rotated pairs are neighbours.
fn half_split_rows(w: &Tensor, heads: usize) -> Result<Tensor> {
    let rows = w.dim(0)?;
    if rows == 0 || !rows.is_multiple_of(2 * heads) {
        bail!("gguf: {rows} rows of queries or keys do not divide into {heads} heads of pairs");
    }
    let rest = w.elem_count() / rows;
    w.reshape((heads, rows / heads / 2, 2, rest))?
        .transpose(1, 2)?
        .reshape(w.dims())
}

/// The configuration that a llama GGUF file's metadata gives, checked against the tensors that the
/// file names.
///
/// # Errors
/// If the architecture is not `llama`, or a value is missing, out of range, at odds with the tensors
/// or nothing that a [`Config`] can say, by its name.
///
/// ```
/// use candle_core::quantized::gguf_file::Content;
/// use candle_fused::models::llama::gguf_config;
/// # mod tiny { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/gguf.rs")); }
/// # let bytes = tiny::gguf("llama", false)?;
/// // The bytes of a GGUF file of one layer.
/// let content = Content::read(&mut std::io::Cursor::new(&bytes))?;
/// let config = gguf_config(&content)?;
/// assert_eq!((config.num_hidden_layers, config.hidden_size), (1, 64));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn gguf_config(ct: &Content) -> Result<Config> {
    config(&Header::read(ct, &KIND)?)
}

fn config(header: &Header) -> Result<Config> {
    if let Some(window) = header.window.filter(|w| *w < header.max_positions) {
        bail!("gguf: a window of {window} positions has no configuration of a Llama model");
    }
    if header.scale != 1. {
        bail!(
            "gguf: rotary frequencies divided by {} have no configuration of a Llama model",
            header.scale
        );
    }
    let head_dim = header.head_dim;
    if head_dim * header.heads != header.hidden || header.rotated != head_dim {
        bail!(
            "gguf: {} heads of {head_dim}, {} of it rotated, have no configuration in a model {} wide",
            header.heads,
            header.rotated,
            header.hidden
        );
    }
    Ok(Config {
        hidden_size: header.hidden,
        intermediate_size: header.intermediate,
        vocab_size: header.vocab,
        num_hidden_layers: header.layers,
        num_attention_heads: header.heads,
        num_key_value_heads: header.kv_heads,
        use_flash_attn: false,
        rms_norm_eps: f64::from(header.eps),
        rope_theta: header.theta,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: header.max_positions,
        tie_word_embeddings: false,
    })
}
