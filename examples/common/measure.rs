//! One side alone: prefill, decode, and on a GPU where a step's time goes.

use std::time::Instant;

use anyhow::{Result, ensure};
use candle_core::Device;
use candle_fused::Fusion;
use candle_fused::generation::{Generation, Options};

use super::comparison::{median, percentile};
use super::generate::TextModel;
#[cfg(feature = "cuda")]
use super::profile;
use super::quantize::QuantizeArgs;
use super::weights::Weights;
use super::{fused, gpu, report, stock};

/// Times that the prompt is read; the first is told apart.
const PREFILLS: usize = 6;

/// What to measure.
pub struct Measurement<'a> {
    pub name: &'a str,
    pub dtype: Option<candle_core::DType>,
    pub quantize: &'a QuantizeArgs,
    pub device: &'a Device,
    pub prompt: &'a [u32],
    pub sample_len: usize,
    /// Sequences side by side; plain candle runs one.
    pub sequences: usize,
    pub graph: bool,
}

impl Measurement<'_> {
    /// Measures plain candle, or with `fusion` the fused model.
    pub fn run(&self, weights: Weights, fusion: Option<Fusion>) -> Result<()> {
        ensure!(
            self.sample_len > 2,
            "--sample-len is {}, expected at least 3: the first token is the prefill's, the second \
             records the step",
            self.sample_len
        );
        gpu::tune(self.device, fusion.is_some())?;
        let stored = || weights.stored_as();
        let dtype = match (self.dtype, self.quantize.describe()) {
            (_, Some(quantized)) if fusion.is_some() => quantized,
            (dtype, _) => dtype.map_or_else(stored, |d| d.as_str().to_owned()),
        };
        let model = match fusion {
            Some(fusion) => {
                let recipe = self.quantize.recipe();
                fused::load(weights, self.dtype, self.device, fusion, recipe.as_ref())?
            }
            None => stock::load(weights, self.dtype, self.device)?,
        };
        let bytes = model.bytes_per_step();
        let mut runner = self.runner(model, fusion.is_some())?;
        let mut prefill = Vec::new();
        for _ in 0..PREFILLS {
            let begun = Instant::now();
            runner.prefill(0, self.prompt)?;
            prefill.push(begun.elapsed().as_secs_f64() * 1e3);
        }
        for index in 1..self.sequences {
            runner.prefill(index, self.prompt)?;
        }
        // The first step records the graph.
        runner.step()?;
        let mut steps = Vec::new();
        let begun = Instant::now();
        for _ in 2..self.sample_len {
            let step = Instant::now();
            runner.step()?;
            steps.push(step.elapsed().as_secs_f64() * 1e3);
        }
        let rate = steps.len() as f64 / begun.elapsed().as_secs_f64();
        let text = format!(
            "{} {dtype} on {}: {} sequences, positions {}-{}\n\
             prefill of {}: {:.3} ms (first {:.1} ms)\n\
             decode: {rate:.0} steps/s, {:.3} ms a step (p50 {:.3}, p99 {:.3}){}\n",
            self.name,
            gpu::name(self.device),
            self.sequences,
            self.prompt.len(),
            self.prompt.len() + self.sample_len,
            self.prompt.len(),
            median(prefill[1..].to_vec()),
            prefill[0],
            1e3 / rate,
            median(steps.clone()),
            percentile(steps, 99.),
            runner.kernels(),
        );
        report::write_text(&mut std::io::stdout().lock(), &text)?;
        let Runner::Fused(mut generation) = runner else {
            return Ok(());
        };
        if let Some(why) = generation.graph_refusal() {
            report::say(format_args!("no CUDA graph: {why}"));
        }
        breakdown(&mut generation, self.device, bytes.unwrap_or(0), rate)
    }

    fn runner(&self, model: Box<dyn TextModel>, fused: bool) -> Result<Runner> {
        let positions = self.prompt.len() + self.sample_len;
        ensure!(
            positions <= model.context_length(),
            "{} prompt tokens and --sample-len {} do not fit into the model's {} positions",
            self.prompt.len(),
            self.sample_len,
            model.context_length()
        );
        ensure!(
            fused || self.sequences == 1,
            "--sequences {} is for the fused side; plain candle runs one",
            self.sequences
        );
        let options = Options {
            sequences: self.sequences,
            positions: Some(positions),
            graph: self.graph,
            ..Default::default()
        };
        Runner::new(model, fused.then_some(&options))
    }
}

/// A model in its token loop.
pub enum Runner {
    Fused(Box<Generation>),
    Stock {
        model: Box<dyn TextModel>,
        position: usize,
        token: u32,
    },
}

impl Runner {
    /// In the loop of [`Generation`] with `options`, or one forward pass after the other.
    pub fn new(model: Box<dyn TextModel>, options: Option<&Options>) -> Result<Self> {
        Ok(match options {
            Some(options) => Self::Fused(Box::new(model.generation(options)?)),
            None => Self::Stock {
                model,
                position: 0,
                token: 0,
            },
        })
    }

    /// Reads the prompt of sequence `index` from its beginning.
    pub fn prefill(&mut self, index: usize, prompt: &[u32]) -> Result<()> {
        match self {
            Self::Fused(generation) => {
                generation.truncate(index, 0)?;
                generation.extend(index, prompt)?;
            }
            Self::Stock {
                model,
                position,
                token,
            } => {
                model.clear()?;
                *token = model.forward(prompt, 0)?.argmax(0)?.to_scalar()?;
                *position = prompt.len();
            }
        }
        Ok(())
    }

    /// Takes one token in, and chooses the next.
    pub fn step(&mut self) -> Result<()> {
        match self {
            Self::Fused(generation) => {
                generation.step()?;
            }
            Self::Stock {
                model,
                position,
                token,
            } => {
                let logits = model.forward(&[*token], *position)?;
                *token = logits.argmax(0)?.to_scalar()?;
                *position += 1;
            }
        }
        Ok(())
    }

    /// The token that was chosen last.
    pub fn token(&self) -> u32 {
        match self {
            Self::Fused(generation) => generation.pending(0).unwrap_or(0),
            Self::Stock { token, .. } => *token,
        }
    }

    fn kernels(&self) -> String {
        match self {
            Self::Fused(generation) if generation.kernels_per_step() > 0 => {
                format!(", {} kernels a step", generation.kernels_per_step())
            }
            _ => String::new(),
        }
    }
}

/// Where a step's time goes, against what the memory allows.
#[cfg(feature = "cuda")]
fn breakdown(generation: &mut Generation, device: &Device, bytes: u64, rate: f64) -> Result<()> {
    let Device::Cuda(cuda) = device else {
        return Ok(());
    };
    let bandwidth = candle_fused::cuda::profile::copy_bandwidth(cuda)?;
    let lines = profile::lines(&generation.profile(20)?);
    let text = format!(
        "weights {:.1} MB, copy bandwidth {:.2} TB/s: {:.1} % of weights / bandwidth\n{}",
        bytes as f64 / 1e6,
        bandwidth / 1e12,
        100. * rate * bytes as f64 / bandwidth,
        profile::table("decode step", &lines, bandwidth)
    );
    report::write_text(&mut std::io::stdout().lock(), &text)
}

/// Copies on the host show nothing that a step could be held against.
#[cfg(not(feature = "cuda"))]
fn breakdown(_: &mut Generation, _: &Device, _: u64, _: f64) -> Result<()> {
    Ok(())
}
