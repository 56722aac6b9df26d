//! What `--compare` reports: as text, and as JSON for machines.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;

/// Stock candle and the fused model side by side; every time is a median over the rounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CompareReport {
    pub model: String,
    /// What the stock side is: `stock` is candle-transformers' own model, `plain candle` ours in
    /// candle's operations, where candle-transformers has none.
    pub baseline: String,
    pub device: String,
    pub dtype: String,
    pub threads: usize,
    pub prompt_tokens: usize,
    pub sample_len: usize,
    pub tokens_match: bool,
    /// Index of the first generated token that differs.
    pub first_mismatch: Option<usize>,
    /// Stock's best logit minus its second best at that token: near the error of the logits,
    /// another choice is not a mistake.
    pub mismatch_margin: Option<f64>,
    pub max_logit_diff: f64,
    pub layers: Vec<LayerError>,
    /// Calls of each fused op for one generated token.
    pub op_calls: BTreeMap<String, u64>,
    pub stock: Side,
    /// Stock candle with the device's settings changed and nothing else; on a GPU only.
    pub settings: Option<Side>,
    pub fused: Side,
    pub speedup: Speedup,
}

/// How far the fused hidden state is from stock's after one layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerError {
    pub layer: usize,
    /// Largest absolute difference of an element.
    pub max_abs: f64,
    /// Norm of the difference over the norm of stock's state.
    pub rel: f64,
}

/// One side's figures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Side {
    pub load_s: f64,
    pub ttft_ms: f64,
    pub prefill_tok_s: f64,
    pub decode_tok_s: f64,
    pub tpot_ms_p50: f64,
    pub tpot_ms_p99: f64,
    /// `None` where the system does not tell.
    pub peak_rss_mb: Option<f64>,
    /// The most that tensors held on the GPU at once.
    pub gpu_memory_mb: Option<f64>,
    /// Kernels that one generated token takes on the GPU.
    pub launches_per_token: Option<u64>,
}

/// What a side takes when it has a process to itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Probe {
    /// Peak memory of the process in bytes, where the system tells.
    pub peak_rss: Option<u64>,
    /// Peak memory of its tensors on the GPU in bytes.
    pub peak_gpu: Option<u64>,
    /// Kernels for one generated token.
    pub launches: Option<u64>,
}

/// How many times faster the fused side is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Speedup {
    pub ttft: f64,
    pub prefill: f64,
    pub decode: f64,
}

/// The times of one generation.
#[derive(Clone, Debug)]
pub struct Round {
    pub first_token: Duration,
    pub prefill: Duration,
    /// One for each token after the first.
    pub steps: Vec<Duration>,
}

impl Side {
    /// Medians over `rounds`, in each of which `prompt_tokens` were read.
    pub fn of_rounds(load: Duration, prompt_tokens: usize, rounds: &[Round], probe: Probe) -> Self {
        let megabytes = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64 / 1e6);
        let over = |figure: &dyn Fn(&Round) -> f64| median(rounds.iter().map(figure).collect());
        let millis = |round: &Round| -> Vec<f64> {
            round.steps.iter().map(|t| t.as_secs_f64() * 1e3).collect()
        };
        Self {
            load_s: load.as_secs_f64(),
            ttft_ms: over(&|round| round.first_token.as_secs_f64() * 1e3),
            prefill_tok_s: over(&|round| prompt_tokens as f64 / round.prefill.as_secs_f64()),
            decode_tok_s: over(&|round| {
                1e3 * round.steps.len() as f64 / millis(round).iter().sum::<f64>()
            }),
            tpot_ms_p50: over(&|round| percentile(millis(round), 50.0)),
            tpot_ms_p99: over(&|round| percentile(millis(round), 99.0)),
            peak_rss_mb: megabytes(probe.peak_rss),
            gpu_memory_mb: megabytes(probe.peak_gpu),
            launches_per_token: probe.launches,
        }
    }
}

impl Speedup {
    /// The ratios of two sides.
    pub fn of(stock: &Side, fused: &Side) -> Self {
        Self {
            ttft: stock.ttft_ms / fused.ttft_ms,
            prefill: fused.prefill_tok_s / stock.prefill_tok_s,
            decode: fused.decode_tok_s / stock.decode_tok_s,
        }
    }
}

/// The middle value, or the mean of the two in the middle; NaN of nothing.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => 0.5 * (values[n / 2 - 1] + values[n / 2]),
    }
}

/// The smallest of the values that `percent` of them do not exceed; NaN of nothing.
pub fn percentile(mut values: Vec<f64>, percent: f64) -> f64 {
    if values.is_empty() {
        return f64::NAN;
    }
    values.sort_by(f64::total_cmp);
    let rank = (percent / 100.0 * values.len() as f64).ceil() as usize;
    values[rank.clamp(1, values.len()) - 1]
}

impl fmt::Display for CompareReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} on {}, {}, {} threads: {} prompt tokens, {} generated",
            self.model, self.device, self.dtype, self.threads, self.prompt_tokens, self.sample_len
        )?;
        self.fmt_agreement(f)?;
        self.fmt_speed(f)
    }
}

impl CompareReport {
    fn fmt_agreement(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.tokens_match, self.first_mismatch, self.mismatch_margin) {
            (true, ..) => writeln!(f, "\ntokens           all equal")?,
            (false, Some(at), Some(margin)) => writeln!(
                f,
                "\ntokens           differ from token {at} on, where {}'s best two logits are {margin:.2e} apart",
                self.baseline
            )?,
            (false, at, _) => writeln!(
                f,
                "\ntokens           differ from token {} on",
                at.unwrap_or(0)
            )?,
        }
        writeln!(
            f,
            "logits           differ by at most {:.2e}",
            self.max_logit_diff
        )?;
        let calls: Vec<_> = self
            .op_calls
            .iter()
            .map(|(op, n)| format!("{op} {n}"))
            .collect();
        let calls = if calls.is_empty() {
            "none".to_owned()
        } else {
            calls.join(", ")
        };
        writeln!(f, "calls per token  {calls}")?;
        if !self.layers.is_empty() {
            writeln!(
                f,
                "\nhidden states of the prompt, against the same model with plain candle operations\n                 largest error  relative"
            )?;
        }
        for layer in &self.layers {
            writeln!(
                f,
                "layer {:<10} {:>13.2e}  {:>8.1e}",
                layer.layer, layer.max_abs, layer.rel
            )?;
        }
        Ok(())
    }

    fn fmt_speed(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sides: Vec<&Side> = [Some(&self.stock), self.settings.as_ref(), Some(&self.fused)]
            .into_iter()
            .flatten()
            .collect();
        let first = FIRST_COLUMN.max(self.baseline.len() + 2);
        write!(f, "\n{:<28}{:>first$}", "", self.baseline)?;
        if self.settings.is_some() {
            write!(f, "{:>15}", "settings only")?;
        }
        writeln!(f, "{:>10}{:>9}", "fused", "ratio")?;
        for row in &ROWS {
            let values: Vec<_> = sides.iter().map(|side| (row.value)(side)).collect();
            if row.gpu_only && values.iter().all(Option::is_none) {
                continue;
            }
            write!(f, "{:<28}", row.name)?;
            for (i, value) in values.iter().enumerate() {
                let width = [first, if values.len() == 3 { 15 } else { 10 }, 10][i];
                let text = value.map_or_else(|| "n/a".to_owned(), figure);
                write!(f, "{text:>width$}")?;
            }
            match (values[0], values[values.len() - 1]) {
                (Some(a), Some(b)) => {
                    let ratio = if row.more_is_better { b / a } else { a / b };
                    writeln!(f, "{ratio:>8.2}x")?;
                }
                _ => writeln!(f)?,
            }
        }
        Ok(())
    }
}

/// A line of the table: a figure of each side, and fused against stock.
struct Row {
    name: &'static str,
    value: fn(&Side) -> Option<f64>,
    more_is_better: bool,
    /// Left out where no side has it.
    gpu_only: bool,
}

/// The width of the first column of figures, unless its name is wider.
const FIRST_COLUMN: usize = 9;

const fn row(name: &'static str, value: fn(&Side) -> Option<f64>) -> Row {
    Row {
        name,
        value,
        more_is_better: false,
        gpu_only: false,
    }
}

const ROWS: [Row; 9] = [
    row("load, s", |side| Some(side.load_s)),
    row("first token, ms", |side| Some(side.ttft_ms)),
    Row {
        more_is_better: true,
        ..row("prefill, tokens/s", |side| Some(side.prefill_tok_s))
    },
    Row {
        more_is_better: true,
        ..row("decode, tokens/s", |side| Some(side.decode_tok_s))
    },
    row("per token, p50, ms", |side| Some(side.tpot_ms_p50)),
    row("per token, p99, ms", |side| Some(side.tpot_ms_p99)),
    row("peak memory, MB", |side| side.peak_rss_mb),
    Row {
        gpu_only: true,
        ..row("peak GPU memory, MB", |side| side.gpu_memory_mb)
    },
    Row {
        gpu_only: true,
        ..row("kernels per token", |side| {
            side.launches_per_token.map(|n| n as f64)
        })
    },
];

/// Four significant digits or so, without an exponent.
fn figure(value: f64) -> String {
    match value.abs() {
        v if !v.is_finite() => "n/a".to_owned(),
        v if v < 1.0 => format!("{value:.3}"),
        v if v < 100.0 => format!("{value:.2}"),
        v if v < 1000.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// A file that the report will be written to. It is opened before the run, so that a path that
/// cannot be written costs no measuring, and appears complete or not at all.
#[derive(Debug)]
pub struct JsonFile {
    path: PathBuf,
    sink: Sink,
}

#[derive(Debug)]
enum Sink {
    /// Written beside the path and renamed to it.
    Beside(NamedTempFile),
    /// A device or pipe, which must not be replaced.
    Direct(File),
}

impl JsonFile {
    /// Makes sure that `path` can be written.
    pub fn create(path: &Path) -> Result<Self> {
        let context = || {
            format!(
                "cannot write {}; give --json a path that can be written",
                path.display()
            )
        };
        if path.is_dir() {
            bail!(
                "--json {} is a folder; give the name of a file",
                path.display()
            );
        }
        // What stands for an open file, as /dev/stdout does, is written through and never replaced.
        let stands_for_another = ["/dev", "/proc"].iter().any(|root| path.starts_with(root));
        if path.exists() && (stands_for_another || !path.is_file()) {
            let file = OpenOptions::new()
                .append(true)
                .open(path)
                .with_context(context)?;
            return Ok(Self {
                path: path.to_owned(),
                sink: Sink::Direct(file),
            });
        }
        if path.exists() {
            OpenOptions::new()
                .append(true)
                .open(path)
                .with_context(context)?;
        }
        // A link is followed, so that what it points to is replaced and not the link.
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let folder = path
            .parent()
            .filter(|p| !p.as_os_str().is_empty())
            .unwrap_or(Path::new("."));
        std::fs::metadata(folder).with_context(context)?;
        // The kind only: the temporary file's name would mean nothing to the user.
        let file = temporary_file()
            .tempfile_in(folder)
            .map_err(|error| std::io::Error::from(error.kind()))
            .with_context(context)?;
        Ok(Self {
            path,
            sink: Sink::Beside(file),
        })
    }

    /// Writes the report.
    pub fn write(self, report: &CompareReport) -> Result<()> {
        let context = || format!("cannot write {}", self.path.display());
        let mut text = serde_json::to_string_pretty(report).with_context(context)?;
        text.push('\n');
        match self.sink {
            Sink::Direct(mut file) => file.write_all(text.as_bytes()).with_context(context),
            Sink::Beside(mut file) => {
                file.write_all(text.as_bytes()).with_context(context)?;
                file.persist(&self.path)
                    .map(drop)
                    .map_err(|error| error.error)
                    .with_context(context)
            }
        }
    }
}

/// Temporary files are private to the user unless told otherwise; a report is an ordinary file.
fn temporary_file() -> tempfile::Builder<'static, 'static> {
    #[allow(unused_mut, reason = "only Unix has permissions to set")]
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    builder
}
