//! `linear`, `rms_norm_linear` and `layer_norm_linear`.

use super::{
    Lie, cases, devices_for, draw, float, length, lie, ok, own_lie, poison, seeded, size, top, unit,
};
use crate::linear::ACTIVATIONS;
use crate::support::{devices, values};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::linear::reference;
use candle_fused::ops::{
    Activation, Epilogue, Prologue, Weight, layer_norm_linear, linear, rms_norm_linear,
};
use proptest::prelude::*;

const EPS: f64 = 1e-5;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Before {
    Nothing,
    Rms,
    Layer,
}

/// The operands of a product, on the CPU.
#[derive(Clone, Debug)]
pub struct Operands {
    pub x: Tensor,
    pub norm: Tensor,
    pub weight: Tensor,
    pub bias: Tensor,
    pub residual: Tensor,
}

impl Operands {
    fn draw(
        (m, k, n): (usize, usize, usize),
        outputs: usize,
        [dtype, weight]: [DType; 2],
        exponent: i32,
        seed: u64,
    ) -> Result<Self> {
        let rng = &mut seeded(seed);
        let small = if weight == DType::F16 || dtype == DType::F16 {
            DType::F16
        } else {
            dtype
        };
        Ok(Self {
            x: draw(rng, &[m, k], size(small, exponent), dtype)?,
            norm: draw(rng, &[k], 1., dtype)?,
            weight: draw(rng, &[n, k], size(small, -exponent / 2), weight)?,
            bias: draw(rng, &[n], 1., dtype)?,
            residual: draw(rng, &[m, outputs], 1., dtype)?,
        })
    }

    fn placed(&self, lies: &[Lie; 3], device: &Device) -> Result<Self> {
        Ok(Self {
            x: lies[0].place(&self.x, device)?,
            norm: self.norm.to_device(device)?,
            weight: lies[1].place(&self.weight, device)?,
            bias: self.bias.to_device(device)?,
            residual: lies[2].place(&self.residual, device)?,
        })
    }

    pub fn prologue(&self, before: Before) -> Prologue<'_> {
        match before {
            Before::Nothing => Prologue::None,
            Before::Rms => Prologue::RmsNorm {
                weight: &self.norm,
                eps: EPS,
            },
            Before::Layer => Prologue::LayerNorm {
                weight: &self.norm,
                bias: None,
                eps: EPS,
            },
        }
    }

    /// Result and plain form.
    fn both(&self, before: Before, activation: Activation) -> Result<[Vec<f64>; 2]> {
        let residuals = [&self.residual];
        let epilogue = Epilogue {
            bias: Some(&self.bias),
            activation,
            residuals: &residuals,
        };
        let weights = [&self.weight];
        let got = match before {
            Before::Nothing => linear(&self.x, &self.weight, &epilogue)?,
            Before::Rms => {
                rms_norm_linear(&self.x, &self.norm, EPS, &weights, &epilogue)?.remove(0)
            }
            Before::Layer => {
                layer_norm_linear(&self.x, &self.norm, None, EPS, &weights, &epilogue)?.remove(0)
            }
        };
        assert_eq!(
            (got.dims(), got.dtype()),
            (self.residual.dims(), self.x.dtype())
        );
        let weights = [Weight::Dense(self.weight.clone())];
        let expected = reference(&self.x, self.prologue(before), &weights, &epilogue)?;
        Ok([values(&got)?, expected.concat()])
    }

    /// The largest sum of magnitudes in a product, bias included, and how it is rounded.
    pub fn sums(&self, before: Before, weight: &[f64]) -> Result<f64> {
        let k = self.x.dims()[1];
        let eye = Tensor::eye(k, DType::F32, self.x.device())?;
        let plain = Epilogue::default();
        let x = reference(
            &self.x,
            self.prologue(before),
            &[Weight::Dense(eye)],
            &plain,
        )?;
        let sum = |x: &[f64], w: &[f64]| x.iter().zip(w).map(|(x, w)| (x * w).abs()).sum::<f64>();
        let each = x
            .iter()
            .flat_map(|x| weight.chunks(k).map(move |w| sum(x, w)));
        Ok(each.fold(0., f64::max) + top(&values(&self.bias)?))
    }
}

/// A layer norm's own rounding in sums of magnitudes: the mean is rounded to f32 as the row's largest value
/// is, which weighs as much as that value does against the deviation.
pub fn off_centre(operands: &Operands, before: Before, weight: &[f64]) -> Result<f64> {
    if before != Before::Layer {
        return Ok(0.);
    }
    let k = operands.x.dims()[1];
    let rows = values(&operands.x)?;
    let off = rows.chunks(k).map(|row| {
        let mean = row.iter().sum::<f64>() / k as f64;
        let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / k as f64;
        top(row) / (variance + EPS).sqrt()
    });
    let heaviest = weight
        .chunks(k)
        .map(|w| w.iter().map(|v| v.abs()).sum::<f64>());
    let heaviest = heaviest.fold(0., f64::max) * top(&values(&operands.norm)?);
    Ok(f32_sum(k) * off.fold(0., f64::max) * heaviest)
}

/// What a sum of k products in f32 loses, in parts of the sum of magnitudes.
pub fn f32_sum(k: usize) -> f64 {
    1.2e-7 * (4. + (k as f64).sqrt())
}

pub fn before() -> impl Strategy<Value = Before> {
    prop::sample::select(vec![Before::Nothing, Before::Rms, Before::Layer])
}

/// What an error of a product becomes behind its activation.
pub fn behind(activation: Activation, error: f64, sums: f64) -> f64 {
    match activation {
        Activation::None => error,
        // Two sums multiply.
        _ if activation.gate().is_some() || activation == Activation::Relu2 => {
            2.5 * error * sums.max(1.)
        }
        // Their slopes are below 1.13.
        _ => 1.2 * error,
    }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn products_agree(
        (m, k, half) in (length(40), 1usize..90, 1usize..24),
        (before, activation) in (before(), prop::sample::select(&ACTIVATIONS[..])),
        (dtypes, lies, exponent, seed) in ([float(), float()], [lie(), lie(), lie()], -20i32..20, any::<u64>()),
    ) {
        let n = 2 * half;
        let outputs = if activation.gate().is_some() { half } else { n };
        let operands = ok(Operands::draw((m, k, n), outputs, dtypes, exponent, seed))?;
        for device in devices_for(m) {
            let operands = ok(operands.placed(&lies, &device))?;
            let [got, expected] = ok(operands.both(before, activation))?;
            let sums = ok(operands.sums(before, &ok(values(&operands.weight))?))?;
            // What a norm gives is rounded twice, and a norm's own sums lose as much as the product's.
            let normed = if before == Before::Nothing { 0. } else { 2.5 * unit(dtypes[0]) + f32_sum(k) };
            let off = ok(off_centre(&operands, before, &ok(values(&operands.weight))?))?;
            let error = (f32_sum(k) + normed) * sums + off;
            let limit = unit(dtypes[0]) * top(&expected) + 2.4e-7 + behind(activation, error, sums);
            for (g, e) in got.iter().zip(&expected) {
                prop_assert!((g - e).abs() <= limit, "{device:?}: {g} {e}, {limit:e} apart at most");
            }
        }
    }

    #[test]
    fn products_keep_poison_in_its_row(
        (m, k, half) in (1usize..20, 1usize..70, 1usize..20),
        (before, dtypes, in_weight) in (before(), [float(), float()], any::<bool>()),
        (lies, poison, at, seed) in ([own_lie(), own_lie(), own_lie()], poison(), any::<prop::sample::Index>(), any::<u64>()),
    ) {
        let n = 2 * half;
        let clean = ok(Operands::draw((m, k, n), n, dtypes, 0, seed))?;
        let mut dirty = clean.clone();
        let at = if in_weight { at.index(n * k) } else { at.index(m * k) };
        let part = if in_weight { &mut dirty.weight } else { &mut dirty.x };
        *part = ok(poison.put(part, at))?;
        for device in devices() {
            let run = |o: &Operands| o.placed(&lies, &device)?.both(before, Activation::None);
            let ([clean, _], [dirty, expected]) = (ok(run(&clean))?, ok(run(&dirty))?);
            // A row of x is a row of outputs, a row of the weights a column.
            let reached = |i: usize| if in_weight { i % n == at / k } else { i / n == at / k };
            poison.check(&clean, &dirty, &expected, reached)?;
        }
    }
}
