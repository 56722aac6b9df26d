//! What e4m3 floats have that whole numbers have not: NaN, and values over a wide range.

use super::{gpus, on, random};
use crate::linear::ACTIVATIONS;
use crate::support::{architecture, randn_on, widest_error};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::cuda::BlockMatrix;
use candle_fused::cuda::with_kernel;
use candle_fused::ops::linear::reference;
use candle_fused::ops::{
    ActivationBits, Epilogue, Prologue, Weight, quant_linear, quant_linear_with,
};
use candle_fused::quant::{Codes, Scheme};
use candle_fused::trace;

const SCHEMES: [Scheme; 2] = [Scheme::Fp8, Scheme::Fp8Block128];

/// Every code, times 1, in rows that begin at different codes.
#[test]
fn every_code_is_its_value() -> Result<()> {
    for device in gpus() {
        for scheme in SCHEMES {
            let (rows, cols) = (16, 256);
            let codes = Codes {
                scheme,
                rows,
                cols,
                codes: (0..rows * cols)
                    .map(|i| (i % cols + 13 * (i / cols)) as u8 as i8)
                    .collect(),
                scales: vec![1.; if scheme == Scheme::Fp8 { rows } else { 2 }],
                zeros: Vec::new(),
                group_scales: Vec::new(),
            };
            let matrix = BlockMatrix::from_codes(&codes, &device)?;
            let values = matrix.dequantize(DType::F32)?.flatten_all()?;
            for (at, (value, expected)) in values
                .to_vec1::<f32>()?
                .iter()
                .zip(codes.dequantize())
                .enumerate()
            {
                let same = value.to_bits() == expected.to_bits();
                let both_nan = value.is_nan() && expected.is_nan();
                assert!(same || both_nan, "{scheme} {at}: {value} for {expected}");
            }
        }
    }
    Ok(())
}

/// One code of a row at a time meets 1, so that products by every kernel are the code's value, exactly.
#[test]
fn products_of_single_codes_are_exact() -> Result<()> {
    for device in gpus() {
        for scheme in SCHEMES {
            let (rows, cols) = (256, 128);
            // Row n has code n at column n % 128, NaN aside.
            let mut codes = vec![0i8; rows * cols];
            for row in 0..rows {
                let code = row as u8;
                codes[row * cols + row % cols] = if code & 0x7f == 0x7f { 0 } else { code as i8 };
            }
            let codes = Codes {
                scheme,
                rows,
                cols,
                codes,
                scales: vec![0.5; if scheme == Scheme::Fp8 { rows } else { 2 }],
                zeros: Vec::new(),
                group_scales: Vec::new(),
            };
            let values = Tensor::from_vec(codes.dequantize(), (rows, cols), &Device::Cpu)?;
            let expected = values.sum(1)?.to_vec1::<f32>()?;
            let weights = [on(&codes, &device)?];
            for m in [1, 2, 4, 5, 8, 16, 33, 70, 130] {
                let x = Tensor::ones((m, cols), DType::F32, &device)?.to_dtype(DType::BF16)?;
                let out = quant_linear(&x, Prologue::None, &weights, &Epilogue::default())?;
                for row in out.to_dtype(DType::F32)?.to_vec2::<f32>()? {
                    assert_eq!(row, expected, "{scheme} M {m}");
                }
            }
        }
    }
    Ok(())
}

/// A NaN among the weights makes its own outputs NaN and no others, whichever kernel multiplies.
#[test]
fn a_nan_reaches_its_row_alone() -> Result<()> {
    let (rows, cols) = (300, 392);
    let places = [
        (0, 0, 0x7f),
        (17, 391, 0xff),
        (129, 130, 0x7f),
        (299, 4, 0xff),
    ];
    for device in gpus() {
        for scheme in SCHEMES {
            let mut codes = random(scheme, rows, cols);
            for (row, col, code) in places {
                codes.codes[row * cols + col] = code as u8 as i8;
            }
            let weights = [on(&codes, &device)?];
            for (m, dtype) in [1, 3, 8, 16, 40, 100, 300]
                .into_iter()
                .flat_map(|m| [(m, DType::BF16), (m, DType::F32)])
            {
                let x = randn_on(&[m, cols], dtype, &device)?;
                let out = quant_linear(&x, Prologue::None, &weights, &Epilogue::default())?;
                for out in out.to_dtype(DType::F32)?.to_vec2::<f32>()? {
                    for (row, y) in out.iter().enumerate() {
                        let expected = places.iter().any(|(bad, ..)| *bad == row);
                        assert_eq!(y.is_nan(), expected, "{scheme} M {m} {dtype:?} row {row}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// The GPUs whose tensor cores take e4m3, each with the kernels for x in it, the chosen one first.
fn e4m3_kernels() -> Result<Vec<(Device, &'static [&'static str])>> {
    let mut found = Vec::new();
    for device in gpus() {
        let kernels: &[_] = match architecture(&device)? {
            ..=88 => continue,
            90 => &["gemm_fp8_sm90", "gemm_fp8_mma"],
            _ => &["gemm_fp8_mma"],
        };
        found.push((device, kernels));
    }
    Ok(found)
}

/// Each 128 values of a row rounded to e4m3 floats of their largest magnitude over 448, by the definition.
fn in_e4m3(x: &Tensor) -> Result<Tensor> {
    let round = |v: f32| {
        if v == 0. {
            return 0.;
        }
        // Steps of an eighth of the power of two, or those of the smallest normal number.
        let step = 2f32.powi(v.abs().log2().floor().max(-6.) as i32 - 3);
        (v / step).round_ties_even() * step
    };
    let mut values = x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    for group in values.chunks_mut(128) {
        let largest = group.iter().fold(0f32, |m, v| m.max(v.abs()));
        let (scale, by) = (largest / 448., 448. / largest);
        group.iter_mut().for_each(|v| *v = round(*v * by) * scale);
    }
    Tensor::from_vec(values, x.dims(), &Device::Cpu)
}

/// Behind rounding x as the kernel does, what is left is that of sums: of the tensor cores' own 14 bits within 128 of K,
/// and in f32 beyond, so that it does not grow with K.
#[test]
fn products_of_e4m3_add_up_in_f32() -> Result<()> {
    for (device, kernels) in e4m3_kernels()? {
        for scheme in SCHEMES {
            for (m, n, k) in [
                (64, 64, 128),
                (100, 200, 384),
                (130, 328, 4096),
                (300, 136, 14336),
            ] {
                let codes = [n, n + 8, 72].map(|rows| random(scheme, rows, k));
                let weights = codes.iter().map(|codes| on(codes, &device));
                let weights = weights.collect::<Result<Vec<_>>>()?;
                let x = randn_on(&[m, k], DType::F32, &Device::Cpu)?;
                let none = Epilogue::default();
                let expected = reference(&in_e4m3(&x)?, Prologue::None, &dense(&codes)?, &none)?;
                let x = x.to_device(&device)?;
                for kernel in kernels {
                    let got = with_kernel(Some(kernel), || {
                        let bits = ActivationBits::Bits8;
                        quant_linear_with(&x, Prologue::None, &weights, &none, bits)
                    })?;
                    let error = widest_error(&got, &expected.concat())?;
                    assert!(error < 8e-4, "{kernel} {scheme} {m}x{n}x{k}: {error:e}");
                }
            }
        }
    }
    Ok(())
}

fn prologue(norm: &Tensor, normed: bool) -> Prologue<'_> {
    match normed {
        false => Prologue::None,
        true => Prologue::RmsNorm {
            weight: norm,
            eps: 1e-5,
        },
    }
}

/// Matrices of float64's side.
fn dense(codes: &[Codes]) -> Result<Vec<Weight>> {
    let weight = |codes: &Codes| {
        let shape = (codes.rows, codes.cols);
        let values = Tensor::from_vec(codes.dequantize(), shape, &Device::Cpu)?;
        Ok(Weight::Dense(values))
    };
    codes.iter().map(weight).collect()
}

/// Every epilogue and prologue, all types of x: within what rounding x to e4m3 costs (2.7 % of a deviation of each
/// output on average, five times that rarely).
#[test]
fn products_of_e4m3_in_every_fused_form() -> Result<()> {
    for (device, kernels) in e4m3_kernels()? {
        for (i, activation) in ACTIVATIONS.into_iter().enumerate() {
            for scheme in SCHEMES {
                let dtype = [DType::BF16, DType::F16, DType::F32][i % 3];
                let (m, n, k) = ([64, 129, 257][i % 3], 192, [512, 1536][i % 2]);
                let width = if activation.gate().is_some() {
                    n
                } else {
                    2 * n
                };
                let codes = [random(scheme, n, k), random(scheme, n, k)];
                let on_host = |dims: &[usize]| randn_on(dims, dtype, &Device::Cpu);
                let (x, norm) = (on_host(&[m, k])?, on_host(&[k])?);
                let (bias, residual) = (on_host(&[2 * n])?, on_host(&[m, width])?);
                let epilogue = Epilogue {
                    bias: Some(&bias),
                    activation,
                    residuals: &[&residual],
                };
                let normed = i % 4 > 1;
                let expected = reference(&x, prologue(&norm, normed), &dense(&codes)?, &epilogue)?;
                let weights = [on(&codes[0], &device)?, on(&codes[1], &device)?];
                let there = |t: &Tensor| t.to_device(&device);
                let (x, norm, bias, residual) =
                    (there(&x)?, there(&norm)?, there(&bias)?, there(&residual)?);
                let epilogue = Epilogue {
                    bias: Some(&bias),
                    activation,
                    residuals: &[&residual],
                };
                for (j, kernel) in kernels.iter().enumerate() {
                    // The first is chosen by itself.
                    let forced = (j > 0).then_some(*kernel);
                    let (got, calls) = trace::capture(|| {
                        let (prologue, bits) = (prologue(&norm, normed), ActivationBits::Bits8);
                        with_kernel(forced, || {
                            quant_linear_with(&x, prologue, &weights, &epilogue, bits)
                        })
                    });
                    assert!(calls.to_string().contains(kernel), "{calls}");
                    let error = widest_error(&got?, &expected.concat())?;
                    assert!(
                        error < 0.2,
                        "{kernel} {scheme} {activation:?} {dtype:?}: {error:e}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// Rows of blocks have scales of their own where there is a NaN.
#[test]
fn a_nan_reaches_its_row_alone_in_e4m3() -> Result<()> {
    let (rows, cols) = (304, 384);
    let places = [(0, 0, 0x7f), (129, 130, 0xff), (303, 383, 0x7f)];
    for (device, kernels) in e4m3_kernels()? {
        for scheme in SCHEMES {
            let mut codes = random(scheme, rows, cols);
            for (row, col, code) in places {
                codes.codes[row * cols + col] = code as u8 as i8;
            }
            let weights = [on(&codes, &device)?];
            let x = randn_on(&[100, cols], DType::BF16, &device)?;
            for kernel in kernels {
                let out = with_kernel(Some(kernel), || {
                    let (none, bits) = (Epilogue::default(), ActivationBits::Bits8);
                    quant_linear_with(&x, Prologue::None, &weights, &none, bits)
                })?;
                for out in out.to_dtype(DType::F32)?.to_vec2::<f32>()? {
                    for (row, y) in out.iter().enumerate() {
                        let expected = places.iter().any(|(bad, ..)| *bad == row);
                        assert_eq!(y.is_nan(), expected, "{kernel} {scheme} row {row}");
                    }
                }
            }
        }
    }
    Ok(())
}
