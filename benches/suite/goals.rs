//! What was to be reached, held against the figures of a run. docs/performance.md has the whole list,
//! with the goals that another program has to be run beside for.

use crate::cases::{CANDLE, GEMM};
use crate::child::Form;
use crate::export::{Export, OpRun};
use crate::models::ModelRun;

/// A figure that is to be at least, or at most, so large.
struct Goal {
    what: String,
    must: f64,
    /// Whether more is better.
    more: bool,
    unit: &'static str,
    reached: Option<f64>,
}

impl Goal {
    fn is_met(&self) -> Option<bool> {
        self.reached.map(|reached| match self.more {
            true => reached >= self.must,
            false => reached <= self.must,
        })
    }
}

/// Prints every goal that the run has a figure for.
pub fn show(export: &Export) {
    let mut goals = match export.machine.device.as_str() {
        "cpu" => of_cpu(export),
        _ => of_gpu(export),
    };
    goals.retain(|goal| goal.reached.is_some());
    if goals.is_empty() {
        return;
    }
    println!("\ngoals{:<59}{:>12}{:>12}", "", "must", "reached");
    for goal in &goals {
        println!(
            "{:<64}{:>12}{:>12}  {}",
            goal.what,
            format!("{:.2}{}", goal.must, goal.unit),
            goal.reached
                .map_or_else(String::new, |r| format!("{r:.2}{}", goal.unit)),
            if goal.is_met() == Some(true) {
                "met"
            } else {
                "missed"
            }
        );
    }
    let met = goals
        .iter()
        .filter(|goal| goal.is_met() == Some(true))
        .count();
    println!("{met} of {} met", goals.len());
}

/// The run of a model whose name contains `model`.
fn run<'a>(export: &'a Export, model: &str, format: &str, form: Form) -> Option<&'a ModelRun> {
    export.models.iter().find(|run| {
        run.model.to_lowercase().contains(model) && run.format == format && run.form == form
    })
}

fn at_least(what: &str, must: f64, unit: &'static str, reached: Option<f64>) -> Goal {
    Goal {
        what: what.to_owned(),
        must,
        more: true,
        unit,
        reached,
    }
}

/// A decode rate over that of plain candle.
fn over_stock(export: &Export, model: &str, format: &str, form: Form) -> Option<f64> {
    let stock = run(export, model, format, Form::Stock)?;
    Some(stock.token.median / run(export, model, format, form)?.token.median)
}

/// The least of some cases' figures.
fn least(
    export: &Export,
    of: impl Fn(&OpRun) -> bool,
    figure: impl Fn(&OpRun) -> Option<f64>,
) -> Option<f64> {
    let figures: Vec<_> = export
        .ops
        .iter()
        .filter(|run| of(run))
        .filter_map(figure)
        .collect();
    figures.into_iter().reduce(f64::min)
}

fn of_gpu(export: &Export) -> Vec<Goal> {
    let graph = |model: &str, format: &str| run(export, model, format, Form::Graph);
    let rate = |model, format| graph(model, format).map(ModelRun::tokens_per_second);
    let share = |model: &str| {
        let run = graph(model, "bf16")?;
        Some(100. * run.last.bytes? as f64 / run.token.median / export.limits.copy)
    };
    let mut goals = vec![
        at_least(
            "SmolLM2-135M bf16 decode",
            2000.,
            "/s",
            rate("smollm2", "bf16"),
        ),
        at_least(
            "SmolLM2-135M Q4_1 decode",
            2000.,
            "/s",
            rate("q4_1", "stored"),
        ),
        at_least(
            "Llama-3.2-1B decode",
            900.,
            "/s",
            rate("llama-3.2-1b", "bf16"),
        ),
        at_least(
            "Llama-3-8B decode of weights/copy",
            90.,
            "%",
            share("llama-3-8b"),
        ),
        at_least("Qwen3-0.6B decode", 1200., "/s", rate("qwen3-0.6b", "bf16")),
        at_least(
            "Pythia-2.8B decode of weights/copy",
            90.,
            "%",
            share("pythia-2.8b"),
        ),
    ];
    for (what, model, format, must) in [
        ("SmolLM2 prefill of 512, bf16", "smollm2", "bf16", 2.5),
        ("SmolLM2 prefill of 512, Q4_1", "q4_1", "stored", 3.),
    ] {
        let run = graph(model, format).filter(|run| run.prefill_tokens == 512);
        goals.push(Goal {
            what: what.to_owned(),
            must,
            more: false,
            unit: " ms",
            reached: run.map(|run| run.prefill.median * 1e3),
        });
    }
    for (model, must) in [
        ("smollm2", 4.),
        ("qwen3-0.6b", 4.),
        ("llama-3.2-1b", 4.),
        ("pythia-2.8b", 2.5),
    ] {
        let reached = over_stock(export, model, "bf16", Form::Graph);
        goals.push(at_least(
            &format!("{model} decode over plain candle"),
            must,
            "x",
            reached,
        ));
    }
    let int4 = graph("llama-3-8b", "int4-g128").zip(graph("llama-3-8b", "bf16"));
    let int4 = int4.map(|(int4, bf16)| bf16.token.median / int4.token.median);
    goals.push(at_least(
        "Llama-3-8B INT4 g128 decode over bf16",
        2.5,
        "x",
        int4,
    ));
    goals.extend(of_gpu_ops(export));
    goals
}

fn of_gpu_ops(export: &Export) -> Vec<Goal> {
    let bandwidth = |run: &OpRun| Some(100. * run.work.bytes / run.fused() / export.limits.copy);
    let mut goals = Vec::new();
    for op in ["rms_norm", "residual_add"] {
        let reached = least(export, |r| r.op == op && r.model == "16384x4096", bandwidth);
        goals.push(at_least(
            &format!("{op} 16384x4096 of copy"),
            85.,
            "%",
            reached,
        ));
    }
    let large = |r: &OpRun| r.op == "flash_decoding" && r.model.starts_with("32 heads");
    let reached = least(export, large, bandwidth);
    goals.push(at_least(
        "flash_decoding over 256 MB of copy, any head",
        85.,
        "%",
        reached,
    ));
    for (format, rows, must) in [
        ("int8", 1, 1.75),
        ("int4-g128", 1, 3.),
        ("ternary-row", 1, 5.),
        ("int4-g128", 16, 2.5),
        ("int8", 512, 1.4),
        ("int8", 2048, 1.4),
    ] {
        let parts: &[&str] = if rows == 1 {
            &["gate_up", "down", "head"]
        } else {
            &["gate_up", "down"]
        };
        for part in parts {
            let of = |r: &OpRun| {
                (r.op.as_str(), r.model.as_str()) == ("quant_linear", "llama-3-8b")
                    && (r.format.as_str(), r.rows) == (format, rows)
                    && r.part == *part
            };
            let reached = least(export, of, |r| r.speedup_over(GEMM));
            let what = format!("Llama-3-8B {part} in {format}, {rows} rows, over cuBLAS bf16");
            goals.push(at_least(&what, must, "x", reached));
        }
    }
    goals
}

fn of_cpu(export: &Export) -> Vec<Goal> {
    let mut goals = Vec::new();
    for model in ["qwen2-0.5b", "qwen3-0.6b"] {
        for (format, must) in [("bf16", 3.), ("f32", 1.5)] {
            let reached = over_stock(export, model, format, Form::Eager);
            let what = format!("{model} {format} decode over {CANDLE}");
            goals.push(at_least(&what, must, "x", reached));
        }
    }
    // Files as `requantize` names them; the fused side quantizes the f32 weights of the same shape.
    let stock = |file| run(export, file, "stored", Form::Stock);
    for (format, file, must) in [("int8+head", "q8_0", 2.), ("int4-g32+head", "q4_0", 4.)] {
        let ours = run(export, "smollm2", format, Form::Eager);
        let reached = stock(file)
            .zip(ours)
            .map(|(a, b)| a.token.median / b.token.median);
        goals.push(at_least(
            &format!("SmolLM2 {format} decode over {CANDLE}'s {file}"),
            must,
            "x",
            reached,
        ));
    }
    let int4 = run(export, "smollm2", "int4-g32+head", Form::Eager);
    let ternary = run(export, "smollm2", "ternary-row+head", Form::Eager);
    let reached = int4
        .zip(ternary)
        .map(|(a, b)| a.token.median / b.token.median);
    goals.push(at_least(
        "SmolLM2 ternary decode over INT4",
        1.3,
        "x",
        reached,
    ));
    goals
}
