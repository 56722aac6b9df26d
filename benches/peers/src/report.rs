//! Medians and their spread, as a table and as JSON.

use crate::args::{Args, Measure};
use crate::ik::Setting;
use crate::peer::Peer;
use crate::plan::{Results, Series};
use anyhow::{Context, Result};
use serde::Serialize;
use std::fmt::Write;
use std::path::Path;

/// Everything that was measured, and with what.
#[derive(Serialize)]
pub struct Report {
    processor: String,
    /// What candle-fused chose.
    simd: &'static str,
    threads: u32,
    rounds: u32,
    steps: u32,
    busy: u32,
    models: Vec<Results>,
}

impl Report {
    pub fn new(args: &Args, models: Vec<Results>) -> Self {
        Self {
            processor: processor(),
            simd: candle_fused::cpu::simd::level().name(),
            threads: args.threads,
            rounds: args.rounds,
            steps: args.steps,
            busy: args.busy,
            models,
        }
    }

    /// Writes `path`.md and `path`.json.
    pub fn write(&self, path: &Path) -> Result<()> {
        let write = |extension: &str, text: String| {
            let mut name = path.as_os_str().to_owned();
            name.push(extension);
            std::fs::write(&name, text).with_context(|| name.to_string_lossy().into_owned())
        };
        write(".md", self.markdown())?;
        write(".json", serde_json::to_string(self)? + "\n")
    }

    pub fn markdown(&self) -> String {
        let mut text = format!(
            "{}, candle-fused at {}, {} threads, {} rounds in turns, {} tokens a decode",
            self.processor, self.simd, self.threads, self.rounds, self.steps
        );
        if self.busy > 0 {
            write!(text, ", {} busy threads beside them", self.busy).expect("a String takes it");
        }
        text.push_str(
            ". Medians with the lowest and highest. Ratios are candle-fused's value over that of the \
             other's better setting, round by round: tokens/s should be above 1, time and \
             memory below.\n",
        );
        for model in &self.models {
            text.push_str(&table(model));
            text.push_str(&tokens(model));
        }
        text
    }
}

/// Each column's name and values, without the ratios.
fn columns(series: &Series) -> Vec<(&'static str, &[f64])> {
    let sides = series
        .values
        .iter()
        .map(|(peer, values)| (peer.name(), &values[..]));
    let ik = series
        .ik
        .iter()
        .map(|(setting, values)| (setting.name(), &values[..]));
    sides.chain(ik).collect()
}

fn table(model: &Results) -> String {
    let mut text = format!(
        "\n### {} ({} MB)\n\n|",
        model.model,
        model.bytes / 1_000_000
    );
    let Some(first) = model.measures.first() else {
        return text;
    };
    for (name, _) in columns(first) {
        text.push_str(&format!(" | {name}"));
    }
    text.push_str(" | over llama.cpp |");
    if !first.ik.is_empty() {
        text.push_str(" over ik_llama.cpp |");
    }
    let cells = columns(first).len() + 2 + usize::from(!first.ik.is_empty());
    text.push_str(&format!("\n|{}\n", "---|".repeat(cells)));
    for series in &model.measures {
        let unit = Unit::of(series.measure);
        text.push_str(&format!("| {} |", unit.title));
        for (_, values) in columns(series) {
            let scaled: Vec<_> = values.iter().map(|value| value * unit.scale).collect();
            text.push_str(&cell(&scaled, unit.digits, ""));
        }
        text.push_str(&cell(&ratios(series, unit.more), 2, "x"));
        if !series.ik.is_empty() {
            text.push_str(&cell(&ratios_over_ik(series, unit.more), 2, "x"));
        }
        text.push('\n');
    }
    text
}

/// The median with the lowest and the highest; nothing if there are no values.
fn cell(values: &[f64], digits: usize, unit: &str) -> String {
    let [low, middle, high] = spread(values);
    match values.len() {
        0 => " |".to_owned(),
        1 => format!(" **{middle:.digits$}{unit}** |"),
        _ => format!(" **{middle:.digits$}{unit}** ({low:.digits$} to {high:.digits$}) |"),
    }
}

/// The greedy tokens beside each other.
fn tokens(model: &Results) -> String {
    let mut text = String::from("\nGreedy tokens behind position 512:\n\n```text\n");
    let first = model.tokens.first().map_or(&[][..], |(_, ids)| ids);
    for (peer, ids) in &model.tokens {
        let same = ids.iter().zip(first).take_while(|(a, b)| a == b).count();
        let list: Vec<_> = ids.iter().map(u32::to_string).collect();
        let name = peer.name();
        text.push_str(&format!("{name:26} {}", list.join(" ")));
        text.push_str(&match same == first.len() {
            true => "\n".to_owned(),
            false => format!("  (differs from token {} on)\n", same + 1),
        });
    }
    text.push_str("```\n");
    text
}

/// How a measure is shown.
struct Unit {
    title: &'static str,
    scale: f64,
    digits: usize,
    /// Whether more of it is better.
    more: bool,
}

impl Unit {
    fn of(measure: Measure) -> Self {
        let (title, scale, digits) = match measure {
            Measure::Decode64 => ("decode at 64, tokens/s", 1., 0),
            Measure::Decode512 => ("decode at 512, tokens/s", 1., 0),
            Measure::Decode2000 => ("decode at 2000, tokens/s", 1., 0),
            Measure::Prefill512 => ("prefill of 512, tokens/s", 1., 0),
            Measure::FirstToken => ("start to first token, ms", 1e3, 0),
            Measure::PeakMemory => ("peak memory, MB", 1e-6, 1),
        };
        Self {
            title,
            scale,
            digits,
            more: !matches!(measure, Measure::FirstToken | Measure::PeakMemory),
        }
    }
}

fn values(series: &Series, peer: Peer) -> &[f64] {
    let found = series.values.iter().find(|(other, _)| *other == peer);
    found.map_or(&[][..], |(_, values)| values)
}

/// candle-fused's values over those of llama.cpp's setting with the better median, round by round.
fn ratios(series: &Series, more: bool) -> Vec<f64> {
    let rivals = [Peer::LlamaFlash, Peer::LlamaPlain].map(|peer| values(series, peer));
    over(values(series, Peer::Fused), rivals, more)
}

/// The same over ik_llama.cpp's better setting.
fn ratios_over_ik(series: &Series, more: bool) -> Vec<f64> {
    let of = |setting: Setting| {
        let found = series.ik.iter().find(|(other, _)| *other == setting);
        found.map_or(&[][..], |(_, values)| values)
    };
    over(values(series, Peer::Fused), Setting::ALL.map(of), more)
}

/// Values over those of the rival with the better median; `more`: whether more of it is better.
fn over(ours: &[f64], rivals: [&[f64]; 2], more: bool) -> Vec<f64> {
    let [one, other] = rivals.map(|values| spread(values)[1]);
    let rival = rivals[usize::from((other > one) == more)];
    ours.iter()
        .zip(rival)
        .map(|(ours, theirs)| ours / theirs)
        .collect()
}

/// The lowest, the median and the highest.
fn spread(values: &[f64]) -> [f64; 3] {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    match n {
        0 => [f64::NAN; 3],
        _ => {
            let middle = (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.;
            [sorted[0], middle, sorted[n - 1]]
        }
    }
}

/// The processor's name, as the kernel has it.
fn processor() -> String {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .and_then(|line| line.split_once(':'));
    name.map_or_else(
        || std::env::consts::ARCH.to_owned(),
        |(_, name)| name.trim().to_owned(),
    )
}
