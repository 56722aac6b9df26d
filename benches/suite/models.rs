//! The table of models: stock, with settings only, fused one launch after the other, and as a graph.

use crate::args::Args;
use crate::budget::Budget;
use crate::cases::{Extent, MODELS};
use crate::child::{Child, Job, Turn};
use crate::figures::{Last, ModelRun};
use crate::form::Form;
use crate::place::Place;
use crate::stats::Times;
use anyhow::{Context, Result};
use clap::ValueEnum;
use common::comparison::{median, percentile};
use std::time::Instant;

/// How much is measured of each model.
struct Plan {
    prefill: usize,
    prompt: usize,
    /// Of the fastest form (on a CPU of ours), and of the others: those take longer, and are given as
    /// much time as there is.
    steps: usize,
    slow_steps: usize,
    /// Prompts of a round; the first only warms up where there are more.
    prefills: usize,
    /// Rounds, and where all forms are ours on a CPU, whose other users come and go.
    rounds: usize,
    rounds_of_ours: usize,
    fastest: fn(Form) -> bool,
}

impl Plan {
    fn of(gpu: bool, quick: bool) -> Self {
        let plan = |prefill, prompt, (steps, slow_steps), prefills| Self {
            prefill,
            prompt,
            steps,
            slow_steps,
            prefills,
            rounds: 3,
            rounds_of_ours: if gpu || quick { 3 } else { 9 },
            fastest: if gpu {
                |form| form == Form::Graph
            } else {
                Form::is_fused
            },
        };
        match (gpu, quick) {
            (true, false) => plan(512, 128, (512, 64), 8),
            (true, true) => plan(512, 128, (128, 32), 4),
            (false, false) => plan(128, 64, (64, 16), 1),
            (false, true) => plan(32, 16, (6, 6), 1),
        }
    }

    fn steps_of(&self, form: Form) -> usize {
        match (self.fastest)(form) {
            true => self.steps,
            false => self.slow_steps,
        }
    }

    fn rounds_of(&self, jobs: &[Job]) -> usize {
        match jobs.iter().all(|job| job.form.is_fused()) {
            true => self.rounds_of_ours,
            false => self.rounds,
        }
    }

    fn positions(&self) -> usize {
        self.prefill.max(self.prompt + self.steps) + 4
    }
}

/// Keys that the middle one of a model's steps sees.
pub fn context(gpu: bool, quick: bool) -> usize {
    let plan = Plan::of(gpu, quick);
    plan.prompt + plan.steps / 2
}

/// Bytes of weights above which forms are loaded one after the other, not side by side.
fn side_by_side(gpu: bool) -> u64 {
    if gpu { 8 << 30 } else { 4 << 30 }
}

/// What a form's turns took, in the order of the rounds.
#[derive(Clone, Default)]
struct Turns {
    first: Vec<f64>,
    prefills: Vec<f64>,
    decode: Vec<Turn>,
}

impl Turns {
    fn take(&mut self, child: &mut Child, plan: &Plan, form: Form) -> Result<()> {
        let seconds = child.prefills(plan.prefill, plan.prefills)?;
        let warm = usize::from(seconds.len() > 1);
        self.first.extend(seconds.first());
        self.prefills.extend(&seconds[warm..]);
        let turn = child.turn(plan.prompt, plan.steps_of(form))?;
        self.decode.push(turn);
        Ok(())
    }
}

/// Measures every model that is wanted.
pub fn run(place: &Place, args: &Args, budget: &Budget) -> Result<Vec<ModelRun>> {
    let gpu = place.device.is_cuda();
    let plan = Plan::of(gpu, args.quick);
    println!(
        "\nmodels: a prompt of {}; then so many steps behind {}",
        plan.prefill, plan.prompt
    );
    println!(
        "{:<18}{:<12}{:<10}{:>11}{:>7}{:>9}{:>10}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}{:>8}",
        "",
        "",
        "",
        "prefill ms",
        "steps",
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
    let wanted = wanted(place, args)?;
    for group in beside_one_another(&wanted, gpu)? {
        let formats: Vec<_> = group.iter().map(|(_, format, _)| format.as_str()).collect();
        let (model, formats) = (&group[0].0, formats.join(", "));
        if budget.is_spent() {
            println!("{model} {formats}: left out, the time that --budget gives is over");
            continue;
        }
        let job = |(model, format, form): (&String, &String, Form)| Job {
            model: model.clone(),
            format: format.clone(),
            form,
            cpu: !gpu,
            threads: args.most_threads(),
            positions: plan.positions(),
        };
        let forms = group.iter().flat_map(|(model, format, forms)| {
            forms.iter().map(move |form| (model, format, *form))
        });
        let jobs: Vec<_> = forms.map(job).collect();
        let started = Instant::now();
        let measured = measure(&jobs, &plan).with_context(|| format!("{model} in {formats}"))?;
        let compared = measured.iter().map(|run| run.steps + 1).min();
        for run in &measured {
            line(run, compared.unwrap_or(0));
        }
        let seconds = started.elapsed().as_secs_f64();
        let loads = measured.iter().map(|run| format!("{:.2}", run.last.load));
        let loads = loads.collect::<Vec<_>>().join(", ");
        println!(
            "{:<40}loaded in {loads} s, with all measurements {seconds:.0} s",
            ""
        );
        runs.extend(measured);
    }
    Ok(runs)
}

/// A model's name, a format, and the forms in it.
type Wanted = (String, String, Vec<Form>);

/// Whose rounds take turns: the forms of a format, on a CPU those of all formats of a model if they fit
/// side by side, so that what else the machine does meets all formats alike.
fn beside_one_another(wanted: &[Wanted], gpu: bool) -> Result<Vec<&[Wanted]>> {
    let mut groups = Vec::new();
    for formats in wanted.chunk_by(|a, b| a.0 == b.0) {
        let mut bytes = 0;
        for (model, format, forms) in formats {
            bytes += crate::child::weight_bytes(model, format)? * forms.len() as u64;
        }
        match !gpu && bytes <= side_by_side(gpu) {
            true => groups.push(formats),
            false => groups.extend(formats.chunks(1)),
        }
    }
    Ok(groups)
}

/// Models with their formats and forms.
fn wanted(place: &Place, args: &Args) -> Result<Vec<Wanted>> {
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
                true => Form::value_variants().to_vec(),
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

/// The forms of a model's formats, in turns where they fit side by side.
fn measure(jobs: &[Job], plan: &Plan) -> Result<Vec<ModelRun>> {
    let bytes = crate::child::weight_bytes(&jobs[0].model, &jobs[0].format)?;
    let mut turns = vec![Turns::default(); jobs.len()];
    let mut lasts = Vec::new();
    let group = match bytes > side_by_side(!jobs[0].cpu) {
        true => 1,
        false => jobs.len(),
    };
    for (jobs, turns) in jobs.chunks(group).zip(turns.chunks_mut(group)) {
        let mut children = Child::start_all(jobs)?;
        for round in 0..=plan.rounds_of(jobs) {
            let sides = children.iter_mut().zip(jobs).zip(turns.iter_mut());
            for ((child, job), turns) in sides {
                // The first warms up: it records graphs and loads kernels.
                if round == 0 {
                    child.turn(plan.prefill, 2)?;
                } else {
                    turns.take(child, plan, job.form)?;
                }
            }
        }
        for child in children {
            lasts.push(child.end()?);
        }
    }
    let mut runs = Vec::new();
    for ((job, own), last) in jobs.iter().zip(&turns).zip(lasts) {
        let first = jobs
            .iter()
            .zip(&turns)
            .find(|(j, _)| j.format == job.format);
        let first = first.map_or(own, |(_, turns)| turns);
        runs.push(summary(job, plan, own, &first.decode[0].tokens, last));
    }
    Ok(runs)
}

/// What a form's turns come to.
fn summary(job: &Job, plan: &Plan, turns: &Turns, first: &[u32], last: Last) -> ModelRun {
    let decode = &turns.decode;
    let mean = |turn: &Turn| turn.steps.iter().sum::<f64>() / turn.steps.len() as f64;
    let means: Vec<_> = decode.iter().map(mean).collect();
    let steps: Vec<_> = decode.iter().flat_map(|turn| turn.steps.clone()).collect();
    let energies: Option<Vec<_>> = decode.iter().map(|turn| turn.energy).collect();
    // The GPU's counter moves ten times a second: what it did not see is not nothing.
    let joules = energies
        .map(|all| all.iter().map(|(joules, _)| joules).sum::<f64>())
        .filter(|joules| *joules > 0.);
    let tokens = &decode[0].tokens;
    ModelRun {
        model: name_of(&job.model),
        format: job.format.clone(),
        form: job.form,
        prefill_tokens: plan.prefill,
        prefill: Times::of(&turns.prefills),
        prefill_first: Some(median(turns.first.clone())),
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

/// In MB, or nothing.
pub fn megabytes(bytes: Option<u64>) -> String {
    bytes.map_or_else(String::new, |bytes| format!("{:.0}", bytes as f64 * 1e-6))
}

/// `compared` are the tokens that all forms have.
fn line(run: &ModelRun, compared: usize) {
    let or_blank = |value: Option<String>| value.unwrap_or_default();
    println!(
        "{:<18}{:<12}{:<10}{:>11.2}{:>7}{:>9.1}{:>10.3}{:>9.3}{:>9.3}{:>9.3}{:>9}{:>9}{:>9}{:>8}",
        run.model,
        run.format,
        run.form.name(),
        run.prefill.median * 1e3,
        run.steps,
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
            "{:<40}{} of its tokens are the first form's, then they part",
            "", run.agreed
        );
    }
    if let Some(why) = &run.last.refusal {
        println!("{:<40}no graph: {why}", "");
    }
}
