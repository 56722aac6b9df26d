//! A model's files opened: weights that a loader can take, and the tokenizer beside them.

use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use candle_core::DType;
use candle_core::quantized::gguf_file::Content;
use serde_json::Value;

use super::gguf_vocab;
use super::source::{ModelFiles, SafetensorsFiles};
use super::tokenizer::Text;
use super::validate;

/// Weights ready to be loaded.
pub enum Weights {
    Gguf {
        path: PathBuf,
        content: Content,
        reader: BufReader<File>,
    },
    Safetensors {
        files: SafetensorsFiles,
        config: Value,
    },
}

/// Opens a model.
pub fn open(files: &ModelFiles) -> Result<(Weights, Text)> {
    match files {
        ModelFiles::Gguf { file, tokenizer } => {
            let opened =
                File::open(file).with_context(|| format!("cannot open {}", file.display()))?;
            let mut reader = BufReader::new(opened);
            let content = Content::read(&mut reader).with_context(|| {
                format!("{} is damaged or cut short; fetch it again", file.display())
            })?;
            let text = Text::from_gguf(&content, file, tokenizer.as_ref())?;
            Ok((
                Weights::Gguf {
                    path: file.clone(),
                    content,
                    reader,
                },
                text,
            ))
        }
        ModelFiles::Safetensors(files) => {
            let config = validate::json(&files.config)?;
            let text = Text::from_files(files)?;
            Ok((
                Weights::Safetensors {
                    files: files.clone(),
                    config,
                },
                text,
            ))
        }
    }
}

impl Weights {
    /// The model's architecture: `llama`, `qwen2` and so on.
    pub fn architecture(&self) -> Result<&str> {
        match self {
            Self::Gguf { path, content, .. } => gguf_vocab::text(content, "general.architecture")
                .with_context(|| {
                    format!(
                        "{} does not say its architecture; fetch it again",
                        path.display()
                    )
                }),
            Self::Safetensors { files, config } => {
                config["model_type"].as_str().with_context(|| {
                    format!(
                        "{} has no model_type; fetch it again",
                        files.config.display()
                    )
                })
            }
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
            Self::Safetensors { config, .. } => config_dtype(config)
                .map_or("f32", |dtype| dtype.as_str())
                .to_owned(),
        }
    }

    /// The dtype that safetensors weights are to be loaded in: what was asked for, else as stored.
    pub fn dtype(&self, asked: Option<DType>) -> Result<DType> {
        match (self, asked) {
            (_, Some(dtype)) => Ok(dtype),
            (Self::Gguf { .. }, None) => Ok(DType::F32),
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
