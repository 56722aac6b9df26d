//! What the table of `linear` on CUDA chooses, over the rows of x: its time beside cuBLAS's product of dense weights,
//! and the rows at which it jumps.

use crate::args::Args;
use crate::budget::Budget;
use crate::cases::{Contender, KernelCase};
use crate::figures::{KernelRun, Tuned};
use crate::ops::checked;
use crate::place::Place;
use crate::stats::Times;
use crate::timing::{Effort, race};
use crate::tune::{Launched, tuned};
use anyhow::{Context, Result};
use candle_fused::cuda::with_kernel;
use std::collections::BTreeMap;

/// The library's product, of weights in the dtype of x.
const CUBLAS: &str = "gemm_dense_cublaslt";

/// How many times longer than more rows a product may take, and than one row less.
const MORE: f64 = 1.15;
const ONE: f64 = 1.4;

/// cuBLAS's seconds by M, N, K and the dtype of x.
type Library = BTreeMap<(usize, usize, usize, String), Times>;

/// Times the choice for every one of the `cases` that is wanted, prints it, and then where it jumps.
pub fn run(
    place: &Place,
    cases: Vec<KernelCase>,
    args: &Args,
    budget: &Budget,
) -> Result<Vec<Tuned>> {
    let effort = Effort::of(place, args.quick);
    let (mut all, mut library) = (Vec::new(), Library::new());
    for case in cases {
        let name = case.name();
        if !args.wants(&name) || budget.is_spent() {
            continue;
        }
        let tuned =
            time(place, &case, &mut library, effort).with_context(|| format!("in {name}"))?;
        show(&tuned);
        all.push(tuned);
    }
    println!();
    let found = cliffs(&all);
    for line in &found {
        println!("CLIFF {line}");
    }
    println!("{} products; {} cliffs", all.len(), found.len());
    Ok(all)
}

fn time(place: &Place, case: &KernelCase, library: &mut Library, effort: Effort) -> Result<Tuned> {
    let contender = case.contender(place)?.recorded();
    checked(place, &contender)?;
    let launched = Launched::by(&contender.call)?;
    let taken = race(place, std::slice::from_ref(&contender), effort)?.remove(0);
    let chosen = KernelRun {
        name: launched.kernels.join(" and "),
        plan: Some(launched.plan),
        times: Some(taken.times),
        graph: taken.graph,
        refusal: None,
    };
    let key = (
        case.m,
        case.product.n(),
        case.product.k,
        case.x.as_str().to_owned(),
    );
    let of_library = match library.get(&key) {
        Some(times) => *times,
        None => {
            let times = of_library(place, case, effort)?;
            library.insert(key, times);
            times
        }
    };
    let cublas = KernelRun {
        name: CUBLAS.to_owned(),
        times: Some(of_library),
        graph: Some(of_library),
        ..Default::default()
    };
    let name = chosen.name.clone();
    Ok(tuned(case, name, taken.host, vec![chosen, cublas]))
}

/// The product of weights in the dtype of x, by cuBLAS.
fn of_library(place: &Place, case: &KernelCase, effort: Effort) -> Result<Times> {
    let dense = KernelCase {
        model: case.model.clone(),
        product: case.product.clone(),
        m: case.m,
        x: case.x,
        format: case.x.as_str().to_owned(),
    };
    let Contender { call, expected, .. } = dense.contender(place)?;
    let forced = move |turn| with_kernel(Some(CUBLAS), || call(turn));
    let forced = Contender::new(CUBLAS, expected, forced).recorded();
    let taken = race(place, &[forced], effort)?.remove(0);
    Ok(taken.graph.unwrap_or(taken.times))
}

/// Of the table's choice: in a graph, if it can be recorded.
fn seconds(tuned: &Tuned) -> f64 {
    let chosen = &tuned.kernels[0];
    chosen
        .graph
        .or(chosen.times)
        .map_or(f64::NAN, |times| times.median)
}

fn show(tuned: &Tuned) {
    let seconds = seconds(tuned);
    let library = tuned.kernels[1]
        .times
        .map_or(f64::NAN, |times| times.median);
    println!(
        "{:<44}{:>9.2} us {:>6.2}x of cuBLAS {:>9.2} us{:>7.0} GB/s{:>7.1} TFLOP/s  {}",
        tuned.name,
        1e6 * seconds,
        library / seconds,
        1e6 * library,
        1e-9 * tuned.work.bytes / seconds,
        1e-12 * tuned.work.flops / seconds,
        tuned.chosen,
    );
}

/// Products that take longer than those of more rows, or much longer than those of one row less.
fn cliffs(all: &[Tuned]) -> Vec<String> {
    let mut groups: BTreeMap<(&str, &str, &str), BTreeMap<usize, &Tuned>> = BTreeMap::new();
    for tuned in all {
        let group = groups
            .entry((&tuned.model, &tuned.format, &tuned.x))
            .or_default();
        group.insert(tuned.m, tuned);
    }
    let mut lines = Vec::new();
    for by_rows in groups.values() {
        for (m, tuned) in by_rows {
            let own = seconds(tuned);
            let mut compare = |other: &Tuned, most: f64| {
                let ratio = own / seconds(other);
                if ratio > most {
                    lines.push(format!(
                        "{}: {:.2} us ({}), {ratio:.2}x of m{} ({:.2} us, {})",
                        tuned.name,
                        1e6 * own,
                        tuned.chosen,
                        other.m,
                        1e6 * seconds(other),
                        other.chosen
                    ));
                }
            };
            let more = by_rows.range(m + 1..).map(|(_, tuned)| tuned);
            if let Some(least) = more.min_by(|a, b| seconds(a).total_cmp(&seconds(b))) {
                compare(least, MORE);
            }
            if let Some(before) = m.checked_sub(1).and_then(|less| by_rows.get(&less)) {
                compare(before, ONE);
            }
        }
    }
    lines
}
