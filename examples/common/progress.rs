//! Progress on standard error: a bar on a terminal, otherwise one line when a transfer begins.

use std::io::{Read, Result, Seek, SeekFrom};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::report::{self, bytes};

/// Downloads below this come and go too fast to be worth a bar.
const WORTH_SHOWING: u64 = 1_000_000;

/// Shows how far one transfer is. The bar goes away with it.
pub struct Meter {
    name: String,
    bar: ProgressBar,
    announced: AtomicBool,
}

impl Meter {
    /// A transfer of yet unknown size.
    pub fn new(name: &str) -> Self {
        let bar = ProgressBar::no_length();
        bar.set_style(
            ProgressStyle::with_template("{spinner} {msg}  {bytes}")
                .unwrap_or_else(|_| ProgressStyle::default_spinner()),
        );
        bar.set_message(name.to_owned());
        Self {
            name: name.to_owned(),
            bar,
            announced: AtomicBool::new(false),
        }
    }

    /// Shows the transfer from now on, though its size is not known.
    pub fn show(&self) {
        self.bar.enable_steady_tick(Duration::from_millis(120));
        self.announce(&self.name);
    }

    /// The size is known.
    pub fn total(&self, total: u64) {
        if total < WORTH_SHOWING {
            return;
        }
        self.bar.set_style(
            ProgressStyle::with_template(
                "{msg}  {bar:30}  {bytes} of {total_bytes}  {bytes_per_sec}  {eta}",
            )
            .unwrap_or_else(|_| ProgressStyle::default_bar()),
        );
        self.bar.set_length(total);
        self.announce(&format!("{} ({})", self.name, bytes(total)));
    }

    /// So many bytes are done.
    pub fn at(&self, done: u64) {
        if self.announced.load(Ordering::Relaxed) {
            self.bar.set_position(done);
        }
    }

    fn announce(&self, what: &str) {
        if !self.announced.swap(true, Ordering::Relaxed) && self.bar.is_hidden() {
            report::say(what);
        }
    }
}

/// A file that shows how much of it has been read, once that has taken [`PATIENCE`].
pub struct Watched<R> {
    inner: R,
    meter: Meter,
    begun: Instant,
    done: u64,
    total: u64,
}

/// What is done before that needs no progress shown.
const PATIENCE: Duration = Duration::from_millis(500);

impl<R> Watched<R> {
    /// `total` bytes are to be read, for what is called `name`.
    pub fn new(inner: R, name: &str, total: u64) -> Self {
        Self {
            inner,
            meter: Meter::new(name),
            begun: Instant::now(),
            done: 0,
            total,
        }
    }
}

impl<R: Read> Read for Watched<R> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let read = self.inner.read(buffer)?;
        self.done += read as u64;
        if self.begun.elapsed() > PATIENCE {
            self.meter.total(self.total);
            self.meter.at(self.done);
        }
        Ok(read)
    }
}

impl<R: Seek> Seek for Watched<R> {
    fn seek(&mut self, to: SeekFrom) -> Result<u64> {
        self.inner.seek(to)
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
