//! Columns of matrices brought to like sizes before they are quantized, without a change to the model.
//!
//! A scale that serves a whole row leaves the same error in all of its columns, and what an input puts
//! through it grows with that input. So columns are multiplied by factors and what they are multiplied
//! with is divided by them (cross-layer equalization, Nagel et al. 2019; SmoothQuant, Xiao et al. 2023):
//!
//! - behind a norm by `c[k] = sqrt(|weight[k]|) / m[k]`, which the norm's weight and bias are divided by;
//! - of the last matrix of a gated MLP by `c[k] = 1 / m[k]`, which the rows of the matrix before it, the
//!   one without the activation, are divided by.
//!
//! `m[k]` is the root of the mean square of column k over all rows, each divided by its largest
//! magnitude. The norm's weight stands in for the inputs themselves, which nothing is known of. Factors
//! are powers of two, so that every product stays the same number in f32 and bf16.

use super::names::Qkv;
use super::shape::Shape;
use super::weights::Source;
use crate::nn::LinearWeight;
use candle_core::{DType, Device, Result, Tensor, bail};
use std::collections::HashMap;

/// Factors lie within 2 to the power of this and its reciprocal: f16 has room for them too.
const MAX_LOG2: f32 = 6.;

/// Inputs whose norm weighs them less than this part of the largest weight count as if they had it.
const LEAST: f32 = 1e-3;

/// Values that are widened at a time.
const PART: usize = 1 << 20;

/// Whose inputs are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Site {
    Attention,
    Mlp,
    Down,
}

/// What becomes of a tensor of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    layer: usize,
    /// Its columns are multiplied by this site's factors.
    columns: Option<Site>,
    /// Its rows, or numbers, are divided by this site's factors.
    rows: Option<Site>,
}

/// A source whose matrices are balanced, or left as they are.
pub struct Balanced<S> {
    source: S,
    /// None leaves everything as it is.
    shape: Option<Shape>,
    factors: HashMap<(usize, Site), Vec<f32>>,
}

impl<S: Source> Balanced<S> {
    /// Over the tensors of a model of this shape, under its checkpoint's names.
    pub fn new(source: S, shape: Option<Shape>) -> Self {
        Self {
            source,
            shape,
            factors: HashMap::new(),
        }
    }

    pub fn device(&self) -> &Device {
        self.source.device()
    }

    pub fn dtype(&self) -> Option<DType> {
        self.source.dtype()
    }

    pub fn has(&self, tensor: &str) -> bool {
        self.source.has(tensor)
    }

    /// The numbers `[rows, cols]` of a matrix.
    pub fn matrix(&mut self, tensor: &str, size: (usize, usize)) -> Result<Tensor> {
        let mut matrix = numbers(&mut self.source, tensor, size)?;
        let Some(Place {
            layer,
            columns,
            rows,
        }) = self.place(tensor)
        else {
            return Ok(matrix);
        };
        if let Some(site) = columns {
            let by = self.factors(layer, site)?;
            matrix = matrix.broadcast_mul(&like(by, &matrix)?)?;
        }
        if let Some(site) = rows {
            let by = like(inverse(&self.factors(layer, site)?), &matrix)?;
            matrix = matrix.broadcast_mul(&by.unsqueeze(1)?)?;
        }
        Ok(matrix)
    }

    /// The numbers `[len]` of a vector.
    pub fn vector(&mut self, tensor: &str, len: usize) -> Result<Tensor> {
        let vector = self.source.vector(tensor, len)?;
        match self.place(tensor) {
            Some(Place {
                layer,
                rows: Some(site),
                ..
            }) => &vector * like(inverse(&self.factors(layer, site)?), &vector)?,
            _ => Ok(vector),
        }
    }

    fn place(&self, tensor: &str) -> Option<Place> {
        let shape = self.shape.as_ref()?;
        let names = &shape.kind.names;
        let within = tensor.strip_prefix(names.layer)?.strip_prefix('.')?;
        let (layer, rest) = within.split_once('.')?;
        let (part, end) = rest.rsplit_once('.')?;
        let gated = shape.activation.gate().is_some();
        let is_qkv = match &names.qkv {
            Qkv::Three(parts) => parts.contains(&part),
            Qkv::Joint(name) | Qkv::PerHead(name) => *name == part,
        };
        // Rows of a gate in one matrix with what it gates cannot be told apart here, and a norm stands in between.
        let apart = names.up.len() == 2 && !shape.kind.sub_norms;
        let down = (gated && apart).then_some(Site::Down);
        let (columns, rows) = match part {
            _ if is_qkv => (Some(Site::Attention), None),
            _ if part == names.attention_norm => (None, Some(Site::Attention)),
            _ if part == names.mlp_norm => (None, Some(Site::Mlp)),
            _ if names.up.last() == Some(&part) => (Some(Site::Mlp), down),
            _ if names.up.contains(&part) => (Some(Site::Mlp), None),
            _ if part == names.down => (down, None),
            _ => return None,
        };
        Some(Place {
            layer: layer.parse().ok()?,
            // Biases have no columns.
            columns: columns.filter(|_| end == "weight"),
            rows,
        })
    }

    /// The factors of a site's inputs.
    fn factors(&mut self, layer: usize, site: Site) -> Result<Vec<f32>> {
        if let Some(known) = self.factors.get(&(layer, site)) {
            return Ok(known.clone());
        }
        let Some(shape) = &self.shape else {
            return Ok(Vec::new());
        };
        let names = &shape.kind.names;
        let name = |part: &str| format!("{}.{layer}.{part}.weight", names.layer);
        let [q, k, v] = shape.attention.widths();
        let (hidden, inner) = (shape.hidden, shape.intermediate);
        let (matrices, norm, cols): (Vec<_>, _, _) = match (site, &names.qkv) {
            (Site::Attention, Qkv::Three(parts)) => {
                let parts = parts.iter().zip([q, k, v]);
                let parts = parts.map(|(part, rows)| (name(part), rows)).collect();
                (parts, Some(names.attention_norm), hidden)
            }
            (Site::Attention, Qkv::Joint(part) | Qkv::PerHead(part)) => (
                vec![(name(part), q + k + v)],
                Some(names.attention_norm),
                hidden,
            ),
            (Site::Mlp, _) => {
                let rows = shape.activation.inputs(inner) / names.up.len();
                let parts = names.up.iter().map(|part| (name(part), rows)).collect();
                (parts, Some(names.mlp_norm), hidden)
            }
            (Site::Down, _) => (vec![(name(names.down), hidden)], None, inner),
        };
        let norm = norm.map(name);
        let mut squares = Squares::new(cols);
        for (name, rows) in &matrices {
            squares.add(&numbers(&mut self.source, name, (*rows, cols))?)?;
        }
        let inputs = match norm {
            Some(norm) => {
                let weight = self.source.vector(&norm, cols)?.to_dtype(DType::F32)?;
                weight.to_vec1()?
            }
            None => vec![1.; cols],
        };
        let factors = balancing(&inputs, &squares.roots());
        self.factors.insert((layer, site), factors.clone());
        Ok(factors)
    }
}

/// The numbers of a matrix.
fn numbers(source: &mut impl Source, name: &str, (rows, cols): (usize, usize)) -> Result<Tensor> {
    match source.matrix(name, rows, cols, None)? {
        LinearWeight::Dense(matrix) => Ok(matrix),
        _ => bail!("tensor `{name}` is quantized already, expected numbers"),
    }
}

/// Sums of squares by column, of rows divided by their largest magnitudes.
struct Squares {
    sums: Vec<f32>,
    rows: usize,
}

impl Squares {
    fn new(cols: usize) -> Self {
        Self {
            sums: vec![0.; cols],
            rows: 0,
        }
    }

    fn add(&mut self, matrix: &Tensor) -> Result<()> {
        let (rows, cols) = matrix.dims2()?;
        let some = (PART / cols.max(1)).max(1);
        for first in (0..rows).step_by(some) {
            let part = matrix.narrow(0, first, some.min(rows - first))?;
            let values: Vec<f32> = part.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
            for row in values.chunks_exact(cols) {
                let most = row.iter().fold(0f32, |m, w| m.max(w.abs()));
                if most > 0. && most.is_finite() {
                    let by = 1. / most;
                    for (sum, w) in self.sums.iter_mut().zip(row) {
                        *sum += (w * by) * (w * by);
                    }
                }
            }
        }
        self.rows += rows;
        Ok(())
    }

    fn roots(&self) -> Vec<f32> {
        let mean = |sum: &f32| (sum / self.rows.max(1) as f32).sqrt();
        self.sums.iter().map(mean).collect()
    }
}

/// `sqrt(|input|) / column` over its geometric mean, as powers of two. Inputs and columns that are zero
/// or no numbers stay as they are.
fn balancing(inputs: &[f32], columns: &[f32]) -> Vec<f32> {
    let most = inputs.iter().fold(0f32, |m, w| m.max(w.abs()));
    let logs: Vec<f32> = inputs
        .iter()
        .zip(columns)
        .map(|(input, column)| 0.5 * input.abs().max(LEAST * most).log2() - column.log2())
        .collect();
    let counted: Vec<f32> = logs.iter().copied().filter(|l| l.is_finite()).collect();
    let mean = counted.iter().sum::<f32>() / counted.len().max(1) as f32;
    logs.iter()
        .map(|log| match log.is_finite() {
            true => power_of_two((log - mean).round().clamp(-MAX_LOG2, MAX_LOG2)),
            false => 1.,
        })
        .collect()
}

/// 2 to the power of a whole number between -126 and 127, to the bit: `exp2` promises no precision.
fn power_of_two(exponent: f32) -> f32 {
    f32::from_bits(((exponent as i32 + 127) as u32) << 23)
}

fn inverse(factors: &[f32]) -> Vec<f32> {
    factors.iter().map(|c| 1. / c).collect()
}

/// Factors in the dtype and on the device of what they multiply.
fn like(factors: Vec<f32>, tensor: &Tensor) -> Result<Tensor> {
    Tensor::new(factors, tensor.device())?.to_dtype(tensor.dtype())
}

#[cfg(test)]
mod tests {
    use super::balancing;

    #[test]
    fn factors_are_powers_of_two_around_one() {
        let columns = [1., 0.25, 4., 0., f32::NAN];
        assert_eq!(balancing(&[1.; 5], &columns), [1., 4., 0.25, 1., 1.]);
        let mut columns = [1.; 64];
        columns[63] = 1e-9;
        assert_eq!(balancing(&[1.; 64], &columns)[62..], [1., 64.]);
        // An input four times as large, and one that counts for nothing.
        assert_eq!(balancing(&[1., 16., 0.], &[1.; 3]), [1., 4., 0.125]);
    }
}
