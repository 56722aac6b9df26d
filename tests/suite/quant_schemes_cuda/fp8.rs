//! What e4m3 floats have that whole numbers have not: NaN, and values over a wide range.

use super::{gpus, on, random};
use crate::support::randn_on;
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::cuda::BlockMatrix;
use candle_fused::ops::{Epilogue, Prologue, quant_linear};
use candle_fused::quant::{Codes, Scheme};

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
