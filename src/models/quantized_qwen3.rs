//! Qwen3 from GGUF files, under the names of `candle_transformers::models::quantized_qwen3`. The layers that
//! [`Gguf`] gives are this crate's.

pub use super::qwen3::ModelWeights;

use super::rotary_tables::RotaryTables;
use crate::nn::{Linear, RmsNorm};
use crate::ops::RopeStyle;
use candle_core::quantized::QTensor;
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{DType, Device, Result, Tensor};
use std::collections::HashMap;
use std::io::{Read, Seek};

/// The tensors of a GGUF file as layers, for models of one's own.
///
/// ```no_run
/// use candle_core::quantized::gguf_file::Content;
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_fused::models::quantized_qwen3::Gguf;
/// let mut file = std::fs::File::open("model.gguf")?;
/// let content = Content::read(&mut file)?;
/// let mut gguf = Gguf::new(content, file, Device::Cpu);
/// let norm = gguf.rms_norm("blk.0.ffn_norm.weight", 1e-6)?;
/// let up = gguf.qmatmul("blk.0.ffn_up.weight")?;
/// let x = Tensor::ones((1, 1024), DType::F32, &Device::Cpu)?;
/// let y = up.forward(&norm.forward(&x)?)?;
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// ```
/// use candle_core::quantized::gguf_file::Content;
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_fused::models::quantized_qwen3::Gguf;
/// # mod tiny { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/gguf.rs")); }
/// # let bytes = tiny::gguf("qwen3", false)?;
/// // The bytes of a GGUF file.
/// let mut file = std::io::Cursor::new(&bytes);
/// let content = Content::read(&mut file)?;
/// let mut gguf = Gguf::new(content, file, Device::Cpu);
/// assert_eq!(gguf.metadata()["qwen3.block_count"].to_u32()?, 1);
/// assert_eq!(gguf.tensor("token_embd.weight")?.shape().dims(), [32, 64]);
/// let (norm, gate) = (gguf.rms_norm("output_norm.weight", 1e-6)?, gguf.qmatmul("blk.0.ffn_gate.weight")?);
/// let x = Tensor::ones((1, 64), DType::F32, &Device::Cpu)?;
/// assert_eq!(gate.forward(&norm.forward(&x)?)?.dims(), [1, 96]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub struct Gguf<R: Read + Seek> {
    ct: Content,
    reader: R,
    device: Device,
}

impl<R: Read + Seek> Gguf<R> {
    /// A file whose header has been read.
    pub fn new(ct: Content, reader: R, device: Device) -> Self {
        Self { ct, reader, device }
    }

    /// The matrix of this name as a layer without bias.
    ///
    /// # Errors
    /// If there is no such tensor, it is no matrix, or the file is cut short.
    pub fn qmatmul(&mut self, name: &str) -> Result<Linear> {
        Linear::from_qtensor(self.tensor(name)?)
    }

    /// The norm whose weight has this name.
    ///
    /// # Errors
    /// If there is no such tensor, or the file is cut short.
    pub fn rms_norm(&mut self, name: &str, eps: f64) -> Result<RmsNorm> {
        let weight = self.tensor(name)?.dequantize(&self.device)?;
        Ok(RmsNorm::new(weight, eps))
    }

    /// The file's metadata.
    pub fn metadata(&self) -> &HashMap<String, Value> {
        &self.ct.metadata
    }

    /// The tensor of this name as it is stored.
    ///
    /// # Errors
    /// If there is no such tensor, or the file is cut short.
    pub fn tensor(&mut self, name: &str) -> Result<QTensor> {
        self.ct.tensor(&mut self.reader, name, &self.device)
    }
}

/// Rotary tables in half-split form, for queries and keys `[B, H, T, D]`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::models::quantized_qwen3::RotaryEmbedding;
/// let rotary = RotaryEmbedding::new(DType::F32, 64, 512, 1e6, &Device::Cpu)?;
/// let q = Tensor::ones((1, 8, 3, 64), DType::F32, &Device::Cpu)?;
/// let k = Tensor::ones((1, 2, 3, 64), DType::F32, &Device::Cpu)?;
/// let (q, k) = rotary.apply(&q, &k, 100)?;
/// # assert_eq!((q.dims(), k.dims()), (&[1, 8, 3, 64][..], &[1, 2, 3, 64][..]));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct RotaryEmbedding(RotaryTables);

impl RotaryEmbedding {
    /// Tables for `head_dim` dimensions and `max_position_embeddings` positions. They are kept in f32,
    /// whatever `dtype` is: in 16 bits, positions past 256 would be rounded together.
    ///
    /// # Errors
    /// If `head_dim` is odd or 0, or `rope_theta` is not above 0.
    pub fn new(
        dtype: DType,
        head_dim: usize,
        max_position_embeddings: usize,
        rope_theta: f64,
        dev: &Device,
    ) -> Result<Self> {
        let _ = dtype;
        let (style, positions) = (RopeStyle::HalfSplit, max_position_embeddings);
        let tables = RotaryTables::new(head_dim, positions, rope_theta, style, dev)?;
        Ok(Self(tables))
    }

    /// Queries and keys `[B, H, T, D]` rotated as the tokens at `offset..offset + T`.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit, or the positions pass the tables.
    pub fn apply(&self, q: &Tensor, k: &Tensor, offset: usize) -> Result<(Tensor, Tensor)> {
        self.0.apply(q, k, offset)
    }

    /// Cosines and sines of one position, `head_dim / 2` each; none past the tables.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_fused::models::quantized_qwen3::RotaryEmbedding;
    /// let rotary = RotaryEmbedding::new(DType::F32, 16, 128, 1e4, &Device::Cpu)?;
    /// let (cos, sin) = rotary.cos_sin_at(3);
    /// assert_eq!((cos[0], sin[0], cos.len()), (3f32.cos(), 3f32.sin(), 8));
    /// let q = Tensor::ones((1, 4, 2, 16), DType::F32, &Device::Cpu)?;
    /// let (q, k) = rotary.apply(&q, &q, 3)?;
    /// assert_eq!((q.dims(), k.dims()), (&[1, 4, 2, 16][..], &[1, 4, 2, 16][..]));
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn cos_sin_at(&self, pos: usize) -> (&[f32], &[f32]) {
        self.0.at(pos)
    }
}
