//! The kernels of the table of `linear` on CUDA, each on the same product: how long each takes, whether
//! the table chooses the fastest, and why a kernel does not take the product.

use crate::args::Args;
use crate::budget::Budget;
use crate::cases::{Call, Contender, KernelCase};
use crate::figures::{KernelRun, Tuned};
use crate::ops::checked;
use crate::place::Place;
use crate::stats::Times;
use crate::timing::{Effort, race};
use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use candle_fused::cuda::with_kernel;
use candle_fused::ops::linear::kernel_table;
use candle_fused::trace;
use std::collections::BTreeMap;
use std::rc::Rc;

/// How many times faster another kernel is where the table is called wrong; less may be noise.
const WRONG: f64 = 1.05;

/// Would force one kernel on every side.
const FORCED: &str = "CANDLE_FUSED_KERNEL";

/// The side that runs what the table chooses.
const TABLE: &str = "table";

/// Times the kernels on every one of the `cases` that is wanted and prints them.
pub fn run(
    place: &Place,
    cases: Vec<KernelCase>,
    args: &Args,
    budget: &Budget,
) -> Result<Vec<Tuned>> {
    ensure!(
        std::env::var_os(FORCED).is_none(),
        "{FORCED} is set, which forces a kernel on every product: unset it"
    );
    let kernels = kernels(&args.kernel)?;
    let effort = Effort::of(place, args.quick);
    let (mut all, mut left_out) = (Vec::new(), 0);
    for case in cases {
        let name = case.name();
        if !args.wants(&name) {
            continue;
        }
        if budget.is_spent() {
            left_out += 1;
            continue;
        }
        let tuned = time(place, &case, &kernels, effort).with_context(|| format!("in {name}"))?;
        show(&tuned);
        all.push(tuned);
    }
    let wrong = all.iter().filter(|tuned| !faster(tuned).is_empty());
    println!(
        "\n{} products; about {} of them the table is wrong",
        all.len(),
        wrong.count()
    );
    if left_out > 0 {
        println!("{left_out} left out: the time that --budget gives is over");
    }
    Ok(all)
}

/// The table's kernels, each once.
fn table() -> Vec<&'static str> {
    let mut names = Vec::new();
    for kernel in kernel_table() {
        if !names.contains(&kernel.name) {
            names.push(kernel.name);
        }
    }
    names
}

/// Those with these names; without names all.
fn kernels(names: &[String]) -> Result<Vec<&'static str>> {
    let mut table = table();
    for name in names {
        ensure!(
            table.contains(&name.as_str()),
            "there is no kernel {name}, expected one of {}",
            table.join(", ")
        );
    }
    table.retain(|kernel| names.is_empty() || names.iter().any(|name| name == kernel));
    Ok(table)
}

/// Asks every kernel, then times those that take the case in turns, with the table's choice beside them.
fn time(place: &Place, case: &KernelCase, kernels: &[&str], effort: Effort) -> Result<Tuned> {
    let Contender { call, expected, .. } = case.contender(place)?;
    let call: Rc<dyn Fn(usize) -> candle_core::Result<Vec<Tensor>>> = call.into();
    let by_table = call.clone();
    let table = Contender::new(TABLE, expected.clone(), move |turn| by_table(turn));
    checked(place, &table)?;
    let chosen = Launched::by(&table.call)?.kernels.join(" and ");
    let (mut sides, mut runs) = (vec![table], Vec::new());
    for kernel in kernels {
        let (call, name) = (call.clone(), (*kernel).to_owned());
        let forced = move |turn| with_kernel(Some(&name), || call(turn));
        let forced = Contender::new(kernel, expected.clone(), forced).recorded();
        let mut run = KernelRun {
            name: (*kernel).to_owned(),
            ..Default::default()
        };
        match asked(kernel, &forced.call)? {
            Ok(plan) => {
                checked(place, &forced)?;
                run.plan = Some(plan);
                sides.push(forced);
            }
            Err(reason) => run.refusal = Some(reason),
        }
        runs.push(run);
    }
    let mut taken = race(place, &sides, effort)?.into_iter();
    let host = taken.next().and_then(|table| table.host);
    for (run, taken) in runs.iter_mut().filter(|r| r.plan.is_some()).zip(taken) {
        (run.times, run.graph) = (Some(taken.times), taken.graph);
    }
    Ok(tuned(case, chosen, host, runs))
}

/// The figures of a product.
pub fn tuned(
    case: &KernelCase,
    chosen: String,
    host: Option<f64>,
    kernels: Vec<KernelRun>,
) -> Tuned {
    Tuned {
        name: case.name(),
        model: case.model.clone(),
        part: case.product.name().to_owned(),
        m: case.m,
        n: case.product.n(),
        k: case.product.k,
        format: case.format.clone(),
        x: case.x.as_str().to_owned(),
        work: case.work(),
        chosen,
        host,
        kernels,
    }
}

/// What a kernel launches for a call that it is forced on, or why it does not take it.
fn asked(kernel: &str, call: &Call) -> Result<Result<String, String>> {
    let error = match Launched::by(call) {
        Ok(launched) if launched.kernels == [kernel] => return Ok(Ok(launched.plan)),
        // It is left alone there, and the table chooses.
        Ok(_) => return Ok(Err("it does not take weights of this format".to_owned())),
        Err(error) => error,
    };
    let text = error.to_string();
    let refusal = text.lines().next().and_then(|line| {
        let (_, case) = line.split_once(&format!("kernel {kernel} cannot take "))?;
        Some(case.split_once(": ")?.1.to_owned())
    });
    refusal.map(Err).ok_or(error)
}

/// What a call launches, as the trace has it.
pub struct Launched {
    /// Of the table: several where a product is cut into parts.
    pub kernels: Vec<&'static str>,
    /// Names, entries, grids and parameters.
    pub plan: String,
}

impl Launched {
    pub fn by(call: &Call) -> Result<Self> {
        let (result, calls) = trace::capture(|| call(0));
        result?;
        let mut found = Vec::new();
        for (traced, _) in calls.iter() {
            for kernel in table() {
                let at = traced.path.find(&format!(" {kernel} ("));
                found.extend(at.map(|at| (at, kernel, &traced.path[at + 1..])));
            }
        }
        found.sort_unstable();
        let (_, _, plan) = found
            .first()
            .with_context(|| format!("no kernel of the table ran: {calls}"))?;
        Ok(Self {
            plan: (*plan).to_owned(),
            kernels: found.iter().map(|(_, name, _)| *name).collect(),
        })
    }
}

/// Seconds of those that took the product: in graphs, as a model decodes, if all could be recorded.
fn seconds(tuned: &Tuned) -> Vec<(&KernelRun, Times)> {
    let timed = || tuned.kernels.iter().filter(|run| run.times.is_some());
    let graphs = timed().all(|run| run.graph.is_some());
    let of = |run: &KernelRun| if graphs { run.graph } else { run.times };
    timed().filter_map(|run| Some((run, of(run)?))).collect()
}

/// Kernels that the table should have chosen: their names, seconds, and those of its choice.
fn faster(tuned: &Tuned) -> Vec<(&str, f64, f64)> {
    let all = seconds(tuned);
    let Some((_, chosen)) = all.iter().find(|(run, _)| run.name == tuned.chosen) else {
        return Vec::new();
    };
    let faster = all
        .iter()
        .filter(|(_, times)| chosen.median > WRONG * times.median);
    let mut faster: Vec<_> = faster
        .map(|(run, times)| (run.name.as_str(), times.median, chosen.median))
        .collect();
    faster.sort_by(|a, b| a.1.total_cmp(&b.1));
    faster
}

fn show(tuned: &Tuned) {
    let Tuned { m, n, k, .. } = tuned;
    let host = tuned
        .host
        .map_or_else(String::new, |s| format!(", {:.1} us of the host", s * 1e6));
    println!(
        "\n{}: M {m}, N {n}, K {k}; the table chooses {}{host}",
        tuned.name, tuned.chosen
    );
    let all = seconds(tuned);
    if all.iter().any(|(run, _)| run.graph.is_none()) {
        println!("  launch by launch: not all of them are recorded in a graph");
    }
    for (run, times) in all {
        let mark = if run.name == tuned.chosen { "*" } else { "" };
        println!(
            "{mark:>2}{:<28}{:>10.2} us +-{:>2.0}%{:>8.0} GB/s{:>8.1} TFLOP/s  {}",
            run.name,
            times.median * 1e6,
            100. * times.noise(),
            tuned.work.bytes / times.median * 1e-9,
            tuned.work.flops / times.median * 1e-12,
            run.plan.as_deref().unwrap_or_default()
        );
    }
    let mut refusals: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for run in &tuned.kernels {
        if let Some(reason) = &run.refusal {
            refusals.entry(reason).or_default().push(&run.name);
        }
    }
    for (reason, kernels) in refusals {
        println!("  refused, {reason}: {}", kernels.join(", "));
    }
    for (name, seconds, chosen) in faster(tuned) {
        println!(
            "TABLE WRONG: {}: {name} is {:.2}x faster than the chosen {} ({:.2} us against {:.2} us)",
            tuned.name,
            chosen / seconds,
            tuned.chosen,
            seconds * 1e6,
            chosen * 1e6
        );
    }
}
