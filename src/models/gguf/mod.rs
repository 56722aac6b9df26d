//! Models from GGUF files: metadata, tensors, and the model that is made of them.

mod file;
mod header;

use super::Architecture;
use super::decoder::{Decoder, DecoderCache, Rotaries};
use super::parts::Parts;
use super::weights::Loader;
use crate::Fusion;
use crate::cpu::packed::SharedBytes;
use crate::ops::view::float;
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Result, Tensor};
pub use file::{File, cache_dtype, embedding_and_head};
pub use header::Header;
use std::io::{Cursor, Read, Seek};
use std::marker::PhantomData;

/// A model with GGUF weights that keeps its own cache, in 16 bits where weights are in blocks, on the CPU
/// computed with int8 activations:
/// `ModelWeights` of [`llama`](super::llama::ModelWeights), [`qwen2`](super::qwen2::ModelWeights),
/// [`qwen3`](super::qwen3::ModelWeights) and [`gpt_neox`](super::gpt_neox::ModelWeights).
///
/// ```
/// use candle_core::quantized::gguf_file::Content;
/// use candle_core::{Device, Tensor};
/// use candle_fused::Fusion;
/// use candle_fused::models::llama::ModelWeights;
/// use std::io::Cursor;
/// use std::sync::Arc;
/// # mod tiny { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/gguf.rs")); }
/// # let bytes = tiny::gguf("llama", false)?;
/// // The bytes of a GGUF file of one layer.
/// let mut file = Cursor::new(&bytes);
/// let content = Content::read(&mut file)?;
/// let mut model = ModelWeights::from_gguf(content, &mut file, &Device::Cpu)?;
/// assert_eq!((model.vocab_size(), model.max_positions()), (32, 128));
/// let ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?;
/// let logits = model.forward(&ids, 0)?;
/// assert_eq!(logits.dims(), [1, 32]);
/// model.clear_kv_cache();
/// // The embedding, then the output of each layer, and the logits of every token.
/// let (states, logits) = model.hidden_states(&ids, 0)?;
/// assert_eq!((states.len(), logits.dims()), (2, &[1, 3, 32][..]));
///
/// // In candle's own operations; then with the blocks left where they are.
/// let content = Content::read(&mut Cursor::new(&bytes))?;
/// ModelWeights::from_gguf_fused(content, &mut file, &Device::Cpu, Fusion::none())?;
/// let content = Content::read(&mut Cursor::new(&bytes))?;
/// let mut in_place = ModelWeights::from_gguf_in_place(content, Arc::new(bytes.clone()), Fusion::all())?;
/// assert_eq!(in_place.forward(&ids, 0)?.dims(), [1, 32]);
/// # Ok::<(), candle_core::Error>(())
/// ```
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
        Self::from_gguf_with_dtype(ct, reader, device, DType::F32, fusion)
    }

    /// Loads the weights for activations in `dtype`: f32, as [`GgufModel::from_gguf`] has them, f16 or bf16. Blocks stay
    /// blocks, where `fusion` multiplies by them; in 16 bits all other weights, and keys and values, are of that dtype. On
    /// a GPU 16 bits are faster for several sequences and for prompts, since tensor cores take them as they are. f16 ends
    /// at 65,504, which activations of some models pass; bf16 has 8 significant bits.
    ///
    /// ```
    /// use candle_core::quantized::gguf_file::Content;
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_fused::Fusion;
    /// use candle_fused::models::llama::ModelWeights;
    /// use std::io::Cursor;
    /// # mod tiny { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/gguf.rs")); }
    /// # let bytes = tiny::gguf("llama", false)?;
    /// // The bytes of a GGUF file.
    /// let mut file = Cursor::new(&bytes);
    /// let content = Content::read(&mut file)?;
    /// let (device, dtype) = (Device::Cpu, DType::BF16);
    /// let mut model = ModelWeights::from_gguf_with_dtype(content, &mut file, &device, dtype, Fusion::all())?;
    /// let logits = model.forward(&Tensor::new(&[[1u32, 2, 3]], &device)?, 0)?;
    /// assert_eq!((logits.dims(), logits.dtype()), (&[1, 32][..], DType::F32));
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`GgufModel::from_gguf`], or if `dtype` is another.
    pub fn from_gguf_with_dtype<R: Seek + Read>(
        ct: Content,
        reader: &mut R,
        device: &Device,
        dtype: DType,
        fusion: Fusion,
    ) -> Result<Self> {
        float("gguf", "dtype", dtype)?;
        let multiplies_blocks = fusion.on(device).quant_linear;
        let file = File::new(&ct, reader, device, multiplies_blocks);
        Self::load(file.with_dtype(dtype), fusion)
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
        let opened = File::new(
            &ct,
            &mut reader,
            &Device::Cpu,
            fusion.on(&Device::Cpu).quant_linear,
        );
        Self::load(opened.staying_in(&file), fusion)
    }

    fn load<R: Seek + Read>(mut file: File<'_, R>, fusion: Fusion) -> Result<Self> {
        let (ct, device) = (file.ct, file.device);
        let header = Header::read(ct, C::KIND)?;
        let mut shape = header.shape(C::KIND);
        file.scale(&mut shape.frequencies)?;
        shape.long = file.long(&header, &mut shape.frequencies)?;
        let rotaries = Rotaries::new(&shape, header.style, device)?;
        let dtype = file.cache_dtype(fusion);
        let loader = Loader {
            source: file,
            names: &C::KIND.gguf_names,
            shape: &shape,
            fusion,
        };
        Ok(Self {
            decoder: loader.decoder()?,
            cache: DecoderCache::new(shape.layers, rotaries, true, dtype, device),
            config: PhantomData,
        })
    }

    /// A model put together from another kind of file.
    pub(super) fn of(decoder: Decoder, cache: DecoderCache) -> Self {
        Self {
            decoder,
            cache,
            config: PhantomData,
        }
    }

    /// The logits `[B, vocab]` (f32) after the last of `x` `[B, T]` (u32 token ids), which stand at
    /// positions `index_pos..index_pos + T`. Position 0 starts over.
    ///
    /// # Errors
    /// If `x` is empty, an id is out of the vocabulary, or the context length is passed.
    pub fn forward(&mut self, x: &Tensor, index_pos: usize) -> Result<Tensor> {
        let stack = &self.decoder.stack;
        let embedded = stack.embed(x)?;
        let x = stack.forward(&embedded, index_pos, &mut self.cache)?;
        self.decoder.last_logits(&x)?.to_dtype(DType::F32)
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
