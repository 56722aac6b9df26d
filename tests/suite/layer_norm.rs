//! LayerNorm and its core against float64.

use crate::support::{layouts, randn, widest_error};
use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_fused::cpu::norm;
use candle_fused::cpu::simd::Level;
use candle_fused::ops::layer_norm::{layer_norm, reference};

const WIDTHS: [usize; 8] = [1, 7, 16, 111, 500, 576, 1024, 4096];

#[test]
fn norms_agree_with_float64() -> Result<()> {
    for width in WIDTHS {
        for rows in [1, 3, 70] {
            let x = randn(&[rows, width], DType::F32)?;
            let (weight, bias) = (randn(&[width], DType::F32)?, randn(&[width], DType::F32)?);
            for bias in [None, Some(&bias)] {
                let got = layer_norm(&x, &weight, bias, 1e-5)?;
                let error = widest_error(&got, &reference(&x, &weight, bias, 1e-5)?)?;
                let limit = 1.2e-7 * (6. + (width as f64).sqrt() / 4.);
                assert!(error < limit, "{rows}x{width}: {error:e}");
            }
        }
    }
    Ok(())
}

/// An offset of 1e4 leaves 11 bits for the spread in f32; the inputs carry that rounding, so they
/// are what the reference starts from, and nothing more may be lost.
#[test]
fn a_large_offset_costs_nothing() -> Result<()> {
    for width in [17, 576, 4096] {
        let x = (randn(&[4, width], DType::F32)? + 1e4)?;
        let weight = Tensor::ones(width, DType::F32, &Device::Cpu)?;
        let got = layer_norm(&x, &weight, None, 1e-5)?;
        let error = widest_error(&got, &reference(&x, &weight, None, 1e-5)?)?;
        // Subtracting a mean near 1e4 rounds to 5e-4, which is exact to a few in 1e4 of the spread.
        assert!(error < 5e-4, "{width}: {error:e}");
    }
    Ok(())
}

#[test]
fn low_precision_is_no_worse_than_candles() -> Result<()> {
    for (dtype, floor) in [(DType::F16, 5e-4), (DType::BF16, 4e-3)] {
        for width in [7, 576, 1024] {
            let x = randn(&[5, width], dtype)?;
            let (weight, bias) = (randn(&[width], dtype)?, randn(&[width], dtype)?);
            let expected = reference(&x, &weight, Some(&bias), 1e-5)?;
            let fused = layer_norm(&x, &weight, Some(&bias), 1e-5)?;
            let candle = candle_nn::LayerNorm::new(weight, bias, 1e-5).forward(&x)?;
            let (fused, plain) = (
                widest_error(&fused, &expected)?,
                widest_error(&candle, &expected)?,
            );
            assert!(
                fused <= 2. * plain + floor,
                "{dtype:?} {width}: {fused:e}, {plain:e}"
            );
        }
    }
    Ok(())
}

#[test]
fn any_layout_gives_what_its_copy_gives() -> Result<()> {
    for x in layouts(DType::F32)? {
        let weight = randn(&[x.dim(D::Minus1)?], DType::F32)?;
        let flat = |t: Tensor| t.flatten_all()?.to_vec1::<f32>();
        let strided = layer_norm(&x, &weight, Some(&weight), 1e-5)?;
        let copied = layer_norm(&x.contiguous()?, &weight, Some(&weight), 1e-5)?;
        assert_eq!(flat(strided)?, flat(copied)?);
    }
    Ok(())
}

#[test]
fn every_level_agrees() -> Result<()> {
    for width in WIDTHS {
        let x = randn(&[width], DType::F32)?.to_vec1::<f32>()?;
        let weight = randn(&[width], DType::F32)?.to_vec1::<f32>()?;
        let mut expected = vec![0f32; width];
        norm::layer_norm(Level::Scalar, &x, &weight, Some(&x), 1e-5, &mut expected);
        for level in Level::available() {
            let mut out = vec![f32::NAN; width];
            norm::layer_norm(level, &x, &weight, Some(&x), 1e-5, &mut out);
            for (a, b) in out.iter().zip(&expected) {
                assert!(
                    (a - b).abs() <= 1e-4 * (1. + b.abs()),
                    "{level:?} {width}: {a} {b}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn bad_arguments_are_named() -> Result<()> {
    let x = randn(&[2, 8], DType::F32)?;
    let weight = randn(&[8], DType::F32)?;
    let message = |x: &Tensor, w: &Tensor, b: Option<&Tensor>| {
        layer_norm(x, w, b, 1e-5).expect_err("").to_string()
    };
    assert!(message(&x, &randn(&[7], DType::F32)?, None).contains("weight has shape [7]"));
    assert!(message(&x, &weight, Some(&x)).contains("bias has shape [2, 8]"));
    assert!(message(&x, &randn(&[8], DType::BF16)?, None).contains("weight is BF16"));
    assert!(message(&Tensor::new(1f32, &Device::Cpu)?, &weight, None).contains("x is a scalar"));
    Ok(())
}
