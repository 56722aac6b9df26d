//! Log-probabilities against their float64 form.

use crate::support::{devices, randn};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::logprobs::{MAX_TOP, logprobs, reference};

/// The likeliest tokens of a row, the likeliest first.
fn likeliest(row: &[f64], top: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..row.len() as u32).collect();
    let of = |id: &u32| row[*id as usize];
    ids.sort_by(|a, b| of(b).total_cmp(&of(a)).then(a.cmp(b)));
    ids.truncate(top);
    ids
}

#[test]
fn they_are_those_of_the_plain_form() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (rows, vocab) in [(1, 1), (3, 31), (2, 1024), (5, 5000), (2, 151_936)] {
                let logits = (randn(&[rows, vocab], DType::F32)? * 4.)?.to_dtype(dtype)?;
                let expected = reference(&logits)?;
                let tokens: Vec<u32> = (0..rows).map(|i| (i * 7919 % vocab) as u32).collect();
                for top in [0, 1, 5, MAX_TOP].map(|top| top.min(vocab)) {
                    let on = Tensor::new(&tokens[..], &device)?;
                    let got = logprobs(&logits.to_device(&device)?, &on, top)?;
                    let (chosen, ids) = (
                        got.chosen.to_vec1::<f32>()?,
                        got.top_ids.to_device(&Device::Cpu)?,
                    );
                    assert_eq!(ids.dims(), [rows, top]);
                    for (i, row) in expected.iter().enumerate() {
                        // A sum of f32 over the vocabulary, in parts.
                        let near = |got: f32, expected: f64| {
                            let error = (f64::from(got) - expected).abs();
                            assert!(error < 1e-5 * (1. + expected.abs()), "{got} {expected}");
                        };
                        near(chosen[i], row[tokens[i] as usize]);
                        if top == 0 {
                            continue;
                        }
                        let ids = ids.get(i)?.to_vec1::<u32>()?;
                        assert_eq!(ids, likeliest(row, top), "{dtype:?} {vocab}");
                        for (id, logprob) in ids.iter().zip(got.top.get(i)?.to_vec1::<f32>()?) {
                            near(logprob, row[*id as usize]);
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

/// Equal logits, infinite ones, and what is no number.
#[test]
fn rows_of_odd_numbers() -> Result<()> {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let half = 0.5f32.ln();
    for device in devices() {
        let logits = Tensor::new(
            &[
                [7f32, 7., nan, -inf, -inf],
                [inf, 0., inf, nan, 5.],
                [nan, nan, 3., nan, nan],
                [nan, nan, nan, nan, nan],
            ],
            &device,
        )?;
        let tokens = Tensor::new(&[1u32, 2, 2, 9], &device)?;
        let got = logprobs(&logits, &tokens, 3)?;
        let (chosen, ids) = (got.chosen.to_vec1::<f32>()?, got.top_ids.to_vec2::<u32>()?);
        let top = got.top.to_vec2::<f32>()?;
        let none = u32::MAX;
        assert_eq!(ids, [[0, 1, 3], [0, 2, 4], [2, none, none], [none; 3]]);
        for (got, expected) in chosen.iter().zip([half, half, 0.]) {
            assert!((got - expected).abs() < 1e-6, "{chosen:?}");
        }
        assert!(chosen[3].is_nan());
        assert!((top[0][1] - half).abs() < 1e-6 && (top[1][1] - half).abs() < 1e-6);
        assert_eq!((top[0][2], top[1][2], top[2][1]), (-inf, -inf, -inf));
    }
    Ok(())
}

/// A sequence's figures are its own, whatever stands beside it and in whatever strides.
#[test]
fn rows_do_not_depend_on_their_neighbours() -> Result<()> {
    for device in devices() {
        let logits = randn(&[2000, 40], DType::F32)?.to_device(&device)?.t()?;
        let tokens = Tensor::arange(0u32, 40, &device)?;
        let all = logprobs(&logits, &tokens, 4)?;
        for i in [0, 17, 39] {
            let one = logprobs(&logits.narrow(0, i, 1)?, &tokens.narrow(0, i, 1)?, 4)?;
            assert_eq!(
                one.chosen.to_vec1::<f32>()?,
                all.chosen.narrow(0, i, 1)?.to_vec1::<f32>()?
            );
            assert_eq!(
                one.top_ids.to_vec2::<u32>()?,
                all.top_ids.narrow(0, i, 1)?.to_vec2::<u32>()?
            );
        }
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_named() -> Result<()> {
    let logits = Tensor::zeros((2, 30), DType::F32, &Device::Cpu)?;
    let tokens = Tensor::zeros(2, DType::U32, &Device::Cpu)?;
    for (logits, tokens, top, name) in [
        (logits.get(0)?, tokens.clone(), 1, "logits"),
        (logits.to_dtype(DType::F64)?, tokens.clone(), 1, "logits"),
        (logits.clone(), tokens.narrow(0, 0, 1)?, 1, "tokens"),
        (logits.clone(), tokens.to_dtype(DType::F32)?, 1, "tokens"),
        (logits.clone(), tokens.clone(), 21, "top is 21"),
        (logits.narrow(1, 0, 4)?, tokens.clone(), 5, "top is 5"),
    ] {
        let error = logprobs(&logits, &tokens, top).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
    Ok(())
}
