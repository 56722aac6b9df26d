//! Products over GGUF blocks, against float64 and in every combination of matrices.

use crate::linear::error;
use crate::support::randn;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::cpu::packed::PackedMatrix;
use candle_fused::ops::linear::reference;
use candle_fused::ops::{Activation, Epilogue, Prologue, Weight, quant_linear};
use candle_fused::trace;
use std::sync::Arc;

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
    let x = randn(&[2, 64], DType::F32)?;
    let none = Epilogue::default();
    let message = |weights: &[Weight]| {
        quant_linear(&x, Prologue::None, weights, &none)
            .expect_err("accepted")
            .to_string()
    };
    assert!(message(&[]).contains("weights is empty"));
    let wide = packed(16, 96, GgmlDType::Q4_0)?;
    assert!(message(&[wide]).contains("weights[0] is [16, 96]"));
    Ok(())
}

#[test]
fn huge_inputs_are_fine() -> Result<()> {
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
