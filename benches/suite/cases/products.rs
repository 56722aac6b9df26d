//! The products of a layer with what stands around them: the norm in front, the activation or the
//! residual behind.

use super::picked::{rows_of, spread};
use super::{Call, Case, Contender, Dims, Expected, Extent, limit};
use crate::figures::{CANDLE, FUSED, GEMM, Work};
use crate::place::Place;
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_fused::Fusion;
use candle_fused::nn::{LayerNorm, LinearWeight, Norm, Projection, RmsNorm};
use candle_fused::ops::{self, Activation, Epilogue, Prologue, Weight};

const EPS: f64 = 1e-5;

/// Rows of the input, and outputs of each matrix, that are checked.
const CHECKED: usize = 4;
const CHECKED_OUTPUTS: usize = 48;

/// Deviation of the weights: outputs near 1 for inputs near 1.
fn deviation(k: usize) -> f32 {
    1. / (k as f32).sqrt()
}

/// A product of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Qkv,
    Output,
    /// Gate and up with SwiGLU, or up alone with GELU.
    Up,
    Down,
    Head,
    /// Of no model, with nothing around it.
    Plain,
}

/// A product's shape.
#[derive(Clone, Debug)]
pub struct Product {
    pub part: Part,
    /// Outputs of each matrix.
    pub outputs: Vec<usize>,
    /// Inputs.
    pub k: usize,
    pub neox: bool,
}

impl Product {
    pub fn of(dims: &Dims, part: Part) -> Self {
        let width = dims.heads * dims.head_dim;
        let (outputs, k) = match part {
            Part::Qkv => (dims.qkv().to_vec(), dims.hidden),
            Part::Output | Part::Plain => (vec![dims.hidden], width),
            Part::Up if dims.neox => (vec![dims.inner], dims.hidden),
            Part::Up => (vec![dims.inner; 2], dims.hidden),
            Part::Down => (vec![dims.hidden], dims.inner),
            Part::Head => (vec![dims.vocab], dims.hidden),
        };
        Self {
            part,
            outputs,
            k,
            neox: dims.neox,
        }
    }

    /// Of one matrix `[n, k]` alone.
    pub fn plain(n: usize, k: usize) -> Self {
        Self {
            part: Part::Plain,
            outputs: vec![n],
            k,
            neox: false,
        }
    }

    /// Its name in a layer.
    pub fn name(&self) -> &'static str {
        match self.part {
            Part::Qkv => "qkv",
            Part::Output => "output",
            Part::Up if self.neox => "up",
            Part::Up => "gate_up",
            Part::Down => "down",
            Part::Head => "head",
            Part::Plain => "product",
        }
    }

    /// The op that it is.
    pub fn op(&self) -> &'static str {
        match (self.is_behind_norm(), self.neox) {
            (false, _) => "linear",
            (true, false) => "rms_norm_linear",
            (true, true) => "layer_norm_linear",
        }
    }

    pub fn is_behind_norm(&self) -> bool {
        matches!(self.part, Part::Qkv | Part::Up | Part::Head)
    }

    pub fn activation(&self) -> Activation {
        match (self.part, self.neox) {
            (Part::Up, false) => Activation::SwiGlu,
            (Part::Up, true) => Activation::Gelu,
            _ => Activation::None,
        }
    }

    pub fn adds_residual(&self) -> bool {
        matches!(self.part, Part::Output | Part::Down)
    }

    /// Outputs of all matrices.
    pub fn n(&self) -> usize {
        self.outputs.iter().sum()
    }

    /// Outputs behind the activation.
    pub fn width(&self) -> usize {
        match self.activation() {
            Activation::SwiGlu => self.n() / 2,
            _ => self.n(),
        }
    }

    /// With weights of `bytes`, for `m` rows in `dtype`.
    pub fn work(&self, m: usize, bytes: usize, dtype: DType) -> Work {
        let residual = if self.adds_residual() { self.n() } else { 0 };
        let around = m * (self.k + self.width() + residual) * dtype.size_in_bytes();
        Work::product((m, self.n(), self.k), bytes, around)
    }
}

pub fn cases(dims: &Dims, dtype: DType, extent: Extent) -> Vec<Case> {
    let mut cases = Vec::new();
    for m in extent.rows() {
        for part in [Part::Qkv, Part::Output, Part::Up, Part::Down, Part::Head] {
            // Only the last token of a prompt reaches the head.
            if part != Part::Head || *m <= 8 {
                cases.push(case(&dims.name, Product::of(dims, part), *m, dtype));
            }
        }
    }
    cases
}

pub fn case(model: &str, product: Product, m: usize, dtype: DType) -> Case {
    let bytes = product.n() * product.k * dtype.size_in_bytes();
    Case {
        op: product.op(),
        model: model.to_owned(),
        part: product.name().to_owned(),
        rows: m,
        context: 0,
        format: dtype.as_str().to_owned(),
        work: product.work(m, bytes, dtype),
        build: Box::new(move |place| Tensors::new(place, &product, m, dtype)?.contenders(place)),
    }
}

/// What a product works on.
pub struct Tensors {
    product: Product,
    pub x: Tensor,
    /// Weight and bias of the norm.
    norm: Option<(Tensor, Option<Tensor>)>,
    /// Those that take turns.
    weights: Vec<Vec<Tensor>>,
    pub bias: Option<Tensor>,
    residual: Option<Tensor>,
}

impl Tensors {
    pub fn new(place: &Place, product: &Product, m: usize, dtype: DType) -> Result<Self> {
        Self::with_weights(place, product, (m, dtype), dtype)
    }

    /// The same with weights in a dtype of their own.
    pub fn with_weights(
        place: &Place,
        product: &Product,
        (m, dtype): (usize, DType),
        weights: DType,
    ) -> Result<Self> {
        let k = product.k;
        let first = product
            .outputs
            .iter()
            .map(|n| place.random(&[*n, k], deviation(k), weights))
            .collect::<Result<Vec<_>>>()?;
        let bytes = product.n() * k * weights.size_in_bytes();
        let biases = product.neox && product.part != Part::Head;
        let norm_bias = product.neox.then(|| place.x(&[k], dtype)).transpose()?;
        Ok(Self {
            x: place.x(&[m, k], dtype)?,
            norm: match product.is_behind_norm() {
                true => Some((place.x(&[k], dtype)?, norm_bias)),
                false => None,
            },
            weights: place.in_turns(bytes, first, |all| all.iter().map(Tensor::copy).collect())?,
            bias: biases.then(|| place.x(&[product.n()], dtype)).transpose()?,
            residual: product
                .adds_residual()
                .then(|| place.x(&[m, product.width()], dtype))
                .transpose()?,
            product: product.clone(),
        })
    }

    fn layer_norm(&self) -> Option<Norm> {
        let (weight, bias) = self.norm.clone()?;
        let fusion = Fusion::none();
        Some(match bias {
            Some(bias) => Norm::Layer(LayerNorm::from_weights(weight, Some(bias), EPS, fusion)),
            None => Norm::Rms(RmsNorm::from_weight(weight, EPS, fusion)),
        })
    }

    /// The weights as a model holds them, those that take turns.
    fn projections(&self, fusion: Fusion) -> Result<Vec<Projection>> {
        let projection = |all: &Vec<Tensor>| {
            let weights = all.iter().cloned().map(LinearWeight::Dense).collect();
            Projection::new(weights, self.bias.clone(), fusion)
        };
        self.weights.iter().map(projection).collect()
    }

    /// The call as a model makes it, with everything fused or in candle's operations.
    fn call(&self, fusion: Fusion) -> Result<impl Fn(usize) -> Result<Vec<Tensor>> + use<>> {
        Ok(self.through(self.projections(fusion)?))
    }

    /// The same through projections of another kind.
    pub fn through(
        &self,
        projections: Vec<Projection>,
    ) -> impl Fn(usize) -> Result<Vec<Tensor>> + use<> {
        let (x, norm, residual) = (self.x.clone(), self.layer_norm(), self.residual.clone());
        let activation = self.product.activation();
        move |turn| {
            let projection = &projections[turn % projections.len()];
            match (&residual, activation) {
                (Some(residual), _) => Ok(vec![projection.forward_residual(&x, residual)?]),
                (None, Activation::None) => projection.forward_parts(&x, norm.as_ref()),
                _ => Ok(vec![projection.forward_activated(
                    &x,
                    norm.as_ref(),
                    activation,
                )?]),
            }
        }
    }

    /// candle's matmul alone, one for all matrices.
    fn gemm(&self) -> Result<impl Fn(usize) -> Result<Vec<Tensor>> + use<>> {
        let joined = self
            .weights
            .iter()
            .map(|all| Tensor::cat(all, 0))
            .collect::<Result<Vec<_>>>()?;
        let x = self.x.clone();
        Ok(move |turn: usize| Ok(vec![x.matmul(&joined[turn % joined.len()].t()?)?]))
    }

    /// The dense weights whose turn is first.
    pub fn first(&self) -> &[Tensor] {
        &self.weights[0]
    }

    /// candle's operations one by one, each with the input that the one before it gives.
    pub fn steps(&self) -> Result<Vec<Contender>> {
        let mut steps = Vec::new();
        let mut step = |name: &str, call: Call| steps.push(Contender::new(name, Vec::new(), call));
        let mut x = self.x.clone();
        if let Some(norm) = self.layer_norm() {
            let (input, held) = (x.clone(), norm.clone());
            x = norm.forward(&x)?;
            step("norm", Box::new(move |_| Ok(vec![held.forward(&input)?])));
        }
        let projections = self.projections(Fusion::none())?;
        let parts = projections[0].forward_parts(&x, None)?;
        let product =
            move |turn: usize| projections[turn % projections.len()].forward_parts(&x, None);
        step(self.product.name(), Box::new(product));
        match (self.product.activation(), parts.as_slice()) {
            (Activation::SwiGlu, [gate, up]) => {
                let (gate, up) = (gate.clone(), up.clone());
                step("swiglu", Box::new(move |_| Ok(vec![(gate.silu()? * &up)?])));
            }
            (Activation::Gelu, [y]) => {
                let y = y.clone();
                step("gelu", Box::new(move |_| Ok(vec![y.gelu_erf()?])));
            }
            _ => {}
        }
        if let (Some(residual), [y]) = (&self.residual, parts.as_slice()) {
            let (residual, y) = (residual.clone(), y.clone());
            step("residual", Box::new(move |_| Ok(vec![(&y + &residual)?])));
        }
        Ok(steps)
    }

    /// candle, fused, and on a GPU the library's product alone.
    pub fn contenders(&self, place: &Place) -> Result<Vec<Contender>> {
        let rows = self.x.dims()[0];
        let fused = self.fused()?;
        let expected = fused.expected.clone();
        let mut all = vec![
            Contender::new(CANDLE, expected, self.call(Fusion::none())?),
            fused.in_graph(rows),
        ];
        if place.device.is_cuda() {
            all.push(self.library()?);
        }
        Ok(all)
    }

    /// The fused product alone.
    pub fn fused(&self) -> Result<Contender> {
        let first = self.first();
        let picked = first.iter().zip(self.outputs());
        let picked: Vec<_> = picked
            .map(|(w, places)| rows_of(w, &places))
            .collect::<Result<_>>()?;
        // The rounding of the coarser of both.
        let limit = limit(self.x.dtype()).max(limit(first[0].dtype()));
        let expected = self.expected(&picked, limit)?;
        Ok(Contender::new(FUSED, expected, self.call(Fusion::all())?))
    }

    /// The library's product alone.
    pub fn library(&self) -> Result<Contender> {
        let rows = spread(self.x.dims()[0], CHECKED);
        let weight = Tensor::cat(self.first(), 0)?;
        let cols = spread(self.product.n(), CHECKED_OUTPUTS);
        let weights = [Weight::Dense(rows_of(&weight, &cols)?)];
        let x = rows_of(&self.x, &rows)?;
        let values =
            ops::linear::reference(&x, Prologue::None, &weights, &Epilogue::default())?.concat();
        let expected = Expected {
            rows,
            cols,
            values,
            limit: limit(self.x.dtype()),
        };
        let product = Contender::new(GEMM, vec![expected], self.gemm()?);
        Ok(product.in_graph(self.x.dims()[0]))
    }

    /// The outputs of each matrix that are checked.
    pub fn outputs(&self) -> Vec<Vec<usize>> {
        let outputs = self.product.outputs.iter();
        outputs.map(|n| spread(*n, CHECKED_OUTPUTS)).collect()
    }

    /// The right results: `picked` are the rows of each matrix that [`Self::outputs`] names, on the
    /// host.
    pub fn expected(&self, picked: &[Tensor], limit: f64) -> Result<Vec<Expected>> {
        let rows = spread(self.x.dims()[0], CHECKED);
        let host = |t: &Tensor| t.to_device(&Device::Cpu);
        let x = rows_of(&self.x, &rows)?;
        let norm = match &self.norm {
            Some((weight, bias)) => Some((host(weight)?, bias.as_ref().map(host).transpose()?)),
            None => None,
        };
        let prologue = match &norm {
            None => Prologue::None,
            Some((weight, None)) => Prologue::RmsNorm { weight, eps: EPS },
            Some((weight, bias)) => Prologue::LayerNorm {
                weight,
                bias: bias.as_ref(),
                eps: EPS,
            },
        };
        let activation = self.product.activation();
        // The matrices that give one result together.
        let together = if activation == Activation::SwiGlu {
            2
        } else {
            1
        };
        let outputs = self.outputs();
        let mut start = 0;
        let mut expected = Vec::new();
        for (weights, cols) in picked.chunks(together).zip(outputs.chunks(together)) {
            let bias = match &self.bias {
                Some(bias) => {
                    let places: Vec<_> = cols[0].iter().map(|col| start + col).collect();
                    Some(rows_of(bias, &places)?)
                }
                None => None,
            };
            let residual = match &self.residual {
                Some(residual) => {
                    let part =
                        rows_of(&residual.narrow(1, start, self.product.outputs[0])?, &rows)?;
                    Some(
                        rows_of(&part.t()?.contiguous()?, &cols[0])?
                            .t()?
                            .contiguous()?,
                    )
                }
                None => None,
            };
            let residuals: Vec<_> = residual.iter().collect();
            let epilogue = Epilogue {
                bias: bias.as_ref(),
                activation,
                residuals: &residuals,
            };
            let weights: Vec<_> = weights.iter().cloned().map(Weight::Dense).collect();
            let values = ops::linear::reference(&x, prologue, &weights, &epilogue)?.concat();
            start += self.product.outputs[expected.len()];
            expected.push(Expected {
                rows: rows.clone(),
                cols: cols[0].clone(),
                values,
                limit,
            });
        }
        Ok(expected)
    }
}
