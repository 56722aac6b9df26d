//! Stock candle and the fused model on the same weights and prompt, in turns.

use super::comparison::{CompareReport, LayerError, Round, Side, Speedup, median};
use super::generate::TextModel;
use super::source::Located;
use super::{fused, report, stock, weights};
use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use candle_fused::{Fusion, trace};
use std::process::Command;
use std::time::{Duration, Instant};

/// Rounds in which both sides take a turn.
const ROUNDS: usize = 3;

/// One of the two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// candle-transformers' own model.
    Stock,
    /// candle-fused's, with these fusions.
    Fused(Fusion),
}

/// What to compare.
pub struct Comparison<'a> {
    pub located: &'a Located,
    pub dtype: Option<DType>,
    pub device: &'a Device,
    pub fusion: Fusion,
    pub prompt: &'a [u32],
    pub sample_len: usize,
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
    /// Runs the rounds and gathers the report.
    pub fn run(&self) -> Result<CompareReport> {
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
        let memory = [self.probe("stock")?, self.probe("fused")?];
        let mut generations: [Vec<Generation>; 2] = [Vec::new(), Vec::new()];
        for round in 0..ROUNDS {
            report::say(format_args!("round {} of {ROUNDS}", round + 1));
            let sides = [
                (Form::Stock, &mut stock),
                (Form::Fused(self.fusion), &mut fused),
            ];
            for ((form, model), runs) in sides.into_iter().zip(&mut generations) {
                let load;
                (*model, load) = self.load(form)?;
                runs.push(self.generate(model.as_mut(), load)?);
            }
        }
        let [stock_runs, fused_runs] = &generations;
        let first_mismatch = first_difference(&stock_runs[0].tokens, &fused_runs[0].tokens);
        let side = |peak_rss, runs: &[Generation]| {
            let rounds: Vec<_> = runs.iter().map(|g| g.round.clone()).collect();
            let load = median(runs.iter().map(|g| g.load.as_secs_f64()).collect());
            let load = Duration::from_secs_f64(load);
            Side::of_rounds(load, self.prompt.len(), &rounds, peak_rss)
        };
        let stock_side = side(memory[0], stock_runs);
        let fused_side = side(memory[1], fused_runs);
        Ok(CompareReport {
            model: self.located.name.clone(),
            device: "cpu".into(),
            dtype: self.dtype_name()?,
            threads: candle_fused::cpu::pool::threads(),
            prompt_tokens: self.prompt.len(),
            sample_len: self.sample_len,
            tokens_match: first_mismatch.is_none(),
            first_mismatch,
            mismatch_margin: first_mismatch.map(|at| f64::from(stock_runs[0].margins[at])),
            max_logit_diff: self.logit_difference(
                stock.as_mut(),
                fused.as_mut(),
                &stock_runs[0],
            )?,
            layers: self.layers(fused.as_mut())?,
            op_calls: self.calls(fused.as_mut())?,
            speedup: Speedup::of(&stock_side, &fused_side),
            stock: stock_side,
            fused: fused_side,
        })
    }

    fn load(&self, form: Form) -> Result<(Box<dyn TextModel>, Duration)> {
        let (weights, _) = weights::open(&self.located.files)?;
        let started = Instant::now();
        let model = match form {
            Form::Stock => stock::load(weights, self.dtype, self.device)?,
            Form::Fused(fusion) => fused::load(weights, self.dtype, self.device, fusion)?,
        };
        Ok((model, started.elapsed()))
    }

    fn dtype_name(&self) -> Result<String> {
        Ok(match self.dtype {
            Some(dtype) => dtype.as_str().to_owned(),
            None => weights::open(&self.located.files)?.0.stored_as(),
        })
    }

    fn generate(&self, model: &mut dyn TextModel, load: Duration) -> Result<Generation> {
        model.clear()?;
        let (mut tokens, mut margins, mut steps) = (Vec::new(), Vec::new(), Vec::new());
        let started = Instant::now();
        let logits = model.forward(self.prompt, 0)?;
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
            let a = stock.forward(ids, position)?;
            let b = fused.forward(ids, position)?;
            let difference = (a - b)?.abs()?.max(0)?.to_scalar::<f32>()?;
            largest = largest.max(f64::from(difference));
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
        let pairs = (
            fused.hidden_states(self.prompt)?,
            plain.hidden_states(self.prompt)?,
        );
        let (Some(fused), Some(plain)) = pairs else {
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

    /// Peak memory in bytes of one side alone, measured in a process of its own.
    fn probe(&self, side: &str) -> Result<Option<u64>> {
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
    /// its peak memory.
    pub fn answer_probe(&self, form: Form) -> Result<()> {
        let (mut model, load) = self.load(form)?;
        self.generate(model.as_mut(), load)?;
        let answer = serde_json::to_string(&report::peak_memory())?;
        report::write_text(&mut std::io::stdout().lock(), &answer)
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
    let plain = plain.to_dtype(DType::F64)?;
    let difference = (fused.to_dtype(DType::F64)? - &plain)?;
    let norm = |t: &Tensor| -> Result<f64> { Ok(t.sqr()?.sum_all()?.to_scalar::<f64>()?.sqrt()) };
    Ok(LayerError {
        layer,
        max_abs: difference.abs()?.flatten_all()?.max(0)?.to_scalar()?,
        rel: norm(&difference)? / norm(&plain)?,
    })
}
