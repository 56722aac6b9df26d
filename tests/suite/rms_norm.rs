//! RMSNorm, alone, with a residual, and its cores, against float64.

use crate::common::distance::pairs;
use crate::support::{devices, layouts_on, randn, randn_on, values, widest_error};
use candle_core::{D, DType, Device, Result, Tensor};
use candle_fused::cpu::norm;
use candle_fused::cpu::simd::Level;
use candle_fused::ops::rms_norm::{reference, rms_norm, rms_norm_residual};
use proptest::prelude::*;

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
                let x = randn_on(&[rows, width], DType::F32, &device)?;
                let weight = randn_on(&[width], DType::F32, &device)?;
                let got = rms_norm(&x, &weight, 1e-5)?;
                // Sums of squares lose the square root of K units at most, the rest a few.
                let limit = 1.2e-7 * (4. + (width as f64).sqrt() / 4.);
                let error = widest_error(&got, &reference(&x, &weight, 1e-5)?)?;
                assert!(error < limit, "{device:?} {rows}x{width}: {error:e}");
            }
        }
    }
    Ok(())
}

/// Held to twice the error of candle's own op at the same dtype, plus half a unit.
#[test]
fn low_precision_is_no_worse_than_candles() -> Result<()> {
    for (dtype, floor) in [(DType::F16, 5e-4), (DType::BF16, 4e-3)] {
        for width in WIDTHS {
            let x = randn(&[5, width], dtype)?;
            let weight = randn(&[width], dtype)?;
            let expected = reference(&x, &weight, 1e-5)?;
            let candle = candle_nn::ops::rms_norm(&x, &weight, 1e-5)?;
            let plain = widest_error(&candle, &expected)?;
            for device in devices() {
                let (x, weight) = (x.to_device(&device)?, weight.to_device(&device)?);
                let fused = widest_error(&rms_norm(&x, &weight, 1e-5)?, &expected)?;
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
            for dims in [&[1, 576][..], &[3, 2, 111], &[64, 1024], &[7], &[2, 33000]] {
                let x = randn_on(dims, dtype, &device)?;
                let residual = randn_on(dims, dtype, &device)?;
                let weight = randn_on(&dims[dims.len() - 1..], dtype, &device)?;
                let (sum, normed) = rms_norm_residual(&x, &residual, &weight, 1e-6)?;
                let cpu = Device::Cpu;
                let plain = (x.to_device(&cpu)? + residual.to_device(&cpu)?)?;
                assert_eq!(values(&sum)?, values(&plain)?);
                let plain = rms_norm(&plain.to_device(&device)?, &weight, 1e-6)?;
                assert_eq!(values(&normed)?, values(&plain)?);
                assert_eq!((sum.dims(), normed.dims()), (dims, dims));
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
            let copied = x.contiguous()?;
            assert_eq!(
                values(&rms_norm(&x, &weight, 1e-5)?)?,
                values(&rms_norm(&copied, &weight, 1e-5)?)?
            );
            let (_, a) = rms_norm_residual(&x, &x, &weight, 1e-5)?;
            let (_, b) = rms_norm_residual(&copied, &copied, &weight, 1e-5)?;
            assert_eq!(values(&a)?, values(&b)?);
        }
    }
    Ok(())
}

/// Rows that begin in the middle of 16 bytes, and a row whatever stands beside it.
#[test]
fn unaligned_rows_and_single_ones_are_normalised() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::BF16] {
            let limit = if dtype == DType::F32 { 1e-6 } else { 8e-3 };
            let base = randn_on(&[9, 576], dtype, &device)?.flatten_all()?;
            let weight = randn_on(&[576], dtype, &device)?;
            for start in [0, 1, 3, 8] {
                let x = base.narrow(0, start, 8 * 576)?.reshape((8, 576))?;
                let got = rms_norm(&x, &weight, 1e-5)?;
                let error = widest_error(&got, &reference(&x, &weight, 1e-5)?)?;
                assert!(error < limit, "{device:?} {dtype:?} {start}: {error:e}");
                let one = rms_norm(&x.narrow(0, 5, 1)?, &weight, 1e-5)?;
                assert_eq!(values(&one)?, values(&got.narrow(0, 5, 1)?)?);
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
        norm::rms_norm(Level::Scalar, &x, &weight, 1e-5, &mut expected);
        for level in Level::available() {
            let mut out = vec![f32::NAN; width];
            norm::rms_norm(level, &x, &weight, 1e-5, &mut out);
            for (a, b) in pairs(&out, &expected)? {
                assert!(
                    (a - b).abs() <= 1e-5 * (1. + b.abs()),
                    "{level:?} {width}: {a} {b}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn zeros_stay_zeros_and_huge_rows_stay_finite() -> Result<()> {
    for device in devices() {
        let on = |t: Tensor| t.to_device(&device);
        let weight = on(Tensor::ones(64, DType::F32, &Device::Cpu)?)?;
        let zeros = on(Tensor::zeros((2, 64), DType::F32, &Device::Cpu)?)?;
        assert_eq!(values(&rms_norm(&zeros, &weight, 1e-6)?)?, [0.; 128]);
        for scale in [1e4, 1e15] {
            let x = on((randn(&[2, 64], DType::F32)? * scale)?)?;
            let error = widest_error(
                &rms_norm(&x, &weight, 1e-6)?,
                &reference(&x, &weight, 1e-6)?,
            )?;
            assert!(error < 1e-6, "{device:?} {scale:e}: {error:e}");
        }
        // Squares overflow f32: zeros, as documented, and as Hugging Face gives.
        let x = on((Tensor::ones((1, 64), DType::F32, &Device::Cpu)? * 1e30)?)?;
        assert_eq!(values(&rms_norm(&x, &weight, 1e-6)?)?, [0.; 64]);
        let empty = zeros.narrow(0, 0, 0)?;
        assert_eq!(rms_norm(&empty, &weight, 1e-6)?.dims(), [0, 64]);
    }
    Ok(())
}

#[test]
fn bad_arguments_are_named() -> Result<()> {
    let x = randn(&[2, 8], DType::F32)?;
    let message = |x: &Tensor, w: &Tensor| rms_norm(x, w, 1e-5).expect_err("").to_string();
    assert!(message(&x, &randn(&[7], DType::F32)?).contains("weight has shape [7]"));
    assert!(message(&x, &randn(&[8], DType::F16)?).contains("weight is F16"));
    assert!(message(&Tensor::new(1f32, &Device::Cpu)?, &x).contains("x is a scalar"));
    let empty = Tensor::zeros((2, 0), DType::F32, &Device::Cpu)?;
    assert!(message(&empty, &x).contains("last dimension above 0"));
    let whole = Tensor::ones((2, 8), DType::U32, &Device::Cpu)?;
    let ones = Tensor::ones(8, DType::U32, &Device::Cpu)?;
    assert!(message(&whole, &ones).contains("x is U32"));
    let weight = randn(&[8], DType::F32)?;
    let other = randn(&[8, 2], DType::F32)?;
    let error = rms_norm_residual(&x, &other, &weight, 1e-5)
        .expect_err("")
        .to_string();
    assert!(error.contains("residual has shape [8, 2]"), "{error}");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(100) })]

    #[test]
    fn random_views_agree_with_float64(
        dims in prop::collection::vec(1usize..12, 1..4),
        (axis, start, swap) in (0usize..3, 0usize..4, any::<bool>()),
    ) {
        let mut x = randn(&dims, DType::F32).unwrap();
        let axis = axis.min(dims.len() - 1);
        let start = start.min(dims[axis] - 1);
        x = x.narrow(axis, start, dims[axis] - start).unwrap();
        if swap {
            x = x.transpose(0, dims.len() - 1).unwrap();
        }
        let weight = randn(&[x.dim(D::Minus1).unwrap()], DType::F32).unwrap();
        let got = rms_norm(&x, &weight, 1e-5).unwrap();
        let expected = reference(&x, &weight, 1e-5).unwrap();
        prop_assert!(widest_error(&got, &expected).unwrap() < 1e-6);
    }
}
