//! The table of models: stock, with settings only, fused one launch after the other, and as a graph.

use crate::args::Args;
use crate::cases::{Extent, MODELS};
use crate::child::{Child, Form, Job, Last, Turn};
use crate::common::comparison::percentile;
use crate::place::Place;
use crate::run::Budget;
use crate::stats::Times;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// A model in one form.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ModelRun {
    pub model: String,
    pub format: String,
    pub form: Form,
    /// Tokens of the prompt whose time `prefill` is.
    pub prefill_tokens: usize,
    /// Seconds of that prompt, with its token.
    pub prefill: Times,
    /// Tokens in front of the first step, and steps of a round.
    pub prompt: usize,
    pub steps: usize,
    /// Seconds of a token, over the rounds' means.
    pub token: Times,
    /// Seconds of single tokens over all rounds.
    pub p50: f64,
    pub p99: f64,
    pub max: f64,
    /// Leading tokens in common with the first form.
    pub agreed: usize,
    /// On a GPU, or where RAPL may be read.
    pub joules_per_token: Option<f64>,
    #[serde(flatten)]
    pub last: Last,
}

/// How much is measured of each model.
struct Plan {
    prefill: usize,
    prompt: usize,
    steps: usize,
    /// Of plain candle, whose steps take longer and are as many as there is time for.
    stock_steps: usize,
    rounds: usize,
}

impl Plan {
    fn of(gpu: bool, quick: bool) -> Self {
        let plan = |prefill, prompt, steps, stock_steps| Self {
            prefill,
            prompt,
            steps,
            stock_steps,
            rounds: 3,
        };
        match (gpu, quick) {
            (true, false) => plan(512, 128, 512, 64),
            (true, true) => plan(512, 128, 128, 32),
            (false, false) => plan(128, 64, 16, 16),
            (false, true) => plan(32, 16, 6, 6),
        }
    }

    fn steps_of(&self, form: Form) -> usize {
        if form.is_fused() {
            self.steps
        } else {
            self.stock_steps
        }
    }

    fn positions(&self) -> usize {
        self.prefill.max(self.prompt + self.steps) + 4
    }
}

/// Bytes of weights above which forms are loaded one after the other, not side by side.
const SIDE_BY_SIDE: u64 = 4 << 30;

/// Measures every model that is wanted.
pub fn run(place: &Place, args: &Args, budget: &Budget) -> Result<Vec<ModelRun>> {
    let gpu = place.device.is_cuda();
    let plan = Plan::of(gpu, args.quick);
    println!(
        "\nmodels: a prompt of {}; then {} tokens behind {}",
        plan.prefill, plan.steps, plan.prompt
    );
    println!(
        "{:<18}{:<12}{:<10}{:>11}{:>9}{:>10}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}{:>8}",
        "",
        "",
        "",
        "prefill ms",
        "tokens/s",
        "ms/token",
        "p50",
        "p99",
        "max",
        "kernels",
        "RSS MB",
        "GPU MB",
        "J/token"
    );
    let mut runs = Vec::new();
    for (model, format, forms) in wanted(place, args)? {
        if budget.is_spent() {
            println!("{model} {format}: left out, the time that --budget gives is over");
            continue;
        }
        let job = |form| Job {
            model: model.clone(),
            format: format.clone(),
            form,
            cpu: !gpu,
            threads: args.threads,
            positions: plan.positions(),
        };
        let jobs: Vec<_> = forms.into_iter().map(job).collect();
        let measured = measure(&jobs, &plan).with_context(|| format!("{model} in {format}"))?;
        let compared = measured.iter().map(|run| run.steps + 1).min();
        for run in &measured {
            line(run, compared.unwrap_or(0));
        }
        runs.extend(measured);
    }
    Ok(runs)
}

/// Models with their formats and forms.
fn wanted(place: &Place, args: &Args) -> Result<Vec<(String, String, Vec<Form>)>> {
    let gpu = place.device.is_cuda();
    let extent = Extent::of(args.quick);
    let names: Vec<_> = match args.models.is_empty() {
        false => args.models.clone(),
        // Two cores take minutes for a token of the larger ones in plain bf16.
        true if !gpu => MODELS[..2].iter().map(|shape| shape.name()).collect(),
        true => extent.models().iter().map(|shape| shape.name()).collect(),
    };
    let names = if args.quick && !gpu && args.models.is_empty() {
        &names[..1]
    } else {
        &names[..]
    };
    let mut all = Vec::new();
    for name in names {
        let is_shape = crate::child::is_shape(name);
        let formats = match (args.formats.is_empty(), is_shape) {
            (false, _) => args.formats.clone(),
            (true, false) => vec!["stored".to_owned()],
            (true, true) => place.dtypes.iter().map(|d| d.as_str().to_owned()).collect(),
        };
        for format in formats {
            let plain = format == "stored" || format.parse::<candle_core::DType>().is_ok();
            let forms: Vec<_> = match gpu {
                true => vec![Form::Stock, Form::Settings, Form::Eager, Form::Graph],
                false => vec![Form::Stock, Form::Eager],
            };
            let asked = |form: &Form| args.forms.is_empty() || args.forms.contains(form);
            let forms: Vec<_> = forms
                .into_iter()
                .filter(|form| asked(form) && (plain || form.is_fused()))
                .collect();
            if args.wants(&format!("model {name} {format}")) && !forms.is_empty() {
                all.push((name.clone(), format, forms));
            }
        }
    }
    Ok(all)
}

/// A file or folder by its name alone.
fn name_of(model: &str) -> String {
    let name = std::path::Path::new(model).file_name();
    name.map_or(model, |name| name.to_str().unwrap_or(model))
        .to_owned()
}

/// The forms of a model, in turns where they fit side by side.
fn measure(jobs: &[Job], plan: &Plan) -> Result<Vec<ModelRun>> {
    let bytes = crate::child::weight_bytes(&jobs[0].model, &jobs[0].format)?;
    let turn = |child: &mut Child, form: Form| -> Result<(Turn, Turn)> {
        Ok((
            child.turn(plan.prefill, 0)?,
            child.turn(plan.prompt, plan.steps_of(form))?,
        ))
    };
    let mut turns: Vec<Vec<(Turn, Turn)>> = vec![Vec::new(); jobs.len()];
    let mut lasts = Vec::new();
    let group = if bytes > SIDE_BY_SIDE { 1 } else { jobs.len() };
    for (jobs, turns) in jobs.chunks(group).zip(turns.chunks_mut(group)) {
        let mut children = jobs.iter().map(Child::start).collect::<Result<Vec<_>>>()?;
        for round in 0..=plan.rounds {
            let sides = children.iter_mut().zip(jobs).zip(turns.iter_mut());
            for ((child, job), turns) in sides {
                // The first warms up: it records graphs and loads kernels.
                if round == 0 {
                    child.turn(plan.prefill, 2)?;
                } else {
                    turns.push(turn(child, job.form)?);
                }
            }
        }
        for child in children {
            lasts.push(child.end()?);
        }
    }
    let first = &turns[0][0].1.tokens;
    Ok(jobs
        .iter()
        .zip(&turns)
        .zip(lasts)
        .map(|((job, turns), last)| ModelRun::of(job, plan, turns, first, last))
        .collect())
}

impl ModelRun {
    fn of(job: &Job, plan: &Plan, turns: &[(Turn, Turn)], first: &[u32], last: Last) -> Self {
        let prefill: Vec<_> = turns.iter().map(|(prefill, _)| prefill.prefill).collect();
        let mean = |turn: &Turn| turn.steps.iter().sum::<f64>() / turn.steps.len() as f64;
        let means: Vec<_> = turns.iter().map(|(_, decode)| mean(decode)).collect();
        let steps: Vec<_> = turns
            .iter()
            .flat_map(|(_, decode)| decode.steps.clone())
            .collect();
        let energies: Option<Vec<_>> = turns.iter().map(|(_, decode)| decode.energy).collect();
        let joules = energies.map(|all| all.iter().map(|(joules, _)| joules).sum::<f64>());
        let tokens = &turns[0].1.tokens;
        Self {
            model: name_of(&job.model),
            format: job.format.clone(),
            form: job.form,
            prefill_tokens: plan.prefill,
            prefill: Times::of(&prefill),
            prompt: plan.prompt,
            steps: plan.steps_of(job.form),
            token: Times::of(&means),
            p50: percentile(steps.clone(), 50.),
            p99: percentile(steps.clone(), 99.),
            max: percentile(steps.clone(), 100.),
            agreed: tokens.iter().zip(first).take_while(|(a, b)| a == b).count(),
            joules_per_token: joules.map(|joules| joules / steps.len() as f64),
            last,
        }
    }

    /// Steps of a second.
    pub fn tokens_per_second(&self) -> f64 {
        1. / self.token.median
    }
}

/// `compared` are the tokens that all forms have.
fn line(run: &ModelRun, compared: usize) {
    let or_blank = |value: Option<String>| value.unwrap_or_default();
    let megabytes = |bytes: Option<u64>| or_blank(bytes.map(|b| format!("{:.0}", b as f64 * 1e-6)));
    println!(
        "{:<18}{:<12}{:<10}{:>11.2}{:>9.1}{:>10.3}{:>9.3}{:>9.3}{:>9.3}{:>9}{:>9}{:>9}{:>8}",
        run.model,
        run.format,
        run.form.name(),
        run.prefill.median * 1e3,
        run.tokens_per_second(),
        run.token.median * 1e3,
        run.p50 * 1e3,
        run.p99 * 1e3,
        run.max * 1e3,
        or_blank(run.last.launches.map(|n| n.to_string())),
        megabytes(run.last.peak_rss),
        megabytes(run.last.peak_gpu),
        or_blank(run.joules_per_token.map(|j| format!("{j:.3}"))),
    );
    if run.agreed < compared {
        println!(
            "{:<40}its tokens part from the first form's at the {}th",
            "", run.agreed
        );
    }
    if let Some(why) = &run.last.refusal {
        println!("{:<40}no graph: {why}", "");
    }
}
