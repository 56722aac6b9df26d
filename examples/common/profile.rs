//! Where the time on a GPU goes: one prefill launch by launch, one decode step part by part.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use anyhow::{Context, Result};
use candle_core::CudaDevice;
use candle_fused::cuda::profile::{self, Launch};
use candle_fused::generation::{Generation, PartTime};
use serde_json::{Value, json};

use super::report;

/// A line of a table: launches of one kind.
#[derive(Clone, Debug)]
pub struct Line {
    pub name: String,
    pub launches: usize,
    pub seconds: f64,
    /// 0 where nobody counted.
    pub bytes: u64,
}

/// A table of what `lines` took, slowest first if they have no order of their own; `bandwidth` is
/// that of a copy on the same GPU in the same run, in bytes per second.
pub fn table(title: &str, lines: &[Line], bandwidth: f64) -> String {
    let total: f64 = lines.iter().map(|l| l.seconds).sum();
    let mut text = format!(
        "{title:<34}{:>9}{:>11}{:>8}{:>11}{:>9}{:>8}\n",
        "launches", "us", "share", "MB", "GB/s", "of copy"
    );
    for line in lines {
        text += &format!(
            "{:<34}{:>9}{:>11.1}{:>7.1}%",
            line.name,
            line.launches,
            line.seconds * 1e6,
            100. * line.seconds / total
        );
        if line.bytes > 0 {
            let speed = line.bytes as f64 / line.seconds;
            text += &format!(
                "{:>11.3}{:>9.0}{:>7.1}%",
                line.bytes as f64 / 1e6,
                speed / 1e9,
                100. * speed / bandwidth
            );
        }
        text.push('\n');
    }
    let launches: usize = lines.iter().map(|l| l.launches).sum();
    text += &format!("{:<34}{launches:>9}{:>11.1}\n", "sum", total * 1e6);
    text
}

/// The parts of a decode step as lines.
pub fn lines(parts: &[PartTime]) -> Vec<Line> {
    let line = |part: &PartTime| Line {
        name: part.part.to_owned(),
        launches: part.launches,
        seconds: part.seconds,
        bytes: part.bytes,
    };
    parts.iter().map(line).collect()
}

/// Profiles reading `prompt` and the step behind it; prints both tables and writes the timeline of the
/// prefill, with the decode step behind it, to `file` for chrome://tracing or ui.perfetto.dev.
pub fn run(
    generation: &mut Generation,
    prompt: &[u32],
    device: &CudaDevice,
    file: &Path,
) -> Result<()> {
    let bandwidth = profile::copy_bandwidth(device)?;
    // Once before, so that kernels are loaded and the library has chosen its algorithms.
    generation.extend(0, prompt)?;
    generation.truncate(0, 0)?;
    let (_, launches) = profile::capture(device, || generation.extend(0, prompt))?;
    generation.step()?;
    let decode = lines(&generation.profile(30)?);
    let text = format!(
        "copy bandwidth {:.2} TB/s\n\n{}\n{}",
        bandwidth / 1e12,
        table(
            &format!("prefill of {}", prompt.len()),
            &by_kernel(&launches),
            bandwidth
        ),
        table("decode step", &decode, bandwidth)
    );
    report::write_text(&mut std::io::stdout().lock(), &text)?;
    let out = File::create(file).with_context(|| format!("cannot write {}", file.display()))?;
    serde_json::to_writer(BufWriter::new(out), &timeline(&launches, &decode))?;
    report::say(format_args!("timeline in {}", file.display()));
    Ok(())
}

/// The launches of each kernel together, slowest first.
fn by_kernel(launches: &[Launch]) -> Vec<Line> {
    let mut kinds: BTreeMap<(&str, &str), Line> = BTreeMap::new();
    for launch in launches {
        let line = kinds
            .entry((launch.stem, launch.kernel))
            .or_insert_with(|| Line {
                name: launch.kernel.to_owned(),
                launches: 0,
                seconds: 0.,
                bytes: 0,
            });
        line.launches += 1;
        line.seconds += launch.seconds;
        line.bytes += launch.bytes;
    }
    let mut lines: Vec<Line> = kinds.into_values().collect();
    lines.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    lines
}

/// Complete events of the Trace Event Format: the prefill as it ran, and the parts of the decode step
/// one behind the other.
fn timeline(launches: &[Launch], decode: &[Line]) -> Vec<Value> {
    let mut events: Vec<_> = launches
        .iter()
        .map(|l| event("prefill", l.kernel, (l.start, l.seconds), l.bytes))
        .collect();
    let mut at = launches.last().map_or(0., |l| l.start + l.seconds) + 1e-4;
    for line in decode {
        events.push(event(
            "decode, by part",
            &line.name,
            (at, line.seconds),
            line.bytes,
        ));
        at += line.seconds;
    }
    events
}

/// One event; times in microseconds.
fn event(thread: &str, name: &str, (start, seconds): (f64, f64), bytes: u64) -> Value {
    json!({
        "name": name, "cat": thread, "ph": "X", "pid": 0, "tid": thread,
        "ts": start * 1e6, "dur": seconds * 1e6, "args": { "bytes": bytes },
    })
}
