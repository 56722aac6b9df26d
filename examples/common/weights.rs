//! A model's files opened: weights that a loader can take, and the tokenizer beside them.

use std::fs::File;
use std::io::{BufReader, Cursor};
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use anyhow::{Context, Result, bail, ensure};
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Tensor};
use candle_fused::cpu::packed::SharedBytes;
use candle_fused::models::{self, llama};
use candle_fused::quant::QuantizedFile;
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use memmap2::Mmap;
use serde_json::Value;

use super::architecture::{Architecture, Config};
use super::gguf_vocab;
use super::shapes::{RandomWeights, Shape};
use super::source::{ModelFiles, SafetensorsFiles};
use super::tokenizer::Text;
use super::validate;

/// Weights ready to be loaded.
pub enum Weights {
    Gguf {
        path: PathBuf,
        /// Without what belongs to the tokenizer.
        content: Content,
        vocabulary: Arc<Content>,
        reader: BufReader<File>,
        /// Of activations.
        compute_dtype: DType,
        /// The file in memory, if its blocks are to stay there.
        map: Option<SharedBytes>,
        /// A tokenizer.json beside the file.
        tokenizer: Option<PathBuf>,
    },
    Safetensors {
        files: SafetensorsFiles,
        config: Value,
    },
    Random(Shape),
}

/// Opens a model.
pub fn open(files: &ModelFiles) -> Result<Weights> {
    Ok(match files {
        ModelFiles::Gguf {
            file,
            tokenizer,
            mapped,
        } => {
            let opened =
                File::open(file).with_context(|| format!("cannot open {}", file.display()))?;
            let map = map(&opened).with_context(|| format!("cannot map {}", file.display()))?;
            // candle asks for the position at every string, which of a file is a system call.
            let mut content =
                Content::read(&mut Cursor::new((*map).as_ref())).with_context(|| {
                    format!("{} is damaged or cut short; fetch it again", file.display())
                })?;
            Weights::Gguf {
                path: file.clone(),
                vocabulary: Arc::new(gguf_vocab::take(&mut content)),
                content,
                reader: BufReader::new(opened),
                compute_dtype: DType::F32,
                map: mapped.then_some(map),
                tokenizer: tokenizer.clone(),
            }
        }
        ModelFiles::Safetensors(files) => Weights::Safetensors {
            config: validate::json(&files.config)?,
            files: files.clone(),
        },
        ModelFiles::Random(shape) => Weights::Random(*shape),
    })
}

fn map(file: &File) -> Result<SharedBytes> {
    // SAFETY: the file is mapped read-only; like every memory-mapped loader this one asks that nobody
    // changes it while the model is in use.
    Ok(Arc::new(unsafe { Mmap::map(file) }?))
}

/// A tokenizer that another thread is making.
pub struct Meanwhile(JoinHandle<Result<Text>>);

impl Meanwhile {
    /// It, once it is made.
    pub fn wait(self) -> Result<Text> {
        self.0.join().unwrap_or_else(|panic| resume_unwind(panic))
    }
}

/// Weights that are read as a loader asks for them.
pub struct Checkpoint {
    pub config: Config,
    pub vb: VarBuilder<'static>,
    pub dtype: DType,
    pub bytes: Arc<Bytes>,
}

impl Weights {
    /// Has activations in `asked`, if one is, beside the blocks of a GGUF file.
    pub fn with_compute_dtype(mut self, asked: Option<DType>) -> Result<Self> {
        match (&mut self, asked) {
            (Self::Gguf { compute_dtype, .. }, Some(asked)) => *compute_dtype = asked,
            (_, Some(_)) => {
                bail!("--compute-dtype is for GGUF files; here --dtype says what to compute in")
            }
            (_, None) => (),
        }
        Ok(self)
    }

    /// The tokenizer and chat template.
    pub fn text(&self) -> Result<Text> {
        self.making_text()()
    }

    /// The same, made by a thread of its own while the weights are loaded.
    pub fn text_meanwhile(&self) -> Meanwhile {
        Meanwhile(std::thread::spawn(self.making_text()))
    }

    /// What makes it, with all that this takes.
    fn making_text(&self) -> Box<dyn FnOnce() -> Result<Text> + Send> {
        match self {
            Self::Gguf {
                path,
                vocabulary,
                tokenizer,
                ..
            } => {
                let (path, tokenizer) = (path.clone(), tokenizer.clone());
                let vocabulary = Arc::clone(vocabulary);
                Box::new(move || Text::from_gguf(&vocabulary, &path, tokenizer.as_ref()))
            }
            Self::Safetensors { files, .. } => {
                let files = files.clone();
                Box::new(move || Text::from_files(&files))
            }
            Self::Random(_) => {
                let vocab = self.vocab_size();
                Box::new(move || Text::made_up(vocab?))
            }
        }
    }

    /// The model's architecture.
    pub fn architecture(&self) -> Result<Architecture> {
        let name = match self {
            Self::Gguf { path, content, .. } => gguf_vocab::text(content, "general.architecture")
                .with_context(|| {
                format!(
                    "{} does not say its architecture; fetch it again",
                    path.display()
                )
            })?,
            Self::Safetensors { files, config } => {
                config["model_type"].as_str().with_context(|| {
                    format!(
                        "{} has no model_type; fetch it again",
                        files.config.display()
                    )
                })?
            }
            Self::Random(shape) => {
                let config = shape.config();
                return Architecture::named(config["model_type"].as_str().unwrap_or_default());
            }
        };
        Architecture::named(name)
    }

    /// Tokens have ids below this.
    pub fn vocab_size(&self) -> Result<usize> {
        match self {
            Self::Gguf { path, content, .. } => {
                let table = content.tensor_infos.get("token_embd.weight");
                let rows = table.and_then(|tensor| tensor.shape.dims().first());
                rows.copied().with_context(|| {
                    format!(
                        "{} has no tensor token_embd.weight; fetch it again",
                        path.display()
                    )
                })
            }
            Self::Safetensors { files, config } => vocab_size(config).with_context(|| {
                format!(
                    "{} has no vocab_size; fetch it again",
                    files.config.display()
                )
            }),
            Self::Random(shape) => {
                vocab_size(&shape.config()).context("the shape has no vocab_size")
            }
        }
    }

    /// The weights with numbers in `asked` or in what they are stored as.
    pub fn checkpoint(self, asked: Option<DType>, device: &Device) -> Result<Checkpoint> {
        let architecture = self.architecture()?;
        let dtype = self.dtype(asked)?;
        let quantized = self.quantized()?;
        let (config, tensors): (_, Box<dyn SimpleBackend>) = match self {
            Self::Gguf {
                path,
                content,
                mut reader,
                ..
            } => {
                ensure!(
                    architecture == Architecture::Llama,
                    "{} is a {architecture} model, whose GGUF files run as they are; leave --dtype away",
                    path.display()
                );
                let (config, tensors) =
                    llama::dequantize_gguf(&content, &mut reader, dtype, device)
                        .with_context(|| damaged(&path))?;
                (Config::Llama(config), Box::new(tensors))
            }
            Self::Safetensors { files, config } => {
                let text = config.to_string();
                let config = read_config(architecture, config, &files)?;
                let tensors: Box<dyn SimpleBackend> = match quantized {
                    Some(file) => Box::new(file),
                    None => Box::new(
                        models::Checkpoint::open(&files.weights, &text)
                            .context("the weights cannot be opened")?,
                    ),
                };
                (config, tensors)
            }
            Self::Random(shape) => {
                let json = shape.config();
                let own_head = json["tie_word_embeddings"] == false;
                (
                    architecture.config(json)?,
                    Box::new(RandomWeights { own_head }),
                )
            }
        };
        let bytes = Arc::new(Bytes::default());
        let counted = Counted {
            tensors,
            bytes: Arc::clone(&bytes),
        };
        Ok(Checkpoint {
            config,
            vb: VarBuilder::from_backend(Box::new(counted), dtype, device.clone()),
            dtype,
            bytes,
        })
    }

    /// The file of a model that was quantized and saved; none for others.
    pub fn quantized(&self) -> Result<Option<QuantizedFile>> {
        let Self::Safetensors { files, .. } = self else {
            return Ok(None);
        };
        let [file] = files.weights.as_slice() else {
            return Ok(None);
        };
        if !validate::is_quantized(file)? {
            return Ok(None);
        }
        // SAFETY: the file is mapped read-only; like every memory-mapped loader this one asks that
        // nobody truncates it while the model is in use.
        let file = unsafe { QuantizedFile::open(file) };
        Ok(Some(file.context(
            "the quantized weights cannot be opened; quantize them again",
        )?))
    }

    /// The configuration of a model as transformers saves it.
    pub fn config(&self) -> Result<Config> {
        match self {
            Self::Safetensors { files, config } => {
                read_config(self.architecture()?, config.clone(), files)
            }
            _ => bail!("the model has no config.json"),
        }
    }

    /// The kind of number most of the weights are stored as, for people.
    pub fn stored_as(&self) -> String {
        match self {
            Self::Gguf { content, .. } => {
                let mut sizes = std::collections::BTreeMap::new();
                for tensor in content.tensor_infos.values() {
                    *sizes.entry(format!("{:?}", tensor.ggml_dtype)).or_insert(0) +=
                        tensor.shape.elem_count();
                }
                let most = sizes.into_iter().max_by_key(|(_, size)| *size);
                most.map_or_else(|| "nothing".to_owned(), |(name, _)| name.to_lowercase())
            }
            Self::Safetensors { config, .. } => match self.quantized() {
                Ok(Some(file)) => most(file.matrices().map(|(_, scheme)| scheme.to_string())),
                _ => match config["quantization_config"]["quant_method"].as_str() {
                    Some(method) => method.to_owned(),
                    None => config_dtype(config)
                        .map_or("f32", |dtype| dtype.as_str())
                        .to_owned(),
                },
            },
            Self::Random(_) => RANDOM.as_str().to_owned(),
        }
    }

    /// The dtype that safetensors weights are to be loaded in: what was asked for, else as stored.
    pub fn dtype(&self, asked: Option<DType>) -> Result<DType> {
        match (self, asked) {
            (_, Some(dtype)) => Ok(dtype),
            (Self::Gguf { .. }, None) => Ok(DType::F32),
            (Self::Random(_), None) => Ok(RANDOM),
            (Self::Safetensors { config, .. }, None) => match config_dtype(config) {
                Some(dtype @ (DType::F32 | DType::F16 | DType::BF16)) => Ok(dtype),
                Some(other) => bail!(
                    "weights stored as {} are not run as they are; give --dtype",
                    other.as_str()
                ),
                None => Ok(DType::F32),
            },
        }
    }
}

fn read_config(
    architecture: Architecture,
    config: Value,
    files: &SafetensorsFiles,
) -> Result<Config> {
    architecture.config(config).with_context(|| {
        format!(
            "{} is no usable {architecture} configuration",
            files.config.display()
        )
    })
}

/// The name that comes up most.
fn most(names: impl Iterator<Item = String>) -> String {
    let mut counts = std::collections::BTreeMap::new();
    for name in names {
        *counts.entry(name).or_insert(0) += 1;
    }
    let most = counts.into_iter().max_by_key(|(_, count)| *count);
    most.map_or_else(|| "nothing".to_owned(), |(name, _)| name)
}

/// transformers 5 calls it `dtype`, earlier ones `torch_dtype`.
fn config_dtype(config: &Value) -> Option<DType> {
    let name = config["dtype"]
        .as_str()
        .or(config["torch_dtype"].as_str())?;
    match name.trim_start_matches("torch.") {
        "float32" => Some(DType::F32),
        "float16" => Some(DType::F16),
        "bfloat16" => Some(DType::BF16),
        "float64" => Some(DType::F64),
        _ => None,
    }
}

/// What random weights are unless another dtype is asked for, as checkpoints are published in it.
const RANDOM: DType = DType::BF16;

fn vocab_size(config: &Value) -> Option<usize> {
    config["vocab_size"].as_u64()?.try_into().ok()
}

/// What to say of a GGUF file that does not load.
pub fn damaged(path: &Path) -> String {
    format!(
        "{} cannot be loaded; fetch it again or take another model",
        path.display()
    )
}

/// The bytes of the matrices that a loader has taken.
#[derive(Debug, Default)]
pub struct Bytes {
    embedding: AtomicU64,
    head: AtomicU64,
    others: AtomicU64,
}

impl Bytes {
    /// What a decode step reads: all but an embedding that is no head as well, of which it reads a row.
    pub fn per_step(&self) -> u64 {
        let [embedding, head, others] =
            [&self.embedding, &self.head, &self.others].map(|n| n.load(Ordering::Relaxed));
        others + if head > 0 { head } else { embedding }
    }

    /// Every tensor's.
    pub fn all(&self) -> u64 {
        let kinds = [&self.embedding, &self.head, &self.others];
        kinds.iter().map(|n| n.load(Ordering::Relaxed)).sum()
    }

    /// Counts a tensor, by its name in a checkpoint or GGUF file.
    fn add(&self, name: &str, bytes: u64) {
        let kind = match name {
            "model.embed_tokens.weight" | "gpt_neox.embed_in.weight" | "token_embd.weight" => {
                &self.embedding
            }
            "lm_head.weight" | "embed_out.weight" | "output.weight" => &self.head,
            _ => &self.others,
        };
        kind.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Those of a GGUF file.
    pub fn of_gguf(content: &Content) -> Self {
        let bytes = Self::default();
        for (name, info) in &content.tensor_infos {
            let blocks = info.shape.elem_count() / info.ggml_dtype.block_size();
            bytes.add(name, (blocks * info.ggml_dtype.type_size()) as u64);
        }
        bytes
    }
}

/// Tensors that are counted as they are taken.
struct Counted {
    tensors: Box<dyn SimpleBackend>,
    bytes: Arc<Bytes>,
}

impl Counted {
    fn count(&self, name: &str, tensor: Tensor) -> Tensor {
        let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
        self.bytes.add(name, bytes as u64);
        tensor
    }
}

impl SimpleBackend for Counted {
    fn get(
        &self,
        shape: candle_core::Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let tensor = self.tensors.get(shape, name, init, dtype, device)?;
        Ok(self.count(name, tensor))
    }

    fn get_unchecked(
        &self,
        name: &str,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let tensor = self.tensors.get_unchecked(name, dtype, device)?;
        Ok(self.count(name, tensor))
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.tensors.contains_tensor(name)
    }
}
