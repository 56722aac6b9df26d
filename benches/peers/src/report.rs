//! Medians and their spread, as a table and as JSON.

use crate::args::{Args, Measure};
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
            ". Medians with the lowest and highest. The ratio is candle-fused's value over that of \
             llama.cpp's better setting, round by round: tokens/s should be above 1, time and \
             memory below.\n",
        );
        for model in &self.models {
            text.push_str(&table(model));
            text.push_str(&tokens(model));
        }
        text
    }
}

fn table(model: &Results) -> String {
    let mut text = format!(
        "\n### {} ({} MB)\n\n|",
        model.model,
        model.bytes / 1_000_000
    );
    for peer in Peer::ALL {
        text.push_str(" | ");
        text.push_str(peer.name());
    }
    text.push_str(" | ratio |\n|---|---|---|---|---|\n");
    for series in &model.measures {
        let unit = Unit::of(series.measure);
        text.push_str(&format!("| {} |", unit.title));
        for (_, values) in &series.values {
            let [low, middle, high] = spread(values).map(|value| value * unit.scale);
            let digits = unit.digits;
            text.push_str(&format!(" **{middle:.digits$}**"));
            if values.len() > 1 {
                text.push_str(&format!(" ({low:.digits$} to {high:.digits$})"));
            }
            text.push_str(" |");
        }
        let ratios = ratios(series, unit.more);
        let [low, middle, high] = spread(&ratios);
        text.push_str(&format!(" **{middle:.2}x**"));
        if ratios.len() > 1 {
            text.push_str(&format!(" ({low:.2} to {high:.2})"));
        }
        text.push_str(" |\n");
    }
    text
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

/// candle-fused's values over those of llama.cpp's setting with the better median, round by round.
fn ratios(series: &Series, more: bool) -> Vec<f64> {
    let values = |peer: Peer| {
        let found = series.values.iter().find(|(other, _)| *other == peer);
        found.map_or(&[][..], |(_, values)| values)
    };
    let rivals = [values(Peer::LlamaFlash), values(Peer::LlamaPlain)];
    let [flash, plain] = rivals.map(|values| spread(values)[1]);
    let rival = rivals[usize::from((plain > flash) == more)];
    values(Peer::Fused)
        .iter()
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
