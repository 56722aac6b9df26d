//! What of Llama's GGUF files is not as in others: the row order of queries and keys, and files as
//! dense checkpoints.

use super::{Config, KIND};
#[cfg(feature = "cuda")]
use crate::cuda::BlockMatrix;
use crate::models::gguf::{File, Header};
use crate::ops::RopeStyle;
use crate::pool;
#[cfg(feature = "cuda")]
use crate::quant;
use candle_core::quantized::gguf_file::Content;
use candle_core::quantized::{QStorage, QTensor};
use candle_core::{DType, Device, Result, Tensor, bail};
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::io::{Read, Seek};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Values of tensors that are dequantized in parallel and are in host memory together, but for one that has more.
const TOGETHER: usize = 1 << 26;

/// Values that a thread dequantizes at a time, if that is a whole number of rows.
const PIECE: usize = 1 << 20;

/// Hugging Face's name of a tensor, and its blocks in the rows' order of Hugging Face.
type Stored = (String, QTensor);

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
            let mut tensor = file.any(name, &Device::Cpu)?;
            if let Some(heads) = heads.filter(|_| header.style == RopeStyle::Interleaved) {
                tensor = half_split_rows(&tensor, name, heads)?;
            }
            // A fraction of the bytes that its numbers have, which the GPU is then sent.
            #[cfg(feature = "cuda")]
            if let Some(numbers) = dequantize_on_gpu(&tensor, dtype, device)? {
                tensors.insert(dense, numbers);
                continue;
            }
            stored.push((dense, tensor));
            values = values.saturating_add(count);
        }
        for ((dense, _), tensor) in stored.iter().zip(dequantize(&stored, dtype)) {
            tensors.insert(dense.clone(), tensor?.to_device(device)?);
        }
    }
    Ok((cfg, tensors))
}

/// The numbers of a matrix on a CUDA device, if the kernels for blocks take it.
#[cfg(feature = "cuda")]
fn dequantize_on_gpu(tensor: &QTensor, dtype: DType, device: &Device) -> Result<Option<Tensor>> {
    let &[rows, width] = tensor.shape().dims() else {
        return Ok(None);
    };
    let numbers = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    if !device.is_cuda() || !numbers || !quant::supports(tensor.dtype()) {
        return Ok(None);
    }
    let blocks = BlockMatrix::new(tensor.dtype(), rows, width, &tensor.data()?, device)?;
    blocks.dequantize(dtype).map(Some)
}

/// The numbers of tensors. Threads share tensors out in pieces of some rows, so that none is left alone with a large
/// one.
fn dequantize(stored: &[Stored], dtype: DType) -> Vec<Result<Tensor>> {
    let pieces: Vec<_> = stored
        .iter()
        .enumerate()
        .flat_map(|(i, (_, tensor))| pieces(tensor).map(move |rows| (i, rows)))
        .collect();
    let parts = in_parallel(pieces.len(), |i| {
        let (tensor, rows) = &pieces[i];
        dequantize_rows(&stored[*tensor].1, rows.clone(), dtype)
    });
    let mut of_tensor: Vec<_> = stored.iter().map(|_| Vec::new()).collect();
    for ((tensor, _), part) in pieces.iter().zip(parts) {
        of_tensor[*tensor].push(part);
    }
    // Taken out by the thread that joins them, so that they are freed then.
    let of_tensor: Vec<_> = of_tensor.into_iter().map(Mutex::new).collect();
    in_parallel(stored.len(), |i| {
        let mut parts = of_tensor[i].lock().unwrap_or_else(PoisonError::into_inner);
        let mut parts: Vec<Tensor> = parts.drain(..).collect::<Result<_>>()?;
        match parts.len() {
            1 => Ok(parts.swap_remove(0)),
            _ => Tensor::cat(&parts, 0),
        }
    })
}

/// The rows of a tensor in pieces of some [`PIECE`] values; a tensor that is no matrix is one piece.
fn pieces(tensor: &QTensor) -> impl Iterator<Item = Range<usize>> + use<> {
    let (rows, step) = match tensor.shape().dims() {
        [rows, width] => (*rows, (PIECE / width).max(1)),
        _ => (1, 1),
    };
    (0..rows)
        .step_by(step)
        .map(move |row| row..(row + step).min(rows))
}

/// Some rows of a tensor, or, if it is no matrix, all of it.
fn dequantize_rows(tensor: &QTensor, rows: Range<usize>, dtype: DType) -> Result<Tensor> {
    let cpu = Device::Cpu;
    let part = match tensor.shape().dims() {
        [all, width] if rows.len() < *all => {
            let data = tensor.data()?;
            let row = data.len() / all;
            let bytes = Cow::Borrowed(&data[rows.start * row..rows.end * row]);
            let storage = QStorage::from_data(bytes, &cpu, tensor.dtype())?;
            QTensor::new(storage, (rows.len(), *width))?.dequantize(&cpu)?
        }
        _ => tensor.dequantize(&cpu)?,
    };
    part.to_dtype(dtype)
}

/// What `f` makes of each number below `count`, by the pool's threads.
fn in_parallel<T: Send>(count: usize, f: impl Fn(usize) -> Result<T> + Sync) -> Vec<Result<T>> {
    let done: Vec<_> = (0..count).map(|_| Mutex::new(None)).collect();
    pool::run(count, |i| {
        *done[i].lock().unwrap_or_else(PoisonError::into_inner) = Some(f(i));
    });
    let results = done.into_iter().map(|result| {
        let result = result.into_inner().unwrap_or_else(PoisonError::into_inner);
        result.unwrap_or_else(|| bail!("gguf: a tensor was not dequantized"))
    });
    results.collect()
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
fn half_split_rows(tensor: &QTensor, name: &str, heads: usize) -> Result<QTensor> {
    let rows = tensor.shape().dims().first().copied().unwrap_or(0);
    let data = tensor.data()?;
    if rows == 0 || !rows.is_multiple_of(2 * heads) || !data.len().is_multiple_of(rows) {
        bail!(
            "gguf: tensor `{name}` has shape {:?}, expected rows of {heads} heads of pairs",
            tensor.shape()
        );
    }
    let row = data.len() / rows;
    let mut split = Vec::with_capacity(data.len());
    for head in data.chunks_exact(rows / heads * row) {
        for half in [0, row] {
            let of_pairs = head.chunks_exact(2 * row).map(|pair| &pair[half..][..row]);
            of_pairs.for_each(|bytes| split.extend_from_slice(bytes));
        }
    }
    let storage = QStorage::from_data(Cow::Owned(split), &Device::Cpu, tensor.dtype())?;
    QTensor::new(storage, tensor.shape().clone())
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

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::quantized::GgmlDType;

    #[test]
    fn pieces_of_a_tensor_are_the_tensor() -> Result<()> {
        let (rows, width) = (3 * PIECE / 512 + 8, 512);
        let values = (0..rows * width).map(|i| ((i * 37) % 1009) as f32 - 500.);
        let values = Tensor::from_iter(values, &Device::Cpu)?.reshape((rows, width))?;
        for dtype in [GgmlDType::Q4_1, GgmlDType::F16] {
            let tensor = QTensor::quantize(&values, dtype)?;
            let whole = tensor.dequantize(&Device::Cpu)?.to_dtype(DType::BF16)?;
            assert_eq!(pieces(&tensor).count(), 4);
            let vector = {
                let row = Tensor::new(values.get(0)?.to_vec1::<f32>()?, &Device::Cpu)?;
                QTensor::quantize(&row, GgmlDType::F32)?
            };
            let split = half_split_rows(&tensor, "w", 2)?;
            let stored = vec![
                ("w".to_owned(), tensor),
                ("v".to_owned(), vector),
                ("split".to_owned(), split),
            ];
            let same = |ours: &Tensor, expected: &Tensor| -> Result<bool> {
                let differ = ours.ne(expected)?.to_dtype(DType::F32)?.sum_all()?;
                Ok(differ.to_scalar::<f32>()? == 0.)
            };
            let ours = dequantize(&stored, DType::BF16);
            assert!(same(ours[0].as_ref().unwrap(), &whole)?, "{dtype:?}");
            let row = values.get(0)?.to_dtype(DType::BF16)?;
            assert!(same(ours[1].as_ref().unwrap(), &row)?, "{dtype:?}");
            let pairs = whole.reshape((2, rows / 4, 2, width))?;
            let split = pairs.transpose(1, 2)?.reshape((rows, width))?;
            assert!(same(ours[2].as_ref().unwrap(), &split)?, "{dtype:?}");
        }
        Ok(())
    }
}
