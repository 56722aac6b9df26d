//! Many requests at once: tokens per second under their bound, and the times that a request waits.

use super::{COLORS, Line, Lines};
use crate::export::Export;
use crate::figures::{Arrivals, ServingRun};

/// What a line shows.
type Figure = fn(&ServingRun) -> Option<f64>;

/// A plot over the sequences of a step, with a solid and a dashed line for each model, format and load.
struct Plot {
    name: &'static str,
    title: &'static str,
    unit: &'static str,
    of: Arrivals,
    sides: [(&'static str, Figure); 2],
}

const PLOTS: [Plot; 3] = [
    Plot {
        name: "serving",
        title: "tokens per second of many requests at once",
        unit: "tokens/s",
        of: Arrivals::Offline,
        sides: [
            ("", |run| Some(run.tokens_per_second)),
            ("bound", |run| Some(run.bound.as_ref()?.tokens_per_second())),
        ],
    },
    Plot {
        name: "first-token",
        title: "time to the first token, arrivals at random",
        unit: "ms",
        of: Arrivals::Poisson,
        sides: [
            ("p50", |run| Some(run.first_p50 * 1e3)),
            ("p99", |run| Some(run.first_p99 * 1e3)),
        ],
    },
    Plot {
        name: "between-tokens",
        title: "time between tokens, arrivals at random",
        unit: "ms",
        of: Arrivals::Poisson,
        sides: [
            ("p50", |run| Some(run.between_p50 * 1e3)),
            ("p99", |run| Some(run.between_p99 * 1e3)),
        ],
    },
];

/// Those that the run has figures for: file, title and lines.
pub(super) fn plots(export: &Export) -> Vec<(&'static str, &'static str, Lines<'static>)> {
    let mut plots = Vec::new();
    for plot in PLOTS {
        let lines = lines(&export.serving, &plot);
        if !lines.is_empty() {
            let axes = ("sequences", plot.unit);
            let lines = Lines::new(plot.title, export.machine.name(), axes, lines);
            plots.push((plot.name, plot.title, lines.rising()));
        }
    }
    plots
}

fn lines(runs: &[ServingRun], plot: &Plot) -> Vec<Line> {
    let runs: Vec<_> = runs.iter().filter(|run| run.arrivals == plot.of).collect();
    // Other lengths are other lines.
    let alike = runs.iter().all(|run| run.lengths() == runs[0].lengths());
    let name = |run: &ServingRun| {
        let mut name = format!("{} {}", run.model, run.format);
        if let Some(load) = run.load {
            name += &format!(" at {load}");
        }
        if !alike {
            name += &format!(", {}", run.lengths());
        }
        name
    };
    let mut names: Vec<String> = Vec::new();
    for run in &runs {
        if !names.contains(&name(run)) {
            names.push(name(run));
        }
    }
    let mut lines = Vec::new();
    for (i, of) in names.iter().enumerate() {
        let color = COLORS[i % COLORS.len()];
        for (line, (side, figure)) in [Line::solid, Line::dashed].into_iter().zip(plot.sides) {
            let runs = runs.iter().filter(|run| name(run) == *of);
            let mut points: Vec<_> = runs
                .filter_map(|run| Some((run.sequences as f64, figure(run)?)))
                .filter(|(_, figure)| *figure > 0.)
                .collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            if !points.is_empty() {
                lines.push(line(format!("{of} {side}").trim_end(), color, points));
            }
        }
    }
    lines
}
