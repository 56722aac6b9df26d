//! NaN and infinity among the values of x.

use super::{gpus, int4, on, random, ternary};
use candle_core::{DType, Result, Tensor};
use candle_fused::ops::{Epilogue, Prologue, quant_linear};
use candle_fused::quant::{Scheme, TernaryScale};

#[test]
fn they_show() -> Result<()> {
    for device in gpus() {
        for scheme in [
            Scheme::Int8,
            Scheme::Fp8,
            Scheme::Fp8Block128,
            Scheme::Nvfp4,
            Scheme::Nf4,
            int4(32, true),
            ternary(TernaryScale::Row),
        ] {
            let weights = [on(&random(scheme, 16, 128), &device)?];
            for bad in [f32::NAN, f32::INFINITY] {
                let mut x = vec![1f32; 256];
                x[130] = bad;
                let x = Tensor::from_vec(x, (2, 128), &device)?;
                let y = quant_linear(&x, Prologue::None, &weights, &Epilogue::default())?;
                let y = y.to_vec2::<f32>()?;
                assert!(y[0].iter().all(|v| v.is_finite()), "{scheme:?} {bad}");
                assert!(y[1].iter().any(|v| !v.is_finite()), "{scheme:?} {bad}");
            }
            let zeros = Tensor::zeros((1, 128), DType::F32, &device)?;
            let y = quant_linear(&zeros, Prologue::None, &weights, &Epilogue::default())?;
            assert_eq!(y.to_vec2::<f32>()?, [[0.; 16]]);
        }
    }
    Ok(())
}

/// Wherever in K they are: other kernels take a row by itself.
#[test]
fn they_show_in_one_row() -> Result<()> {
    for device in gpus() {
        for (scheme, k) in [
            (int4(32, true), 416),
            (int4(128, false), 384),
            (Scheme::Fp8, 384),
        ] {
            let weights = [on(&random(scheme, 16, k), &device)?];
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                for (bad, at) in [(f32::NAN, 0), (f32::INFINITY, 255), (f32::NAN, k - 1)] {
                    let mut x = vec![1f32; k];
                    x[at] = bad;
                    let x = Tensor::from_vec(x, (1, k), &device)?.to_dtype(dtype)?;
                    let y = quant_linear(&x, Prologue::None, &weights, &Epilogue::default())?;
                    let y = y.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
                    let shows = y.iter().any(|v| !v.is_finite());
                    assert!(shows, "{scheme:?} {dtype:?}: {bad} at {at}");
                }
            }
        }
    }
    Ok(())
}
