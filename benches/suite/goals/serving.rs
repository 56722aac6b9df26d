//! Many requests: throughput, the host's work, pages, a prefix that is cached, and clients over HTTP.

use super::Goal;
use crate::export::Export;
use crate::figures::{Arrivals, ServingRun};

/// Sequences of a step.
const SEQUENCES: [usize; 4] = [8, 32, 64, 256];

/// Tokens of a second on an H200 for each of those, behind prompts of 128 tokens, 256 for each request.
const SPEEDS: [(&str, &str, [f64; 4]); 4] = [
    ("llama-3.2-1b", "bf16", [8_500., 28_000., 42_000., 110_000.]),
    ("llama-3-8b", "bf16", [1_850., 6_400., 10_500., 24_000.]),
    (
        "llama-3-8b",
        "int4-g128",
        [3_300., 9_000., 12_000., 22_000.],
    ),
    (
        "smollm2-135m",
        "bf16",
        [16_000., 55_000., 90_000., 200_000.],
    ),
];

/// The host's work in a step at most, in percent, by sequences.
const HOST: [(usize, f64); 2] = [(64, 5.), (256, 10.)];

/// Slots of pages without a token at most, in percent.
const WASTED: f64 = 4.;

pub(super) fn goals(export: &Export) -> Vec<Goal> {
    let mut goals = of_speeds(export);
    for (sequences, most) in HOST {
        let share = |run: &ServingRun| run.host_share().filter(|_| run.sequences == sequences);
        goals.push(Goal::at_most(
            &format!("host's work in a step of {sequences} sequences, any model"),
            (most, "%"),
            worst(export, share),
        ));
    }
    goals.push(Goal::at_most(
        "slots of pages without a token, any model",
        (WASTED, "%"),
        worst(export, |run| Some(run.wasted)),
    ));
    goals.extend(of_prefixes(export));
    goals
}

/// Whether requests are those that the goals speak of.
fn is_plain(run: &ServingRun) -> bool {
    let lengths = (run.prompt_lengths.as_str(), run.answer_lengths.as_str());
    run.arrivals == Arrivals::Offline
        && lengths == ("fixed:128", "fixed:256")
        && run.shared_prefix.is_none()
        && run.requests == run.sequences
}

fn of_speeds(export: &Export) -> Vec<Goal> {
    let is_h200 = export.machine.name().contains("H200");
    let mut goals = Vec::new();
    for (model, format, speeds) in SPEEDS {
        for (sequences, must) in SEQUENCES.into_iter().zip(speeds) {
            let same = |run: &&ServingRun| {
                (run.model.as_str(), run.format.as_str()) == (model, format)
                    && run.sequences == sequences
                    && is_plain(run)
            };
            let run = export.serving.iter().find(same).filter(|_| is_h200);
            let what = format!("{model} {format}, {sequences} sequences, H200");
            let reached = run.map(|run| run.tokens_per_second);
            goals.push(Goal::new(&what, (must, "/s"), reached));
        }
    }
    goals
}

/// The most of what runs of all models have, in percent.
fn worst(export: &Export, of: impl Fn(&ServingRun) -> Option<f64>) -> Option<f64> {
    let runs = export.serving.iter().filter(|run| is_plain(run));
    runs.filter_map(of)
        .reduce(f64::max)
        .map(|share| 100. * share)
}

/// The first token behind a cached prefix, and clients of the server.
fn of_prefixes(export: &Export) -> Vec<Goal> {
    let run = export.prefixes.iter().find(|run| {
        (run.model.as_str(), run.format.as_str()) == ("llama-3-8b", "bf16") && run.prefix == 2048
    });
    let clients = [
        Goal::new("Llama-3.2-1B, 32 HTTP clients", (20_000., "/s"), None),
        Goal::new("32 HTTP clients, of the engine offline", (80., "%"), None),
    ];
    let mut goals = vec![Goal::at_most(
        "Llama-3-8B, prefix of 2,048 cached: first token, of uncached",
        (20., "%"),
        run.map(|run| 100. * run.share()),
    )];
    goals.extend(clients.map(|goal| goal.measured_by("the benchmark load of the server")));
    goals
}
