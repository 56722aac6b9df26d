//! A transfer in a thread of its own: how far it is, whether it still moves.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use hf_hub::api::Progress;

use super::progress::Meter;

/// A call in a thread of its own, which may outlive whoever asked for it.
pub struct Worker<T>(mpsc::Receiver<T>);

impl<T: Send + 'static> Worker<T> {
    /// Begins the call.
    pub fn start(call: impl FnOnce() -> T + Send + 'static) -> Result<Self> {
        let (sender, receiver) = mpsc::channel();
        std::thread::Builder::new()
            .name("hub".to_owned())
            // Nobody may be left to take the answer.
            .spawn(move || drop(sender.send(call())))
            .context("cannot start a thread")?;
        Ok(Self(receiver))
    }

    /// What the call gave, if it ends in time.
    pub fn within(&self, limit: Duration) -> Result<Option<T>> {
        match self.0.recv_timeout(limit) {
            Ok(value) => Ok(Some(value)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(anyhow!("hf-hub panicked")),
        }
    }
}

/// Follows one transfer: knows how far it is and when it last moved.
pub struct Watch {
    begun: Instant,
    /// Milliseconds after `begun` at which bytes last came.
    moved: AtomicU64,
    done: AtomicU64,
    total: AtomicU64,
}

impl Watch {
    /// A transfer that begins now.
    #[expect(clippy::new_without_default, reason = "it begins now")]
    pub fn new() -> Self {
        Self {
            begun: Instant::now(),
            moved: AtomicU64::new(0),
            done: AtomicU64::new(0),
            total: AtomicU64::new(0),
        }
    }

    /// Bytes that are there.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// How long nothing has come.
    pub fn still_for(&self) -> Duration {
        let moved = Duration::from_millis(self.moved.load(Ordering::Relaxed));
        self.begun.elapsed().saturating_sub(moved)
    }

    fn has_moved(&self) {
        let now = self.begun.elapsed().as_millis() as u64;
        self.moved.store(now, Ordering::Relaxed);
    }

    /// Brings the meter up to date.
    pub fn draw(&self, meter: &Meter) {
        match self.total.load(Ordering::Relaxed) {
            0 => {}
            total => meter.total(total),
        }
        meter.at(self.done());
    }

    /// A server may send more or less than it announced.
    pub fn check_size(&self, path: &Path) -> Result<()> {
        let total = self.total.load(Ordering::Relaxed);
        let size = std::fs::metadata(path)
            .with_context(|| format!("cannot read {}", path.display()))?
            .len();
        ensure!(
            size == total,
            "{size} bytes came where the hub announced {total}"
        );
        Ok(())
    }
}

/// What hf-hub reports to.
pub struct Reports(pub Arc<Watch>);

impl Progress for Reports {
    /// Called once before a transfer and once more when its bytes begin to come.
    fn init(&mut self, size: usize, _name: &str) {
        self.0.total.store(size as u64, Ordering::Relaxed);
        self.0.done.store(0, Ordering::Relaxed);
        self.0.has_moved();
    }

    /// The first call tells what an earlier transfer has left.
    fn update(&mut self, size: usize) {
        if size > 0 {
            self.0.done.fetch_add(size as u64, Ordering::Relaxed);
            self.0.has_moved();
        }
    }

    fn finish(&mut self) {}
}
