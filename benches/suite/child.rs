//! A model's side in a process of its own: so its memory is its own, and sides take turns. The
//! parent writes a line for each turn, the child answers with a line of JSON.

use crate::figures::Last;
use crate::form::Form;
use crate::nvml::Meter;
use anyhow::{Context, Result, bail};
use candle_core::{DType, Device};
use candle_fused::generation::Options;
use candle_fused::quant::{Quantization, Recipe};
use candle_fused::{ActivationBits, Fusion};
use clap::ValueEnum;
use common::compare::launches;
use common::measure::Runner;
use common::report::peak_memory;
use common::source::{self, Located, SourceOptions};
use common::weights::{self, Weights};
use common::{fused, gpu, shapes, stock};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child as Process, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

/// What a child is to run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// The name of a shape, or of a model's file, folder or repository.
    pub model: String,
    /// A dtype, a format that the layers are quantized to (with `+head`: the head too; with `@f32`: that dtype of
    /// activations), or `stored` (likewise).
    pub format: String,
    pub form: Form,
    pub cpu: bool,
    pub threads: Option<usize>,
    /// Positions that there is room for.
    pub positions: usize,
}

/// A line from the parent.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Request {
    /// Read `prompt` tokens and generate as many as `steps`.
    Turn {
        prompt: usize,
        steps: usize,
    },
    /// Read `prompt` tokens so many times, one behind the other.
    Prefills {
        prompt: usize,
        times: usize,
    },
    End,
}

/// What a turn took.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Turn {
    /// Seconds of each step.
    pub steps: Vec<f64>,
    /// Joules and seconds of all steps.
    pub energy: Option<(f64, f64)>,
    pub tokens: Vec<u32>,
}

/// The parent's end.
pub struct Child {
    process: Process,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Child {
    /// Starts this program again for each job; they load their models side by side.
    pub fn start_all(jobs: &[Job]) -> Result<Vec<Self>> {
        let mut children = jobs.iter().map(Self::spawn).collect::<Result<Vec<_>>>()?;
        // A child's first line says that it has loaded.
        children.iter_mut().try_for_each(Self::answer::<()>)?;
        Ok(children)
    }

    /// One that has loaded its model.
    pub fn start(job: &Job) -> Result<Self> {
        let mut child = Self::spawn(job)?;
        child.answer::<()>()?;
        Ok(child)
    }

    fn spawn(job: &Job) -> Result<Self> {
        let this = std::env::current_exe().context("cannot find this program")?;
        let mut process = Command::new(this)
            .args(["--child", &serde_json::to_string(job)?])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start this program again")?;
        let (to, from) = (process.stdin.take(), process.stdout.take());
        let (Some(to), Some(from)) = (to, from) else {
            bail!("the child has no standard input or output");
        };
        let from = BufReader::new(from);
        Ok(Self { process, to, from })
    }

    pub fn turn(&mut self, prompt: usize, steps: usize) -> Result<Turn> {
        self.ask(&Request::Turn { prompt, steps })?;
        self.answer()
    }

    /// Seconds of each prompt, its token included. The first finds the caches and the clocks as
    /// another process or another prompt left them.
    pub fn prefills(&mut self, prompt: usize, times: usize) -> Result<Vec<f64>> {
        self.ask(&Request::Prefills { prompt, times })?;
        self.answer()
    }

    pub fn end(mut self) -> Result<Last> {
        self.ask(&Request::End)?;
        let last = self.answer()?;
        self.process.wait()?;
        Ok(last)
    }

    fn ask(&mut self, request: &Request) -> Result<()> {
        writeln!(self.to, "{}", serde_json::to_string(request)?)?;
        Ok(self.to.flush()?)
    }

    fn answer<T: for<'a> Deserialize<'a>>(&mut self) -> Result<T> {
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        serde_json::from_str(&line).context("a model's process ended early")
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // One that has ended already cannot be killed.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The child's end.
pub fn serve(job: &str) -> Result<()> {
    let job: Job = serde_json::from_str(job)?;
    if let Some(threads) = job.threads {
        candle_fused::cpu::pool::set_threads(threads);
    }
    let device = match job.cpu {
        true => Device::Cpu,
        false => Device::new_cuda(0)?,
    };
    gpu::tune(&device, !job.form.leaves_settings())?;
    let started = Instant::now();
    let model = load(&job, &device)?;
    let mut last = Last {
        load: started.elapsed().as_secs_f64(),
        bytes: model.bytes_per_step(),
        ..Default::default()
    };
    let vocab = model.vocab_size();
    let options = Options {
        positions: Some(job.positions),
        graph: job.form == Form::Graph,
        ..Default::default()
    };
    let mut runner = Runner::new(model, job.form.has_generation().then_some(&options))?;
    let meter = Meter::new(device.is_cuda());
    say(&())?;
    let mut longest = 1;
    for line in std::io::stdin().lock().lines() {
        match serde_json::from_str(&line?)? {
            Request::Turn { prompt, steps } => {
                longest = longest.max(prompt);
                let ids = shapes::tokens(prompt, vocab);
                say(&turn(&mut runner, &ids, steps, meter.as_ref())?)?;
            }
            Request::Prefills { prompt, times } => {
                let ids = shapes::tokens(prompt, vocab);
                let seconds = (0..times).map(|_| prefill(&mut runner, &ids));
                say(&seconds.collect::<Result<Vec<_>>>()?)?;
            }
            Request::End => break,
        }
    }
    last.peak_rss = peak_memory();
    last.peak_gpu = gpu::peak_memory(&device);
    match &mut runner {
        Runner::Fused(generation) => {
            last.launches = Some(generation.kernels_per_step() as u64).filter(|n| *n > 0);
            last.refusal = generation.graph_refusal().map(str::to_owned);
            let parts = generation.profile(20)?;
            let part = |p: &candle_fused::generation::PartTime| {
                (p.part.to_owned(), p.launches, p.seconds, p.bytes)
            };
            last.parts = parts.iter().map(part).collect();
        }
        Runner::Stock { model, .. } => {
            let ids = shapes::tokens(longest.min(16), vocab);
            last.launches = launches(model.as_mut(), &ids, false)?;
        }
    }
    say(&last)
}

fn say<T: Serialize>(value: &T) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(value)?)?;
    Ok(out.flush()?)
}

/// The model of a job.
pub fn load(job: &Job, device: &Device) -> Result<Box<dyn common::generate::TextModel>> {
    let located = located(&job.model)?;
    let weights = weights::open(&located.files)?;
    let (format, asked) = activations_dtype(&job.format)?;
    let (weights, asked) = match (&weights, format) {
        (Weights::Gguf { .. }, "stored") => (weights.with_compute_dtype(asked)?, None),
        _ => (weights, asked),
    };
    let dtype = format.parse::<DType>().ok();
    let recipe = match (dtype, format) {
        (Some(_), _) | (None, "stored") => None,
        (None, format) => Some(recipe(format)?),
    };
    // Whose activations stay as they are.
    let dtype = dtype
        .or(asked)
        .or((job.cpu && recipe.is_some()).then_some(DType::F32));
    let fusion = Fusion {
        activations: activations(&job.model),
        ..Fusion::all()
    };
    match job.form {
        form if form.is_fused() => fused::load(weights, dtype, device, fusion, recipe.as_ref()),
        _ if recipe.is_some() => bail!("plain candle does not quantize what it loads"),
        _ => stock::load(weights, dtype, device),
    }
}

/// How a model's quantized products take their activations.
fn activations(model: &str) -> ActivationBits {
    match shapes::Shape::from_str(model, true) {
        // As its layers were trained.
        Ok(shapes::Shape::BitNet) => ActivationBits::PerToken8,
        _ => ActivationBits::Auto,
    }
}

/// A quantized format, and the dtype behind `@` that its activations are to have.
pub fn activations_dtype(format: &str) -> Result<(&str, Option<DType>)> {
    Ok(match format.split_once('@') {
        Some((format, dtype)) => (format, Some(dtype.parse()?)),
        None => (format, None),
    })
}

fn recipe(format: &str) -> Result<Recipe> {
    let (layers, head) = match format.strip_suffix("+head") {
        Some(layers) => (layers.parse::<Quantization>()?, true),
        None => (format.parse()?, false),
    };
    let recipe = Recipe::new(layers);
    Ok(if head {
        recipe.with_head(layers)
    } else {
        recipe
    })
}

/// Whether a model is a named shape.
pub fn is_shape(model: &str) -> bool {
    shapes::Shape::from_str(model, true).is_ok()
}

/// Bytes of a model's weights, about.
pub fn weight_bytes(model: &str, format: &str) -> Result<u64> {
    let Ok(shape) = shapes::Shape::from_str(model, true) else {
        return Ok(0);
    };
    let size = format
        .parse::<DType>()
        .map_or(2, |dtype| dtype.size_in_bytes());
    Ok((crate::cases::Dims::of(shape)?.weights() * size) as u64)
}

/// A shape, or a model that is found as the examples find it.
fn located(model: &str) -> Result<Located> {
    match shapes::Shape::from_str(model, true) {
        Ok(shape) => Ok(shape.located()),
        Err(_) => source::locate(Some(model), None, &SourceOptions::from_env()),
    }
}

/// Seconds until the host knows the token behind the prompt.
fn prefill(runner: &mut Runner, prompt: &[u32]) -> Result<f64> {
    let started = Instant::now();
    runner.prefill(0, prompt)?;
    Ok(started.elapsed().as_secs_f64())
}

fn turn(runner: &mut Runner, prompt: &[u32], steps: usize, meter: Option<&Meter>) -> Result<Turn> {
    prefill(runner, prompt)?;
    let mut tokens = vec![runner.token()];
    let mut times = Vec::new();
    let mut walk = || -> Result<()> {
        for _ in 0..steps {
            let started = Instant::now();
            runner.step()?;
            times.push(started.elapsed().as_secs_f64());
            tokens.push(runner.token());
        }
        Ok(())
    };
    let energy = match meter {
        Some(meter) => {
            let (walked, energy) = meter.around(walk);
            walked?;
            energy
        }
        None => {
            walk()?;
            None
        }
    };
    Ok(Turn {
        steps: times,
        energy,
        tokens,
    })
}
