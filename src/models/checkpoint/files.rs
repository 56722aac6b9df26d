//! The files of a checkpoint, beside their configuration.

use super::config::Format;
use super::packing::Packing;
use super::shards::Shards;
use super::tensors::{AS_STORED, CONFIG, Read, Tensors, stored_dtype};
use crate::nn::pack::named;
use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use std::path::Path;

/// A checkpoint of the hub, dense or quantized: its safetensors files and its `config.json`,
/// whose `quantization_config` says how quantized matrices are stored.
///
/// `Llama::load`, `ModelForCausalLM::new` and their relatives take GPTQ, AWQ (`gemm`) and
/// compressed-tensors (`pack-quantized`, `int-quantized`) from its [`VarBuilder`] as they are: in INT4
/// or INT8 on the crate's own kernels; FP8 with scales of rows, of the matrix or of blocks of 128 x 128 values in FP8;
/// bitsandbytes' NF4 in blocks of multiples of 64 values in NF4; and BitNet in ternary, whose layers take their input in
/// 8 bits of each token. FP8 and NF4 in other blocks are dequantized at load. From a plain `VarBuilder` of safetensors files they take what
/// the tensors alone tell: AWQ, `pack-quantized`, NF4, and GPTQ with symmetric weights.
///
/// A tensor that is stored in another dtype than its format has is an error. The builder may be given a prefix or
/// other names: the configuration goes along.
///
/// As a backend of a `VarBuilder` it turns quantized matrices into numbers where their `weight` is asked
/// for, so that any candle model can load it, as large as if it were dense.
///
/// ```no_run
/// use candle_core::{DType, Device};
/// use candle_fused::models::Checkpoint;
/// use candle_fused::models::llama::{Llama, LlamaConfig};
/// let config = std::fs::read_to_string("Llama-3.2-1B-GPTQ/config.json")?;
/// let checkpoint = Checkpoint::open(&["Llama-3.2-1B-GPTQ/model.safetensors"], &config)?;
/// let vb = checkpoint.var_builder(DType::F16, &Device::Cpu);
/// let config: LlamaConfig = serde_json::from_str(&config)?;
/// let llama = Llama::load(vb, &config.into_config(false))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::models::llama::{Cache, Config, Llama};
/// use candle_fused::models::{Checkpoint, save_compressed_tensors};
/// use candle_fused::quant::Recipe;
/// # let config = Config {
/// #     hidden_size: 64, intermediate_size: 96, vocab_size: 32, num_hidden_layers: 1,
/// #     num_attention_heads: 4, num_key_value_heads: 2, ..Config::config_7b_v2(false)
/// # };
/// # let vb = candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu);
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// // A checkpoint in compressed-tensors' layout.
/// let quantization = save_compressed_tensors(&config, vb, &Recipe::new("int4-g32".parse()?), &path)?;
/// let json = format!(r#"{{"quantization_config": {quantization}}}"#);
/// let checkpoint = Checkpoint::open(&[&path], &json)?;
/// let llama = Llama::load(checkpoint.var_builder(DType::F32, &Device::Cpu), &config)?;
/// let mut cache = Cache::new(true, DType::F32, &config, &Device::Cpu)?;
/// let ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?;
/// assert_eq!(llama.forward(&ids, 0, &mut cache)?.dims(), [1, 32]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub struct Checkpoint {
    tensors: Shards,
    config: String,
    format: Option<Format>,
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Checkpoint({} tensors)", self.tensors.len())
    }
}

impl Checkpoint {
    /// Opens the files, one or several shards, beside the text of their `config.json`. Tensors are read when they are
    /// asked for, by all threads; the files stay open meanwhile.
    ///
    /// # Errors
    /// If a file cannot be read or is no safetensors file, `config` is no JSON, or its
    /// `quantization_config` asks for what cannot be had exactly, by the field's name.
    pub fn open(files: &[impl AsRef<Path>], config: &str) -> Result<Self> {
        Ok(Self {
            format: Format::of_config(config)?,
            tensors: Shards::open(files)?,
            config: config.to_owned(),
        })
    }

    /// The tensors, those that are numbers in `dtype`.
    pub fn var_builder(self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self), dtype, device.clone())
    }

    /// The numbers of a quantized matrix; none if it is none.
    fn values(
        &self,
        shape: &Shape,
        name: &str,
        dtype: DType,
        device: &Device,
    ) -> Result<Option<Tensor>> {
        let (Some(stem), Ok(size)) = (name.strip_suffix(".weight"), shape.dims2()) else {
            return Ok(None);
        };
        let tensors = Tensors::new(self, stem);
        let Some(packing) = Packing::of(self.format, &tensors, size)? else {
            return Ok(None);
        };
        let values = packing.values(&tensors, size, dtype)?;
        values.to_device(device).map(Some)
    }

    /// A tensor as it is stored; signed bytes, which candle has not, as unsigned ones of the same bits.
    fn stored(&self, name: &str, device: &Device) -> Result<Tensor> {
        if is_config(name) {
            return Tensor::new(self.config.as_bytes(), device);
        }
        self.tensors.tensor(name, device)
    }
}

/// Whether the configuration is asked for, behind whatever a builder puts in front of its names.
fn is_config(name: &str) -> bool {
    name.ends_with(CONFIG)
}

impl Read for Checkpoint {
    fn contains(&self, name: &str) -> bool {
        self.tensors.contains(name)
    }

    fn read_on(&self, name: &str, _: DType, device: &Device) -> Result<Tensor> {
        self.stored(name, device)
    }
}

impl SimpleBackend for Checkpoint {
    fn get(&self, s: Shape, name: &str, _: Init, dtype: DType, dev: &Device) -> Result<Tensor> {
        if let Some(values) = named(name, self.values(&s, name, dtype, dev))? {
            return Ok(values);
        }
        let tensor = self.stored(name, dev)?;
        // Codes whose scales are not there are no numbers.
        if name.ends_with(".weight") && dtype.is_float() && tensor.dtype().is_int() {
            bail!(
                "tensor `{name}` is {}, expected f32, f16 or bf16",
                stored_dtype(tensor.dtype())
            );
        }
        if tensor.shape() != &s {
            bail!(
                "tensor `{name}` has shape {:?}, expected {s:?}",
                tensor.shape()
            );
        }
        tensor.to_dtype(dtype)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, dev: &Device) -> Result<Tensor> {
        let tensor = self.stored(name, dev)?;
        match dtype {
            AS_STORED => Ok(tensor),
            _ => tensor.to_dtype(dtype),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        let stem = name.strip_suffix(".weight");
        let renamed = |stem| Packing::is_renamed(&Tensors::new(self, stem));
        is_config(name) || self.contains(name) || stem.is_some_and(renamed)
    }
}
