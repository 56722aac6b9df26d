//! Models from the Hugging Face hub, through hf-hub and its cache.
//!
//! hf-hub has no time limits of its own and stores what a server sends without looking at it. So a
//! first small request finds out whether the hub answers at all, a transfer that stands still is
//! given up, and every file is checked before it is used.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use hf_hub::progress::{DownloadEvent, ProgressEvent, ProgressHandler};
use hf_hub::repository::HFRepository;
use hf_hub::{HFClient, HFError, RepoTypeModel};
use tokio::runtime::Runtime;

use super::progress::Meter;
use super::report::{self, bytes};
use super::source::{ModelFiles, SafetensorsFiles};
use super::validate;

/// How often a file that broke off or arrived damaged is asked for.
const ATTEMPTS: usize = 3;

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
    client: HFClient,
    options: HubOptions,
    runtime: Option<Runtime>,
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
        let http = reqwest::Client::builder()
            .user_agent(concat!("candle-fused/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(options.answer_within)
            .read_timeout(options.stalled_after)
            .build()
            .context("cannot set up HTTPS")?;
        // Retries are this module's: only it knows whether the first request or the tenth failed.
        let mut builder = HFClient::builder().client(http).retry_max_attempts(0);
        if let Some(endpoint) = &options.endpoint {
            builder = builder.endpoint(endpoint);
        }
        if let Some(cache) = &options.cache {
            builder = builder.cache_dir(cache);
        }
        let client = builder.build().map_err(|error| match error {
            HFError::Url(error) => {
                anyhow!("HF_ENDPOINT is no URL ({error}); unset it or correct it")
            }
            error => anyhow!(error),
        })?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("cannot start the download runtime")?;
        Ok(Self {
            client,
            options: options.clone(),
            runtime: Some(runtime),
        })
    }

    /// The files of a model if the cache has all of them, undamaged.
    pub fn cached(&self, id: &str, revision: Option<&str>) -> Option<ModelFiles> {
        let repo = self.repo(id);
        self.block_on(collect(async |name| {
            let path = repo
                .download_file()
                .filename(name)
                .maybe_revision(revision)
                .local_files_only(true)
                .send()
                .await
                .map_err(|_| Failure::Missing)?;
            check(name, &path).map_err(Failure::Final)?;
            Ok(path)
        }))
        .ok()
    }

    /// Downloads what the cache lacks of a model.
    pub fn fetch(&self, id: &str, revision: Option<&str>) -> Result<ModelFiles> {
        let repo = self.repo(id);
        self.block_on(async {
            self.ask(&repo, revision).await?;
            collect(async |name| self.file(&repo, revision, name).await).await
        })
    }

    fn repo(&self, id: &str) -> HFRepository<RepoTypeModel> {
        let (owner, name) = hf_hub::split_id(id);
        self.client.model(owner, name)
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime
            .as_ref()
            .expect("held until drop")
            .block_on(future)
    }

    /// Finds out within the time limit whether the hub answers and has the model.
    async fn ask(&self, repo: &HFRepository<RepoTypeModel>, revision: Option<&str>) -> Result<()> {
        let request = repo
            .download_file_to_bytes()
            .filename("config.json")
            .maybe_revision(revision)
            .send();
        let id = repo.repo_path();
        match tokio::time::timeout(self.options.answer_within, request).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(HFError::EntryNotFound { context, .. })) => {
                let code = context.and_then(|context| context.error_code);
                Err(match (code.as_deref(), revision) {
                    (Some("RevisionNotFound"), Some(revision)) => {
                        anyhow!("{id} has no revision {revision}")
                    }
                    (Some("EntryNotFound"), _) => {
                        anyhow!("{id} has no config.json, so it is no transformers model")
                    }
                    _ => anyhow!("the hub has no model {id}"),
                })
            }
            Ok(Err(error)) => Err(self.explain(error)),
            Err(_) => Err(anyhow!(
                "hub not reachable ({} did not answer within {} s)",
                self.client.endpoint(),
                self.options.answer_within.as_secs_f32()
            )),
        }
    }

    /// Says in one clause why the hub failed.
    fn explain(&self, error: HFError) -> anyhow::Error {
        let endpoint = self.client.endpoint();
        match error {
            HFError::Http { context } => {
                anyhow!("hub not reachable ({endpoint} answered {})", context.status)
            }
            HFError::AuthRequired { .. } => {
                anyhow!("the hub has no such model, or it is private: log in or set HF_TOKEN")
            }
            HFError::Forbidden { .. } => {
                anyhow!(
                    "the hub refuses access: accept the model's terms on its page and set HF_TOKEN"
                )
            }
            HFError::RateLimited { .. } => {
                anyhow!("hub not reachable ({endpoint} asks to come back later)")
            }
            HFError::Request { source, .. } => {
                let mut cause: &dyn std::error::Error = &source;
                while let Some(next) = cause.source() {
                    cause = next;
                }
                anyhow!(
                    "hub not reachable ({endpoint}: {})",
                    clipped(&cause.to_string())
                )
            }
            error => anyhow!(error),
        }
    }

    /// One file, checked. A transfer that breaks off is begun again.
    async fn file(
        &self,
        repo: &HFRepository<RepoTypeModel>,
        revision: Option<&str>,
        name: &str,
    ) -> Result<PathBuf, Failure> {
        let mut attempt = 1;
        loop {
            match self.transfer(repo, revision, name).await {
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

    async fn transfer(
        &self,
        repo: &HFRepository<RepoTypeModel>,
        revision: Option<&str>,
        name: &str,
    ) -> Result<PathBuf, Failure> {
        let watch = Arc::new(Watch::new(name));
        let request = repo
            .download_file()
            .filename(name)
            .maybe_revision(revision)
            .progress(Arc::clone(&watch))
            .send();
        let path = match watch.guard(request, self.options.stalled_after).await {
            Some(Ok(path)) => path,
            Some(Err(HFError::EntryNotFound { .. })) => return Err(Failure::Missing),
            Some(Err(HFError::Request { source, .. }))
                if source.is_body() || source.is_decode() =>
            {
                return Err(Failure::Broken(anyhow!(
                    "the connection broke off after {}",
                    bytes(watch.done())
                )));
            }
            Some(Err(
                error @ (HFError::Request { .. } | HFError::Http { .. } | HFError::Xet { .. }),
            )) => {
                return Err(Failure::Broken(self.explain(error)));
            }
            Some(Err(HFError::CacheLockTimeout { .. })) => {
                return Err(Failure::Final(anyhow!(
                    "another process is fetching {name}; wait for it and try again"
                )));
            }
            Some(Err(error)) => return Err(Failure::Final(self.explain(error))),
            None => {
                return Err(Failure::Broken(anyhow!(
                    "nothing came for {} s after {}",
                    self.options.stalled_after.as_secs_f32(),
                    bytes(watch.done())
                )));
            }
        };
        let checked = watch.check_size(&path).and_then(|()| check(name, &path));
        checked.map_err(|error| {
            forget(&path);
            Failure::Broken(error)
        })?;
        Ok(path)
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        // A name look-up that hangs would hold up an orderly shutdown.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Puts a model's files together with whatever fetches one of them.
async fn collect(file: impl AsyncFn(&str) -> Result<PathBuf, Failure>) -> Result<ModelFiles> {
    let optional = async |name: &str| match file(name).await {
        Ok(path) => Ok(Some(path)),
        Err(Failure::Missing) => Ok(None),
        Err(Failure::Final(error) | Failure::Broken(error)) => Err(error),
    };
    let required = async |name: &str| {
        optional(name)
            .await?
            .with_context(|| format!("the model has no {name} in its repository"))
    };
    let config = required("config.json").await?;
    let tokenizer = required("tokenizer.json").await?;
    let generation_config = optional("generation_config.json").await?;
    let tokenizer_config = optional("tokenizer_config.json").await?;
    let chat_template = optional("chat_template.jinja").await?;
    let weights = match optional("model.safetensors").await? {
        Some(single) => vec![single],
        None => {
            let index = optional("model.safetensors.index.json").await?.context(
                "the model has no safetensors weights; weights of other kinds are not read",
            )?;
            let mut weights = Vec::new();
            for shard in validate::shards(&index)? {
                weights.push(required(&shard).await?);
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

/// Follows one transfer: draws its progress and knows when it last moved.
struct Watch {
    meter: Meter,
    begun: Instant,
    /// Milliseconds after `begun` at which bytes last came.
    moved: AtomicU64,
    done: AtomicU64,
    total: AtomicU64,
}

impl Watch {
    fn new(name: &str) -> Self {
        Self {
            meter: Meter::new(&format!("fetching {name}")),
            begun: Instant::now(),
            moved: AtomicU64::new(0),
            done: AtomicU64::new(0),
            total: AtomicU64::new(0),
        }
    }

    fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    fn still_for(&self) -> Duration {
        self.begun
            .elapsed()
            .saturating_sub(Duration::from_millis(self.moved.load(Ordering::Relaxed)))
    }

    fn at(&self, done: u64) {
        if self.done.swap(done, Ordering::Relaxed) != done {
            self.moved
                .store(self.begun.elapsed().as_millis() as u64, Ordering::Relaxed);
            self.meter.at(done);
        }
    }

    /// Awaits `transfer`, but gives it up when it has not moved for `limit`.
    async fn guard<F: Future>(&self, transfer: F, limit: Duration) -> Option<F::Output> {
        let mut transfer = std::pin::pin!(transfer);
        loop {
            let wait = limit.saturating_sub(self.still_for());
            match tokio::time::timeout(wait, transfer.as_mut()).await {
                Ok(output) => return Some(output),
                Err(_) if self.still_for() >= limit => return None,
                Err(_) => {}
            }
        }
    }

    /// hf-hub also stores the body of an error page; its size gives it away.
    fn check_size(&self, path: &Path) -> Result<()> {
        let total = self.total.load(Ordering::Relaxed);
        let size = std::fs::metadata(path)
            .with_context(|| format!("cannot read {}", path.display()))?
            .len();
        ensure!(
            total == 0 || size == total,
            "{size} bytes came where the hub announced {total}"
        );
        Ok(())
    }
}

impl ProgressHandler for Watch {
    fn on_progress(&self, event: &ProgressEvent) {
        let ProgressEvent::Download(event) = event else {
            return;
        };
        match event {
            DownloadEvent::Start { total_bytes, .. } => {
                self.total.store(*total_bytes, Ordering::Relaxed);
                self.meter.total(*total_bytes);
                self.moved
                    .store(self.begun.elapsed().as_millis() as u64, Ordering::Relaxed);
            }
            DownloadEvent::Progress { files } => {
                files.iter().for_each(|file| self.at(file.bytes_completed))
            }
            DownloadEvent::AggregateProgress {
                bytes_completed, ..
            } => self.at(*bytes_completed),
            DownloadEvent::Complete => {}
        }
    }
}
