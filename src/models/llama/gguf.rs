//! Llama from a GGUF file.

use super::{Config, DEFAULT_MAX_SEQ_LEN};
use crate::cpu::packed::PackedMatrix;
#[cfg(feature = "cuda")]
use crate::cuda::BlockMatrix;
use crate::generation::sealed::Parts;
use crate::models::decoder::{Block, Decoder, DecoderCache};
use crate::nn::{
    Attention, AttentionConfig, Embedding, GatedMlp, LinearWeight, Projection, RmsNorm,
    RotaryEmbedding, dense,
};
use crate::ops::{RopeStyle, Weight};
use crate::{Fusion, quant};
use candle_core::quantized::QTensor;
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{DType, Device, Result, Tensor, bail};
use std::collections::HashMap;
use std::io::{Read, Seek};
use std::sync::Arc;

/// A Llama model with GGUF weights, computed with int8 activations.
#[derive(Debug, Clone)]
pub struct ModelWeights {
    decoder: Decoder,
    cache: DecoderCache,
}

impl Parts for ModelWeights {
    fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    fn empty_cache(&self) -> Result<DecoderCache> {
        Ok(self.cache.over(Vec::new()))
    }
}

impl ModelWeights {
    /// Loads the weights with every fusion on.
    ///
    /// # Errors
    /// If the architecture is not `llama`, metadata or a tensor is missing (by its name), or a
    /// tensor does not have the shape that the metadata asks for.
    pub fn from_gguf<R: Seek + Read>(ct: Content, reader: &mut R, device: &Device) -> Result<Self> {
        Self::from_gguf_fused(ct, reader, device, Fusion::all())
    }

    /// Loads the weights with the fusions that are on in `fusion`.
    ///
    /// # Errors
    /// As [`ModelWeights::from_gguf`].
    pub fn from_gguf_fused<R: Seek + Read>(
        ct: Content,
        reader: &mut R,
        device: &Device,
        fusion: Fusion,
    ) -> Result<Self> {
        let mut file = File {
            ct: &ct,
            reader,
            device,
        };
        let cfg = file.config()?;
        let frequencies = file.frequencies(&cfg)?;
        let decoder = file.decoder(&cfg, fusion)?;
        let rotary = RotaryEmbedding::new(frequencies, RopeStyle::Interleaved, device)?;
        let layers = cfg.num_hidden_layers;
        let dtype = file.cache_dtype();
        let cache = DecoderCache::new(layers, rotary, true, dtype, device);
        Ok(Self { decoder, cache })
    }

    /// The logits `[B, vocab]` (f32) after the last of `x` `[B, T]` (u32 token ids), which stand at
    /// positions `index_pos..index_pos + T`. Position 0 starts over.
    ///
    /// # Errors
    /// If `x` is empty, an id is out of the vocabulary, or the context length is passed.
    pub fn forward(&mut self, x: &Tensor, index_pos: usize) -> Result<Tensor> {
        let embedded = self.decoder.embedding.forward(x)?;
        let x = self
            .decoder
            .layers(&embedded, index_pos, &mut self.cache, None)?;
        self.decoder.last_logits(&x)
    }

    /// Every hidden state and all logits of `x`, as [`super::Llama::hidden_states`].
    ///
    /// # Errors
    /// As [`ModelWeights::forward`].
    pub fn hidden_states(&mut self, x: &Tensor, index_pos: usize) -> Result<(Vec<Tensor>, Tensor)> {
        self.decoder
            .states_and_logits(x, index_pos, &mut self.cache)
    }

    /// Rows of the embedding: token ids are below this.
    pub fn vocab_size(&self) -> usize {
        self.decoder.embedding.vocab_size()
    }

    /// The context length.
    pub fn max_positions(&self) -> usize {
        self.decoder.max_positions
    }

    /// Forgets all positions.
    pub fn clear_kv_cache(&mut self) {
        self.cache.clear();
    }
}

/// The configuration of a llama GGUF file and its tensors as a dense checkpoint: dequantized to
/// `dtype`, under Hugging Face's names and in its row order, so that `VarBuilder::from_tensors` and
/// any Llama implementation for safetensors can load them.
///
/// # Errors
/// As [`ModelWeights::from_gguf`].
pub fn dequantize_gguf<R: Seek + Read>(
    ct: &Content,
    reader: &mut R,
    dtype: DType,
    device: &Device,
) -> Result<(Config, HashMap<String, Tensor>)> {
    let mut file = File { ct, reader, device };
    let mut cfg = file.config()?;
    cfg.tie_word_embeddings = !ct.tensor_infos.contains_key("output.weight");
    if ct.tensor_infos.contains_key("rope_freqs.weight") {
        bail!("gguf: scaled rotary frequencies (`rope_freqs.weight`) have no dense configuration");
    }
    let mut tensors = HashMap::new();
    for name in ct.tensor_infos.keys() {
        let Some((dense, heads)) = dense_name(name, &cfg) else {
            bail!("gguf: tensor `{name}` is not one of a llama model's");
        };
        let tensor = file
            .any(name, &Device::Cpu)?
            .dequantize(&Device::Cpu)?
            .to_dtype(dtype)?;
        let tensor = match heads {
            Some(heads) => half_split_rows(&tensor, heads)?,
            None => tensor,
        };
        tensors.insert(dense, tensor.to_device(device)?);
    }
    Ok((cfg, tensors))
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
/// If the architecture is not `llama`, or a value is missing, out of range or at odds with the
/// tensors, by its name.
pub fn gguf_config(ct: &Content) -> Result<Config> {
    File {
        ct,
        reader: &mut std::io::empty(),
        device: &Device::Cpu,
    }
    .config()
}

/// A quantized table as an embedding and as the weight of a head, which share it.
fn shared_table(table: QTensor) -> Result<(Embedding, Weight)> {
    #[cfg(feature = "cuda")]
    if table.device().is_cuda() {
        let blocks = Arc::new(BlockMatrix::from_qtensor(&table)?);
        return Ok((Embedding::Blocks(blocks.clone()), Weight::Blocks(blocks)));
    }
    let (rows, cols) = table.shape().dims2()?;
    let packed = PackedMatrix::pack(table.dtype(), rows, cols, &table.data()?)?;
    let packed = Arc::new(packed);
    Ok((Embedding::Packed(packed.clone()), Weight::Packed(packed)))
}

/// A file being read.
struct File<'a, R> {
    ct: &'a Content,
    reader: &'a mut R,
    device: &'a Device,
}

impl<R> File<'_, R> {
    fn config(&self) -> Result<Config> {
        match self.ct.metadata.get("general.architecture") {
            Some(Value::String(arch)) if arch == "llama" => {}
            Some(Value::String(arch)) => {
                bail!("gguf: architecture is `{arch}`, expected `llama`")
            }
            _ => bail!("gguf: metadata `general.architecture` is missing"),
        }
        if let Some(Value::String(kind)) = self.ct.metadata.get("llama.rope.scaling.type")
            && kind != "none"
        {
            bail!("gguf: llama.rope.scaling.type is `{kind}`, expected `none`");
        }
        if self.number_or("llama.expert_count", 0)? > 0 {
            bail!("gguf: mixtures of experts are not supported (`llama.expert_count`)");
        }
        let heads = self.number("llama.attention.head_count")?;
        let hidden_size = self.number("llama.embedding_length")?;
        let kv_heads = self.number_or("llama.attention.head_count_kv", heads)?;
        if heads == 0 || !hidden_size.is_multiple_of(heads) {
            bail!("gguf: llama.embedding_length {hidden_size} does not divide by {heads} heads");
        }
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            bail!("gguf: {heads} heads do not divide by {kv_heads} key and value heads");
        }
        let head_dim = hidden_size / heads;
        let rotated = self.number_or("llama.rope.dimension_count", head_dim)?;
        if rotated != head_dim {
            bail!("gguf: llama.rope.dimension_count is {rotated}, expected head size {head_dim}");
        }
        let num_hidden_layers = self.number("llama.block_count")?;
        let held = |layer: usize| {
            let name = format!("blk.{layer}.attn_norm.weight");
            self.ct.tensor_infos.contains_key(&name)
        };
        if !num_hidden_layers.checked_sub(1).is_some_and(held) || held(num_hidden_layers) {
            bail!("gguf: llama.block_count is {num_hidden_layers}, the file holds other layers");
        }
        let table = self.shape("token_embd.weight")?;
        let vocab_size = table.first().copied().unwrap_or(0);
        if self.number_or("llama.vocab_size", vocab_size)? != vocab_size {
            bail!("gguf: llama.vocab_size is not the {vocab_size} rows of `token_embd.weight`");
        }
        Ok(Config {
            hidden_size,
            intermediate_size: self.number("llama.feed_forward_length")?,
            vocab_size,
            num_hidden_layers,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            use_flash_attn: false,
            rms_norm_eps: f64::from(self.positive("llama.attention.layer_norm_rms_epsilon")?),
            rope_theta: match self.ct.metadata.contains_key("llama.rope.freq_base") {
                true => self.positive("llama.rope.freq_base")?,
                false => 10_000.,
            },
            bos_token_id: None,
            eos_token_id: None,
            rope_scaling: None,
            max_position_embeddings: self.number_or("llama.context_length", DEFAULT_MAX_SEQ_LEN)?,
            tie_word_embeddings: false,
        })
    }
}

impl<R: Seek + Read> File<'_, R> {
    fn decoder(&mut self, cfg: &Config, fusion: Fusion) -> Result<Decoder> {
        let (hidden, vocab) = (cfg.hidden_size, cfg.vocab_size);
        let table = self.matrix("token_embd.weight", vocab, hidden)?;
        let tied = !self.ct.tensor_infos.contains_key("output.weight");
        let (embedding, head) = if fusion.quant_linear && quant::supports(table.dtype()) {
            let (embedding, weight) = shared_table(table)?;
            let head = tied.then(|| Projection::from_weights(vec![weight], fusion));
            (embedding, head)
        } else {
            let dense = dense(&table)?;
            let weight = LinearWeight::Quantized(Arc::new(table));
            let head = tied
                .then(|| Projection::new(vec![weight], None, fusion))
                .transpose()?;
            (Embedding::Dense(dense), head)
        };
        let head = match head {
            Some(head) => head,
            None => self.linear(&[("output", vocab)], hidden, fusion)?,
        };
        let blocks = (0..cfg.num_hidden_layers)
            .map(|i| self.block(i, cfg, fusion))
            .collect::<Result<_>>()?;
        let norm = self.norm("output_norm.weight", cfg, fusion)?;
        let max_positions = cfg.max_position_embeddings;
        Ok(Decoder {
            embedding,
            blocks,
            norm,
            head,
            max_positions,
        })
    }

    fn block(&mut self, layer: usize, cfg: &Config, fusion: Fusion) -> Result<Block> {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let (hidden, inner) = (cfg.hidden_size, cfg.intermediate_size);
        let (heads, kv_heads) = (cfg.num_attention_heads, cfg.num_key_value_heads);
        let head_dim = cfg.head_dim();
        let kv_rows = kv_heads * head_dim;
        let (q, k, v) = (name("attn_q"), name("attn_k"), name("attn_v"));
        let (gate, up) = (name("ffn_gate"), name("ffn_up"));
        let qkv = self.linear(
            &[(&q, hidden), (&k, kv_rows), (&v, kv_rows)],
            hidden,
            fusion,
        )?;
        let output = self.linear(&[(&name("attn_output"), hidden)], hidden, fusion)?;
        Ok(Block {
            attention_norm: self.norm(&name("attn_norm.weight"), cfg, fusion)?,
            attention: Attention::new(
                qkv,
                output,
                AttentionConfig {
                    heads,
                    kv_heads,
                    head_dim,
                },
                fusion,
            ),
            mlp_norm: self.norm(&name("ffn_norm.weight"), cfg, fusion)?,
            mlp: GatedMlp::new(
                self.linear(&[(&gate, inner), (&up, inner)], hidden, fusion)?,
                self.linear(&[(&name("ffn_down"), hidden)], inner, fusion)?,
            ),
        })
    }

    /// What keys and values are stored in: on a GPU a file that is quantized has them in 16 bits, as
    /// its tensor cores take them.
    fn cache_dtype(&self) -> DType {
        let mut infos = self.ct.tensor_infos.values();
        match self.device.is_cuda() && infos.any(|info| quant::supports(info.ggml_dtype)) {
            true => DType::F16,
            false => DType::F32,
        }
    }

    fn frequencies(&mut self, cfg: &Config) -> Result<Vec<f32>> {
        let mut frequencies = cfg.inverse_frequencies();
        if self.ct.tensor_infos.contains_key("rope_freqs.weight") {
            // Llama 3.1 and later: the smoothing, written out as divisors.
            let factors = self
                .vector("rope_freqs.weight", frequencies.len())?
                .to_vec1::<f32>()?;
            frequencies
                .iter_mut()
                .zip(factors)
                .for_each(|(f, factor)| *f /= factor);
        }
        Ok(frequencies)
    }

    fn linear(
        &mut self,
        names: &[(&str, usize)],
        cols: usize,
        fusion: Fusion,
    ) -> Result<Projection> {
        let weights = names
            .iter()
            .map(|(name, rows)| {
                let weight = self.matrix(&format!("{name}.weight"), *rows, cols)?;
                Ok(LinearWeight::Quantized(Arc::new(weight)))
            })
            .collect::<Result<_>>()?;
        let has_bias = |name: &str| self.ct.tensor_infos.contains_key(&format!("{name}.bias"));
        let bias = if names.iter().any(|(name, _)| has_bias(name)) {
            let parts = names
                .iter()
                .map(|(name, rows)| self.vector(&format!("{name}.bias"), *rows))
                .collect::<Result<Vec<_>>>()?;
            Some(Tensor::cat(&parts, 0)?.to_device(self.device)?)
        } else {
            None
        };
        Projection::new(weights, bias, fusion)
    }

    fn norm(&mut self, name: &str, cfg: &Config, fusion: Fusion) -> Result<RmsNorm> {
        let weight = self.vector(name, cfg.hidden_size)?.to_device(self.device)?;
        Ok(RmsNorm::from_weight(weight, cfg.rms_norm_eps, fusion))
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<QTensor> {
        let dims = self.shape(name)?;
        if dims != [rows, cols] {
            bail!(
                "gguf: tensor `{name}` has shape {dims:?}, the metadata asks for [{rows}, {cols}]"
            );
        }
        self.any(name, self.device)
    }

    /// On the CPU: what is made of it there needs no kernel of candle's, which the driver would have
    /// to compile first.
    fn vector(&mut self, name: &str, len: usize) -> Result<Tensor> {
        let dims = self.shape(name)?;
        if dims != [len] {
            bail!("gguf: tensor `{name}` has shape {dims:?}, the metadata asks for [{len}]");
        }
        self.any(name, &Device::Cpu)?.dequantize(&Device::Cpu)
    }

    fn any(&mut self, name: &str, device: &Device) -> Result<QTensor> {
        match self.ct.tensor(self.reader, name, device) {
            Ok(tensor) => Ok(tensor),
            Err(e) => bail!("gguf: tensor `{name}`: {e}; the file may be cut short"),
        }
    }
}

impl<R> File<'_, R> {
    fn shape(&self, name: &str) -> Result<&[usize]> {
        match self.ct.tensor_infos.get(name) {
            Some(info) => Ok(info.shape.dims()),
            None => bail!("gguf: tensor `{name}` is missing"),
        }
    }

    /// A number that may be missing, but not be of another kind.
    fn number_or(&self, key: &str, missing: usize) -> Result<usize> {
        match self.ct.metadata.contains_key(key) {
            true => self.number(key),
            false => Ok(missing),
        }
    }

    fn number(&self, key: &str) -> Result<usize> {
        match self.ct.metadata.get(key) {
            Some(value) => Ok(value.to_u64()? as usize),
            None => bail!("gguf: metadata `{key}` is missing"),
        }
    }

    /// A number above zero.
    fn positive(&self, key: &str) -> Result<f32> {
        let value = match self.ct.metadata.get(key) {
            Some(value) => value.to_f32()?,
            None => bail!("gguf: metadata `{key}` is missing"),
        };
        if !(value > 0. && value.is_finite()) {
            bail!("gguf: {key} is {value}, expected a number above 0");
        }
        Ok(value)
    }
}
