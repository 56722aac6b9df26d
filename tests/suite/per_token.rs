//! Products whose input is rounded to 8 bits of each row, as layers take it that were trained so.

use crate::quant_schemes::weight_on;
use crate::support::{device, on_every_device, randn};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::linear::reference;
use candle_fused::ops::{
    self, ActivationBits, Epilogue, Prologue, Weight, quant_linear_with, rms_norm,
};

/// An outlier of each row makes the steps of the others so large that unrounded inputs give something else.
fn rows(m: usize, k: usize, dtype: DType) -> Result<Tensor> {
    let mut values = randn(&[m, k], DType::F32)?.to_vec2::<f32>()?;
    for (i, row) in values.iter_mut().enumerate() {
        row[(7 * i + 3) % k] = 30.;
    }
    Tensor::new(values, &device())?.to_dtype(dtype)
}

/// Each row in whole numbers of a 127th of its largest magnitude, in f32.
fn rounded(x: &Tensor) -> Result<Tensor> {
    let mut values = x.to_dtype(DType::F32)?.to_vec2::<f32>()?;
    for row in &mut values {
        let largest = row.iter().fold(0f32, |most, v| most.max(v.abs()));
        for v in row {
            *v = (*v * (127. / largest)).round_ties_even() * (largest / 127.);
        }
    }
    Tensor::new(values, x.device())
}

/// The largest difference by the largest output.
pub fn apart(y: &Tensor, expected: &[Vec<f64>]) -> Result<f64> {
    let y = y.to_dtype(DType::F64)?.to_vec2::<f64>()?;
    let (mut most, mut largest) = (0f64, 0f64);
    for (a, b) in y.iter().flatten().zip(expected.iter().flatten()) {
        assert!(a.is_finite());
        most = most.max((a - b).abs());
        largest = largest.max(b.abs());
    }
    Ok(most / largest)
}

/// On a CPU the sums are exact. On a GPU a rounded row is in x's dtype, or in bf16 for the tensor cores, and a value next
/// to the middle of two steps may fall to the other side.
fn limit(dtype: DType) -> f64 {
    match (device(), dtype) {
        (Device::Cpu, DType::F32) => 1e-5,
        (Device::Cpu, _) => 4e-3,
        _ => 5e-3,
    }
}

#[test]
fn rows_are_rounded_for_every_format_and_any_count() -> Result<()> {
    on_every_device(|| {
        for (i, scheme) in ["ternary-row", "ternary-tensor", "int8", "int4-g128"]
            .into_iter()
            .enumerate()
        {
            for m in [1, 2, 4, 5, 7, 8, 9, 33, 64, 65, 130] {
                let k = [256, 640, 6912][(i + m) % 3];
                let weights = [
                    weight_on(24, k, scheme.parse()?, &device())?,
                    weight_on(40, k, scheme.parse()?, &device())?,
                ];
                for dtype in [DType::F32, DType::BF16, DType::F16] {
                    let x = rows(m, k, dtype)?;
                    let product = |bits| {
                        let epilogue = Epilogue::default();
                        quant_linear_with(&x, Prologue::None, &weights, &epilogue, bits)
                    };
                    let y = product(ActivationBits::PerToken8)?;
                    let expected = of(&rounded(&x)?, &weights)?;
                    let error = apart(&y, &expected)?;
                    let what = format!("{scheme} {dtype:?} [{m}, {k}] on {:?}", device());
                    assert!(error < limit(dtype), "{what}: {error:e}");
                    // What is not rounded is farther away than that.
                    let fine = apart(&y, &of(&x.to_dtype(DType::F32)?, &weights)?)?;
                    assert!(fine > 2. * limit(dtype), "{what}: {fine:e} from x itself");
                }
            }
        }
        Ok(())
    })
}

fn of(x: &Tensor, weights: &[Weight]) -> Result<Vec<Vec<f64>>> {
    reference(x, Prologue::None, weights, &Epilogue::default())
}

/// Behind a norm, in front of a gate and a residual.
#[test]
fn rows_are_rounded_behind_their_norm() -> Result<()> {
    on_every_device(|| {
        for m in [1, 2, 3, 4, 6, 8, 17] {
            for k in [640, 2560, 6912] {
                let weights = [
                    weight_on(32, k, "ternary-row".parse()?, &device())?,
                    weight_on(32, k, "ternary-row".parse()?, &device())?,
                ];
                for dtype in [DType::F32, DType::BF16] {
                    let x = rows(m, k, dtype)?;
                    let gain = (randn(&[k], DType::F32)?.abs()? + 0.5)?;
                    let gain = gain.to_device(&device())?.to_dtype(dtype)?;
                    let norm = Prologue::RmsNorm {
                        weight: &gain,
                        eps: 1e-5,
                    };
                    let residual = randn(&[m, 32], DType::F32)?.to_device(&device())?;
                    let residual = residual.to_dtype(dtype)?;
                    let epilogue = Epilogue {
                        activation: ops::Activation::Relu2Glu,
                        residuals: &[&residual],
                        ..Default::default()
                    };
                    let bits = ActivationBits::PerToken8;
                    let y = quant_linear_with(&x, norm, &weights, &epilogue, bits)?;
                    let normed = rounded(&rms_norm(&x, &gain, 1e-5)?)?;
                    let wide = residual.to_dtype(DType::F32)?;
                    let epilogue = Epilogue {
                        residuals: &[&wide],
                        ..epilogue
                    };
                    let expected = reference(&normed, Prologue::None, &weights, &epilogue)?;
                    let error = apart(&y, &expected)?;
                    // Squares and products of the two make three times as much of a deviation.
                    let limit = 3. * limit(dtype);
                    assert!(
                        error < limit,
                        "{dtype:?} [{m}, {k}] on {:?}: {error:e}",
                        device()
                    );
                }
            }
        }
        Ok(())
    })
}
