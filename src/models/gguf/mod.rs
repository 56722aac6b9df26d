//! Models from GGUF files: metadata, tensors, and the model that is made of them.

mod file;

use super::Architecture;
use super::decoder::{Decoder, DecoderCache};
use super::parts::Parts;
use super::shape::{GGUF_SIZES, Head, Kind, NormKind, Shape, check_sizes, inverse_frequencies};
use super::weights::Loader;
use crate::Fusion;
use crate::cpu::packed::SharedBytes;
use crate::nn::{AttentionConfig, RotaryEmbedding};
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{Device, Result, Tensor, bail};
pub use file::File;
use file::shape_of;
use std::io::{Cursor, Read, Seek};
use std::marker::PhantomData;

/// The context length of files that do not name one.
const DEFAULT_POSITIONS: usize = 4096;

/// A model with GGUF weights that keeps its own cache, in 16 bits where weights are in blocks, on the CPU
/// computed with int8 activations:
/// `ModelWeights` of [`llama`](super::llama::ModelWeights), [`qwen2`](super::qwen2::ModelWeights),
/// [`qwen3`](super::qwen3::ModelWeights) and [`gpt_neox`](super::gpt_neox::ModelWeights).
#[derive(Debug, Clone)]
pub struct GgufModel<C> {
    decoder: Decoder,
    cache: DecoderCache,
    config: PhantomData<C>,
}

impl<C> Parts for GgufModel<C> {
    fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    fn empty_cache(&self) -> Result<DecoderCache> {
        Ok(self.cache.over(Vec::new()))
    }
}

impl<C: Architecture> GgufModel<C> {
    /// Loads the weights with every fusion on. On the CPU blocks are repacked as they are read.
    ///
    /// `Content::read` asks its reader for the position at every string, which of a file is a system
    /// call: read the metadata out of a memory map, or of anything else that knows where it is.
    ///
    /// # Errors
    /// If the file is of another architecture, metadata or a tensor is missing (by its name), or a
    /// tensor does not have the shape that the metadata asks for.
    pub fn from_gguf<R: Seek + Read>(ct: Content, reader: &mut R, device: &Device) -> Result<Self> {
        Self::from_gguf_fused(ct, reader, device, Fusion::all())
    }

    /// Loads the weights with the fusions that are on in `fusion`.
    ///
    /// # Errors
    /// As [`GgufModel::from_gguf`].
    pub fn from_gguf_fused<R: Seek + Read>(
        ct: Content,
        reader: &mut R,
        device: &Device,
        fusion: Fusion,
    ) -> Result<Self> {
        let packs = fusion.quant_linear;
        Self::load(File::new(&ct, reader, device, packs), fusion)
    }

    /// Loads the weights on the CPU from a file in memory, usually a memory map (`memmap2::Mmap`),
    /// and leaves the blocks there: the model starts at once and shares the file's memory, but a step
    /// takes longer than with weights that are repacked, as [`PackedMatrix::in_place`](crate::cpu::packed::PackedMatrix::in_place) says. Without
    /// `fusion.quant_linear`, and for types without a core of their own, tensors are copied as
    /// elsewhere.
    ///
    /// # Errors
    /// As [`GgufModel::from_gguf`].
    pub fn from_gguf_in_place(ct: Content, file: SharedBytes, fusion: Fusion) -> Result<Self> {
        let mut reader = Cursor::new((*file).as_ref());
        let opened = File::new(&ct, &mut reader, &Device::Cpu, fusion.quant_linear);
        Self::load(opened.staying_in(&file), fusion)
    }

    fn load<R: Seek + Read>(mut file: File<'_, R>, fusion: Fusion) -> Result<Self> {
        let (ct, device) = (file.ct, file.device);
        let mut shape = Header::read(ct, C::KIND)?.shape(C::KIND);
        file.scale(&mut shape.frequencies)?;
        let frequencies = shape.frequencies.clone();
        let rotary = RotaryEmbedding::new(frequencies, C::KIND.gguf_style, device)?;
        let dtype = file.cache_dtype(fusion);
        let loader = Loader {
            source: file,
            names: &C::KIND.gguf_names,
            shape: &shape,
            fusion,
        };
        Ok(Self {
            decoder: loader.decoder()?,
            cache: DecoderCache::new(shape.layers, rotary, true, dtype, device),
            config: PhantomData,
        })
    }

    /// The logits `[B, vocab]` (f32) after the last of `x` `[B, T]` (u32 token ids), which stand at
    /// positions `index_pos..index_pos + T`. Position 0 starts over.
    ///
    /// # Errors
    /// If `x` is empty, an id is out of the vocabulary, or the context length is passed.
    pub fn forward(&mut self, x: &Tensor, index_pos: usize) -> Result<Tensor> {
        let stack = &self.decoder.stack;
        let embedded = stack.embedding.forward(x)?;
        let x = stack.forward(&embedded, index_pos, &mut self.cache)?;
        self.decoder.last_logits(&x)
    }

    /// Every hidden state of `x` as transformers' `output_hidden_states` counts them (the embedding,
    /// then after each layer, the last one after the final norm; `[B, T, hidden]` each), and the
    /// logits of every position, `[B, T, vocab]` (f32).
    ///
    /// # Errors
    /// As [`GgufModel::forward`].
    pub fn hidden_states(&mut self, x: &Tensor, index_pos: usize) -> Result<(Vec<Tensor>, Tensor)> {
        self.decoder
            .states_and_logits(x, index_pos, &mut self.cache)
    }

    /// Rows of the embedding: token ids are below this.
    pub fn vocab_size(&self) -> usize {
        self.decoder.stack.embedding.vocab_size()
    }

    /// The context length.
    pub fn max_positions(&self) -> usize {
        self.decoder.stack.max_positions
    }

    /// Forgets all positions.
    pub fn clear_kv_cache(&mut self) {
        self.cache.clear();
    }
}

/// What a file's metadata says of its model, checked against the tensors that the file names.
#[derive(Debug)]
pub struct Header {
    pub vocab: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Rotated dimensions of a head.
    pub rotated: usize,
    pub theta: f32,
    pub eps: f32,
    pub max_positions: usize,
    pub parallel: bool,
}

impl Header {
    /// # Errors
    /// If the architecture is not `kind`'s, or a value is missing, out of range or at odds with the
    /// tensors, by its name.
    pub fn read(ct: &Content, kind: &Kind) -> Result<Self> {
        let header = Metadata { ct, kind }.header()?;
        let sizes = [
            header.hidden,
            header.intermediate,
            header.vocab,
            header.layers,
            header.heads,
            header.kv_heads,
            header.head_dim,
            header.max_positions,
        ];
        check_sizes(&format!("gguf: {}.", kind.gguf), GGUF_SIZES, sizes)?;
        Ok(header)
    }

    /// The shape of a model of `kind`, with plain frequencies.
    pub fn shape(&self, kind: &'static Kind) -> Shape {
        Shape {
            kind,
            vocab: self.vocab,
            hidden: self.hidden,
            intermediate: self.intermediate,
            layers: self.layers,
            attention: AttentionConfig {
                heads: self.heads,
                kv_heads: self.kv_heads,
                head_dim: self.head_dim,
                window: None,
            },
            sliding: None,
            frequencies: inverse_frequencies(self.theta, self.rotated),
            eps: f64::from(self.eps),
            activation: kind.activation,
            parallel: self.parallel,
            biases: kind.biases,
            head: Head::Either,
            max_positions: self.max_positions,
        }
    }
}

/// Metadata under the architecture's prefix.
struct Metadata<'a> {
    ct: &'a Content,
    kind: &'a Kind,
}

impl Metadata<'_> {
    fn header(&self) -> Result<Header> {
        self.check()?;
        let heads = self.number("attention.head_count")?;
        let hidden = self.number("embedding_length")?;
        let kv_heads = self.number_or("attention.head_count_kv", heads)?;
        let head_dim = match self.value("attention.key_length") {
            Some(_) => self.number("attention.key_length")?,
            None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
            None => bail!(
                "gguf: {} {hidden} does not divide by the {heads} heads of {}",
                self.key("embedding_length"),
                self.key("attention.head_count")
            ),
        };
        if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
            bail!(
                "gguf: {heads} heads ({}) do not divide by {kv_heads} key and value heads ({})",
                self.key("attention.head_count"),
                self.key("attention.head_count_kv")
            );
        }
        if self.number_or("attention.value_length", head_dim)? != head_dim {
            bail!(
                "gguf: {} is not the {head_dim} of {}",
                self.key("attention.value_length"),
                self.key("attention.key_length")
            );
        }
        let rotated = self.number_or("rope.dimension_count", head_dim)?;
        if rotated > head_dim || !rotated.is_multiple_of(2) {
            bail!(
                "gguf: {} is {rotated}, expected an even number up to head size {head_dim}",
                self.key("rope.dimension_count")
            );
        }
        let [vocab, width] = *shape_of(self.ct, "token_embd.weight")? else {
            bail!("gguf: `token_embd.weight` is no matrix");
        };
        if width != hidden {
            bail!(
                "gguf: {} is {hidden}, the rows of `token_embd.weight` are {width} wide",
                self.key("embedding_length")
            );
        }
        let stated = self.number_or("vocab_size", vocab)?;
        if stated != vocab {
            bail!(
                "gguf: {} is {stated}, `token_embd.weight` has {vocab} rows",
                self.key("vocab_size")
            );
        }
        let eps = match self.kind.norm {
            NormKind::Rms => "attention.layer_norm_rms_epsilon",
            NormKind::Layer => "attention.layer_norm_epsilon",
        };
        Ok(Header {
            vocab,
            hidden,
            intermediate: self.number("feed_forward_length")?,
            layers: self.layers()?,
            heads,
            kv_heads,
            head_dim,
            rotated,
            theta: match self.value("rope.freq_base") {
                Some(_) => self.positive("rope.freq_base")?,
                None => 10_000.,
            },
            eps: self.positive(eps)?,
            max_positions: self.number_or("context_length", DEFAULT_POSITIONS)?,
            parallel: self.parallel()?,
        })
    }

    fn parallel(&self) -> Result<bool> {
        let name = "use_parallel_residual";
        match self.value(name) {
            _ if !self.kind.side_by_side => Ok(false),
            Some(value) => value.to_bool(),
            None => bail!("gguf: metadata `{}` is missing", self.key(name)),
        }
    }

    fn check(&self) -> Result<()> {
        match self.ct.metadata.get("general.architecture") {
            Some(Value::String(arch)) if arch == self.kind.gguf => {}
            Some(Value::String(arch)) => bail!(
                "gguf: architecture is `{arch}`, expected `{}`",
                self.kind.gguf
            ),
            _ => bail!("gguf: metadata `general.architecture` is missing"),
        }
        if let Some(Value::String(kind)) = self.value("rope.scaling.type")
            && kind != "none"
        {
            bail!(
                "gguf: {} is `{kind}`, expected `none`",
                self.key("rope.scaling.type")
            );
        }
        if self.number_or("expert_count", 0)? > 0 {
            bail!(
                "gguf: mixtures of experts are not supported (`{}`)",
                self.key("expert_count")
            );
        }
        Ok(())
    }

    fn layers(&self) -> Result<usize> {
        let layers = self.number("block_count")?;
        let held = |layer: usize| {
            let name = format!("blk.{layer}.attn_norm.weight");
            self.ct.tensor_infos.contains_key(&name)
        };
        if !layers.checked_sub(1).is_some_and(held) || held(layers) {
            bail!(
                "gguf: {} is {layers}, the file holds other layers",
                self.key("block_count")
            );
        }
        Ok(layers)
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.kind.gguf)
    }

    fn value(&self, name: &str) -> Option<&Value> {
        self.ct.metadata.get(&self.key(name))
    }

    /// A number that may be missing, but not be of another kind.
    fn number_or(&self, name: &str, missing: usize) -> Result<usize> {
        match self.value(name) {
            Some(_) => self.number(name),
            None => Ok(missing),
        }
    }

    fn number(&self, name: &str) -> Result<usize> {
        let key = self.key(name);
        match self.value(name) {
            Some(Value::Array(all)) => {
                bail!("gguf: {key} is a list of {}, expected a number", all.len())
            }
            Some(value) => match value.to_u64().map(usize::try_from) {
                Ok(Ok(number)) => Ok(number),
                _ => bail!("gguf: {key} is {value:?}, expected a whole number from 0 on"),
            },
            None => bail!("gguf: metadata `{key}` is missing"),
        }
    }

    /// A number above zero.
    fn positive(&self, name: &str) -> Result<f32> {
        let key = self.key(name);
        let value = match self.value(name) {
            Some(value) => value.to_f32()?,
            None => bail!("gguf: metadata `{key}` is missing"),
        };
        if !(value > 0. && value.is_finite()) {
            bail!("gguf: {key} is {value}, expected a number above 0");
        }
        Ok(value)
    }
}
