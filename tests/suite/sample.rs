//! Choosing tokens: the likeliest, and draws against their float64 distribution.

use crate::support::{devices, randn};
use candle_core::{D, DType, Device, Result, Tensor};
use candle_fused::ops::sample::{SampleOptions, SamplingParams, reference, sample, sample_with};

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
    draws_with(logits, params, history, rows, &SampleOptions::default())
}

fn draws_with(
    logits: &Tensor,
    params: &SamplingParams,
    history: &[u32],
    rows: usize,
    options: &SampleOptions,
) -> Result<Vec<u32>> {
    let vocab = logits.elem_count();
    let logits = logits
        .reshape((1, vocab))?
        .broadcast_as((rows, vocab))?
        .contiguous()?;
    let (params, history) = (vec![params.clone(); rows], vec![history; rows]);
    let sampled = sample_with(&logits, &params, &history, options)?;
    sampled.tokens.to_vec1()
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

fn min_p(temperature: f64, min_p: f64) -> SamplingParams {
    SamplingParams {
        min_p: Some(min_p),
        ..params(temperature, None, None)
    }
}

/// Each third token and each fifth may be drawn.
fn some(token: u32) -> bool {
    token.is_multiple_of(3) || token.is_multiple_of(5)
}

/// The words of a mask of `vocab` tokens.
fn words(vocab: usize, allowed: impl Fn(u32) -> bool) -> Vec<u32> {
    let mut words = vec![0u32; vocab.div_ceil(32)];
    let tokens = (0..vocab as u32).filter(|token| allowed(*token));
    tokens.for_each(|token| words[token as usize / 32] |= 1 << (token % 32));
    words
}

/// That mask for each of `rows` sequences.
fn masked(words: &[u32], rows: usize, device: &Device) -> Result<SampleOptions> {
    let mask = Tensor::from_vec(words.repeat(rows), (rows, words.len()), device)?;
    Ok(SampleOptions {
        mask: Some(mask),
        ..Default::default()
    })
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
        min_p(1., 0.1),
        SamplingParams {
            top_p: Some(0.9),
            ..min_p(1.3, 0.2)
        },
        SamplingParams {
            repeat_penalty: 1.5,
            repeat_last_n: 3,
            ..params(1., None, None)
        },
    ];
    let logits = (randn(&[40], DType::F32)? * 1.5)?;
    let mask = words(40, some);
    for device in devices() {
        let options = [SampleOptions::default(), masked(&mask, ROWS, &device)?];
        for (kind, options) in kinds
            .iter()
            .flat_map(|k| options.iter().map(move |o| (k, o)))
        {
            let history = [9, 3, 3, 7, 1];
            let words = options.mask.as_ref().map(|_| &mask[..]);
            let expected = reference(&logits, kind, &history, words)?;
            let on_device = logits.to_device(&device)?;
            let mut counts = [0f64; 40];
            for round in 0..ROUNDS {
                let seeded = SamplingParams {
                    seed: round as u64,
                    ..kind.clone()
                };
                for token in draws_with(&on_device, &seeded, &history, ROWS, options)? {
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
        min_p(1., 0.05),
    ];
    let history: Vec<Vec<u32>> = (0..64).map(|i| (0..i).collect()).collect();
    let history: Vec<&[u32]> = history.iter().map(Vec::as_slice).collect();
    for kind in kinds {
        let kind = SamplingParams {
            repeat_penalty: 1.2,
            ..kind
        };
        let kinds = vec![kind.clone(); 64];
        let all = |_| true;
        for mask in [None, Some(words(3000, some)), Some(words(3000, all))] {
            let draw = |device: &Device| -> Result<Vec<u32>> {
                let options = match &mask {
                    Some(mask) => masked(mask, 64, device)?,
                    None => SampleOptions::default(),
                };
                let logits = logits.to_device(device)?;
                let sampled = sample_with(&logits, &kinds, &history, &options)?;
                sampled.tokens.to_vec1::<u32>()
            };
            let expected = draw(&Device::Cpu)?;
            for device in devices() {
                let got = draw(&device)?;
                let differing = got.iter().zip(&expected).filter(|(a, b)| a != b).count();
                // The last bits of exp and ln differ between libraries: two tokens may be that close.
                assert!(differing <= 1, "{kind:?}: {differing}");
            }
        }
    }
    Ok(())
}

/// Draws that were written down once: options that are off change none, nor does a mask that allows all.
#[test]
fn draws_stay_what_they_were() -> Result<()> {
    let vocab = 1000;
    let logits: Vec<f32> = (0..vocab).map(|i| ((i * 37) % 101) as f32 / 20.).collect();
    let logits = Tensor::new(logits, &Device::Cpu)?.unsqueeze(0)?;
    let kinds = [
        params(0., None, None),
        params(1., None, None),
        params(0.8, Some(20), None),
        params(1.2, None, Some(0.6)),
    ];
    for device in devices() {
        let logits = logits.to_device(&device)?;
        for options in [
            SampleOptions::default(),
            masked(&words(vocab, |_| true), 1, &device)?,
        ] {
            let draw = |kind: &SamplingParams| -> Result<u32> {
                let params = std::slice::from_ref(kind);
                let sampled = sample_with(&logits, params, &[&[5, 6]], &options)?;
                sampled.tokens.squeeze(0)?.to_scalar::<u32>()
            };
            let drawn = kinds.iter().map(draw).collect::<Result<Vec<_>>>()?;
            assert_eq!(drawn, [30, 289, 333, 289]);
        }
    }
    Ok(())
}

/// The likeliest of those that are allowed, in slices of several blocks too.
#[test]
fn a_mask_leaves_the_likeliest_that_it_allows() -> Result<()> {
    for device in devices() {
        for vocab in [1, 31, 33, 1025, 5000, 151_936] {
            let logits = randn(&[vocab], DType::F32)?;
            let values = logits.to_vec1::<f32>()?;
            let allowed = (0..vocab as u32).filter(|token| some(*token));
            let best = allowed.max_by(|a, b| values[*a as usize].total_cmp(&values[*b as usize]));
            let options = masked(&words(vocab, some), 2, &device)?;
            let penalised = SamplingParams {
                repeat_penalty: 1.5,
                ..Default::default()
            };
            let logits = logits.to_device(&device)?;
            // Token 1 is penalised and not allowed all the same.
            for (kind, history) in [(params(0., None, None), &[][..]), (penalised, &[1])] {
                let drawn = draws_with(&logits, &kind, history, 2, &options)?;
                assert_eq!(drawn, [best.unwrap(); 2], "{vocab}");
            }
        }
    }
    Ok(())
}

#[test]
fn masks_that_do_not_fit_are_refused() -> Result<()> {
    for device in devices() {
        let logits = Tensor::zeros((2, 40), DType::F32, &device)?;
        let refusal = |mask: Tensor, kind: SamplingParams| {
            let options = SampleOptions {
                mask: Some(mask),
                ..Default::default()
            };
            let sampled = sample_with(&logits, &[kind.clone(), kind], &[&[], &[]], &options);
            sampled.unwrap_err().to_string()
        };
        let none = Tensor::new(&[[1u32, 0], [0, 0xffff_ff00]], &device)?;
        for kind in [params(0., None, None), params(1., Some(3), None)] {
            let error = refusal(none.clone(), kind);
            assert!(error.contains("mask allows sequence 1 nothing"), "{error}");
        }
        for mask in [
            Tensor::ones((2, 1), DType::U32, &device)?,
            Tensor::ones((1, 2), DType::U32, &device)?,
            Tensor::ones((2, 2), DType::F32, &device)?,
        ] {
            let error = refusal(mask, params(0., None, None));
            assert!(error.contains("mask is"), "{error}");
        }
        let logits = Tensor::new(&[[f32::NAN, 1.]], &device)?;
        let one = [SamplingParams::default()];
        let error = sample_with(&logits, &one, &[&[]], &masked(&[1], 1, &device)?).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("no logit that the mask"), "{error}");
    }
    Ok(())
}

/// Log-probabilities are those of the logits, whatever the draw is made from.
#[test]
fn log_probabilities_are_of_the_logits_as_they_are() -> Result<()> {
    let logits = (randn(&[3, 50], DType::F32)? * 2.)?;
    let expected = candle_nn::ops::log_softmax(&logits, D::Minus1)?.to_vec2::<f32>()?;
    for device in devices() {
        let options = SampleOptions {
            top_logprobs: Some(4),
            ..masked(&words(50, some), 3, &device)?
        };
        let kind = SamplingParams {
            repeat_penalty: 2.,
            ..params(0.3, Some(5), None)
        };
        let history = [&[1u32, 2][..]; 3];
        let sampled = sample_with(
            &logits.to_device(&device)?,
            &vec![kind; 3],
            &history,
            &options,
        )?;
        let logprobs = sampled.logprobs.expect("they were asked for");
        let (chosen, top) = (
            logprobs.chosen.to_vec1::<f32>()?,
            logprobs.top.to_vec2::<f32>()?,
        );
        let ids = logprobs.top_ids.to_vec2::<u32>()?;
        for (row, token) in sampled.tokens.to_vec1::<u32>()?.into_iter().enumerate() {
            assert!(some(token));
            assert!((chosen[row] - expected[row][token as usize]).abs() < 1e-5);
            for (id, logprob) in ids[row].iter().zip(&top[row]) {
                assert!((logprob - expected[row][*id as usize]).abs() < 1e-5);
            }
        }
        let options = SampleOptions {
            top_logprobs: Some(21),
            ..Default::default()
        };
        let kinds = vec![SamplingParams::default(); 3];
        let error = sample_with(&logits.to_device(&device)?, &kinds, &history, &options);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("top_logprobs is 21"), "{error}");
    }
    Ok(())
}

/// 1,024 sequences, each with parameters, a mask and a history of its own, draw what each draws alone.
#[test]
fn a_thousand_sequences_each_with_parameters_of_their_own() -> Result<()> {
    const ROWS: usize = 1024;
    const VOCAB: usize = 1500;
    let logits = (randn(&[ROWS, VOCAB], DType::F32)? * 3.)?;
    let kind = |i: usize| SamplingParams {
        temperature: [0., 0.7, 1., 1.4][i % 4],
        top_k: [None, Some(5), Some(100)][i % 3],
        top_p: [None, Some(0.9)][i / 3 % 2],
        min_p: [None, None, Some(0.05)][i / 7 % 3],
        repeat_penalty: [1., 1.3][i / 2 % 2],
        seed: i as u64,
        ..Default::default()
    };
    let kinds: Vec<_> = (0..ROWS).map(kind).collect();
    let history: Vec<Vec<u32>> = (0..ROWS).map(|i| (0..i as u32 % 9).collect()).collect();
    let history: Vec<&[u32]> = history.iter().map(Vec::as_slice).collect();
    let mask = |i: usize| {
        words(VOCAB, move |token| {
            i.is_multiple_of(2) || token as usize % 7 == i % 7
        })
    };
    let masks: Vec<u32> = (0..ROWS).flat_map(mask).collect();
    for device in devices() {
        let masks = Tensor::from_vec(masks.clone(), (ROWS, VOCAB.div_ceil(32)), &device)?;
        let options = SampleOptions {
            mask: Some(masks.clone()),
            top_logprobs: Some(3),
        };
        let logits = logits.to_device(&device)?;
        let all = sample_with(&logits, &kinds, &history, &options)?;
        let tokens = all.tokens.to_vec1::<u32>()?;
        let chosen = all.logprobs.expect("asked for").chosen.to_vec1::<f32>()?;
        // The number of a sequence in its call is a part of its draw: those that run alone are greedy or number 0.
        for i in (0..ROWS).filter(|i| i % 4 == 0) {
            let options = SampleOptions {
                mask: Some(masks.narrow(0, i, 1)?),
                top_logprobs: Some(0),
            };
            let alone = sample_with(
                &logits.narrow(0, i, 1)?,
                &kinds[i..=i],
                &history[i..=i],
                &options,
            )?;
            assert_eq!(alone.tokens.to_vec1::<u32>()?, [tokens[i]], "{i}");
            let logprobs = alone.logprobs.expect("asked for");
            assert_eq!(logprobs.chosen.to_vec1::<f32>()?, [chosen[i]], "{i}");
        }
        let rows = logits.to_device(&Device::Cpu)?;
        for (i, token) in tokens.iter().enumerate().filter(|(i, _)| i % 16 == 5) {
            let may = reference(&rows.get(i)?, &kinds[i], history[i], Some(&mask(i)))?;
            assert!(
                may[*token as usize] > 0.,
                "{i}: {:?} drew {token}",
                kinds[i]
            );
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
        (min_p(1., -0.1), "min_p"),
        (min_p(1., 1.1), "min_p"),
        (min_p(1., f64::NAN), "min_p"),
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
