//! A model against reference outputs, layer by layer.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use candle_fused::generation::Options;

use super::comparison::LayerError;
use super::distance::Distance;
use super::generate::TextModel;

/// What another implementation computed.
pub struct Golden {
    /// `[B, T]`, u32.
    input_ids: Tensor,
    /// `[B, T', vocab]`, of the last `T'` positions.
    logits: Tensor,
    /// `[layers + 1, B, T', hidden]`: the embedding, then after each layer, the last one after the final
    /// norm.
    hidden_states: Tensor,
    /// The greedy continuation of each row.
    greedy: Vec<Vec<u32>>,
    /// By how much each of those tokens led.
    margins: Option<Vec<Vec<f64>>>,
}

impl Golden {
    /// Reads a safetensors file with `input_ids`, `logits`, `hidden_states` and `greedy`, and perhaps
    /// `greedy_margin`.
    pub fn open(file: &Path) -> Result<Self> {
        let tensors = candle_core::safetensors::load(file, &Device::Cpu)
            .with_context(|| format!("--golden {} cannot be read", file.display()))?;
        Self::from_tensors(&tensors).with_context(|| format!("--golden {}", file.display()))
    }

    fn from_tensors(tensors: &HashMap<String, Tensor>) -> Result<Self> {
        let find = |name: &str, rank: usize| -> Result<&Tensor> {
            let tensor = tensors
                .get(name)
                .with_context(|| format!("there is no tensor {name}"))?;
            ensure!(
                tensor.rank() == rank && tensor.elem_count() > 0,
                "{name} has shape {:?}, expected {rank} dimensions",
                tensor.shape()
            );
            Ok(tensor)
        };
        let (rows, tokens) = find("input_ids", 2)?.dims2()?;
        let input_ids = ids(find("input_ids", 2)?, "input_ids")?;
        let (logits, hidden_states) = (find("logits", 3)?, find("hidden_states", 4)?);
        for (name, dims) in [
            ("logits", &logits.dims()[..2]),
            ("hidden_states", &hidden_states.dims()[1..3]),
        ] {
            ensure!(
                dims[0] == rows && dims[1] <= tokens,
                "{name} is of {} rows of {} tokens, expected {rows} rows of at most {tokens}",
                dims[0],
                dims[1]
            );
            let values = tensors[name].to_dtype(DType::F64)?.flatten_all()?;
            ensure!(
                values.to_vec1::<f64>()?.iter().all(|v| v.is_finite()),
                "{name} holds values that are not numbers"
            );
        }
        let greedy = find("greedy", 2)?;
        ensure!(
            greedy.dim(0)? == rows,
            "greedy is of {} rows, expected {rows}",
            greedy.dim(0)?
        );
        let margins = tensors.get("greedy_margin");
        if let Some(margins) = margins {
            ensure!(
                margins.dims() == greedy.dims(),
                "greedy_margin has shape {:?}, greedy {:?}",
                margins.shape(),
                greedy.shape()
            );
        }
        Ok(Self {
            input_ids,
            logits: logits.clone(),
            hidden_states: hidden_states.clone(),
            greedy: ids(greedy, "greedy")?.to_vec2()?,
            margins: margins
                .map(|m| m.to_dtype(DType::F64)?.to_vec2())
                .transpose()?,
        })
    }

    /// Runs `model` on the same tokens; errors above `tolerance`, relative to the largest reference
    /// value, are too large.
    pub fn check(&self, model: &mut dyn TextModel, tolerance: f64) -> Result<GoldenReport> {
        let Some((states, logits)) = model.hidden_states(&self.input_ids)? else {
            bail!("this model does not show its hidden states");
        };
        let count = self.hidden_states.dim(0)?;
        ensure!(
            states.len() == count,
            "--golden: hidden_states holds {count} states, the model has {}",
            states.len()
        );
        let layers = states
            .iter()
            .enumerate()
            .map(|(i, state)| error(i, state, &self.hidden_states.get(i)?, "hidden_states"))
            .collect::<Result<_>>()?;
        let logits = error(count, &logits, &self.logits, "logits")?;
        Ok(GoldenReport {
            layers,
            // Both of two logits that stand close may be off.
            greedy: self.greedy(model, 2. * logits.max_abs)?,
            logits,
            generated: self.greedy.iter().map(Vec::len).sum(),
            tolerance,
        })
    }

    /// The greedy tokens that differ. Behind one of them the model goes on from the reference's. A lead of
    /// no more than `excused` is within the error of the logits.
    fn greedy(&self, model: &dyn TextModel, excused: f64) -> Result<Vec<Difference>> {
        let prompts = self.input_ids.to_vec2::<u32>()?;
        let mut differences = Vec::new();
        for (row, (prompt, expected)) in prompts.iter().zip(&self.greedy).enumerate() {
            let mut generation = model.generation(&Options {
                positions: Some(prompt.len() + expected.len()),
                ..Default::default()
            })?;
            let mut token = generation.extend(0, prompt)?;
            for (step, wanted) in expected.iter().enumerate() {
                if token != *wanted {
                    let margin = self.margins.as_ref().map(|m| m[row][step]);
                    differences.push(Difference {
                        row,
                        step,
                        token,
                        expected: *wanted,
                        margin,
                        excused: margin.is_some_and(|m| m <= excused),
                    });
                }
                if step + 1 == expected.len() {
                    break;
                }
                token = match token == *wanted {
                    true => generation.step()?[0].context("the sequence has ended")?,
                    false => {
                        generation.truncate(0, prompt.len() + step)?;
                        generation.extend(0, &[*wanted])?
                    }
                };
            }
        }
        Ok(differences)
    }
}

/// Token ids in u32.
fn ids(tensor: &Tensor, name: &str) -> Result<Tensor> {
    ensure!(
        tensor.dtype().is_int(),
        "{name} is {:?}, expected token ids",
        tensor.dtype()
    );
    let wide = tensor.to_dtype(DType::I64)?;
    let smallest = wide.flatten_all()?.min(0)?.to_scalar::<i64>()?;
    ensure!(smallest >= 0, "{name} holds {smallest}, which is no token");
    Ok(wide.to_dtype(DType::U32)?)
}

/// The error of `got` against the last positions that `expected` is of.
fn error(layer: usize, got: &Tensor, expected: &Tensor, name: &str) -> Result<LayerError> {
    let (tokens, last) = (got.dim(1)?, expected.dim(1)?);
    let got = got.narrow(1, tokens - last, last)?;
    ensure!(
        got.dims() == expected.dims(),
        "--golden: {name} is {:?} for each state, the model's is {:?}",
        expected.shape(),
        got.shape()
    );
    let distance =
        Distance::between(&got, expected).with_context(|| format!("--golden: {name}"))?;
    Ok(LayerError {
        layer,
        max_abs: distance.largest,
        rel: distance.relative(),
    })
}

/// A greedy token that is not the reference's.
#[derive(Clone, Debug)]
pub struct Difference {
    row: usize,
    step: usize,
    token: u32,
    expected: u32,
    /// The lead of the expected one, where the reference names it.
    margin: Option<f64>,
    /// Whether rounding may have taken that lead.
    excused: bool,
}

/// How far a model is from the reference.
#[derive(Clone, Debug)]
pub struct GoldenReport {
    layers: Vec<LayerError>,
    logits: LayerError,
    greedy: Vec<Difference>,
    generated: usize,
    tolerance: f64,
}

impl GoldenReport {
    /// Fails if an error is beyond the tolerance.
    pub fn verdict(&self) -> Result<()> {
        let beyond = |error: &&LayerError| error.rel > self.tolerance;
        if let Some(error) = self.layers.iter().find(beyond) {
            bail!(
                "hidden state {} is off by {:.1e}, more than --tol {:e}",
                error.layer,
                error.rel,
                self.tolerance
            );
        }
        if self.logits.rel > self.tolerance {
            bail!(
                "the logits are off by {:.1e}, more than --tol {:e}",
                self.logits.rel,
                self.tolerance
            );
        }
        let wrong = self.greedy.iter().filter(|d| !d.excused).count();
        ensure!(wrong == 0, "{wrong} greedy tokens are not the reference's");
        Ok(())
    }
}

impl fmt::Display for GoldenReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "                 largest error  relative")?;
        let mut line = |name: String, error: &LayerError| {
            writeln!(
                f,
                "{name:<16} {:>13.2e}  {:>8.1e}",
                error.max_abs, error.rel
            )
        };
        for error in &self.layers {
            line(format!("hidden state {}", error.layer), error)?;
        }
        line("logits".to_owned(), &self.logits)?;
        writeln!(
            f,
            "\ngreedy tokens    {} of {} equal",
            self.generated - self.greedy.len(),
            self.generated
        )?;
        for d in &self.greedy {
            write!(
                f,
                "row {}, token {}: {} where the reference has {}",
                d.row, d.step, d.token, d.expected
            )?;
            match (d.margin, d.excused) {
                (Some(margin), true) => writeln!(f, ", which leads by {margin:.1e} only")?,
                (Some(margin), false) => writeln!(f, ", which leads by {margin:.1e}")?,
                (None, _) => writeln!(f)?,
            }
        }
        Ok(())
    }
}
