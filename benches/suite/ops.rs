//! The table of ops.

use crate::args::Args;
use crate::budget::Budget;
use crate::cases::{Case, Contender};
use crate::figures::{Bound, CANDLE, DENSE, FUSED, GEMM, Limits, OpRun, SideRun, Skipped};
use crate::memory::held_by;
use crate::place::Place;
use crate::timing::{Effort, race};
use candle_core::Result;

/// Measures every one of the `cases` that is wanted and prints it.
pub fn run(
    place: &Place,
    cases: Vec<Case>,
    limits: &Limits,
    args: &Args,
    budget: &Budget,
) -> Result<(Vec<OpRun>, Vec<Skipped>)> {
    let effort = Effort::of(place, args.quick);
    let (mut runs, mut skipped) = (Vec::new(), Vec::new());
    let mut op = "";
    for case in cases {
        let name = case.name();
        if !args.wants(&name) {
            continue;
        }
        if op != case.op {
            op = case.op;
            head(op, place);
        }
        let (floor, _) = limits.floor(case.work);
        let longest = longest(place, &case, args.quick);
        let why = match () {
            _ if floor > longest => Some(format!("a call would take {floor:.2} s or more here")),
            _ if budget.is_spent() => Some("the time that --budget gives is over".to_owned()),
            _ => None,
        };
        if let Some(why) = why {
            skipped.push(Skipped { name, why });
            continue;
        }
        let (run, wrong) =
            measure(place, limits, &case, effort).map_err(|e| e.context(format!("in {name}")))?;
        line(&run);
        runs.push(run);
        skipped.extend(wrong);
    }
    if !skipped.is_empty() {
        println!(
            "\n{} left out: too long here, out of time, or doubted and wrong",
            skipped.len()
        );
    }
    Ok((runs, skipped))
}

/// Seconds of a floor from which on a case is left out: candle's side takes several times that.
fn longest(place: &Place, case: &Case, quick: bool) -> f64 {
    match (place.device.is_cuda(), quick) {
        (true, _) => 0.05,
        (false, true) => 0.015,
        // candle widens all of the weights there at each call.
        (false, false) if case.format == "bf16" => 0.015,
        (false, false) => 0.06,
    }
}

/// Checks every contender, then times them in turns. What is doubted and wrong is left out, and said.
fn measure(
    place: &Place,
    limits: &Limits,
    case: &Case,
    effort: Effort,
) -> Result<(OpRun, Vec<Skipped>)> {
    let (mut contenders, mut memory, mut wrong) = (Vec::new(), Vec::new(), Vec::new());
    for contender in (case.build)(place)? {
        match checked(place, &contender) {
            Ok(bytes) => {
                contenders.push(contender);
                memory.push(bytes);
            }
            Err(error) if !contender.doubted => return Err(error),
            Err(error) => {
                let (name, why) = (case.name(), error.to_string());
                println!("left out of {name}: {why}");
                wrong.push(Skipped { name, why });
            }
        }
    }
    let taken = race(place, &contenders, effort)?;
    let sides = contenders.iter().zip(taken).zip(memory);
    let (floor, bound) = limits.floor(case.work);
    let run = OpRun {
        name: case.name(),
        op: case.op.to_owned(),
        model: case.model.clone(),
        part: case.part.clone(),
        rows: case.rows,
        context: case.context,
        format: case.format.clone(),
        work: case.work,
        sides: sides
            .map(|((contender, taken), memory)| SideRun {
                name: contender.name.clone(),
                times: taken.times,
                host: taken.host,
                graph: taken.graph,
                memory,
            })
            .collect(),
        floor,
        bound,
    };
    Ok((run, wrong))
}

/// The bytes that a call holds; fails if its results are wrong.
pub fn checked(place: &Place, contender: &Contender) -> Result<u64> {
    // Once before, so that what is kept from call to call is there.
    (contender.call)(0)?;
    let (results, bytes) = held_by(place, || (contender.call)(0))?;
    if results.len() != contender.expected.len() {
        candle_core::bail!(
            "{}: {} results, expected {}",
            contender.name,
            results.len(),
            contender.expected.len()
        );
    }
    for (result, expected) in results.iter().zip(&contender.expected) {
        expected.check(&contender.name, result)?;
    }
    Ok(bytes)
}

fn head(op: &str, place: &Place) {
    let library = match (op, place.device.is_cuda()) {
        ("flash_attention_varlen" | "paged_prefill", _) => DENSE,
        (_, true) => GEMM,
        (_, false) => "",
    };
    println!(
        "\n{op:<47}{CANDLE:>10}{library:>10}{:>10}{:>7}{:>8}{:>8}{:>9}{:>9}{:>6}  {:<8}{:>10}{}",
        "fused",
        "+-",
        "faster",
        "GB/s",
        "GFLOP/s",
        "floor us",
        "of it",
        "bound",
        "saved MB",
        match place.device.is_cuda() {
            true => "  in graphs: cublas, fused, faster",
            false => "",
        }
    );
}

fn line(run: &OpRun) {
    let time = |name: &str| {
        run.side(name).map_or_else(String::new, |side| {
            format!("{:.1}", side.times.median * 1e6)
        })
    };
    let fused = run.fused();
    let over = [CANDLE, GEMM, DENSE];
    let faster = over.into_iter().find_map(|name| run.speedup_over(name));
    let (name, spread) = (&run.name[run.op.len()..], run.side("fused"));
    println!(
        "{:<47}{:>10}{:>10}{:>10}{:>6.0}%{:>8}{:>8.1}{:>9.1}{:>9.1}{:>5.0}%  {:<8}{:>10}{}",
        name.trim_start(),
        time(CANDLE),
        time(GEMM) + &time(DENSE),
        time("fused"),
        100. * spread.map_or(f64::NAN, |side| side.times.noise()),
        faster.map_or_else(String::new, |ratio| format!("{ratio:.2}x")),
        run.work.bytes / fused * 1e-9,
        run.work.flops / fused * 1e-9,
        run.floor * 1e6,
        100. * run.floor / fused,
        match run.bound {
            Bound::Memory => "memory",
            Bound::Compute => "compute",
            Bound::Dispatch => "call",
        },
        saved(run).map_or_else(String::new, |saved| format!("{:.2}", saved / 1e6)),
        in_graphs(run).unwrap_or_default()
    );
}

/// What the product takes in a graph beside the library's.
fn in_graphs(run: &OpRun) -> Option<String> {
    let time = |name| Some(run.side(name)?.graph?.median * 1e6);
    Some(format!(
        "  {:>17.1}{:>7.1}{:>7.2}x",
        time(GEMM)?,
        time(FUSED)?,
        run.speedup_in_graph_over(GEMM)?
    ))
}

/// Bytes that candle's operations hold beyond what the op does.
pub fn saved(run: &OpRun) -> Option<f64> {
    let held = |name| Some(run.side(name)?.memory as f64);
    Some(held(CANDLE)? - held(FUSED)?)
}
