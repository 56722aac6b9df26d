//! Residual additions against float64, bit for bit against candle, and in every layout.

use crate::support::{devices, layouts_on, randn, randn_on, values, widest_error};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::cpu::norm;
use candle_fused::cpu::simd::Level;
use candle_fused::ops::residual_add::{reference, residual_add};
use candle_fused::trace;
use proptest::prelude::*;

#[test]
fn sums_are_candles_bit_for_bit() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for dims in [
                &[1][..],
                &[7],
                &[3, 111],
                &[2, 5, 576],
                &[40, 1024],
                &[0, 4],
            ] {
                let (x, a, b) = (
                    randn_on(dims, dtype, &device)?,
                    randn_on(dims, dtype, &device)?,
                    randn_on(dims, dtype, &device)?,
                );
                let one = residual_add(&x, &[&a])?;
                let two = residual_add(&x, &[&a, &b])?;
                let cpu = Device::Cpu;
                let (x, a, b) = (x.to_device(&cpu)?, a.to_device(&cpu)?, b.to_device(&cpu)?);
                assert_eq!(values(&one)?, values(&(&x + &a)?)?);
                assert_eq!(values(&two)?, values(&((&x + &a)? + &b)?)?);
                if x.elem_count() > 0 && dtype == DType::F32 {
                    assert!(widest_error(&two, &reference(&x, &[&a, &b])?)? < 3e-7);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn any_layout_gives_what_its_copy_gives() -> Result<()> {
    for device in devices() {
        let views = layouts_on(DType::F32, &device)?;
        for x in &views {
            for residual in layouts_on(DType::F32, &device)? {
                if residual.dims() == x.dims() {
                    let got = residual_add(x, &[&residual, x])?;
                    let expected = residual_add(&x.contiguous()?, &[&residual.contiguous()?, x])?;
                    assert_eq!(values(&got)?, values(&expected)?);
                    assert!(got.is_contiguous());
                }
            }
        }
    }
    Ok(())
}

/// Views that start in the middle of 16 bytes, and are long enough for vectors.
#[test]
fn unaligned_views_are_summed() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::BF16] {
            let base = randn_on(&[5000], dtype, &device)?;
            for start in 0..9 {
                let (x, a) = (base.narrow(0, start, 4097)?, base.narrow(0, 3, 4097)?);
                let got = residual_add(&x, &[&a])?;
                let cpu = Device::Cpu;
                let expected = (x.to_device(&cpu)? + a.to_device(&cpu)?)?;
                assert_eq!(values(&got)?, values(&expected)?);
            }
        }
    }
    Ok(())
}

#[test]
fn every_level_gives_the_same() {
    for n in [1, 3, 8, 15, 16, 17, 100] {
        let x: Vec<f32> = (0..n).map(|i| i as f32 * 0.37).collect();
        let mut expected = vec![0.; n];
        norm::add(Level::Scalar, &x, &x, Some(&x), &mut expected);
        for level in Level::available() {
            let mut out = vec![f32::NAN; n];
            norm::add(level, &x, &x, Some(&x), &mut out);
            assert_eq!(out, expected, "{level:?}");
        }
    }
}

#[test]
fn bad_arguments_are_named() -> Result<()> {
    let x = randn(&[2, 3], DType::F32)?;
    let message = |residuals: &[&Tensor]| residual_add(&x, residuals).expect_err("").to_string();
    assert!(message(&[]).contains("residuals holds 0"));
    assert!(message(&[&x, &x, &x]).contains("residuals holds 3"));
    assert!(message(&[&randn(&[3, 2], DType::F32)?]).contains("residuals[0] has shape [3, 2]"));
    assert!(message(&[&x, &randn(&[2, 3], DType::BF16)?]).contains("residuals[1] is BF16"));
    let whole = Tensor::ones((2, 3), DType::I64, &Device::Cpu)?;
    let error = residual_add(&whole, &[&whole]).expect_err("").to_string();
    assert!(error.contains("x is I64"), "{error}");
    Ok(())
}

#[test]
fn calls_are_counted() -> Result<()> {
    for device in devices() {
        let x = randn_on(&[4], DType::BF16, &device)?;
        let (_, calls) = trace::capture(|| residual_add(&x, &[&x]));
        assert_eq!(calls.count("residual_add"), 1);
        residual_add(&x, &[&x])?;
        let (_, calls) = trace::capture(|| ());
        assert_eq!(calls.count("residual_add"), 0);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(100) })]

    #[test]
    fn random_views_agree(
        dims in prop::collection::vec(1usize..9, 1..4),
        cuts in prop::collection::vec((0usize..8, 1usize..9), 3),
        swap in any::<bool>(),
    ) {
        let mut view = randn(&dims, DType::F32).unwrap();
        for (axis, (start, len)) in cuts.into_iter().enumerate().take(dims.len()) {
            let start = start.min(dims[axis] - 1);
            view = view.narrow(axis, start, len.min(dims[axis] - start)).unwrap();
        }
        if swap && dims.len() > 1 {
            view = view.transpose(0, dims.len() - 1).unwrap();
        }
        let got = residual_add(&view, &[&view]).unwrap().flatten_all().unwrap();
        let expected = (&view + &view).unwrap().flatten_all().unwrap();
        prop_assert_eq!(got.to_vec1::<f32>().unwrap(), expected.to_vec1::<f32>().unwrap());
    }
}
