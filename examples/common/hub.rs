//! Models from the Hugging Face hub, through hf-hub and its cache.
//!
//! hf-hub has no time limits of its own. So whatever is asked of the hub is asked in a thread, which
//! is left to itself when no answer comes or a transfer stands still, and every file is checked
//! before it is used.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use hf_hub::api::RepoInfo;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError};
use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use ureq::http::Uri;

use super::progress::Meter;
use super::report::{self, bytes};
use super::source::{ModelFiles, SafetensorsFiles};
use super::transfer::{Reports, Watch, Worker};
use super::validate;

/// How often a file that broke off or arrived damaged is asked for.
const ATTEMPTS: usize = 3;

/// How often the meter of a transfer is drawn.
const REDRAW: Duration = Duration::from_millis(100);

/// How to reach the hub.
#[derive(Clone, Debug)]
pub struct HubOptions {
    /// `None` reads HF_ENDPOINT, else the public hub.
    pub endpoint: Option<String>,
    /// `None` reads HF_HUB_CACHE and HF_HOME, else the usual folder.
    pub cache: Option<PathBuf>,
    /// How long the first answer may take before the hub counts as out of reach.
    pub answer_within: Duration,
    /// How long a transfer may stand still.
    pub stalled_after: Duration,
}

/// A connection to the hub and its cache on disk.
pub struct Hub {
    api: Api,
    cache: Cache,
    endpoint: String,
    options: HubOptions,
}

/// Why a file did not come.
enum Failure {
    /// The repository does not have it.
    Missing,
    /// Asking again cannot help.
    Final(anyhow::Error),
    /// The transfer broke off, or what came is damaged.
    Broken(anyhow::Error),
}

impl Hub {
    /// Prepares a client; nothing is sent yet.
    pub fn new(options: &HubOptions) -> Result<Self> {
        let endpoint = options
            .endpoint
            .clone()
            .or_else(|| env("HF_ENDPOINT"))
            .unwrap_or_else(|| "https://huggingface.co".to_owned());
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        let url = endpoint.parse::<Uri>().ok();
        ensure!(
            url.is_some_and(|url| matches!(url.scheme_str(), Some("http" | "https"))),
            "HF_ENDPOINT is no URL ({endpoint}); unset it or correct it"
        );
        let cache = Cache::new(options.cache.clone().unwrap_or_else(cache_folder));
        let api = ApiBuilder::from_cache(cache.clone())
            .with_endpoint(endpoint.clone())
            .with_token(token())
            .with_progress(false)
            .with_user_agent("candle-fused", env!("CARGO_PKG_VERSION"))
            .build()
            .context("cannot set up HTTPS")?;
        Ok(Self {
            api,
            cache,
            endpoint,
            options: options.clone(),
        })
    }

    /// The files of a model if the cache has all of them, undamaged.
    pub fn cached(&self, id: &str, revision: Option<&str>) -> Option<ModelFiles> {
        let repo = self.cache.repo(repo(id, revision));
        collect(|name| {
            // A revision may also be the commit itself, which has a folder and no name.
            let path = repo
                .get(name)
                .or_else(|| Some(repo.pointer_path(revision?).join(name)))
                .filter(|path| path.exists())
                .ok_or(Failure::Missing)?;
            check(name, &path).map_err(Failure::Final)?;
            Ok(path)
        })
        .ok()
    }

    /// Downloads what the cache lacks of a model.
    pub fn fetch(&self, id: &str, revision: Option<&str>) -> Result<ModelFiles> {
        let listing = self.ask(id, revision)?;
        let repo = repo(id, revision);
        collect(|name| {
            let known = listing.siblings.iter().any(|file| file.rfilename == name);
            if !known {
                return Err(Failure::Missing);
            }
            self.file(&repo, &listing.sha, name)
        })
    }

    /// What a repository holds, if the hub says so within the time limit.
    fn ask(&self, id: &str, revision: Option<&str>) -> Result<RepoInfo> {
        let info = |revision| {
            let repo = self.api.repo(repo(id, revision));
            Worker::start(move || repo.info())?.within(self.options.answer_within)
        };
        match info(revision)? {
            Some(Ok(listing)) => Ok(listing),
            Some(Err(error)) if status(&error) == Some(404) => Err(match revision {
                Some(revision) if matches!(info(None)?, Some(Ok(_))) => {
                    anyhow!("{id} has no revision {revision}")
                }
                _ => anyhow!("the hub has no model {id}"),
            }),
            Some(Err(error)) => Err(self.explain(error)),
            None => Err(anyhow!(
                "hub not reachable ({} did not answer within {} s)",
                self.endpoint,
                self.options.answer_within.as_secs_f32()
            )),
        }
    }

    /// Says in one clause why the hub failed.
    fn explain(&self, error: ApiError) -> anyhow::Error {
        let endpoint = &self.endpoint;
        match (status(&error), error) {
            (Some(401), _) => {
                anyhow!("the hub has no such model, or it is private: log in or set HF_TOKEN")
            }
            (Some(403), _) => anyhow!(
                "the hub refuses access: accept the model's terms on its page and set HF_TOKEN"
            ),
            (Some(429), _) => anyhow!("hub not reachable ({endpoint} asks to come back later)"),
            (Some(code), _) => anyhow!("hub not reachable ({endpoint} answered {code})"),
            (None, ApiError::RequestError(error)) => anyhow!(
                "hub not reachable ({endpoint}: {})",
                clipped(&error.to_string())
            ),
            (None, error) => anyhow!(
                "{endpoint} does not answer as the hub does ({})",
                clipped(&error.to_string())
            ),
        }
    }

    /// One file of a commit, checked: out of the cache, or downloaded. A transfer that breaks off is
    /// taken up again.
    fn file(&self, repo: &Repo, commit: &str, name: &str) -> Result<PathBuf, Failure> {
        let cache = self.cache.repo(repo.clone());
        let path = cache.pointer_path(commit).join(name);
        if path.exists() {
            match check(name, &path) {
                Ok(()) if cache.create_ref(commit).is_ok() => return Ok(path),
                _ => forget(&path),
            }
        }
        let mut attempt = 1;
        loop {
            match self.transfer(repo, name) {
                Err(Failure::Broken(error)) if attempt < ATTEMPTS => {
                    attempt += 1;
                    report::say(format_args!(
                        "{name}: {error:#}; trying again ({attempt} of {ATTEMPTS})"
                    ));
                }
                Err(Failure::Broken(error)) => {
                    return Err(Failure::Final(error.context(format!(
                        "{name} did not arrive whole in {ATTEMPTS} tries"
                    ))));
                }
                other => return other,
            }
        }
    }

    fn transfer(&self, repo: &Repo, name: &str) -> Result<PathBuf, Failure> {
        let watch = Arc::new(Watch::new());
        let (files, wanted, reports) = (
            self.api.repo(repo.clone()),
            name.to_owned(),
            Reports(Arc::clone(&watch)),
        );
        let worker = Worker::start(move || files.download_with_progress(&wanted, reports))
            .map_err(Failure::Final)?;
        let meter = Meter::new(&format!("fetching {name}"));
        let outcome = loop {
            let still_for = watch.still_for();
            if still_for >= self.options.stalled_after {
                // The thread still holds the file's lock, so that asking again is of no use. What has
                // come is kept: the next start takes the transfer up there.
                return Err(Failure::Final(anyhow!(
                    "{name} did not arrive whole: nothing came for {} s after {}; try again later",
                    self.options.stalled_after.as_secs_f32(),
                    bytes(watch.done())
                )));
            }
            let wait = REDRAW.min(self.options.stalled_after - still_for);
            if let Some(outcome) = worker.within(wait).map_err(Failure::Final)? {
                break outcome;
            }
            watch.draw(&meter);
        };
        let path = outcome.map_err(|error| self.failed(repo, name, error, &watch))?;
        let checked = watch.check_size(&path).and_then(|()| check(name, &path));
        checked.map_err(|error| {
            forget(&path);
            Failure::Broken(error)
        })?;
        Ok(path)
    }

    /// What the failure of a transfer means.
    fn failed(&self, repo: &Repo, name: &str, error: ApiError, watch: &Watch) -> Failure {
        use std::io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem, StorageFull};
        match (status(&error), error) {
            (Some(401 | 403), error) => Failure::Final(self.explain(error)),
            (Some(404), _) => Failure::Missing,
            // What an earlier transfer left cannot be continued.
            (Some(416), error) | (None, error @ ApiError::InvalidResume) => {
                match self.discard_part(repo, name) {
                    Ok(()) => {
                        Failure::Broken(anyhow!("the part that had come is not of this file"))
                    }
                    Err(_) => Failure::Final(self.explain(error)),
                }
            }
            (None, ApiError::LockAcquisition(_)) => Failure::Final(anyhow!(
                "another process is fetching {name}; wait for it and try again"
            )),
            (None, ApiError::IoError(error))
                if matches!(
                    error.kind(),
                    PermissionDenied | ReadOnlyFilesystem | StorageFull
                ) =>
            {
                Failure::Final(anyhow!(
                    "cannot write to the cache ({}): {error}",
                    self.cache.path().display()
                ))
            }
            (None, ApiError::IoError(_)) => Failure::Broken(anyhow!(
                "the connection broke off after {}",
                bytes(watch.done())
            )),
            (_, error @ ApiError::RequestError(_)) => Failure::Broken(self.explain(error)),
            (_, error) => Failure::Final(self.explain(error)),
        }
    }

    /// Removes what an unfinished transfer of a file has left.
    fn discard_part(&self, repo: &Repo, name: &str) -> Result<()> {
        let files = self.api.repo(repo.clone());
        let (api, url) = (self.api.clone(), files.url(name));
        let metadata = Worker::start(move || api.metadata(&url))?
            .within(self.options.answer_within)?
            .context("no answer")??;
        let cache: CacheRepo = self.cache.repo(repo.clone());
        let part = cache.blob_path(metadata.etag()).with_extension("part");
        Ok(std::fs::remove_file(part)?)
    }
}

fn repo(id: &str, revision: Option<&str>) -> Repo {
    let revision = revision.unwrap_or("main").to_owned();
    Repo::with_revision(id.to_owned(), RepoType::Model, revision)
}

/// The HTTP status that a request failed with.
fn status(error: &ApiError) -> Option<u16> {
    match error {
        ApiError::RequestError(error) => match **error {
            ureq::Error::StatusCode(code) => Some(code),
            _ => None,
        },
        _ => None,
    }
}

fn env(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Where huggingface_hub keeps its cache and the user's token.
fn home_folder() -> PathBuf {
    let cache = || {
        let home = std::env::home_dir().unwrap_or_else(std::env::temp_dir);
        env("XDG_CACHE_HOME").map_or_else(|| home.join(".cache"), PathBuf::from)
    };
    env("HF_HOME").map_or_else(|| cache().join("huggingface"), PathBuf::from)
}

fn cache_folder() -> PathBuf {
    let named = env("HF_HUB_CACHE").or_else(|| env("HUGGINGFACE_HUB_CACHE"));
    named.map_or_else(|| home_folder().join("hub"), PathBuf::from)
}

/// The token that huggingface_hub would send.
fn token() -> Option<String> {
    let unwanted = env("HF_HUB_DISABLE_IMPLICIT_TOKEN");
    if unwanted.is_some_and(|v| matches!(v.to_lowercase().as_str(), "1" | "true" | "yes" | "on")) {
        return None;
    }
    let file = env("HF_TOKEN_PATH").map_or_else(|| home_folder().join("token"), PathBuf::from);
    env("HF_TOKEN")
        .or_else(|| std::fs::read_to_string(file).ok())
        .map(|token| token.trim().to_owned())
        .filter(|token| !token.is_empty())
}

/// Puts a model's files together with whatever fetches one of them.
fn collect(file: impl Fn(&str) -> Result<PathBuf, Failure>) -> Result<ModelFiles> {
    let optional = |name: &str| match file(name) {
        Ok(path) => Ok(Some(path)),
        Err(Failure::Missing) => Ok(None),
        Err(Failure::Final(error) | Failure::Broken(error)) => Err(error),
    };
    let required = |name: &str| {
        optional(name)?.with_context(|| format!("the model has no {name} in its repository"))
    };
    let config = required("config.json")?;
    let tokenizer = required("tokenizer.json")?;
    let generation_config = optional("generation_config.json")?;
    let tokenizer_config = optional("tokenizer_config.json")?;
    let chat_template = optional("chat_template.jinja")?;
    let weights = match optional("model.safetensors")? {
        Some(single) => vec![single],
        None => {
            let index = optional("model.safetensors.index.json")?.context(
                "the model has no safetensors weights; weights of other kinds are not read",
            )?;
            let mut weights = Vec::new();
            for shard in validate::shards(&index)? {
                weights.push(required(&shard)?);
            }
            weights
        }
    };
    Ok(ModelFiles::Safetensors(SafetensorsFiles {
        weights,
        config,
        tokenizer: Some(tokenizer),
        generation_config,
        tokenizer_config,
        chat_template,
    }))
}

fn check(name: &str, path: &Path) -> Result<()> {
    if name.ends_with(".safetensors") {
        validate::safetensors(path)
    } else if name.ends_with(".json") {
        validate::json(path).map(drop)
    } else {
        Ok(())
    }
}

/// The beginning of a message; some certificates list every name of a data centre.
fn clipped(text: &str) -> String {
    match text.char_indices().nth(120) {
        Some((end, _)) => format!("{} ...", &text[..end]),
        None => text.to_owned(),
    }
}

/// Takes a damaged file out of the cache: the entry of the revision and the data it links to.
fn forget(path: &Path) {
    if let Ok(data) = path.canonicalize() {
        let _ = std::fs::remove_file(data);
    }
    let _ = std::fs::remove_file(path);
}
