//! The layer norm as a prologue: every combination against float64, and the parts that come out.

use crate::common::distance::pairs;
use crate::linear::{Norm, combinations, error};
use crate::quant_linear::{blocks_on, tolerance};
use crate::support::{devices, layouts_on, randn, randn_on, values};
use candle_core::quantized::GgmlDType;
use candle_core::{D, DType, Result, Tensor};
use candle_fused::ops::linear::reference;
use candle_fused::ops::{
    Activation, Epilogue, Prologue, layer_norm, layer_norm_linear, linear, quant_linear,
};
use candle_fused::trace;

#[test]
fn every_combination_agrees_with_float64() -> Result<()> {
    combinations(Norm::Layer)
}

/// The norm inside is the norm outside, and each weight has its part.
#[test]
fn it_is_the_norm_followed_by_each_product() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for x in layouts_on(dtype, &device)? {
                norm_then_product(&x, dtype)?;
            }
        }
    }
    Ok(())
}

fn norm_then_product(x: &Tensor, dtype: DType) -> Result<()> {
    let randn = |dims: &[usize]| randn_on(dims, dtype, x.device());
    let k = x.dim(D::Minus1)?;
    let (norm, bias) = (randn(&[k])?, randn(&[k])?);
    let weights = [randn(&[24, k])?, randn(&[7, k])?];
    let refs = [&weights[0], &weights[1]];
    let none = Epilogue::default();
    for bias in [None, Some(&bias)] {
        let run = || layer_norm_linear(x, &norm, bias, 1e-5, &refs, &none);
        let (parts, calls) = trace::capture(run);
        let parts = parts?;
        assert_eq!((parts.len(), calls.count("layer_norm_linear")), (2, 1));
        assert_eq!(calls.by_op().values().sum::<u64>(), 1);
        let normed = layer_norm(x, &norm, bias, 1e-5)?;
        for (part, weight) in parts.iter().zip(refs) {
            let expected = linear(&normed, weight, &none)?;
            assert_eq!(part.dims(), expected.dims());
            for (a, b) in pairs(&values(part)?, &values(&expected)?)? {
                // Sums over K may be taken in another order when more rows share a tile, and a mean
                // that differs in its last place may round a normalised value up instead of down.
                assert!((a - b).abs() <= 2e-2 * (1. + b.abs()), "{dtype:?}: {a} {b}");
            }
        }
    }
    Ok(())
}

/// In front of blocks too, from one row to many.
#[test]
fn it_stands_in_front_of_blocks() -> Result<()> {
    for device in devices() {
        for dtype in [
            GgmlDType::Q4_0,
            GgmlDType::Q8_0,
            GgmlDType::Q2K,
            GgmlDType::Q6K,
        ] {
            for (m, k) in [(1, 512), (3, 1536), (8, 2304), (33, 768)] {
                let randn = |dims: &[usize]| randn_on(dims, DType::F32, &device);
                let (x, weight, bias) = ((randn(&[m, k])? + 3.)?, randn(&[k])?, randn(&[k])?);
                let weights = [blocks_on(40, k, dtype, &device)?];
                for bias in [None, Some(&bias)] {
                    let prologue = Prologue::LayerNorm {
                        weight: &weight,
                        bias,
                        eps: 1e-5,
                    };
                    let epilogue = Epilogue {
                        activation: Activation::Gelu,
                        ..Default::default()
                    };
                    let got = quant_linear(&x, prologue, &weights, &epilogue)?;
                    let expected = reference(&x, prologue, &weights, &epilogue)?;
                    let error = error(&got, &expected)?;
                    let limit = tolerance(&device, m);
                    assert!(error < limit, "{device:?} {dtype:?} {m}x{k}: {error:e}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn bad_arguments_are_named() -> Result<()> {
    let x = randn(&[2, 8], DType::F32)?;
    let w = randn(&[6, 8], DType::F32)?;
    let norm = randn(&[8], DType::F32)?;
    let none = Epilogue::default();
    let message = |norm: &Tensor, bias: Option<&Tensor>, weights: &[&Tensor]| {
        layer_norm_linear(&x, norm, bias, 1e-5, weights, &none)
            .expect_err("accepted")
            .to_string()
    };
    let (short, half) = (randn(&[7], DType::F32)?, randn(&[8], DType::F16)?);
    assert!(message(&short, None, &[&w]).contains("norm_weight has shape [7]"));
    assert!(message(&half, None, &[&w]).contains("norm_weight is F16"));
    assert!(message(&norm, Some(&short), &[&w]).contains("norm_bias has shape [7]"));
    assert!(message(&norm, Some(&half), &[&w]).contains("norm_bias is F16"));
    assert!(message(&norm, None, &[]).contains("weights is empty"));
    assert!(message(&norm, None, &[&x.t()?]).contains("weights[0] is [8, 2]"));
    Ok(())
}
