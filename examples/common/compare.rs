//! Stock candle and the fused model on the same weights and prompt, in turns.

use super::args;
use super::comparison::{CompareReport, JsonFile, LayerError, Probe, Round, Side, Speedup, median};
use super::distance::Distance;
use super::generate::TextModel;
use super::quantize::QuantizeArgs;
use super::source::Located;
use super::{fused, gpu, report, stock, weights};
use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use candle_fused::generation::{self, Options};
use candle_fused::{Fusion, trace};
use std::process::Command;
use std::time::{Duration, Instant};

/// Rounds in which both sides take a turn.
const ROUNDS: usize = 3;

/// One of the two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Plain candle, as [`stock::load`] gives it.
    Stock,
    /// The same on a GPU whose settings are changed.
    Settings,
    /// candle-fused's, with these fusions.
    Fused(Fusion),
}

/// What to compare.
pub struct Comparison<'a> {
    pub located: &'a Located,
    pub dtype: Option<DType>,
    /// How the fused side is quantized.
    pub quantize: &'a QuantizeArgs,
    pub device: &'a Device,
    pub fusion: Fusion,
    pub prompt: &'a [u32],
    pub sample_len: usize,
    /// Whether the fused side may record its step as a CUDA graph.
    pub graph: bool,
}

/// A greedy generation and what it took.
struct Generation {
    tokens: Vec<u32>,
    /// The best logit minus the second best at each step.
    margins: Vec<f32>,
    load: Duration,
    round: Round,
}

impl Comparison<'_> {
    /// Answers a probe, or compares, prints the report and writes it to `json`.
    pub fn carry_out(&self, probe: Option<args::Side>, json: Option<JsonFile>) -> Result<()> {
        match probe {
            Some(args::Side::Settings) => return self.answer_probe(Form::Settings),
            Some(args::Side::Stock) => return self.answer_probe(Form::Stock),
            Some(args::Side::Fused) => return self.answer_probe(Form::Fused(self.fusion)),
            None => {}
        }
        let report = self.run()?;
        report::write_text(&mut std::io::stdout().lock(), &report.to_string())?;
        json.map_or(Ok(()), |file| file.write(&report))
    }

    /// Runs the rounds and gathers the report.
    fn run(&self) -> Result<CompareReport> {
        let (mut stock, _) = self.load(Form::Stock)?;
        let (mut fused, _) = self.load(Form::Fused(self.fusion))?;
        let context = stock.context_length().min(fused.context_length());
        if self.prompt.len() + self.sample_len > context {
            bail!(
                "{} prompt tokens and --sample-len {} do not fit into the {context} positions that \
                 both sides have",
                self.prompt.len(),
                self.sample_len
            );
        }
        let probes = self
            .forms()
            .map(|form| form.map(|form| self.probe(form.side())).transpose());
        let mut generations = [Vec::new(), Vec::new(), Vec::new()];
        for round in 0..ROUNDS {
            report::say(format_args!("round {} of {ROUNDS}", round + 1));
            for (form, runs) in self.forms().into_iter().zip(&mut generations) {
                let Some(form) = form else { continue };
                let (mut model, load) = self.load(form)?;
                runs.push(self.generate(model.as_mut(), load)?);
            }
        }
        let side = |index: usize, probe: Option<Probe>| -> Option<Side> {
            let probe = probe?;
            let runs: &[Generation] = &generations[index];
            let rounds: Vec<_> = runs.iter().map(|g| g.round.clone()).collect();
            let load = median(runs.iter().map(|g| g.load.as_secs_f64()).collect());
            let load = Duration::from_secs_f64(load);
            Some(Side::of_rounds(load, self.prompt.len(), &rounds, probe))
        };
        let [a, b, c] = probes;
        let (stock_side, settings, fused_side) = (side(0, a?), side(1, b?), side(2, c?));
        let (Some(stock_side), Some(fused_side)) = (stock_side, fused_side) else {
            bail!("nothing was measured");
        };
        let (reference, fused_run) = (&generations[0][0], &generations[2][0]);
        let first_mismatch = first_difference(&reference.tokens, &fused_run.tokens);
        Ok(CompareReport {
            model: self.located.name.clone(),
            baseline: stock::Kind::of(&weights::open(&self.located.files)?)?
                .name()
                .to_owned(),
            device: gpu::name(self.device),
            dtype: self.dtype_name()?,
            threads: candle_fused::cpu::pool::threads(),
            prompt_tokens: self.prompt.len(),
            sample_len: self.sample_len,
            tokens_match: first_mismatch.is_none(),
            first_mismatch,
            mismatch_margin: first_mismatch.map(|at| f64::from(reference.margins[at])),
            max_logit_diff: self.logit_difference(stock.as_mut(), fused.as_mut(), reference)?,
            layers: self.layers(fused.as_mut())?,
            op_calls: self.calls(fused.as_mut())?,
            speedup: Speedup::of(&stock_side, &fused_side),
            stock: stock_side,
            settings,
            fused: fused_side,
        })
    }

    /// Stock, stock with settings where there are any, and fused.
    fn forms(&self) -> [Option<Form>; 3] {
        let settings = self.device.is_cuda().then_some(Form::Settings);
        [Some(Form::Stock), settings, Some(Form::Fused(self.fusion))]
    }

    fn load(&self, form: Form) -> Result<(Box<dyn TextModel>, Duration)> {
        let weights = weights::open(&self.located.files)?;
        // A device of its own, so that one side's settings do not reach the other.
        let device = match self.device {
            Device::Cpu => Device::Cpu,
            _ => Device::new_cuda(0)?,
        };
        gpu::tune(&device, form != Form::Stock)?;
        let started = Instant::now();
        let model = match form {
            Form::Stock | Form::Settings => stock::load(weights, self.dtype, &device)?,
            Form::Fused(fusion) => {
                let recipe = self.quantize.recipe();
                fused::load(weights, self.dtype, &device, fusion, recipe.as_ref())?
            }
        };
        Ok((model, started.elapsed()))
    }

    fn dtype_name(&self) -> Result<String> {
        let stored = match self.dtype {
            Some(dtype) => dtype.as_str().to_owned(),
            None => weights::open(&self.located.files)?.stored_as(),
        };
        Ok(match self.quantize.describe() {
            Some(quantized) => format!("{stored} against {quantized}"),
            None => stored,
        })
    }

    fn generate(&self, model: &mut dyn TextModel, load: Duration) -> Result<Generation> {
        let options = Options {
            positions: Some(self.prompt.len() + self.sample_len),
            graph: self.graph,
            ..Default::default()
        };
        if model.chooses_tokens() {
            return self.generate_on_device(model.generation(&options)?, load);
        }
        model.clear()?;
        let (mut tokens, mut margins, mut steps) = (Vec::new(), Vec::new(), Vec::new());
        let started = Instant::now();
        let logits = model.forward(self.prompt, 0)?;
        model.device().synchronize()?;
        let prefill = started.elapsed();
        let (token, margin) = best(&logits)?;
        let first_token = started.elapsed();
        tokens.push(token);
        margins.push(margin);
        while tokens.len() < self.sample_len {
            let started = Instant::now();
            let position = self.prompt.len() + tokens.len() - 1;
            let logits = model.forward(&tokens[tokens.len() - 1..], position)?;
            let (token, margin) = best(&logits)?;
            steps.push(started.elapsed());
            tokens.push(token);
            margins.push(margin);
        }
        Ok(Generation {
            tokens,
            margins,
            load,
            round: Round {
                first_token,
                prefill,
                steps,
            },
        })
    }

    /// The same where the tokens are chosen on the device; the margins stay there.
    fn generate_on_device(
        &self,
        mut generation: generation::Generation,
        load: Duration,
    ) -> Result<Generation> {
        let started = Instant::now();
        let mut tokens = vec![generation.extend(0, self.prompt)?];
        let first_token = started.elapsed();
        let mut steps = Vec::new();
        while tokens.len() < self.sample_len {
            let started = Instant::now();
            tokens.extend(generation.step()?[0]);
            steps.push(started.elapsed());
        }
        if let Some(why) = generation.graph_refusal() {
            report::say(format_args!("no CUDA graph: {why}"));
        }
        Ok(Generation {
            margins: vec![f32::NAN; tokens.len()],
            tokens,
            load,
            round: Round {
                first_token,
                prefill: first_token,
                steps,
            },
        })
    }

    /// The largest difference of a logit over the whole generation, both sides fed stock's tokens.
    fn logit_difference(
        &self,
        stock: &mut dyn TextModel,
        fused: &mut dyn TextModel,
        generation: &Generation,
    ) -> Result<f64> {
        stock.clear()?;
        fused.clear()?;
        let mut largest = 0f64;
        let mut step = |ids: &[u32], position| -> Result<()> {
            let expected = stock.forward(ids, position)?;
            let distance = Distance::between(&fused.forward(ids, position)?, &expected)?;
            largest = largest.max(distance.largest);
            Ok(())
        };
        step(self.prompt, 0)?;
        for (i, token) in generation.tokens[..generation.tokens.len() - 1]
            .iter()
            .enumerate()
        {
            step(&[*token], self.prompt.len() + i)?;
        }
        Ok(largest)
    }

    /// The error of each hidden state of the prompt. candle-transformers shows none, so the other
    /// side is the same model with every fusion off, which runs candle's own operations.
    fn layers(&self, fused: &mut dyn TextModel) -> Result<Vec<LayerError>> {
        let (mut plain, _) = self.load(Form::Fused(Fusion::none()))?;
        let ids = Tensor::new(self.prompt, &Device::Cpu)?.unsqueeze(0)?;
        let pairs = (fused.hidden_states(&ids)?, plain.hidden_states(&ids)?);
        let (Some((fused, _)), Some((plain, _))) = pairs else {
            return Ok(Vec::new());
        };
        fused
            .iter()
            .zip(&plain)
            .enumerate()
            .map(|(i, (f, p))| layer_error(i, f, p))
            .collect()
    }

    /// Calls of each fused op for one token behind the prompt.
    fn calls(&self, fused: &mut dyn TextModel) -> Result<std::collections::BTreeMap<String, u64>> {
        fused.clear()?;
        fused.forward(self.prompt, 0)?;
        let last = &self.prompt[self.prompt.len() - 1..];
        let (logits, calls) = trace::capture(|| fused.forward(last, self.prompt.len()));
        logits?;
        Ok(calls
            .by_op()
            .into_iter()
            .map(|(op, n)| (op.to_owned(), n))
            .collect())
    }

    /// What one side alone takes, measured in a process of its own.
    fn probe(&self, side: &str) -> Result<Probe> {
        report::say(format_args!("measuring the memory of the {side} side"));
        let this = std::env::current_exe().context("cannot find this program")?;
        let output = Command::new(this)
            .args(std::env::args_os().skip(1))
            .args(["--probe", side])
            .output()
            .context("cannot start this program again")?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            let last = said
                .lines()
                .rfind(|line| !line.trim().is_empty())
                .unwrap_or("no reason given");
            bail!(
                "the {side} side failed: {}",
                last.trim_start_matches("error: ")
            );
        }
        serde_json::from_slice(&output.stdout).context("the probe's answer cannot be read")
    }

    /// What [`Self::probe`]'s process does: loads one side, reads the prompt, generates, and prints
    /// what that took.
    fn answer_probe(&self, form: Form) -> Result<()> {
        let (mut model, load) = self.load(form)?;
        self.generate(model.as_mut(), load)?;
        let (peak_rss, peak_gpu) = (report::peak_memory(), gpu::peak_memory(self.device));
        let probe = Probe {
            peak_rss,
            peak_gpu,
            launches: launches(model.as_mut(), self.prompt, self.graph)?,
        };
        let answer = serde_json::to_string(&probe)?;
        report::write_text(&mut std::io::stdout().lock(), &answer)
    }
}

/// Kernels that the token behind `prompt` takes.
pub fn launches(model: &mut dyn TextModel, prompt: &[u32], graph: bool) -> Result<Option<u64>> {
    let options = Options {
        positions: Some(prompt.len() + 2),
        graph,
        ..Default::default()
    };
    if model.chooses_tokens() {
        let mut generation = model.generation(&options)?;
        generation.extend(0, prompt)?;
        generation.step()?;
        let kernels = generation.kernels_per_step() as u64;
        // A step that is no chain of kernels counts none.
        return Ok(Some(kernels).filter(|kernels| *kernels > 0));
    }
    model.clear()?;
    model.forward(prompt, 0)?;
    let last = &prompt[prompt.len() - 1..];
    // Once for real, so that every kernel is loaded before the recording.
    model.forward(last, prompt.len())?;
    let device = model.device();
    let position = prompt.len() + 1;
    Ok(gpu::launches(&device, || {
        // A copy, so that what the step frees has been allocated within the recording.
        let mut copy = model.fork().context("this model cannot be copied")?;
        copy.forward(last, position).map(drop)
    }))
}

impl Form {
    /// Its name on the command line of a probe.
    fn side(self) -> &'static str {
        match self {
            Form::Stock => "stock",
            Form::Settings => "settings",
            Form::Fused(_) => "fused",
        }
    }
}

/// The likeliest token and its lead over the next.
fn best(logits: &Tensor) -> Result<(u32, f32)> {
    let logits = logits.to_vec1::<f32>()?;
    ensure!(
        logits.iter().all(|l| l.is_finite()),
        "the model's logits are not numbers: its weights are damaged, fetch them again"
    );
    let (mut first, mut second, mut token) = (f32::NEG_INFINITY, f32::NEG_INFINITY, 0);
    for (i, logit) in logits.iter().enumerate() {
        if *logit > first {
            (second, first, token) = (first, *logit, i as u32);
        } else if *logit > second {
            second = *logit;
        }
    }
    Ok((token, first - second))
}

fn first_difference(a: &[u32], b: &[u32]) -> Option<usize> {
    a.iter().zip(b).position(|(a, b)| a != b)
}

fn layer_error(layer: usize, fused: &Tensor, plain: &Tensor) -> Result<LayerError> {
    let distance = Distance::between(fused, plain)?;
    Ok(LayerError {
        layer,
        max_abs: distance.largest,
        rel: distance.relative_norm(),
    })
}
