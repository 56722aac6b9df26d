//! SmolLM3 from GGUF files, under the names of `candle_transformers::models::smol::quantized_smollm3`.

use super::smollm3::{Config, INTERVAL, ModelWeights};
use crate::models::decoder::{Decoder, DecoderCache};
use crate::models::gguf::Header;
use crate::models::parts::Parts;
use crate::models::rotary_tables::RotaryTables;
use crate::models::shape::Describe;
use crate::ops::RopeStyle;
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Result, Tensor};
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

/// What a file's metadata says.
#[derive(Debug, Clone)]
pub struct QuantizedConfig {
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the gated MLP.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Context length.
    pub max_position_embeddings: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Added to the mean of squares in every norm.
    pub rms_norm_eps: f64,
    /// Rotated dimensions of a head.
    pub rope_dimension_count: usize,
    /// The last of so many layers is not rotated.
    pub no_rope_layer_interval: Option<usize>,
}

impl QuantizedConfig {
    /// Reads a file's metadata.
    ///
    /// # Errors
    /// If a value is missing, out of range or at odds with the tensors, by its name.
    pub fn from_gguf(ct: &Content) -> Result<Self> {
        let header = Header::read(ct, Config::KIND)?;
        Ok(Self {
            vocab_size: header.vocab,
            hidden_size: header.hidden,
            intermediate_size: header.intermediate,
            num_hidden_layers: header.layers,
            num_attention_heads: header.heads,
            num_key_value_heads: header.kv_heads,
            max_position_embeddings: header.max_positions,
            rope_theta: f64::from(header.theta),
            rms_norm_eps: f64::from(header.eps),
            rope_dimension_count: header.rotated,
            no_rope_layer_interval: Some(INTERVAL),
        })
    }

    /// Whether a layer is not rotated.
    pub fn should_skip_rope(&self, layer_idx: usize) -> bool {
        let interval = self.no_rope_layer_interval;
        interval.is_some_and(|interval| (layer_idx + 1).is_multiple_of(interval))
    }

    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.rope_dimension_count
    }
}

/// Rotary tables for queries and keys `[B, H, T, D]`.
#[derive(Debug, Clone)]
pub struct RotaryEmbedding(RotaryTables);

impl RotaryEmbedding {
    /// Tables as `cfg` has them, for neighbouring pairs if `use_interleaved`, else in half-split form. They
    /// are kept in f32, whatever `dtype` is.
    ///
    /// # Errors
    /// If the rotated dimensions are odd or 0, or `rope_theta` is not above 0.
    pub fn new(
        dtype: DType,
        cfg: &QuantizedConfig,
        dev: &Device,
        use_interleaved: bool,
    ) -> Result<Self> {
        let _ = dtype;
        let style = match use_interleaved {
            true => RopeStyle::Interleaved,
            false => RopeStyle::HalfSplit,
        };
        let positions = cfg.max_position_embeddings;
        let tables = RotaryTables::new(cfg.head_dim(), positions, cfg.rope_theta, style, dev)?;
        Ok(Self(tables))
    }

    /// Queries and keys `[B, H, T, D]` rotated as the tokens at `offset..offset + T`.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit, or the positions pass the tables.
    pub fn apply_rotary_emb(
        &self,
        q: &Tensor,
        k: &Tensor,
        offset: usize,
    ) -> Result<(Tensor, Tensor)> {
        self.0.apply(q, k, offset)
    }

    /// Cosines and sines of one position; none past the tables.
    pub fn cos_sin_at(&self, pos: usize) -> (&[f32], &[f32]) {
        self.0.at(pos)
    }
}

/// A SmolLM3 model with GGUF weights: [`ModelWeights`] with candle-transformers' constructor.
///
/// ```no_run
/// use candle_core::{Device, Tensor};
/// use candle_fused::models::smol::quantized_smollm3::QuantizedModelForCausalLM;
/// let mut model = QuantizedModelForCausalLM::from_gguf("model.gguf", &Device::Cpu, false)?;
/// let logits = model.forward(&Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?, 0)?;
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_core::quantized::gguf_file::Content;
/// use candle_fused::models::smol::quantized_smollm3::{
///     QuantizedConfig, QuantizedModelForCausalLM, RotaryEmbedding,
/// };
/// # mod tiny { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/gguf.rs")); }
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.gguf");
/// # std::fs::write(&path, tiny::gguf("smollm3", false)?)?;
/// // A GGUF file of one layer.
/// let mut model = QuantizedModelForCausalLM::from_gguf(&path, &Device::Cpu, false)?;
/// let ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?;
/// assert_eq!(model.forward(&ids, 0)?.dims(), [1, 1, 32]);
/// model.clear_kv_cache();
/// // Every fourth layer is not rotated.
/// let config = model.config();
/// assert!(!config.should_skip_rope(0) && config.should_skip_rope(3) && config.head_dim() == 16);
/// // As a file's metadata has it.
/// let metadata = Content::read(&mut std::fs::File::open(&path)?)?;
/// assert_eq!(QuantizedConfig::from_gguf(&metadata)?.vocab_size, config.vocab_size);
///
/// let rotary = RotaryEmbedding::new(DType::F32, config, &Device::Cpu, false)?;
/// assert_eq!(rotary.cos_sin_at(0).0, [1.; 8]);
/// let q = Tensor::ones((1, 4, 1, 16), DType::F32, &Device::Cpu)?;
/// let (q, _) = rotary.apply_rotary_emb(&q, &q, 0)?;
/// assert_eq!(q.sum_all()?.to_scalar::<f32>()?, 64.);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct QuantizedModelForCausalLM {
    model: ModelWeights,
    config: QuantizedConfig,
}

impl QuantizedModelForCausalLM {
    /// Loads a file. `use_flash_attn` is candle-transformers' switch for its own kernels; the attention
    /// here is always fused.
    ///
    /// # Errors
    /// If the file cannot be read, or as [`ModelWeights::from_gguf`].
    pub fn from_gguf<P: AsRef<Path>>(
        path: P,
        device: &Device,
        use_flash_attn: bool,
    ) -> Result<Self> {
        let _ = use_flash_attn;
        let path = path.as_ref();
        let file = File::open(path).map_err(|e| candle_core::Error::from(e).with_path(path))?;
        let mut reader = BufReader::new(file);
        let content = Content::read(&mut reader)?;
        Ok(Self {
            config: QuantizedConfig::from_gguf(&content)?,
            model: ModelWeights::from_gguf(content, &mut reader, device)?,
        })
    }

    /// The logits `[B, 1, vocab]` (f32) after the last of `input_ids`; the rest as
    /// [`ModelWeights::forward`].
    ///
    /// # Errors
    /// As [`ModelWeights::forward`].
    pub fn forward(&mut self, input_ids: &Tensor, offset: usize) -> Result<Tensor> {
        self.model.forward(input_ids, offset)?.unsqueeze(1)
    }

    /// Forgets all positions.
    pub fn clear_kv_cache(&mut self) {
        self.model.clear_kv_cache();
    }

    /// What the file's metadata said.
    pub fn config(&self) -> &QuantizedConfig {
        &self.config
    }
}

impl Parts for QuantizedModelForCausalLM {
    fn decoder(&self) -> &Decoder {
        self.model.decoder()
    }

    fn empty_cache(&self) -> Result<DecoderCache> {
        self.model.empty_cache()
    }
}
