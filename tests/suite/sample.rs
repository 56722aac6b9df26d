//! Choosing tokens: the likeliest, and draws against their float64 distribution.

use crate::support::{devices, randn};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::sample::{SamplingParams, reference, sample};

fn params(temperature: f64, top_k: Option<usize>, top_p: Option<f64>) -> SamplingParams {
    SamplingParams {
        temperature,
        top_k,
        top_p,
        ..Default::default()
    }
}

/// Draws for rows that all hold the same logits.
fn draws(
    logits: &Tensor,
    params: &SamplingParams,
    history: &[u32],
    rows: usize,
) -> Result<Vec<u32>> {
    let vocab = logits.elem_count();
    let logits = logits
        .reshape((1, vocab))?
        .broadcast_as((rows, vocab))?
        .contiguous()?;
    sample(&logits, &vec![params.clone(); rows], &vec![history; rows])?.to_vec1()
}

#[test]
fn the_likeliest_token_is_the_first_of_the_best_numbers() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let logits = Tensor::new(
                &[
                    [0f32, 2., f32::NAN, 2., -1.],
                    [-3., f32::NEG_INFINITY, -2., -9., -2.],
                    [f32::NAN, f32::NAN, f32::NAN, f32::NAN, -7.],
                ],
                &Device::Cpu,
            )?
            .to_dtype(dtype)?
            .to_device(&device)?;
            let params = vec![SamplingParams::default(); 3];
            let tokens = sample(&logits, &params, &[&[], &[], &[]])?;
            assert_eq!(tokens.to_vec1::<u32>()?, [1, 2, 4]);
        }
        for vocab in [1, 31, 1024, 1025, 49_152, 151_936] {
            let logits = randn(&[2, vocab], DType::F32)?;
            let best: Vec<u32> = logits.argmax(1)?.to_vec1()?;
            let params = vec![SamplingParams::default(); 2];
            let tokens = sample(&logits.to_device(&device)?, &params, &[&[], &[1]])?;
            assert_eq!(tokens.to_vec1::<u32>()?, best, "{vocab}");
        }
    }
    Ok(())
}

#[test]
fn logits_that_are_no_numbers_are_refused() -> Result<()> {
    for device in devices() {
        let logits = Tensor::full(f32::NAN, (1, 40), &Device::Cpu)?.to_device(&device)?;
        for params in [params(0., None, None), params(1., Some(4), Some(0.9))] {
            let error = sample(&logits, &[params], &[&[]]).unwrap_err().to_string();
            assert!(error.contains("no logit is a number"), "{error}");
        }
    }
    Ok(())
}

/// Pearson's chi-squared over the tokens that can come, at a bound which a right sampler passes 999
/// times in 1,000 (Wilson and Hilferty's approximation); the seed is fixed.
#[test]
fn draws_follow_the_distribution() -> Result<()> {
    const ROWS: usize = 512;
    const ROUNDS: usize = 24;
    let kinds = [
        params(1., None, None),
        params(0.7, None, None),
        params(1., Some(5), None),
        params(1.3, None, Some(0.8)),
        params(0.9, Some(12), Some(0.7)),
        SamplingParams {
            repeat_penalty: 1.5,
            repeat_last_n: 3,
            ..params(1., None, None)
        },
    ];
    let logits = (randn(&[40], DType::F32)? * 1.5)?;
    for device in devices() {
        for kind in &kinds {
            let history = [9, 3, 3, 7, 1];
            let expected = reference(&logits, kind, &history)?;
            let on_device = logits.to_device(&device)?;
            let mut counts = [0f64; 40];
            for round in 0..ROUNDS {
                let seeded = SamplingParams {
                    seed: round as u64,
                    ..kind.clone()
                };
                for token in draws(&on_device, &seeded, &history, ROWS)? {
                    counts[token as usize] += 1.;
                }
            }
            let total = (ROWS * ROUNDS) as f64;
            let mut chi = 0.;
            let mut freedom = -1f64;
            for (count, p) in counts.iter().zip(&expected) {
                if *p == 0. {
                    assert_eq!(*count, 0., "{kind:?}");
                } else {
                    chi += (count - p * total).powi(2) / (p * total);
                    freedom += 1.;
                }
            }
            let spread = 2. / (9. * freedom);
            let bound = freedom * (1. - spread + 3.09 * spread.sqrt()).powi(3);
            assert!(chi < bound, "{kind:?}: {chi} of {bound} at {freedom}");
        }
    }
    Ok(())
}

/// Logits over a temperature that overflow: the highest is drawn, and of equally high ones each.
#[test]
fn logits_over_a_tiny_temperature_do_not_overflow() -> Result<()> {
    let penalised = |params| SamplingParams {
        repeat_penalty: 1.5,
        ..params
    };
    for device in devices() {
        for temperature in [1e-38, 1e-37, 1e-30] {
            for (top_k, top_p) in [(None, None), (Some(2), None), (None, Some(0.5))] {
                let kind = params(temperature, top_k, top_p);
                for kind in [kind.clone(), penalised(kind)] {
                    let few = Tensor::new(&[40f32, 50., f32::NAN, -50.], &device)?;
                    assert_eq!(draws(&few, &kind, &[3], 4)?, [1; 4], "{kind:?}");
                    let vast = Tensor::new(&[-3e38f32, 3e38, 2.9e38, f32::NEG_INFINITY], &device)?;
                    assert_eq!(draws(&vast, &kind, &[3], 4)?, [1; 4], "{kind:?}");
                    // In slices of several blocks.
                    let mut many: Vec<f32> = (0..5000).map(|i| (i % 97) as f32).collect();
                    many[4321] = 97.;
                    let many = Tensor::new(many, &device)?;
                    assert_eq!(draws(&many, &kind, &[3], 4)?, [4321; 4], "{kind:?}");
                }
            }
            let pair = Tensor::new(&[50f32, 40., 50.], &device)?;
            let mut drawn = draws(&pair, &params(temperature, None, None), &[], 64)?;
            drawn.sort_unstable();
            drawn.dedup();
            assert_eq!(drawn, [0, 2]);
        }
    }
    Ok(())
}

#[test]
fn the_same_draw_is_made_on_every_device() -> Result<()> {
    let logits = (randn(&[64, 3000], DType::F32)? * 2.)?;
    let kinds = [
        params(1., None, None),
        params(0.8, Some(50), None),
        params(1., Some(3000), Some(0.95)),
        params(1., Some(40), Some(0.5)),
    ];
    let history: Vec<Vec<u32>> = (0..64).map(|i| (0..i).collect()).collect();
    let history: Vec<&[u32]> = history.iter().map(Vec::as_slice).collect();
    for kind in kinds {
        let kind = SamplingParams {
            repeat_penalty: 1.2,
            ..kind
        };
        let kinds = vec![kind.clone(); 64];
        let expected = sample(&logits, &kinds, &history)?.to_vec1::<u32>()?;
        for device in devices() {
            let got = sample(&logits.to_device(&device)?, &kinds, &history)?.to_vec1::<u32>()?;
            let differing = got.iter().zip(&expected).filter(|(a, b)| a != b).count();
            // The last bits of exp and ln differ between libraries: two tokens may be that close.
            assert!(differing <= 1, "{kind:?}: {differing}");
        }
    }
    Ok(())
}

#[test]
fn parameters_out_of_range_are_named() -> Result<()> {
    let logits = Tensor::zeros((1, 8), DType::F32, &Device::Cpu)?;
    let wrong = [
        (params(-1., None, None), "temperature"),
        (params(f64::NAN, None, None), "temperature"),
        (params(1e-300, None, None), "temperature"),
        (params(1e300, None, None), "temperature"),
        (params(1., Some(0), None), "top_k"),
        (params(1., None, Some(0.)), "top_p"),
        (params(1., None, Some(1.5)), "top_p"),
        (
            SamplingParams {
                repeat_penalty: 0.,
                ..Default::default()
            },
            "repeat_penalty",
        ),
        (
            SamplingParams {
                repeat_last_n: 1 << 20,
                ..Default::default()
            },
            "repeat_last_n",
        ),
    ];
    for (params, name) in wrong {
        let error = sample(&logits, &[params], &[&[]]).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
    let one = [SamplingParams::default()];
    assert!(sample(&logits, &[], &[&[]]).is_err());
    assert!(sample(&logits, &one, &[]).is_err());
    assert!(sample(&logits.flatten_all()?, &one, &[&[]]).is_err());
    assert!(sample(&logits.to_dtype(DType::F64)?, &one, &[&[]]).is_err());
    Ok(())
}
