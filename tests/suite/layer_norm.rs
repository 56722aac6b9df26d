//! LayerNorm and its core against float64.

use crate::common::distance::pairs;
use crate::support::{devices, layouts_on, randn, randn_on, values, widest_error};
use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_fused::cpu::norm;
use candle_fused::cpu::simd::Level;
use candle_fused::ops::layer_norm::{layer_norm, layer_norm_residual, reference};
use candle_fused::trace;

const WIDTHS: [usize; 8] = [1, 7, 16, 111, 500, 576, 1024, 4096];

/// Widths past what a GPU's registers hold, too.
const WIDE: [usize; 4] = [8192, 16385, 33000, 65536];

#[test]
fn norms_agree_with_float64() -> Result<()> {
    for device in devices() {
        for width in WIDTHS.into_iter().chain(WIDE) {
            for rows in [1, 3, 70] {
                if rows * width > 1 << 19 {
                    continue;
                }
                let randn = |dims: &[usize]| randn_on(dims, DType::F32, &device);
                let (x, weight, bias) =
                    (randn(&[rows, width])?, randn(&[width])?, randn(&[width])?);
                for bias in [None, Some(&bias)] {
                    let got = layer_norm(&x, &weight, bias, 1e-5)?;
                    let error = widest_error(&got, &reference(&x, &weight, bias, 1e-5)?)?;
                    let limit = 1.2e-7 * (6. + (width as f64).sqrt() / 4.);
                    assert!(error < limit, "{device:?} {rows}x{width}: {error:e}");
                }
            }
        }
    }
    Ok(())
}

/// An offset of 1e4 leaves 11 bits for the spread in f32; the inputs carry that rounding, so they
/// are what the reference starts from, and nothing more may be lost.
#[test]
fn a_large_offset_costs_nothing() -> Result<()> {
    for device in devices() {
        for width in [17, 576, 4096] {
            let x = (randn(&[4, width], DType::F32)? + 1e4)?.to_device(&device)?;
            let weight = Tensor::ones(width, DType::F32, &Device::Cpu)?.to_device(&device)?;
            let got = layer_norm(&x, &weight, None, 1e-5)?;
            let error = widest_error(&got, &reference(&x, &weight, None, 1e-5)?)?;
            // Subtracting a mean near 1e4 rounds to 5e-4, which is exact to a few in 1e4 of the
            // spread.
            assert!(error < 5e-4, "{device:?} {width}: {error:e}");
        }
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
            let candle =
                candle_nn::LayerNorm::new(weight.clone(), bias.clone(), 1e-5).forward(&x)?;
            let plain = widest_error(&candle, &expected)?;
            for device in devices() {
                let on = |t: &Tensor| t.to_device(&device);
                let fused = layer_norm(&on(&x)?, &on(&weight)?, Some(&on(&bias)?), 1e-5)?;
                let fused = widest_error(&fused, &expected)?;
                assert!(
                    fused <= 2. * plain + floor,
                    "{device:?} {dtype:?} {width}: {fused:e}, {plain:e}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn the_residual_form_is_the_sum_and_its_norm() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            // The last two are wider than registers, in 16-byte packs and one by one.
            for dims in [
                &[1, 576][..],
                &[3, 2, 111],
                &[64, 1024],
                &[7],
                &[3, 33000],
                &[2, 16385],
            ] {
                let x = randn_on(dims, dtype, &device)?;
                let residual = randn_on(dims, dtype, &device)?;
                let weight = randn_on(&dims[dims.len() - 1..], dtype, &device)?;
                for bias in [None, Some(&weight)] {
                    let run = || layer_norm_residual(&x, &residual, &weight, bias, 1e-5);
                    let (got, calls) = trace::capture(run);
                    let (sum, normed) = got?;
                    assert_eq!(calls.count("layer_norm"), 1);
                    let cpu = Device::Cpu;
                    let plain = (x.to_device(&cpu)? + residual.to_device(&cpu)?)?;
                    assert_eq!(values(&sum)?, values(&plain)?);
                    let plain = layer_norm(&plain.to_device(&device)?, &weight, bias, 1e-5)?;
                    assert_eq!(values(&normed)?, values(&plain)?);
                    assert_eq!((sum.dims(), normed.dims()), (dims, dims));
                }
            }
        }
    }
    Ok(())
}

#[test]
fn any_layout_gives_what_its_copy_gives() -> Result<()> {
    for device in devices() {
        for x in layouts_on(DType::F32, &device)? {
            let weight = randn_on(&[x.dim(D::Minus1)?], DType::F32, &device)?;
            let strided = layer_norm(&x, &weight, Some(&weight), 1e-5)?;
            let copied = layer_norm(&x.contiguous()?, &weight, Some(&weight), 1e-5)?;
            assert_eq!(values(&strided)?, values(&copied)?);
            let both = |x: &Tensor| layer_norm_residual(x, x, &weight, None, 1e-5);
            let (strided, copied) = (both(&x)?, both(&x.contiguous()?)?);
            assert_eq!(values(&strided.1)?, values(&copied.1)?);
        }
    }
    Ok(())
}

/// Rows that begin in the middle of 16 bytes.
#[test]
fn unaligned_rows_are_normalised() -> Result<()> {
    for device in devices() {
        for (dtype, limit) in [(DType::F32, 1e-6), (DType::BF16, 4e-3)] {
            let base = randn_on(&[9, 576], dtype, &device)?.flatten_all()?;
            let weight = randn_on(&[576], dtype, &device)?;
            for start in [1, 3, 8] {
                let x = base.narrow(0, start, 8 * 576)?.reshape((8, 576))?;
                let got = layer_norm(&x, &weight, None, 1e-5)?;
                let error = widest_error(&got, &reference(&x, &weight, None, 1e-5)?)?;
                assert!(error < limit, "{device:?} {dtype:?} {start}: {error:e}");
            }
        }
    }
    Ok(())
}

/// Values near 2^20, which f32 holds in steps of an eighth: a mean that were rounded like them would put
/// the results off by up to a twentieth.
#[test]
fn a_common_offset_costs_no_precision() -> Result<()> {
    for width in WIDTHS {
        let x: Vec<f32> = (0..width)
            .map(|i| 1048576. + (i * 7 % 11) as f32 / 8.)
            .collect();
        let weight = vec![1f32; width];
        let on_cpu = |v: &[f32]| Tensor::new(v, &Device::Cpu);
        let expected = reference(&on_cpu(&x)?, &on_cpu(&weight)?, None, 1e-5)?;
        for level in Level::available() {
            let mut out = vec![f32::NAN; width];
            norm::layer_norm(level, &x, &weight, None, 1e-5, &mut out);
            for (got, expected) in pairs(&out, &expected)? {
                assert!(
                    (got - expected).abs() <= 2e-5,
                    "{level:?} {width}: {got} {expected}"
                );
            }
        }
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
            for (a, b) in pairs(&out, &expected)? {
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
    let message = |residual: &Tensor| {
        layer_norm_residual(&x, residual, &weight, None, 1e-5)
            .expect_err("")
            .to_string()
    };
    assert!(message(&randn(&[8, 2], DType::F32)?).contains("residual has shape [8, 2]"));
    assert!(message(&x.to_dtype(DType::F16)?).contains("residual is F16"));
    Ok(())
}
