//! `rms_norm`, `layer_norm` and `residual_add`.

use super::{
    Lie, cases, devices_for, draw, float, length, lie, ok, own_lie, poison, seeded, size, top, unit,
};
use crate::support::{devices, values};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::{layer_norm, residual_add, rms_norm};
use half::{bf16, f16};
use proptest::prelude::*;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Norm {
    Rms,
    Residual,
    Layer,
    LayerWithBias,
    LayerResidual,
}

const NORMS: [Norm; 5] = [
    Norm::Rms,
    Norm::Residual,
    Norm::Layer,
    Norm::LayerWithBias,
    Norm::LayerResidual,
];

const EPS: f64 = 1e-5;

/// Result and plain form on a device; with a residual, of the sum.
fn both(norm: Norm, x: &Tensor, [weight, affine]: [&Tensor; 2]) -> Result<[Vec<f64>; 2]> {
    let bias = (norm == Norm::LayerWithBias).then_some(affine);
    let (got, expected) = match norm {
        Norm::Rms => (
            rms_norm::rms_norm(x, weight, EPS)?,
            rms_norm::reference(x, weight, EPS)?,
        ),
        Norm::Residual => {
            let (sum, normed) = rms_norm::rms_norm_residual(x, x, weight, EPS)?;
            assert_eq!(sum.dims(), x.dims());
            (normed, rms_norm::reference(&(x + x)?, weight, EPS)?)
        }
        Norm::LayerResidual => {
            let (sum, normed) = layer_norm::layer_norm_residual(x, x, weight, Some(affine), EPS)?;
            assert_eq!(sum.dims(), x.dims());
            let expected = layer_norm::reference(&(x + x)?, weight, Some(affine), EPS)?;
            (normed, expected)
        }
        Norm::Layer | Norm::LayerWithBias => (
            layer_norm::layer_norm(x, weight, bias, EPS)?,
            layer_norm::reference(x, weight, bias, EPS)?,
        ),
    };
    assert_eq!((got.dims(), got.dtype()), (x.dims(), x.dtype()));
    Ok([values(&got)?, expected])
}

/// How far a row may be off: a rounding of the normalised value and one of the result; and the sums'
/// roundings, which weigh as the largest value does against the deviation.
fn limit(norm: Norm, row: &[f64], expected: &[f64], weight: f64, dtype: DType) -> f64 {
    let n = row.len() as f64;
    let layer = !matches!(norm, Norm::Rms | Norm::Residual);
    let mean = if layer {
        row.iter().sum::<f64>() / n
    } else {
        0.
    };
    let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
    let largest = top(row) / (variance + EPS).sqrt();
    1.6 * unit(dtype) * top(expected) + 1.2e-7 * (4. + n.sqrt()) * largest * weight
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn norms_agree(
        norm in prop::sample::select(&NORMS[..]),
        mut dims in prop::collection::vec(length(7), 0..3),
        width in 1usize..300,
        (dtype, lies, exponent, seed) in (float(), [lie(), lie(), lie()], -24i32..24, any::<u64>()),
    ) {
        dims.push(width);
        let rng = &mut seeded(seed);
        let x = ok(draw(rng, &dims, size(dtype, exponent), dtype))?;
        let affine = ok([1., 1.].map(|s| draw(rng, &[width], s, dtype)).into_iter().collect::<Result<Vec<_>>>())?;
        for device in devices_for(x.elem_count()) {
            let x = ok(lies[0].place(&x, &device))?;
            let weight = ok(lies[1].place(&affine[0], &device))?;
            let bias = ok(lies[2].place(&affine[1], &device))?;
            let [got, expected] = ok(both(norm, &x, [&weight, &bias]))?;
            let doubled = matches!(norm, Norm::Residual | Norm::LayerResidual);
            let (x, weight) = (ok(values(&x))?, top(&ok(values(&weight))?));
            let rows = got.chunks(width).zip(expected.chunks(width)).zip(x.chunks(width));
            for ((got, expected), x) in rows {
                let x: Vec<f64> = x.iter().map(|v| if doubled { 2. * v } else { *v }).collect();
                let limit = limit(norm, &x, expected, weight, dtype);
                for (g, e) in got.iter().zip(expected) {
                    prop_assert!((g - e).abs() <= limit, "{norm:?} {g} {e}, {limit:e} apart at most");
                }
            }
        }
    }

    #[test]
    fn norms_keep_poison_in_its_row(
        norm in prop::sample::select(&NORMS[..]),
        (rows, width) in (1usize..9, 1usize..200),
        (dtype, lie, poison, at, seed) in (float(), own_lie(), poison(), any::<prop::sample::Index>(), any::<u64>()),
    ) {
        let rng = &mut seeded(seed);
        let x = ok(draw(rng, &[rows, width], 1., dtype))?;
        let (weight, bias) = (ok(draw(rng, &[width], 1., dtype))?, ok(draw(rng, &[width], 1., dtype))?);
        let at = at.index(rows * width);
        let bad = ok(poison.put(&x, at))?;
        for device in devices() {
            let [weight, bias] = [&weight, &bias].map(|t| t.to_device(&device).expect("a copy"));
            let run = |x: &Tensor| both(norm, &lie.place(x, &device)?, [&weight, &bias]);
            let ([clean, _], [dirty, expected]) = (ok(run(&x))?, ok(run(&bad))?);
            poison.check(&clean, &dirty, &expected, |i| i / width == at / width)?;
        }
    }

    #[test]
    fn residuals_are_added(
        dims in prop::collection::vec(length(9), 1..4),
        (dtype, lies, exponents) in (float(), [lie(), lie(), lie()], [-24i32..24, -24i32..24, -24i32..24]),
        (two, poison, at, seed) in (any::<bool>(), poison(), any::<prop::sample::Index>(), any::<u64>()),
    ) {
        let rng = &mut seeded(seed);
        let parts: Vec<_> = exponents.iter().map(|e| draw(rng, &dims, size(dtype, *e), dtype)).collect();
        let mut parts = ok(parts.into_iter().collect::<Result<Vec<_>>>())?;
        let elements: usize = dims.iter().product();
        if elements > 0 {
            parts[0] = ok(poison.put(&parts[0], at.index(elements)))?;
        }
        for device in devices_for(elements) {
            sums(&parts, &lies, if two { 2 } else { 1 }, &device)?;
        }
    }
}

/// Each sum is rounded once, to the bit.
fn sums(
    parts: &[Tensor],
    lies: &[Lie; 3],
    residuals: usize,
    device: &Device,
) -> std::result::Result<(), TestCaseError> {
    let place = |(part, lie): (&Tensor, &Lie)| lie.place(part, device);
    let placed: Vec<_> = ok(parts.iter().zip(lies).map(place).collect::<Result<_>>())?;
    let rest: Vec<&Tensor> = placed[1..=residuals].iter().collect();
    let got = ok(residual_add(&placed[0], &rest).and_then(|y| values(&y)))?;
    let mut expected = ok(values(&placed[0]))?;
    for part in rest {
        for (sum, v) in expected.iter_mut().zip(ok(values(part))?) {
            *sum = rounded(*sum + v, parts[0].dtype());
        }
    }
    prop_assert_eq!(got.len(), expected.len());
    for (g, e) in got.iter().zip(&expected) {
        prop_assert!(g == e || (g.is_nan() && e.is_nan()), "{g}, expected {e}");
    }
    Ok(())
}

/// To f32, as a sum in it is, and then to the type.
fn rounded(v: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F16 => f16::from_f32(v as f32).to_f64(),
        DType::BF16 => bf16::from_f32(v as f32).to_f64(),
        _ => f64::from(v as f32),
    }
}
