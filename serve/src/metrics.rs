//! What is counted, in the text format that Prometheus reads (OpenMetrics 1.0).

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use candle_fused::serving::Stats;
use prometheus_client::encoding::{EncodeLabelSet, text::encode};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

/// What became of a request to the engine; a call with n answers is n of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// By an end token or a stop string.
    Stop,
    /// It could not be longer.
    Length,
    /// The client went away.
    Cancelled,
    /// It took too long.
    Timeout,
    /// The engine could not go on.
    Failed,
}

impl Outcome {
    fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
            Self::Timeout => "timeout",
            Self::Failed => "failed",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByOutcome {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByCode {
    code: u16,
}

/// All that is counted.
pub struct Metrics {
    registry: Registry,
    waiting: Gauge,
    running: Gauge,
    finished: Family<ByOutcome, Counter>,
    errors: Family<ByCode, Counter>,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    generated_tokens: Counter,
    preemptions: Counter,
    steps: Counter,
    pages: Gauge,
    pages_free: Gauge,
    slots_held: Gauge,
    slots_used: Gauge,
    first_token: Histogram,
    next_token: Histogram,
    step: Histogram,
    uptime: Gauge<f64, AtomicU64>,
    begun: std::time::Instant,
}

/// Upper bounds in seconds, 1, 2.5 and 5 in each power of ten.
fn bounds(powers: std::ops::Range<i32>) -> impl Iterator<Item = f64> {
    powers.flat_map(|power| [1., 2.5, 5.].map(|step| step * 10f64.powi(power)))
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("candle_fused");
        let r = &mut registry;
        let seconds = |r: &mut Registry, name: &str, help: &str, powers| {
            let histogram = Histogram::new(bounds(powers));
            r.register_with_unit(name, help, Unit::Seconds, histogram.clone());
            histogram
        };
        let first_token = seconds(
            r,
            "time_to_first_token",
            "From a request's arrival to its first token",
            -3..2,
        );
        let next_token = seconds(
            r,
            "time_between_tokens",
            "From one token of a request to its next",
            -4..1,
        );
        let step = seconds(r, "step", "One step of the engine", -4..1);
        let uptime = Gauge::default();
        r.register_with_unit("uptime", "Since the start", Unit::Seconds, uptime.clone());
        let gauge = |r: &mut Registry, name: &str, help: &str| {
            let gauge = Gauge::default();
            r.register(name, help, gauge.clone());
            gauge
        };
        let counter = |r: &mut Registry, name: &str, help: &str| {
            let counter = Counter::default();
            r.register(name, help, counter.clone());
            counter
        };
        let (finished, errors) = (Family::default(), Family::default());
        r.register(
            "requests_finished",
            "Requests that have ended, by how",
            finished.clone(),
        );
        r.register(
            "http_errors",
            "Calls answered with an error, by status",
            errors.clone(),
        );
        Self {
            waiting: gauge(r, "requests_waiting", "Requests in the queue"),
            running: gauge(r, "requests_running", "Requests in the batch"),
            finished,
            errors,
            prompt_tokens: counter(r, "prompt_tokens", "Tokens of prompts let in"),
            cached_tokens: counter(
                r,
                "cached_tokens",
                "Tokens of these that the prefix cache had",
            ),
            generated_tokens: counter(r, "generated_tokens", "Tokens generated"),
            preemptions: counter(r, "preemptions", "Requests sent back for want of pages"),
            steps: counter(r, "steps", "Steps of the engine"),
            pages: gauge(r, "pages", "Pages of keys and values"),
            pages_free: gauge(r, "pages_free", "Pages that no request holds"),
            slots_held: gauge(r, "slots_held", "Tokens that held pages have room for"),
            slots_used: gauge(r, "slots_used", "Tokens in held pages"),
            first_token,
            next_token,
            step,
            uptime,
            begun: std::time::Instant::now(),
            registry,
        }
    }
}

impl Metrics {
    /// All of it as text.
    pub fn text(&self) -> Result<String, std::fmt::Error> {
        self.uptime.set(self.begun.elapsed().as_secs_f64());
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }

    /// Counts a request that has ended.
    pub fn finish(&self, outcome: Outcome) {
        let outcome = outcome.name();
        self.finished.get_or_create(&ByOutcome { outcome }).inc();
    }

    /// Counts a call that was answered with an error.
    pub fn error(&self, code: u16) {
        self.errors.get_or_create(&ByCode { code }).inc();
    }

    /// Counts a request's first token, so long behind its arrival.
    pub fn first_token(&self, after: Duration) {
        self.generated_tokens.inc();
        self.first_token.observe(after.as_secs_f64());
    }

    /// Counts another token, so long behind the one before.
    pub fn next_token(&self, after: Duration) {
        self.generated_tokens.inc();
        self.next_token.observe(after.as_secs_f64());
    }

    /// Counts a step.
    pub fn step(&self, took: Duration) {
        self.steps.inc();
        self.step.observe(took.as_secs_f64());
    }

    /// How busy the engine is, and was `before`.
    pub fn busy(&self, now: &Stats, before: &Stats) {
        for (gauge, value) in [
            (&self.waiting, now.waiting),
            (&self.running, now.running),
            (&self.pages, now.pages),
            (&self.pages_free, now.pages_free),
            (&self.slots_held, now.slots_held),
            (&self.slots_used, now.slots_used),
        ] {
            gauge.set(value as i64);
        }
        for (counter, now, before) in [
            (&self.prompt_tokens, now.prompt_tokens, before.prompt_tokens),
            (&self.cached_tokens, now.cached_tokens, before.cached_tokens),
            (&self.preemptions, now.preemptions, before.preemptions),
        ] {
            counter.inc_by(now.saturating_sub(before));
        }
    }
}
