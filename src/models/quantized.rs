//! Models whose matrices are quantized while they are loaded, and those that were saved so.

mod compressed;
mod file;
mod save;

pub use file::QuantizedFile;

use super::Architecture;
use super::balance::Balanced;
use super::checkpoint::Stored;
use super::names::{Names, Qkv};
use super::shape::{Head, Shape};
use super::weights::{Loader, Source, arranged};
use crate::Fusion;
use crate::cpu::packed::PackedMatrix;
use crate::nn::pack::{dense, named, pack, packed_on_device};
use crate::nn::recipe::{Progress, Quantization, Recipe};
use crate::nn::{Embedding, LinearWeight, Projection};
use crate::ops::Weight;
use crate::quant::Format;
use candle_core::{DType, Device, Result, Tensor, bail};
use candle_nn::VarBuilder;
pub(super) use save::{Label, Saved, save};
use std::path::Path;
use std::sync::Arc;

/// Quantizes a model by `recipe` and writes it to `path` in the format of
/// [`QuantizedFile`](crate::quant::QuantizedFile), from which [`Llama`](super::llama::Llama) and
/// [`CausalLm`](super::CausalLm) load it in place. The file ought to be called `model.safetensors` and
/// to have the model's `config.json` beside it.
///
/// # Errors
/// If `vb` is not on the CPU, the recipe asks for GGUF types, the file cannot be written, or as the
/// model's `new_quantized`: a tensor that is quantized already is one.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_fused::Fusion;
/// use candle_fused::models::llama::{Config, Llama};
/// use candle_fused::models::save_quantized;
/// use candle_fused::quant::{QuantizedFile, Recipe};
/// # let config = Config {
/// #     hidden_size: 64, intermediate_size: 96, vocab_size: 32, num_hidden_layers: 1,
/// #     num_attention_heads: 4, num_key_value_heads: 2, ..Config::config_7b_v2(false)
/// # };
/// # let vb = candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu);
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("model.safetensors");
/// save_quantized(&config, vb, &Recipe::new("int8".parse()?), &path)?;
/// // SAFETY: the file does not change while it is open.
/// let file = unsafe { QuantizedFile::open(&path)? };
/// Llama::from_quantized(&file, &config, DType::F32, &Device::Cpu, Fusion::all())?;
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn save_quantized<C: Architecture>(
    cfg: &C,
    vb: VarBuilder,
    recipe: &Recipe,
    path: impl AsRef<Path>,
) -> Result<()> {
    let saved = quantized(cfg, vb, recipe)?;
    save(path.as_ref(), saved, Label::Quantized)
}

/// The same in the layouts of compressed-tensors, which vLLM and transformers load, and
/// [`Checkpoint`](super::Checkpoint): INT4 without zero points and INT8 as weights of 8 bits in `pack-quantized`, FP8
/// in `float-quantized`. Gives the
/// `quantization_config`, as JSON, that belongs into the `config.json` beside the file.
///
/// # Errors
/// As [`save_quantized`], or by the tensor's name if it would be quantized in another way, or is an
/// embedding or a head that is tied to one.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_fused::models::llama::Config;
/// use candle_fused::models::save_compressed_tensors;
/// use candle_fused::quant::Recipe;
/// # let config = Config {
/// #     hidden_size: 64, intermediate_size: 96, vocab_size: 32, num_hidden_layers: 1,
/// #     num_attention_heads: 4, num_key_value_heads: 2, ..Config::config_7b_v2(false)
/// # };
/// # let vb = candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu);
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("model.safetensors");
/// let json = save_compressed_tensors(&config, vb, &Recipe::new("int8".parse()?), &path)?;
/// assert!(path.exists() && json.contains("pack-quantized"));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn save_compressed_tensors<C: Architecture>(
    cfg: &C,
    vb: VarBuilder,
    recipe: &Recipe,
    path: impl AsRef<Path>,
) -> Result<String> {
    let tied = match cfg.shape()?.head {
        Head::Own => false,
        Head::Embedding => true,
        Head::Either => !vb.contains_tensor(&format!("{}.weight", C::KIND.names.head)),
    };
    let saved = quantized(cfg, vb, recipe)?;
    let (tensors, config) = compressed::layout(saved, &C::KIND.names, tied)?;
    save(path.as_ref(), tensors, Label::Torch)?;
    Ok(config.to_string())
}

/// A model's tensors, quantized by `recipe`.
fn quantized<C: Architecture>(
    cfg: &C,
    vb: VarBuilder,
    recipe: &Recipe,
) -> Result<Vec<(String, Saved)>> {
    if !vb.device().is_cpu() {
        bail!("vb: on {:?}, expected the CPU", vb.device().location());
    }
    let shape = cfg.shape()?;
    let mut saved = Vec::new();
    let stored = Stored::new(vb, Fusion::all())?;
    let mut source = Quantizing::new(stored, recipe, &shape, Fusion::all())?;
    source.saved = Some(&mut saved);
    Loader {
        source,
        names: &C::KIND.names,
        shape: &shape,
        fusion: Fusion::all(),
    }
    .decoder()?;
    Ok(saved)
}

/// Another source's matrices, quantized one by one.
pub struct Quantizing<'a, S> {
    source: Balanced<S>,
    recipe: &'a Recipe,
    names: &'static Names,
    fusion: Fusion,
    /// Matrices that are done, and all of them.
    count: (usize, usize),
    /// What is to be saved, if it is.
    saved: Option<&'a mut Vec<(String, Saved)>>,
}

impl<'a, S: Source> Quantizing<'a, S> {
    /// # Errors
    /// If a pattern of the recipe matches nothing.
    pub fn new(source: S, recipe: &'a Recipe, shape: &Shape, fusion: Fusion) -> Result<Self> {
        let names = &shape.kind.names;
        recipe.check_patterns(|| names.matrices(shape.layers))?;
        let qkv = match names.qkv {
            Qkv::Three(parts) => parts.len(),
            Qkv::Joint(_) | Qkv::PerHead(_) => 1,
        };
        let own_head = source.has(&format!("{}.weight", names.head));
        let total = shape.layers * (qkv + names.up.len() + 2) + 1 + usize::from(own_head);
        Ok(Self {
            source: Balanced::new(source, recipe.is_balanced().then(|| shape.clone())),
            recipe,
            names,
            fusion,
            count: (0, total),
            saved: None,
        })
    }

    fn done(&mut self, tensor: &str) {
        let (done, total) = &mut self.count;
        *done += 1;
        self.recipe.report(Progress {
            tensor,
            done: *done,
            total: *total,
        });
    }

    fn save(&mut self, name: &str, saved: impl FnOnce() -> Saved) {
        if let Some(all) = &mut self.saved {
            all.push((name.to_owned(), saved()));
        }
    }

    /// Quantizes a matrix and notes it.
    fn pack(
        &mut self,
        name: &str,
        matrix: &Tensor,
        quantization: Quantization,
        heads: Option<usize>,
    ) -> Result<Weight> {
        let weight = match self.recipe.finished(name) {
            Some(done) => named(name, finished(done, matrix, quantization))?,
            None => named(name, pack(matrix, quantization))?,
        };
        if let Weight::Packed(packed) = &weight {
            self.save(name, || Saved::Packed(packed.clone(), heads));
        }
        Ok(weight)
    }
}

impl<S: Source> Source for Quantizing<'_, S> {
    fn device(&self) -> &Device {
        self.source.device()
    }

    fn dtype(&self) -> Option<DType> {
        self.source.dtype()
    }

    fn has(&self, tensor: &str) -> bool {
        self.source.has(tensor)
    }

    fn matrix(
        &mut self,
        tensor: &str,
        rows: usize,
        cols: usize,
        heads: Option<usize>,
    ) -> Result<LinearWeight> {
        let stored = self.source.matrix(tensor, (rows, cols))?;
        let is_head = tensor.strip_suffix(".weight") == Some(self.names.head);
        let asked = match is_head {
            true => self.recipe.of_head(tensor),
            false => self.recipe.of(tensor),
        };
        let sorted = arranged(stored.clone(), heads)?;
        let weight = match asked {
            Some(quantization) => {
                let weight = self.pack(tensor, &sorted, quantization, heads)?;
                held(weight, sorted.dtype(), self.fusion)?
            }
            None => {
                self.save(tensor, || Saved::Dense(stored));
                LinearWeight::Dense(sorted)
            }
        };
        self.done(tensor);
        Ok(weight)
    }

    fn vector(&mut self, tensor: &str, len: usize) -> Result<Tensor> {
        let vector = self.source.vector(tensor, len)?;
        self.save(tensor, || Saved::Dense(vector.clone()));
        Ok(vector)
    }

    fn table(
        &mut self,
        tensor: &str,
        size: (usize, usize),
        tied: Option<&str>,
        fusion: Fusion,
    ) -> Result<(Embedding, Option<Projection>)> {
        let table = self.source.matrix(tensor, size)?;
        let asked = self.recipe.of_embedding(tensor);
        let (embedding, weight) = match asked {
            Some(quantization) => {
                let weight = self.pack(tensor, &table, quantization, None)?;
                (looked_up(&weight, table.dtype())?, Some(weight))
            }
            None => {
                self.save(tensor, || Saved::Dense(table.clone()));
                (Embedding::from_table(table.clone()), None)
            }
        };
        self.done(tensor);
        let Some(head) = tied else {
            return Ok((embedding, None));
        };
        let weight = match (self.recipe.of_head(head), weight) {
            // One table for both.
            (of_head, Some(weight)) if of_head == asked => held(weight, table.dtype(), fusion)?,
            (Some(quantization), _) => {
                let weight = self.pack(head, &table, quantization, None)?;
                held(weight, table.dtype(), fusion)?
            }
            (None, quantized) => {
                if quantized.is_some() {
                    self.save(head, || Saved::Dense(table.clone()));
                }
                LinearWeight::Dense(table)
            }
        };
        let head = Projection::new(vec![weight], None, fusion)?;
        Ok((embedding, Some(head)))
    }
}

/// A saved model's tensors, on `device`, with numbers in `dtype`.
pub struct Mapped<'a> {
    pub file: &'a QuantizedFile,
    pub dtype: DType,
    pub device: &'a Device,
    pub fusion: Fusion,
}

impl Source for Mapped<'_> {
    fn device(&self) -> &Device {
        self.device
    }

    fn dtype(&self) -> Option<DType> {
        Some(self.dtype)
    }

    fn has(&self, tensor: &str) -> bool {
        self.file.contains(tensor)
    }

    fn matrix(
        &mut self,
        tensor: &str,
        rows: usize,
        cols: usize,
        heads: Option<usize>,
    ) -> Result<LinearWeight> {
        if !self.file.is_matrix(tensor) {
            let matrix = self.dense(tensor, &[rows, cols])?;
            return Ok(LinearWeight::Dense(arranged(matrix, heads)?));
        }
        let stored = self.file.heads(tensor)?;
        if stored != heads {
            bail!(
                "tensor `{tensor}` has its rows sorted for {stored:?} heads, the configuration asks \
                 for {heads:?}"
            );
        }
        let weight = self.file.weight(tensor, rows, cols, self.device)?;
        held(weight, self.dtype, self.fusion)
    }

    fn vector(&mut self, tensor: &str, len: usize) -> Result<Tensor> {
        self.dense(tensor, &[len])
    }

    fn table(
        &mut self,
        tensor: &str,
        (rows, cols): (usize, usize),
        tied: Option<&str>,
        fusion: Fusion,
    ) -> Result<(Embedding, Option<Projection>)> {
        let (embedding, shared) = match self.file.is_matrix(tensor) {
            true => {
                let weight = self.file.weight(tensor, rows, cols, self.device)?;
                let embedding = looked_up(&weight, self.dtype)?;
                (embedding, held(weight, self.dtype, fusion)?)
            }
            false => {
                let table = self.dense(tensor, &[rows, cols])?;
                (
                    Embedding::from_table(table.clone()),
                    LinearWeight::Dense(table),
                )
            }
        };
        let head = match tied {
            None => return Ok((embedding, None)),
            Some(head) if self.has(head) => self.matrix(head, rows, cols, None)?,
            Some(_) => shared,
        };
        let head = Projection::new(vec![head], None, fusion)?;
        Ok((embedding, Some(head)))
    }
}

impl Mapped<'_> {
    fn dense(&self, name: &str, dims: &[usize]) -> Result<Tensor> {
        let tensor = self.file.tensor(name, self.dtype, self.device)?;
        if tensor.dims() != dims {
            bail!(
                "tensor `{name}` has shape {:?}, the configuration asks for {dims:?}",
                tensor.shape()
            );
        }
        Ok(tensor)
    }
}

/// What a calibration has made of a matrix, on its device.
fn finished(
    done: &Arc<PackedMatrix>,
    matrix: &Tensor,
    quantization: Quantization,
) -> Result<Weight> {
    let (rows, cols) = matrix.dims2()?;
    let asked = quantization.scheme().map(Format::Scheme);
    if (done.rows(), done.cols()) != (rows, cols) || asked != Some(done.format()) {
        bail!("calibrated as {done:?}, expected {quantization}, {rows} x {cols}");
    }
    match matrix.device() {
        Device::Cpu => Ok(Weight::Packed(Arc::clone(done))),
        device => packed_on_device(done, device),
    }
}

/// A quantized weight for a projection, or what it is worth where products are candle's.
fn held(weight: Weight, dtype: DType, fusion: Fusion) -> Result<LinearWeight> {
    Ok(match fusion.quant_linear {
        true => LinearWeight::Packed(weight),
        false => LinearWeight::Dense(dense(&weight)?.to_dtype(dtype)?),
    })
}

/// A quantized table as the embedding of a model in `dtype`.
fn looked_up(weight: &Weight, dtype: DType) -> Result<Embedding> {
    match weight {
        Weight::Packed(table) => Embedding::from_packed(table.clone(), dtype),
        #[cfg(feature = "cuda")]
        Weight::Blocks(table) => Embedding::from_blocks(table.clone(), dtype),
        Weight::Dense(table) => Ok(Embedding::from_table(table.clone())),
    }
}
