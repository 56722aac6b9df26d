//! What was to be reached, held against the figures of a run. docs/performance.md has the same list
//! with the figures of earlier runs, and of those that another program has to be run beside for.

mod serving;

use crate::cases::{QUANT_GOALS, SHARE_GOALS};
use crate::export::Export;
use crate::figures::{CANDLE, DENSE, GEMM, ModelRun, OpRun};
use crate::form::Form;

/// A figure that is to be at least, or at most, so large.
pub struct Goal {
    pub what: String,
    must: f64,
    /// Whether more is better.
    more: bool,
    unit: &'static str,
    reached: Option<f64>,
    /// What measures it, if not this suite.
    elsewhere: Option<&'static str>,
}

impl Goal {
    fn new(what: &str, (must, unit): (f64, &'static str), reached: Option<f64>) -> Self {
        Self {
            what: what.to_owned(),
            must,
            more: true,
            unit,
            reached,
            elsewhere: None,
        }
    }

    /// That is to be at most so large.
    fn at_most(what: &str, must: (f64, &'static str), reached: Option<f64>) -> Self {
        Self {
            more: false,
            ..Self::new(what, must, reached)
        }
    }

    fn measured_by(mut self, elsewhere: &'static str) -> Self {
        self.elsewhere = Some(elsewhere);
        self
    }

    fn is_met(&self) -> Option<bool> {
        self.reached.map(|reached| match self.more {
            true => reached >= self.must,
            false => reached <= self.must,
        })
    }

    pub fn must(&self) -> String {
        let most = if self.more { "" } else { "<= " };
        format!("{most}{:.2}{}", self.must, self.unit)
    }

    pub fn reached(&self) -> String {
        self.reached
            .map_or_else(String::new, |r| format!("{r:.2}{}", self.unit))
    }

    pub fn verdict(&self) -> String {
        match (self.is_met(), self.elsewhere) {
            (Some(true), _) => "met".to_owned(),
            (Some(false), _) => "missed".to_owned(),
            (None, None) => "not in this run".to_owned(),
            (None, Some(by)) => format!("not in this run: {by}"),
        }
    }
}

/// All goals of one kind of device.
pub struct Goals {
    pub device: &'static str,
    pub goals: Vec<Goal>,
}

impl Goals {
    /// Of both kinds; a run has the figures of one.
    pub fn of(export: &Export) -> [Self; 2] {
        let mut none = export.clone();
        none.ops.clear();
        none.models.clear();
        none.prefixes.clear();
        none.serving.clear();
        let cpu = export.machine.device == "cpu";
        let (on_gpu, on_cpu) = if cpu {
            (&none, export)
        } else {
            (export, &none)
        };
        [
            Self {
                device: "CUDA",
                goals: of_gpu(on_gpu),
            },
            Self {
                device: "CPU",
                goals: of_cpu(on_cpu),
            },
        ]
    }

    /// As `3 of 5 met, 7 not in this run`.
    pub fn count(&self) -> String {
        let known: Vec<_> = self.goals.iter().filter_map(Goal::is_met).collect();
        let met = known.iter().filter(|met| **met).count();
        let rest = self.goals.len() - known.len();
        format!("{met} of {} met, {rest} not in this run", known.len())
    }
}

/// Prints every goal, if the run has a figure for any.
pub fn show(export: &Export) {
    let both = Goals::of(export);
    if !both
        .iter()
        .flat_map(|g| &g.goals)
        .any(|g| g.reached.is_some())
    {
        println!("\ngoals: none of their figures is in this run");
        return;
    }
    for kind in &both {
        let title = format!("goals, {}", kind.device);
        println!("\n{title:<64}{:>12}{:>12}", "must", "reached");
        for goal in &kind.goals {
            let (must, reached) = (goal.must(), goal.reached());
            println!(
                "{:<64}{must:>12}{reached:>12}  {}",
                goal.what,
                goal.verdict()
            );
        }
        println!("{}", kind.count());
    }
}

/// The run of a model whose name contains `model`.
fn run<'a>(export: &'a Export, model: &str, format: &str, form: Form) -> Option<&'a ModelRun> {
    export.models.iter().find(|run| {
        run.model.to_lowercase().contains(model) && run.format == format && run.form == form
    })
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
    let figures = export.ops.iter().filter(|run| of(run)).filter_map(figure);
    figures.reduce(f64::min)
}

/// Tokens of a second of a model as a graph.
fn decode(export: &Export, what: &str, must: f64, (model, format): (&str, &str)) -> Goal {
    let rate = run(export, model, format, Form::Graph).map(ModelRun::tokens_per_second);
    Goal::new(what, (must, "/s"), rate)
}

/// The weights of a token over what a copy moves in its time.
fn share_of_copy(export: &Export, what: &str, model: &str) -> Goal {
    let share = |run: &ModelRun| {
        Some(100. * run.last.bytes? as f64 / run.token.median / export.limits.copy)
    };
    let reached = run(export, model, "bf16", Form::Graph).and_then(share);
    Goal::new(what, (90., "%"), reached)
}

/// A prompt of 512 tokens.
fn prefill(export: &Export, what: &str, most: f64, (model, format): (&str, &str)) -> Goal {
    let run = run(export, model, format, Form::Graph).filter(|run| run.prefill_tokens == 512);
    let reached = run.map(|run| run.prefill.median * 1e3);
    Goal::at_most(what, (most, " ms"), reached)
}

fn of_gpu(export: &Export) -> Vec<Goal> {
    let mut goals = of_llamas(export);
    goals.extend(of_bandwidth(export));
    goals.extend(of_ragged(export));
    goals.extend(of_other_models(export));
    goals.extend(over_candle(export));
    goals.extend(of_quantized(export));
    goals.extend(of_quantized_models(export));
    goals.extend(serving::goals(export));
    goals
}

/// Decoding, prompts and attention of the Llamas.
fn of_llamas(export: &Export) -> Vec<Goal> {
    let (small, q4_1) = (("smollm2-135m", "bf16"), ("q4_1", "stored"));
    let attention = Goal::new(
        "attention for 4k to 16k tokens, over torch's SDPA",
        (1., "x"),
        None,
    );
    vec![
        decode(export, "SmolLM2-135M bf16 decode", 2000., small),
        decode(export, "SmolLM2-135M Q4_1 decode", 2000., q4_1),
        decode(
            export,
            "Llama-3.2-1B decode",
            900.,
            ("llama-3.2-1b", "bf16"),
        ),
        share_of_copy(export, "Llama-3-8B decode, weights/copy", "llama-3-8b"),
        prefill(export, "SmolLM2 prefill of 512, bf16", 2.5, small),
        prefill(export, "SmolLM2 prefill of 512, Q4_1", 3., q4_1),
        attention.measured_by("torch beside it"),
    ]
}

/// The start of a process, and decoding of Qwen3 and Pythia.
fn of_other_models(export: &Export) -> Vec<Goal> {
    let start = Goal::at_most(
        "process start to first token, cold driver cache",
        (1.5, " s"),
        None,
    );
    vec![
        start.measured_by("smollm on a fresh machine"),
        decode(export, "Qwen3-0.6B decode", 1200., ("qwen3-0.6b", "bf16")),
        share_of_copy(export, "Pythia-2.8B decode, weights/copy", "pythia-2.8b"),
    ]
}

/// Decoding over plain candle.
fn over_candle(export: &Export) -> Vec<Goal> {
    let goal = |(model, must): (&str, f64)| {
        let reached = over_stock(export, model, "bf16", Form::Graph);
        Goal::new(
            &format!("{model} decode over {CANDLE}"),
            (must, "x"),
            reached,
        )
    };
    [
        ("smollm2-135m", 4.),
        ("qwen2-0.5b", 4.),
        ("qwen3-0.6b", 4.),
        ("llama-3.2-1b", 4.),
        ("pythia-160m", 4.),
        ("pythia-2.8b", 2.5),
    ]
    .map(goal)
    .into()
}

/// What quantized weights gain for a model, how much of bf16 they take, and the study of the ternary.
fn of_quantized_models(export: &Export) -> Vec<Goal> {
    let graph = |format: &str| run(export, "llama-3-8b", format, Form::Graph);
    let int4 = graph("int4-g128").zip(graph("bf16"));
    let int4 = int4.map(|(int4, bf16)| bf16.token.median / int4.token.median);
    let mut goals = vec![Goal::new(
        "Llama-3-8B INT4 g128 decode over bf16",
        (2.5, "x"),
        int4,
    )];
    for (what, must) in [("INT8", 52.), ("INT4 g128", 28.), ("ternary", 15.)] {
        let goal = Goal::at_most(&format!("weights in {what}, of bf16"), (must, "%"), None);
        goals.push(goal.measured_by("follows from the layout"));
    }
    let study = Goal::at_most(
        "ternary study: adaptive over the fastest form",
        (3., "%"),
        None,
    );
    goals.push(study.measured_by("--sections ternary"));
    goals
}

/// What has to come near the bandwidth of a copy.
fn of_bandwidth(export: &Export) -> Vec<Goal> {
    let share = |run: &OpRun| Some(100. * run.work.bytes / run.fused() / export.limits.copy);
    let goal = |(op, model): &(&str, &str)| {
        let of = |r: &OpRun| r.op == *op && r.model == *model;
        let reached = least(export, of, share);
        Goal::new(&format!("{op}, {model}, of copy"), (85., "%"), reached)
    };
    SHARE_GOALS.iter().map(goal).collect()
}

/// Sequences of one length as a ragged batch and in pages, over the op that takes no others.
fn of_ragged(export: &Export) -> [Goal; 2] {
    [("flash_attention_varlen", 0.95), ("paged_prefill", 0.93)].map(|(op, must)| {
        let of = |run: &OpRun| run.op == op && run.side(DENSE).is_some();
        let reached = least(export, of, |run| run.speedup_over(DENSE));
        let name = format!("{op} over flash_attention, prompts of one length");
        Goal::new(&name, (must, "x"), reached)
    })
}

/// Products with quantized weights over the library's in bf16; in graphs where they were recorded.
fn of_quantized(export: &Export) -> Vec<Goal> {
    let mut goals = Vec::new();
    for goal in &QUANT_GOALS {
        for (n, k) in goal.shapes {
            let shape = format!("{n}x{k}");
            let of = |r: &OpRun| {
                (r.op.as_str(), r.model.as_str()) == ("quant_linear", shape.as_str())
                    && (r.format.as_str(), r.rows) == (goal.format, goal.rows)
            };
            let ratio = |r: &OpRun| {
                r.speedup_in_graph_over(GEMM)
                    .or_else(|| r.speedup_over(GEMM))
            };
            let reached = least(export, of, ratio);
            let what = format!(
                "{shape} {}, {} rows, over {GEMM} bf16",
                goal.format, goal.rows
            );
            goals.push(Goal::new(&what, (goal.must, "x"), reached));
        }
    }
    goals
}

fn of_cpu(export: &Export) -> Vec<Goal> {
    let mut goals = of_peers();
    goals.extend(of_ragged(export));
    for model in ["qwen2-0.5b", "qwen3-0.6b"] {
        for (format, must) in [("bf16", 3.), ("f32", 1.5)] {
            let reached = over_stock(export, model, format, Form::Eager);
            let what = format!("{model} {format} decode over {CANDLE}");
            goals.push(Goal::new(&what, (must, "x"), reached));
        }
    }
    // Files as `requantize` names them; the fused side quantizes the weights of the same shape.
    let ours = |format| run(export, "smollm2", format, Form::Eager);
    for (format, file, must) in [("int8+head", "q8_0", 2.), ("int4-g32+head", "q4_0", 4.)] {
        let stock = run(export, file, "stored", Form::Stock);
        let reached = stock
            .zip(ours(format))
            .map(|(a, b)| a.token.median / b.token.median);
        let what = format!("SmolLM2 {format} decode over {CANDLE}'s {file}");
        goals.push(Goal::new(&what, (must, "x"), reached));
    }
    let both = ours("int4-g32+head").zip(ours("ternary-row+head"));
    let reached = both.map(|(a, b)| a.token.median / b.token.median);
    goals.push(Goal::new(
        "SmolLM2 ternary decode over INT4",
        (1.3, "x"),
        reached,
    ));
    for (what, must) in [("INT8", 0.3), ("INT4 g32 with zero points", 6.)] {
        let what = format!("perplexity of SmolLM2 in {what}, over f32");
        goals.push(Goal::at_most(&what, (must, "%"), None).measured_by("the example perplexity"));
    }
    goals
}

/// SmolLM2-135M against llama.cpp, which another crate runs beside.
fn of_peers() -> Vec<Goal> {
    let faster = [
        ("Q4_1 decode at 64", 1.4),
        ("Q4_0 decode at 64", 1.15),
        ("Q8_0 decode at 64", 1.15),
        ("Q4_0 decode at 512", 1.5),
        ("Q4_0 decode at 2000", 1.5),
        ("Q4_1 prefill of 512", 3.),
        ("Q4_0 prefill of 512", 1.15),
        ("Q8_0 prefill of 512", 1.3),
        ("Q4_K_M decode", 1.15),
        ("AVX2 only, Q4_0 decode", 1.1),
        ("AVX2 only, Q4_0 prefill", 1.1),
    ];
    let mut goals: Vec<_> = faster
        .into_iter()
        .map(|(what, must)| Goal::new(&format!("{what}, over llama.cpp"), (must, "x"), None))
        .collect();
    for (what, must) in [("load to first token", 1.), ("peak memory", 1.1)] {
        let what = format!("{what}, of llama.cpp's");
        goals.push(Goal::at_most(&what, (must, "x"), None));
    }
    goals
        .into_iter()
        .map(|goal| goal.measured_by("benches/peers"))
        .collect()
}
