//! The linear op in all its combinations, against float64.

use crate::support::{randn, widest_error};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{D, DType, Device, Result, Tensor};
use candle_fused::cpu::packed::PackedMatrix;
use candle_fused::ops::linear::reference;
use candle_fused::ops::{
    Activation, Epilogue, Prologue, Weight, linear, quant_linear, rms_norm_linear,
};
use candle_fused::trace;
use std::sync::Arc;

const ACTIVATIONS: [Activation; 5] = [
    Activation::None,
    Activation::Silu,
    Activation::Gelu,
    Activation::GeluTanh,
    Activation::SwiGlu,
];

fn error(got: &Tensor, expected: &[Vec<f64>]) -> Result<f64> {
    widest_error(got, &expected.concat())
}

/// Units in the last place of the dtype: one from rounding the result and one for the other factor of
/// a gated product, twice as much behind a norm, which rounds its inputs; plus what f32 sums of K
/// products lose.
fn tolerance(dtype: DType, k: usize, with_norm: bool) -> f64 {
    let unit = match dtype {
        DType::F32 => 1.2e-7,
        DType::F16 => 9.8e-4,
        _ => 7.9e-3,
    };
    let roundings = if with_norm { 4. } else { 2. };
    roundings * unit + 1.2e-7 * (k as f64).sqrt()
}

#[test]
fn every_combination_agrees_with_float64() -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for weight_dtype in [DType::F32, DType::F16, DType::BF16] {
            for (m, k, n) in [
                (1, 64, 48),
                (1, 33, 10),
                (3, 576, 100),
                (9, 111, 34),
                (40, 64, 260),
            ] {
                for activation in ACTIVATIONS {
                    for with_norm in [false, true] {
                        combination(dtype, weight_dtype, (m, k, n), activation, with_norm)?;
                    }
                }
            }
        }
    }
    Ok(())
}

fn combination(
    dtype: DType,
    weight_dtype: DType,
    (m, k, n): (usize, usize, usize),
    activation: Activation,
    with_norm: bool,
) -> Result<()> {
    let x = randn(&[m, k], dtype)?;
    let weights = [
        randn(&[n / 2, k], weight_dtype)?,
        randn(&[n - n / 2, k], weight_dtype)?,
    ];
    let norm_weight = randn(&[k], dtype)?;
    let bias = randn(&[n], dtype)?;
    let width = if activation == Activation::SwiGlu {
        n / 2
    } else {
        n
    };
    let residual = randn(&[m, width], dtype)?;
    let residuals = [&residual, &residual];
    let epilogue = Epilogue {
        bias: Some(&bias),
        activation,
        residuals: &residuals,
    };
    let refs = [&weights[0], &weights[1]];
    let (prologue, got) = if with_norm {
        let parts = rms_norm_linear(&x, &norm_weight, 1e-5, &refs, &epilogue)?;
        (
            Prologue::RmsNorm {
                weight: &norm_weight,
                eps: 1e-5,
            },
            Tensor::cat(&parts, D::Minus1)?,
        )
    } else {
        (
            Prologue::None,
            linear(&x, &Tensor::cat(&refs, 0)?, &epilogue)?,
        )
    };
    assert_eq!((got.dims(), got.dtype()), ([m, width].as_slice(), dtype));
    let weights = weights.map(Weight::Dense);
    let expected = reference(&x, prologue, &weights, &epilogue)?;
    let error = error(&got, &expected)?;
    let limit = tolerance(dtype, k, with_norm);
    assert!(
        error < limit,
        "{dtype:?} x {weight_dtype:?}, {m}x{k}x{n}, {activation:?}, norm {with_norm}: {error:e}"
    );
    Ok(())
}

#[test]
fn any_layout_gives_what_its_copy_gives() -> Result<()> {
    let w = randn(&[24, 40], DType::F32)?;
    let base = randn(&[6, 2, 43], DType::F32)?;
    let views = [
        base.narrow(2, 1, 40)?,
        base.narrow(0, 2, 3)?.narrow(2, 3, 40)?,
        base.narrow(2, 0, 40)?.transpose(0, 1)?,
        randn(&[40, 5], DType::F32)?.t()?,
        randn(&[1, 40], DType::F32)?.broadcast_as((7, 40))?,
        randn(&[40], DType::F32)?,
    ];
    for x in views {
        let residual = randn(&[24], DType::F32)?;
        let mut dims = x.dims().to_vec();
        *dims.last_mut().expect("a dimension") = 24;
        let residual = residual.broadcast_as(dims.as_slice())?;
        let epilogue = Epilogue {
            residuals: &[&residual],
            ..Default::default()
        };
        let strided = linear(&x, &w, &epilogue)?;
        let copied = linear(&x.contiguous()?, &w.contiguous()?, &epilogue)?;
        assert_eq!(strided.dims(), dims);
        let (a, b) = (strided.flatten_all()?, copied.flatten_all()?);
        assert_eq!(a.to_vec1::<f32>()?, b.to_vec1::<f32>()?);
    }
    let transposed = randn(&[40, 24], DType::F32)?.t()?;
    let x = randn(&[2, 40], DType::F32)?;
    let a = linear(&x, &transposed, &Epilogue::default())?;
    let b = linear(&x, &transposed.contiguous()?, &Epilogue::default())?;
    assert_eq!(a.to_vec2::<f32>()?, b.to_vec2::<f32>()?);
    Ok(())
}

fn packed(rows: usize, cols: usize, dtype: GgmlDType) -> Result<Weight> {
    let quantized = QTensor::quantize(&randn(&[rows, cols], DType::F32)?, dtype)?;
    Ok(Weight::Packed(Arc::new(PackedMatrix::pack(
        dtype,
        rows,
        cols,
        &quantized.data()?,
    )?)))
}

/// Int8 activations are off by max / 127 / sqrt(12) on average, 0.6 % of a deviation of the inputs.
/// Errors and outputs both add up as the square root of K, so an output is off by 0.6 % of the
/// outputs' deviation on average, and four times that is rare.
#[test]
fn quantized_products_stay_within_the_error_of_int8() -> Result<()> {
    let types = [
        GgmlDType::Q4_0,
        GgmlDType::Q4_1,
        GgmlDType::Q5_0,
        GgmlDType::Q5_1,
        GgmlDType::Q8_0,
        GgmlDType::Q4K,
        GgmlDType::Q5K,
        GgmlDType::Q6K,
    ];
    for dtype in types {
        for (m, k, n) in [(1, 256, 64), (1, 512, 21), (5, 256, 100), (70, 256, 300)] {
            for with_norm in [false, true] {
                let x = randn(&[m, k], DType::F32)?;
                let norm_weight = randn(&[k], DType::F32)?;
                let prologue = match with_norm {
                    true => Prologue::RmsNorm {
                        weight: &norm_weight,
                        eps: 1e-6,
                    },
                    false => Prologue::None,
                };
                // Matrices whose rows do not divide by the row group, and one that is dense.
                let weights = [
                    packed(n, k, dtype)?,
                    packed(7, k, dtype)?,
                    Weight::Dense(randn(&[5, k], DType::F32)?),
                ];
                let residual = randn(&[m, n + 12], DType::F32)?;
                let epilogue = Epilogue {
                    residuals: &[&residual],
                    ..Default::default()
                };
                let got = quant_linear(&x, prologue, &weights, &epilogue)?;
                let expected = reference(&x, prologue, &weights, &epilogue)?;
                let error = error(&got, &expected)?;
                assert!(
                    error < 2.5e-2,
                    "{dtype:?} {m}x{k}x{n} norm {with_norm}: {error:e}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn gating_pairs_matrices_of_any_size() -> Result<()> {
    for rows in [16, 24, 7, 160] {
        let x = randn(&[3, 64], DType::F32)?;
        let weights = [
            packed(rows, 64, GgmlDType::Q8_0)?,
            packed(rows, 64, GgmlDType::Q4_1)?,
        ];
        let epilogue = Epilogue {
            activation: Activation::SwiGlu,
            ..Default::default()
        };
        let got = quant_linear(&x, Prologue::None, &weights, &epilogue)?;
        let expected = reference(&x, Prologue::None, &weights, &epilogue)?;
        assert!(error(&got, &expected)? < 2.5e-2, "{rows} rows");
    }
    Ok(())
}

#[test]
fn the_trace_tells_what_was_fused() -> Result<()> {
    let x = randn(&[1, 64], DType::F32)?;
    let norm = randn(&[64], DType::F32)?;
    let prologue = Prologue::RmsNorm {
        weight: &norm,
        eps: 1e-6,
    };
    let weights = [
        packed(16, 64, GgmlDType::Q4_1)?,
        packed(16, 64, GgmlDType::Q4_1)?,
    ];
    let epilogue = Epilogue {
        activation: Activation::SwiGlu,
        ..Default::default()
    };
    let (y, calls) = trace::capture(|| quant_linear(&x, prologue, &weights, &epilogue));
    y?;
    let (call, n) = calls.iter().next().expect("a call");
    assert_eq!((call.op, n), ("quant_linear", 1));
    assert!(
        call.path.ends_with("q4_1 rms_norm+ +swiglu"),
        "{}",
        call.path
    );
    Ok(())
}

#[test]
fn bad_arguments_are_named() -> Result<()> {
    let x = randn(&[2, 8], DType::F32)?;
    let w = randn(&[6, 8], DType::F32)?;
    let none = Epilogue::default();
    let message = |result: Result<Tensor>| result.expect_err("accepted").to_string();
    let narrow = randn(&[6, 7], DType::F32)?;
    assert!(message(linear(&x, &narrow, &none)).contains("weights[0] is [6, 7]"));
    assert!(message(linear(&x, &randn(&[8], DType::F32)?, &none)).contains("weights[0]"));
    let scalar = Tensor::new(1f32, &Device::Cpu)?;
    assert!(message(linear(&scalar, &w, &none)).contains("x is a scalar"));
    let whole = Tensor::ones((2, 8), DType::U32, &Device::Cpu)?;
    assert!(message(linear(&whole, &w, &none)).contains("x is U32"));
    let short = randn(&[5], DType::F32)?;
    let bias = Epilogue {
        bias: Some(&short),
        ..none
    };
    assert!(message(linear(&x, &w, &bias)).contains("bias has shape [5]"));
    let half = randn(&[6], DType::BF16)?;
    let bias = Epilogue {
        bias: Some(&half),
        ..none
    };
    assert!(message(linear(&x, &w, &bias)).contains("bias is BF16"));
    let residual = randn(&[2, 5], DType::F32)?;
    let residuals = Epilogue {
        residuals: &[&residual],
        ..none
    };
    assert!(message(linear(&x, &w, &residuals)).contains("residuals[0]"));
    let three = [&x, &x, &x];
    let residuals = Epilogue {
        residuals: &three,
        ..none
    };
    assert!(message(linear(&x, &randn(&[8, 8], DType::F32)?, &residuals)).contains("3 residuals"));
    let odd = Epilogue {
        activation: Activation::SwiGlu,
        ..none
    };
    assert!(message(linear(&x, &randn(&[5, 8], DType::F32)?, &odd)).contains("swiglu"));
    let norm = randn(&[7], DType::F32)?;
    let result = rms_norm_linear(&x, &norm, 1e-5, &[&w], &none).map(|mut y| y.remove(0));
    assert!(message(result).contains("norm_weight has shape [7]"));
    assert!(message(quant_linear(&x, Prologue::None, &[], &none)).contains("weights is empty"));
    Ok(())
}

#[test]
fn empty_and_huge_inputs_are_fine() -> Result<()> {
    let w = randn(&[6, 32], DType::F32)?;
    let none = Tensor::zeros((0, 32), DType::F32, &Device::Cpu)?;
    assert_eq!(linear(&none, &w, &Epilogue::default())?.dims(), [0, 6]);
    let huge = (randn(&[4, 32], DType::F32)? * 1e18)?;
    let norm = Tensor::ones(32, DType::F32, &Device::Cpu)?;
    let weights = [packed(32, 32, GgmlDType::Q8_0)?];
    let prologue = Prologue::RmsNorm {
        weight: &norm,
        eps: 1e-6,
    };
    let y = quant_linear(&huge, prologue, &weights, &Epilogue::default())?;
    let expected = reference(&huge, prologue, &weights, &Epilogue::default())?;
    assert!(error(&y, &expected)? < 2.5e-2);
    Ok(())
}
