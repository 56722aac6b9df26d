//! What changed since an earlier run.

use crate::export::Export;
use crate::figures::{Arrivals, FUSED, ModelRun, PrefixRun, ServingRun};
use crate::stats::Times;

/// A figure of both runs.
struct Change {
    name: String,
    before: Times,
    after: Times,
}

impl Change {
    /// Time now over time then.
    fn ratio(&self) -> f64 {
        self.after.median / self.before.median
    }

    /// Whether the medians are further apart than both spreads together.
    fn is_beyond_noise(&self) -> bool {
        let apart = (self.after.median - self.before.median).abs();
        apart > self.after.spread + self.before.spread
    }
}

/// Prints what is faster or slower beyond the noise, and gives the number of those that are slower by
/// more than `percent`.
pub fn compare(before: &Export, after: &Export, percent: f64) -> usize {
    println!(
        "\nsince {} ({})",
        before.machine.date,
        before.machine.commit.as_deref().unwrap_or("no commit")
    );
    if !before.machine.is_like(&after.machine) {
        println!("another machine: {}", before.machine.describe());
    }
    let changes = changes(before, after);
    let mut beyond: Vec<_> = changes.iter().filter(|c| c.is_beyond_noise()).collect();
    beyond.sort_by(|a, b| b.ratio().total_cmp(&a.ratio()));
    for change in &beyond {
        println!(
            "{:<60}{:>10.1} us{:>10.1} us  {:+.1} %",
            change.name,
            change.before.median * 1e6,
            change.after.median * 1e6,
            100. * (change.ratio() - 1.)
        );
    }
    let slower = |c: &&&Change| c.ratio() > 1. + percent / 100.;
    let regressions = beyond.iter().filter(slower).count();
    println!(
        "{} of {} figures changed beyond the noise, {regressions} are slower by more than {percent} %",
        beyond.len(),
        changes.len()
    );
    regressions
}

/// What both runs have, the fused side of it.
fn changes(before: &Export, after: &Export) -> Vec<Change> {
    let mut changes = Vec::new();
    let earlier = || before.ops.iter().chain(&before.sweep);
    for run in after.ops.iter().chain(&after.sweep) {
        let earlier = earlier().find(|other| other.name == run.name);
        if let Some((a, b)) = earlier.and_then(|e| e.side(FUSED)).zip(run.side(FUSED)) {
            changes.push(Change {
                name: run.name.clone(),
                before: a.times,
                after: b.times,
            });
        }
    }
    for run in &after.models {
        let same = |other: &&ModelRun| {
            (&other.model, &other.format, other.form) == (&run.model, &run.format, run.form)
        };
        if let Some(earlier) = before.models.iter().find(same) {
            for (what, a, b) in [
                ("decode", earlier.token, run.token),
                ("prefill", earlier.prefill, run.prefill),
            ] {
                changes.push(Change {
                    name: format!("{} {} {} {what}", run.model, run.format, run.form.name()),
                    before: a,
                    after: b,
                });
            }
        }
    }
    changes.extend(of_serving(before, after));
    changes
}

/// Steps of many requests all at once, and first tokens behind a cached prefix.
fn of_serving(before: &Export, after: &Export) -> Vec<Change> {
    let mut changes = Vec::new();
    let offline = |run: &&ServingRun| run.arrivals == Arrivals::Offline;
    for run in after.serving.iter().filter(offline) {
        let earlier = before.serving.iter().find(|other| other.is_like(run));
        if let Some((a, b)) = earlier.and_then(|e| e.step).zip(run.step) {
            changes.push(Change {
                name: format!(
                    "{} {} {} sequences, a step",
                    run.model, run.format, run.sequences
                ),
                before: a,
                after: b,
            });
        }
    }
    for run in &after.prefixes {
        let same = |other: &&PrefixRun| {
            (&other.model, &other.format, other.prefix, other.suffix)
                == (&run.model, &run.format, run.prefix, run.suffix)
        };
        if let Some(earlier) = before.prefixes.iter().find(same) {
            changes.push(Change {
                name: format!("{} {} first token, prefix cached", run.model, run.format),
                before: earlier.cached,
                after: run.cached,
            });
        }
    }
    changes
}
