//! Phi-3 from GGUF files, under the names of `candle_transformers::models::quantized_phi3`.

use super::decoder::{Decoder, DecoderCache};
use super::parts::Parts;
use super::phi3;
use candle_core::quantized::gguf_file::Content;
use candle_core::{Device, Result, Tensor};
use std::io::{Read, Seek};

/// A Phi-3 model with GGUF weights: [`phi3::ModelWeights`] with candle-transformers' constructor.
///
/// ```no_run
/// use candle_core::quantized::gguf_file::Content;
/// use candle_core::{Device, Tensor};
/// use candle_fused::models::quantized_phi3::ModelWeights;
/// let mut file = std::fs::File::open("model.gguf")?;
/// let content = Content::read(&mut file)?;
/// let mut model = ModelWeights::from_gguf(false, content, &mut file, &Device::Cpu)?;
/// let logits = model.forward(&Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?, 0)?;
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// ```
/// use candle_core::quantized::gguf_file::Content;
/// use candle_core::{Device, Tensor};
/// use candle_fused::models::quantized_phi3::ModelWeights;
/// # mod tiny { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/gguf.rs")); }
/// # let bytes = tiny::gguf("phi3", true)?;
/// // The bytes of a GGUF file of one layer.
/// let mut file = std::io::Cursor::new(&bytes);
/// let content = Content::read(&mut file)?;
/// let mut model = ModelWeights::from_gguf(false, content, &mut file, &Device::Cpu)?;
/// let ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?;
/// assert_eq!(model.forward(&ids, 0)?.dims(), [1, 32]);
/// model.clear_kv_cache();
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct ModelWeights(phi3::ModelWeights);

impl ModelWeights {
    /// As [`phi3::ModelWeights::from_gguf`]. `use_flash_attn` is candle-transformers' switch for its own
    /// CUDA kernels; the attention here is always fused.
    ///
    /// # Errors
    /// As [`phi3::ModelWeights::from_gguf`].
    pub fn from_gguf<R: Seek + Read>(
        use_flash_attn: bool,
        ct: Content,
        reader: &mut R,
        device: &Device,
    ) -> Result<Self> {
        let _ = use_flash_attn;
        Ok(Self(phi3::ModelWeights::from_gguf(ct, reader, device)?))
    }

    /// As [`phi3::ModelWeights::forward`].
    ///
    /// # Errors
    /// As [`phi3::ModelWeights::forward`].
    pub fn forward(&mut self, xs: &Tensor, index_pos: usize) -> Result<Tensor> {
        self.0.forward(xs, index_pos)
    }

    /// Forgets all positions.
    pub fn clear_kv_cache(&mut self) {
        self.0.clear_kv_cache();
    }
}

impl Parts for ModelWeights {
    fn decoder(&self) -> &Decoder {
        self.0.decoder()
    }

    fn empty_cache(&self) -> Result<DecoderCache> {
        self.0.empty_cache()
    }
}
