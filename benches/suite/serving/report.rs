//! A run in words.

use crate::figures::{ServingRun, StepBound};

/// Prints the figures of a run, and what its bound leaves.
pub fn line(run: &ServingRun) {
    let ms = |seconds: f64| seconds * 1e3;
    let arrivals = match run.load {
        Some(load) => format!("{} {load}", run.arrivals.name()),
        None => run.arrivals.name().to_owned(),
    };
    println!(
        "{:<18}{:<12}{arrivals:<12}{:>4} sequences, {:>4} requests: {:>9.0} tokens/s; step {:.3} ms p50 {:.3} p99{}; \
         prompts {} tokens/s, {:.1} % from the cache; first token {:.1} ms p50 {:.1} p99; between {:.2} p50 {:.2} p99; \
         pages wasted {:.1} %, {} preempted",
        run.model,
        run.format,
        run.sequences,
        run.requests,
        run.tokens_per_second,
        ms(run.step_p50.unwrap_or(0.)),
        ms(run.step_p99.unwrap_or(0.)),
        host(run),
        run.prompts_per_second
            .map_or_else(|| "-".to_owned(), |speed| format!("{speed:.0}")),
        run.hits() * 100.,
        ms(run.first_p50),
        ms(run.first_p99),
        ms(run.between_p50),
        ms(run.between_p99),
        run.wasted * 100.,
        run.preemptions,
    );
    if let Some(bound) = &run.bound {
        println!("{:<30}{}", "", bounded(run, bound));
    }
    let parts = run.parts.iter();
    let parts: Vec<_> = parts
        .map(|(part, launches, seconds, _)| {
            format!(
                "{part} {launches} x {:.2}",
                seconds * 1e6 / *launches as f64
            )
        })
        .collect();
    if !parts.is_empty() {
        println!("{:<30}us: {}", "", parts.join(", "));
    }
    if let Some(why) = &run.refusal {
        println!("{:<30}no graph: {why}", "");
    }
}

/// The host's work in a step, where a GPU does the rest.
fn host(run: &ServingRun) -> String {
    let both = run.host_p50.zip(run.host_share());
    both.map_or_else(String::new, |(host, share)| {
        format!(
            ", host {:.3} ms p50 ({:.1} % of it)",
            host * 1e3,
            share * 100.
        )
    })
}

/// The bound, the share of it that is reached, and what remains in us of a step: by part where parts were measured.
fn bounded(run: &ServingRun, bound: &StepBound) -> String {
    let us = |seconds: f64| seconds * 1e6;
    let by_part = match run.parts.is_empty() {
        true => String::new(),
        false => format!(": {}", run.remains_by_part()),
    };
    format!(
        "bound {:.0} tokens/s, {:.0} us a step ({:.1} tokens, {:.1} of prompts, {:.0} keys): {:.1} % reached; remain \
         {:.0} us{by_part}",
        bound.tokens_per_second(),
        us(bound.seconds()),
        bound.rows,
        bound.prompt_rows,
        bound.keys,
        100. * bound.share(),
        us(bound.step - bound.seconds()),
    )
}
