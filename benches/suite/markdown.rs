//! The tables of a run for docs/results.

mod serving;

use crate::cases::OPS;
use crate::export::Export;
use crate::figures::{Bound, CANDLE, Curve, GEMM, Layer, ModelRun, OpRun};
use crate::goals::{Goal, Goals};
use crate::models::megabytes;
use crate::plots;
use anyhow::{Context, Result};
use common::comparison::median;
use std::path::Path;

/// Cases of a list.
const LISTED: usize = 20;

/// From which on a case counts as slower: 2 % are noise.
const SLOWER: f64 = 0.98;

/// Writes the tables; beside plots that the same run of the suite makes they are shown too.
pub fn write(export: &Export, path: &Path) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new(""));
    if !folder.as_os_str().is_empty() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(path, text(export)).with_context(|| format!("cannot write {}", path.display()))
}

fn text(export: &Export) -> String {
    let mut sections = vec![head(export), goals(export), models(&export.models)];
    sections.extend(serving::tables(export));
    sections.extend([
        ops(&export.ops),
        slower(&export.ops),
        farthest(&export.ops),
        layers(&export.layers),
        growth(export),
    ]);
    sections.retain(|section| !section.is_empty());
    sections.join("\n")
}

/// A section with a table; nothing without rows.
fn section(title: &str, note: &str, columns: &[&str], rows: &[Vec<String>]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let note = match note {
        "" => String::new(),
        note => format!("{note}\n\n"),
    };
    format!("## {title}\n{note}{}", table(columns, rows))
}

/// The first column is text, the others are figures.
fn table(columns: &[&str], rows: &[Vec<String>]) -> String {
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let cells: Vec<_> = cells.collect();
        format!("| {} |\n", cells.join(" | "))
    };
    let rule = (0..columns.len()).map(|i| if i == 0 { "---" } else { "---:" });
    let mut text = line(&mut columns.iter().copied());
    text += &line(&mut { rule });
    for row in rows {
        text += &line(&mut row.iter().map(String::as_str));
    }
    text
}

fn head(export: &Export) -> String {
    let (machine, limits) = (&export.machine, &export.limits);
    let gemm = limits.gemm.iter();
    let gemm: Vec<_> = gemm
        .map(|(dtype, flops)| format!("{:.0} GFLOP/s in {dtype}", flops * 1e-9))
        .collect();
    let mut text = format!(
        "# {}\n{}.\n\nMade from an export by `cargo bench -- --from FILE --markdown README.md --plots .`; \
         [performance.md](../../performance.md) says how to read it.\n\n\
         Limits of this run: copy {:.0} GB/s, read {:.0} GB/s, the library's product {}, an op without work {:.2} us.\n",
        machine.name(),
        machine.describe(),
        limits.copy * 1e-9,
        limits.read * 1e-9,
        gemm.join(", "),
        limits.dispatch * 1e6,
    );
    for clocks in &export.clocks {
        text += &format!("\n{}", clocks.describe());
    }
    if !export.clocks.is_empty() {
        text.push('\n');
    }
    for (name, title) in plots::names(export) {
        text += &format!("\n![{title}]({name}.svg)\n");
    }
    text
}

fn goals(export: &Export) -> String {
    let mut text = String::new();
    for kind in Goals::of(export) {
        let known = kind.goals.iter().filter(|goal| !goal.reached().is_empty());
        let row = |goal: &Goal| {
            vec![
                goal.what.clone(),
                goal.must(),
                goal.reached(),
                goal.verdict(),
            ]
        };
        let rows: Vec<_> = known.map(row).collect();
        let title = format!("Goals, {}", kind.device);
        let columns = ["", "must", "reached", ""];
        text += &section(&title, &format!("{}.", kind.count()), &columns, &rows);
    }
    text
}

fn models(runs: &[ModelRun]) -> String {
    let or_blank = |value: Option<String>| value.unwrap_or_default();
    let stock = |run: &ModelRun| {
        let same = |other: &&ModelRun| (&other.model, &other.format) == (&run.model, &run.format);
        let first = runs.iter().find(same)?;
        (!first.form.is_fused()).then(|| first.token.median / run.token.median)
    };
    let row = |run: &ModelRun| {
        vec![
            format!("{} {} {}", run.model, run.format, run.form.name()),
            format!("{:.2}", run.prefill.median * 1e3),
            run.steps.to_string(),
            format!("{:.1}", run.tokens_per_second()),
            or_blank(stock(run).map(|ratio| format!("{ratio:.1}x"))),
            format!("{:.3}", run.p50 * 1e3),
            format!("{:.3}", run.p99 * 1e3),
            format!("{:.3}", run.max * 1e3),
            or_blank(run.last.launches.map(|n| n.to_string())),
            megabytes(run.last.peak_rss),
            megabytes(run.last.peak_gpu),
            or_blank(run.joules_per_token.map(|j| format!("{j:.3}"))),
            or_blank(run.joules_per_token.map(|j| format!("{:.2}", 1. / j))),
        ]
    };
    let note = runs.first().map_or_else(String::new, |run| {
        format!(
            "A prompt of {} tokens; then decode steps behind {}. Times in ms.",
            run.prefill_tokens, run.prompt
        )
    });
    let columns = [
        "",
        "prefill",
        "steps",
        "tokens/s",
        "faster",
        "p50",
        "p99",
        "max",
        "kernels",
        "RSS MB",
        "GPU MB",
        "J/token",
        "tokens/s/W",
    ];
    section(
        "Models",
        &note,
        &columns,
        &runs.iter().map(row).collect::<Vec<_>>(),
    )
}

/// The least, the middle and the most.
fn range(values: &[f64], unit: &str) -> String {
    if values.is_empty() {
        return String::new();
    }
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let middle = median(values.to_vec());
    format!("{middle:.2}{unit} ({least:.2} to {most:.2})")
}

fn ops(runs: &[OpRun]) -> String {
    let row = |op: &&str| {
        let of: Vec<_> = runs.iter().filter(|run| run.op == *op).collect();
        let over = |name| -> Vec<_> { of.iter().filter_map(|r| r.speedup_over(name)).collect() };
        let floor: Vec<_> = of.iter().map(|r| 100. * r.floor / r.fused()).collect();
        (!of.is_empty()).then(|| {
            vec![
                format!("`{op}`"),
                of.len().to_string(),
                range(&over(CANDLE), "x"),
                range(&over(GEMM), "x"),
                range(&floor, " %"),
            ]
        })
    };
    section(
        "Ops",
        "Median over all shapes, and the range. cuBLAS is the product alone, without the norm, the \
         activation and the residual that the op has with it.",
        &["", "cases", "over candle", "over cuBLAS", "of the floor"],
        &OPS.iter().filter_map(row).collect::<Vec<_>>(),
    )
}

fn microseconds(seconds: f64) -> String {
    format!("{:.1}", seconds * 1e6)
}

/// What is slower than what it replaces; a product of quantized weights in 16 bits replaces the dense.
fn slower(runs: &[OpRun]) -> String {
    let ratio = |run: &OpRun| run.speedup().or_else(|| run.speedup_over(GEMM));
    let mut all: Vec<_> = runs
        .iter()
        .filter_map(|run| Some((ratio(run)?, run)))
        .filter(|(ratio, _)| *ratio < SLOWER)
        .collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let row = |(ratio, run): &(f64, &OpRun)| {
        vec![
            run.name.clone(),
            microseconds(run.fused() * ratio),
            microseconds(run.fused()),
            format!("{ratio:.2}x"),
        ]
    };
    let note = format!("{} of {} cases; the worst {LISTED}.", all.len(), runs.len());
    let rows: Vec<_> = all.iter().take(LISTED).map(row).collect();
    let columns = ["", "candle or cuBLAS, us", "fused, us", "faster"];
    section("Slower than what they replace", &note, &columns, &rows)
}

/// What loses most against its floor, in time.
fn farthest(runs: &[OpRun]) -> String {
    let mut all: Vec<_> = runs.iter().filter(|r| r.bound != Bound::Dispatch).collect();
    all.sort_by(|a, b| (a.floor / a.fused()).total_cmp(&(b.floor / b.fused())));
    let row = |run: &&OpRun| {
        vec![
            run.name.clone(),
            microseconds(run.floor),
            microseconds(run.fused()),
            format!("{:.0} %", 100. * run.floor / run.fused()),
        ]
    };
    let rows: Vec<_> = all.iter().take(LISTED).map(row).collect();
    let note = format!("Of the cases that memory or arithmetic bounds; the last {LISTED}.");
    let columns = ["", "floor, us", "fused, us", "of the floor"];
    section("Farthest from the floor", &note, &columns, &rows)
}

fn layers(all: &[Layer]) -> String {
    all.iter().map(layer).collect::<Vec<_>>().join("\n")
}

fn layer(layer: &Layer) -> String {
    let (stock, fused) = (layer.stock(), layer.fused());
    let row = |name: String, stock: String, fused: String| vec![name, stock, fused];
    let mut rows = Vec::new();
    for group in &layer.groups {
        let steps: Vec<_> = group.stock.iter().map(|step| step.name.as_str()).collect();
        let (s, f) = (group.stock(), group.fused.median);
        rows.push(row(
            steps.join(", "),
            format!("{} ({:.0} %)", microseconds(s), 100. * s / stock),
            format!("{} ({:.0} %)", microseconds(f), 100. * f / fused),
        ));
    }
    let plain = |name: &str, stock: f64, fused: f64| {
        row(name.to_owned(), microseconds(stock), microseconds(fused))
    };
    rows.push(plain("a layer", stock, fused));
    rows.push(plain(
        "norm, head",
        layer.head.stock(),
        layer.head.fused.median,
    ));
    let sums = (layer.stock_sum(), layer.fused_sum());
    rows.push(plain(
        &format!("{} layers and the head", layer.layers),
        sums.0,
        sums.1,
    ));
    let or_blank = |value: Option<String>| value.unwrap_or_default();
    let tokens = (layer.stock_token, layer.fused_token);
    rows.push(row(
        "a token of the model".to_owned(),
        or_blank(tokens.0.map(microseconds)),
        or_blank(tokens.1.map(microseconds)),
    ));
    let rest = |token: Option<f64>, sum: f64| {
        or_blank(token.map(|t| format!("{:+.0} %", 100. * (t - sum) / t)))
    };
    rows.push(row(
        "not accounted for".to_owned(),
        rest(tokens.0, sums.0),
        rest(tokens.1, sums.1),
    ));
    for chain in &layer.chains {
        let host = chain.host.map(microseconds);
        let host = or_blank(host.map(|host| format!("; the host's {host}")));
        rows.push(row(
            format!("{} ops without work", chain.ops),
            String::new(),
            format!("{}{host}", microseconds(chain.seconds)),
        ));
    }
    let title = format!(
        "A layer of {} in {}, {} row(s), context {}",
        layer.model, layer.format, layer.rows, layer.context
    );
    section(
        &title,
        "Microseconds and shares of the layer.",
        &["", "candle", "fused"],
        &rows,
    )
}

fn growth(export: &Export) -> String {
    let row = |curve: &Curve| {
        let ends = [curve.points.first(), curve.points.last()];
        let [first, last] = ends.map(|end| {
            end.map_or_else(String::new, |(x, y)| {
                format!("{x:.0}: {}", microseconds(*y))
            })
        });
        vec![
            format!(
                "{}, {} {} {}",
                curve.over.name(),
                curve.model,
                curve.format,
                curve.side
            ),
            curve
                .law
                .map_or_else(String::new, |l| format!("{:.2}", l.exponent)),
            curve
                .law
                .map_or_else(String::new, |l| format!("{:.3}", l.r2)),
            first,
            last,
        ]
    };
    let rows: Vec<_> = export.scaling.iter().map(row).collect();
    let columns = ["", "exponent", "R2", "first, us", "last, us"];
    section("Growth", "", &columns, &rows)
}
