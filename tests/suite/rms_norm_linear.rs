//! The norm as a prologue: every combination against float64, and the parts that come out.

use crate::common::distance::pairs;
use crate::linear::{Norm, combinations};
use crate::support::{devices, layouts_on, randn, randn_on, values};
use candle_core::{D, DType, Result, Tensor};
use candle_fused::ops::{Activation, Epilogue, linear, rms_norm, rms_norm_linear};
use candle_fused::trace;

#[test]
fn every_combination_agrees_with_float64() -> Result<()> {
    combinations(Norm::Rms)
}

/// The norm inside is the norm outside, bit for bit, and each weight has its part.
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
    let norm = randn(&[k])?;
    let weights = [randn(&[24, k])?, randn(&[7, k])?, randn(&[1, k])?];
    let refs = [&weights[0], &weights[1], &weights[2]];
    let none = Epilogue::default();
    let (parts, calls) = trace::capture(|| rms_norm_linear(x, &norm, 1e-5, &refs, &none));
    let parts = parts?;
    assert_eq!((parts.len(), calls.count("rms_norm_linear")), (3, 1));
    let normed = rms_norm(x, &norm, 1e-5)?;
    for (part, weight) in parts.iter().zip(refs) {
        let expected = linear(&normed, weight, &none)?;
        assert_eq!(part.dims(), expected.dims());
        for (a, b) in pairs(&values(part)?, &values(&expected)?)? {
            // Sums over K may be taken in another order when more rows share a tile.
            assert!((a - b).abs() <= 1e-2 * (1. + b.abs()), "{dtype:?}: {a} {b}");
        }
    }
    Ok(())
}

#[test]
fn no_rows_give_no_rows() -> Result<()> {
    for device in devices() {
        let x = Tensor::zeros((0, 8), DType::F32, &device)?;
        let w = randn_on(&[4, 8], DType::F32, &device)?;
        let norm = randn_on(&[8], DType::F32, &device)?;
        let parts = rms_norm_linear(&x, &norm, 1e-5, &[&w, &w], &Epilogue::default())?;
        assert_eq!(
            (parts[0].dims(), parts[1].dims()),
            (&[0, 4][..], &[0, 4][..])
        );
    }
    Ok(())
}

#[test]
fn bad_arguments_are_named() -> Result<()> {
    let x = randn(&[2, 8], DType::F32)?;
    let w = randn(&[6, 8], DType::F32)?;
    let none = Epilogue::default();
    let message = |norm: &Tensor, weights: &[&Tensor], epilogue: &Epilogue<'_>| {
        rms_norm_linear(&x, norm, 1e-5, weights, epilogue)
            .expect_err("accepted")
            .to_string()
    };
    let norm = randn(&[8], DType::F32)?;
    assert!(message(&randn(&[7], DType::F32)?, &[&w], &none).contains("norm_weight has shape [7]"));
    assert!(message(&randn(&[8], DType::F16)?, &[&w], &none).contains("norm_weight is F16"));
    assert!(message(&norm, &[], &none).contains("weights is empty"));
    assert!(message(&norm, &[&w, &x.t()?], &none).contains("weights[1] is [8, 2]"));
    let odd = Epilogue {
        activation: Activation::SwiGlu,
        ..none
    };
    assert!(message(&norm, &[&w, &w.narrow(0, 0, 5)?], &odd).contains("swiglu"));
    Ok(())
}
