//! Prompts and decoding on the CPU over the number of threads, which take turns.

use crate::args::Args;
use crate::budget::Budget;
use crate::cases::Extent;
use crate::child::{Child, Job};
use crate::figures::ThreadRun;
use crate::form::Form;
use crate::stats::Times;
use anyhow::{Context, Result, ensure};
use candle_core::Device;
use common::comparison::median;

/// Tokens of a prompt, and in front of the steps.
const PREFILL: usize = 512;
const PROMPT: usize = 64;

/// What is measured if no formats are named: all in floats, and as small files hold models.
const FORMATS: [&str; 3] = ["f32", "bf16", "q4_0+head"];

/// Fails if the threads of a run on `device` do not make a table.
pub fn check(device: &Device, args: &Args) -> Result<()> {
    ensure!(
        device.is_cpu(),
        "several --threads measure the CPU: add --cpu"
    );
    ensure!(
        !args.threads.is_empty(),
        "how many threads? Name them, as --threads 1,2,4"
    );
    Ok(())
}

/// Measures every model and format that is wanted on every number of threads.
pub fn run(args: &Args, budget: &Budget) -> Result<Vec<ThreadRun>> {
    let models: Vec<_> = match args.models.is_empty() {
        true => vec![Extent::Quick.models()[0].name().to_owned()],
        false => args.models.clone(),
    };
    let formats: Vec<_> = match args.formats.is_empty() {
        true => FORMATS.map(str::to_owned).to_vec(),
        false => args.formats.clone(),
    };
    println!("\nthreads: a prompt of {PREFILL}; then steps behind {PROMPT}");
    println!(
        "{:<18}{:<12}{:>8}{:>12}{:>10}{:>8}{:>12}{:>10}{:>8}",
        "", "", "threads", "prompt ms", "tokens/s", "", "ms/token", "tokens/s", ""
    );
    let mut runs = Vec::new();
    for model in &models {
        for format in &formats {
            if budget.is_spent() || !args.wants(&format!("threads {model} {format}")) {
                continue;
            }
            let what = || format!("{model} in {format}");
            let measured = measure(model, format, args).with_context(what)?;
            measured.iter().for_each(|run| line(run, &measured[0]));
            runs.extend(measured);
        }
    }
    Ok(runs)
}

/// One model, with a process for each number of threads: a pool's is fixed.
fn measure(model: &str, format: &str, args: &Args) -> Result<Vec<ThreadRun>> {
    let (rounds, prefills, steps) = if args.quick { (2, 2, 16) } else { (7, 3, 64) };
    let job = |threads: &usize| Job {
        model: model.to_owned(),
        format: format.to_owned(),
        form: Form::Eager,
        cpu: true,
        threads: Some(*threads),
        positions: PREFILL.max(PROMPT + steps) + 4,
    };
    let jobs: Vec<_> = args.threads.iter().map(job).collect();
    let mut children = Child::start_all(&jobs)?;
    let mut times = vec![(Vec::new(), Vec::new()); jobs.len()];
    for round in 0..=rounds {
        for (child, (prompts, tokens)) in children.iter_mut().zip(&mut times) {
            let seconds = child.prefills(PREFILL, prefills)?;
            let turn = child.turn(PROMPT, steps)?;
            // The first round warms up, and so does the first prompt of a turn.
            if round > 0 {
                prompts.extend(&seconds[1..]);
                tokens.push(median(turn.steps));
            }
        }
    }
    children.into_iter().try_for_each(|c| c.end().map(|_| ()))?;
    let run = |(threads, (prompts, tokens)): (&usize, &(Vec<f64>, Vec<f64>))| ThreadRun {
        model: model.to_owned(),
        format: format.to_owned(),
        threads: *threads,
        prefill_tokens: PREFILL,
        prefill: Times::of(prompts),
        prompt: PROMPT,
        token: Times::of(tokens),
    };
    Ok(args.threads.iter().zip(&times).map(run).collect())
}

fn line(run: &ThreadRun, first: &ThreadRun) {
    let (prefill, token) = (run.prefill.median, run.token.median);
    println!(
        "{:<18}{:<12}{:>8}{:>12.2}{:>10.0}{:>8}{:>12.3}{:>10.1}{:>8}",
        run.model,
        run.format,
        run.threads,
        prefill * 1e3,
        run.prefill_tokens as f64 / prefill,
        format!("{:.2}x", first.prefill.median / prefill),
        token * 1e3,
        1. / token,
        format!("{:.2}x", first.token.median / token),
    );
}
