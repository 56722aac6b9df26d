//! How an example ends: with a short table of what the run took, or with an error of one line.

use std::fmt;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;

/// Whoever reads standard output has closed it, as `| head` does. The run ends quietly.
#[derive(Debug)]
pub struct OutputClosed;

impl fmt::Display for OutputClosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("standard output is closed")
    }
}

impl std::error::Error for OutputClosed {}

/// Runs an example. An error becomes one line on standard error and exit code 1.
pub fn run_main(body: impl FnOnce() -> Result<()>) -> ExitCode {
    match body() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<OutputClosed>() => ExitCode::SUCCESS,
        Err(error) => {
            say(format_args!("error: {}", one_line(&error)));
            ExitCode::FAILURE
        }
    }
}

/// Writes a line to standard error. Where nobody reads it any more, the run goes on without.
pub fn say(line: impl fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Writes to standard error without ending the line.
pub fn ask(text: &str) {
    let mut out = std::io::stderr();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// An error and its causes on one line, each said once.
pub fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        // candle appends a backtrace to its messages when RUST_BACKTRACE is set.
        let text = text.split("\n   0: ").next().unwrap_or_default();
        let text = text.replace(char::is_control, " ");
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        if !text.is_empty() && !line.contains(&text) {
            if !line.is_empty() {
                line.push_str(": ");
            }
            line.push_str(&text);
        }
    }
    // Damaged files get quoted in messages, and a line is for reading.
    match line.char_indices().nth(LONGEST_LINE) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

/// Characters of an error line.
const LONGEST_LINE: usize = 400;

/// Writes generated text at once, so that it shows as it comes.
pub fn write_text(out: &mut impl Write, text: &str) -> Result<()> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Err(OutputClosed.into()),
        Err(error) => Err(anyhow::Error::new(error).context("cannot write to standard output")),
        Ok(()) => Ok(()),
    }
}

/// Names and values in two aligned columns, with an optional remark.
#[derive(Debug, Default)]
pub struct Table {
    rows: Vec<[String; 3]>,
}

impl Table {
    /// Adds a row.
    pub fn row(
        &mut self,
        name: &str,
        value: impl Into<String>,
        remark: impl Into<String>,
    ) -> &mut Self {
        self.rows
            .push([name.to_owned(), value.into(), remark.into()]);
        self
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |column: usize| {
            self.rows
                .iter()
                .map(|row| row[column].chars().count())
                .max()
                .unwrap_or(0)
        };
        let (names, values) = (width(0), width(1));
        for (index, [name, value, remark]) in self.rows.iter().enumerate() {
            let line = format!("{name:<names$}  {value:>values$}  {remark}");
            let end = if index == 0 { "" } else { "\n" };
            write!(f, "{end}{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// A time with three significant digits: `532 ms`, `4.05 s`.
pub fn seconds(time: Duration) -> String {
    let s = time.as_secs_f64();
    match s {
        s if s < 0.001 => format!("{:.0} µs", s * 1e6),
        s if s < 0.01 => format!("{:.2} ms", s * 1e3),
        s if s < 0.1 => format!("{:.1} ms", s * 1e3),
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s if s < 10.0 => format!("{s:.2} s"),
        s if s < 100.0 => format!("{s:.1} s"),
        s => format!("{s:.0} s"),
    }
}

/// Bytes in decimal units: `269 MB`.
pub fn bytes(count: u64) -> String {
    match count {
        0..1_000 => format!("{count} B"),
        1_000..1_000_000 => format!("{:.0} kB", count as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.0} MB", count as f64 / 1e6),
        _ => format!("{:.2} GB", count as f64 / 1e9),
    }
}

/// A rate: `412 tok/s`, `29.6 tok/s`; `n/a` where nothing was measured.
pub fn rate(tokens: usize, time: Duration) -> String {
    match tokens_per_second(tokens, time) {
        Some(rate) if rate < 100.0 => format!("{rate:.1} tok/s"),
        Some(rate) => format!("{rate:.0} tok/s"),
        None => "n/a".to_owned(),
    }
}

/// Tokens per second, if any token and any time passed.
pub fn tokens_per_second(tokens: usize, time: Duration) -> Option<f64> {
    (tokens > 0 && !time.is_zero()).then(|| tokens as f64 / time.as_secs_f64())
}

/// The most memory this process has held since it began, in bytes. `None` where the system does not
/// say.
pub fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
