//! What matrices of codes hold on a GPU, and which codes are refused.

use super::{SCHEMES, gpus, group_of, int4, random, ternary};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::cuda::BlockMatrix;
use candle_fused::nn::Embedding;
use candle_fused::quant::{Codes, Format, Scheme, TernaryScale};
use std::sync::Arc;

/// Scale times code, bit for bit, from the packed form; and rows of it by token id.
#[test]
fn packed_codes_hold_the_same_values() -> Result<()> {
    for device in gpus() {
        for scheme in SCHEMES {
            for (rows, cols) in [(13usize, 256usize), (8, 768), (37, 100), (1, 32), (9, 192)] {
                if !cols.is_multiple_of(group_of(scheme, cols)) {
                    continue;
                }
                let codes = random(scheme, rows, cols);
                let expected = codes.dequantize();
                let matrix = BlockMatrix::from_codes(&codes, &device)?;
                assert_eq!(matrix.format(), Format::Scheme(scheme));
                let got = matrix.dequantize(DType::F32)?.flatten_all()?;
                assert_eq!(got.to_vec1::<f32>()?, expected, "{scheme:?} {cols}");
                let half = matrix.dequantize(DType::BF16)?.to_dtype(DType::F32)?;
                let rounded = Tensor::from_vec(expected.clone(), (rows, cols), &Device::Cpu)?
                    .to_dtype(DType::BF16)?
                    .to_dtype(DType::F32)?;
                assert_eq!(half.to_vec2::<f32>()?, rounded.to_vec2::<f32>()?);

                let ids = [0u32, rows as u32 - 1, 0];
                let table = Embedding::from_blocks(Arc::new(matrix), DType::F32)?;
                let looked = table.forward(&Tensor::new(&ids, &device)?)?;
                for (id, row) in ids.iter().zip(looked.to_vec2::<f32>()?) {
                    assert_eq!(row, expected[*id as usize * cols..][..cols], "{scheme:?}");
                }
            }
        }
    }
    Ok(())
}

/// Against the bytes of bf16, scales and what fills up rows included.
#[test]
fn matrices_are_as_small_as_promised() -> Result<()> {
    for device in gpus() {
        for (scheme, most) in [
            (Scheme::Int8, 0.52),
            // In tiles of 128 columns: 576 take the room of 640.
            (Scheme::Fp8, 0.57),
            (Scheme::Fp8Block128, 0.57),
            // Four bits and a half; 576 columns take the room of 640.
            (Scheme::Nvfp4, 0.32),
            (Scheme::Nf4, 0.32),
            (int4(128, false), 0.28),
            (int4(128, true), 0.28),
            (ternary(TernaryScale::Row), 0.15),
            (ternary(TernaryScale::Group(128)), 0.15),
        ] {
            for (rows, cols) in [(576usize, 1536usize), (1536, 576), (4096, 4096)] {
                if !cols.is_multiple_of(group_of(scheme, cols)) {
                    continue;
                }
                let matrix = BlockMatrix::from_codes(&random(scheme, rows, cols), &device)?;
                let share = matrix.size_in_bytes() as f64 / (2 * rows * cols) as f64;
                assert!(share < most, "{scheme:?} {rows}x{cols}: {share}");
            }
        }
    }
    Ok(())
}

#[test]
fn bad_codes_are_named() -> Result<()> {
    let cpu = BlockMatrix::from_codes(&random(Scheme::Int8, 2, 32), &Device::Cpu);
    assert!(cpu.expect_err("accepted").to_string().contains("device"));
    for device in gpus() {
        let message = |change: &dyn Fn(&mut Codes)| {
            let mut codes = random(int4(32, true), 3, 64);
            change(&mut codes);
            BlockMatrix::from_codes(&codes, &device)
                .expect_err("accepted")
                .to_string()
        };
        assert!(message(&|c| c.codes[7] = 16).contains("codes: 16 at row 0, column 7"));
        assert!(message(&|c| c.codes.push(0)).contains("codes: 193 given"));
        assert!(message(&|c| c.scales[2] = 0.1).contains("not an f16"));
        assert!(message(&|c| c.scales.clear()).contains("expected 6"));
        assert!(message(&|c| c.zeros.clear()).contains("zeros: 0 given"));
        assert!(message(&|c| c.cols = 48).contains("cols"));
        assert!(message(&|c| c.scheme = int4(48, true)).contains("group: 48"));
        let odd = BlockMatrix::from_codes(&random(Scheme::Int8, 2, 33), &device);
        let odd = odd.expect_err("accepted").to_string();
        assert!(odd.contains("multiple of 4"), "{odd}");
    }
    Ok(())
}
