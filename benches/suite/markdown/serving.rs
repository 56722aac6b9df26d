//! Many requests at once: throughput under its bound, what a request waits, and prefixes that are cached.

use super::section;
use crate::export::Export;
use crate::figures::{Arrivals, PrefixRun, ServingRun};

pub(super) fn tables(export: &Export) -> [String; 3] {
    [
        offline(&export.serving),
        arriving(&export.serving),
        prefixes(&export.prefixes),
    ]
}

fn ms(seconds: f64) -> String {
    format!("{:.2}", seconds * 1e3)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.)
}

fn or_blank(value: Option<String>) -> String {
    value.unwrap_or_default()
}

/// The lengths of the first run, and whether all have them.
fn lengths(runs: &[&ServingRun]) -> String {
    let Some(first) = runs.first() else {
        return String::new();
    };
    let all = runs.iter().all(|run| run.lengths() == first.lengths());
    let others = if all { "" } else { "; others beside it" };
    format!("Tokens: {}{others}.", first.lengths())
}

fn of(runs: &[ServingRun], arrivals: Arrivals) -> Vec<&ServingRun> {
    runs.iter().filter(|run| run.arrivals == arrivals).collect()
}

fn offline(runs: &[ServingRun]) -> String {
    let runs = of(runs, Arrivals::Offline);
    let row = |run: &&ServingRun| {
        let bound = run.bound.as_ref();
        let left = bound.map(|b| format!("{:.0}", (b.step - b.seconds()) * 1e6));
        vec![
            format!("{} {}, {}", run.model, run.format, run.sequences),
            run.requests.to_string(),
            format!("{:.0}", run.tokens_per_second),
            or_blank(bound.map(|b| format!("{:.0}", b.tokens_per_second()))),
            or_blank(bound.map(|b| percent(b.share()))),
            or_blank(left),
            run.remains_by_part(),
            or_blank(run.step_p50.map(ms)),
            or_blank(run.step_p99.map(ms)),
            or_blank(run.host_share().map(percent)),
            or_blank(run.prompts_per_second.map(|speed| format!("{speed:.0}"))),
            percent(run.hits()),
            percent(run.wasted),
        ]
    };
    let note = format!(
        "A model, a format and the sequences of a step. The bound is the sum over the parts of a step of weights and \
         live keys and values over the speed of a copy, or arithmetic over that of the library's products, whichever \
         is the longer. Steps in ms. {}",
        lengths(&runs)
    );
    let columns = [
        "",
        "requests",
        "tokens/s",
        "bound",
        "reached",
        "remain, us a step",
        "by part",
        "step p50",
        "p99",
        "host",
        "prompts/s",
        "cached",
        "wasted",
    ];
    let rows: Vec<_> = runs.iter().map(row).collect();
    section("Many requests, all at once", &note, &columns, &rows)
}

fn arriving(runs: &[ServingRun]) -> String {
    let runs = of(runs, Arrivals::Poisson);
    let row = |run: &&ServingRun| {
        vec![
            format!("{} {}, {}", run.model, run.format, run.sequences),
            run.requests.to_string(),
            or_blank(run.load.map(|load| load.to_string())),
            or_blank(run.rate.map(|rate| format!("{rate:.2}"))),
            format!("{:.0}", run.tokens_per_second),
            ms(run.first_p50),
            ms(run.first_p99),
            ms(run.between_p50),
            ms(run.between_p99),
            or_blank(run.bound.as_ref().map(|b| percent(b.share()))),
            or_blank(run.host_share().map(percent)),
            percent(run.hits()),
            percent(run.wasted),
            run.preemptions.to_string(),
        ]
    };
    let note = format!(
        "A Poisson process. The load is the share of the throughput of requests all at once. Times in ms. {}",
        lengths(&runs)
    );
    let columns = [
        "",
        "requests",
        "load",
        "arrive/s",
        "tokens/s",
        "first p50",
        "p99",
        "between p50",
        "p99",
        "of the bound",
        "host",
        "cached",
        "wasted",
        "preempted",
    ];
    let rows: Vec<_> = runs.iter().map(row).collect();
    section("Many requests, arriving at random", &note, &columns, &rows)
}

fn prefixes(runs: &[PrefixRun]) -> String {
    let row = |run: &PrefixRun| {
        vec![
            format!("{} {}", run.model, run.format),
            run.prefix.to_string(),
            run.suffix.to_string(),
            ms(run.cached.median),
            ms(run.uncached.median),
            percent(run.share()),
        ]
    };
    let columns = ["", "prefix", "own", "cached", "uncached", "of it"];
    let rows: Vec<_> = runs.iter().map(row).collect();
    let note =
        "The time to the first token behind a prefix that the engine has in its pages, in ms.";
    section("A shared prefix", note, &columns, &rows)
}
