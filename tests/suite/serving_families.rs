//! The engine runs every family of models, with the tokens of forward passes.

use crate::golden::Golden;
use crate::serving::{alone, assert_alone, count, finish, request};
use crate::subject::{ALL, Subject, dense};
use crate::support::{device, on_every_device};
use candle_core::{D, DType, Result, Tensor};
use candle_fused::Fusion;
use candle_fused::models::phi3;
use candle_fused::serving::{Engine, Options, Request};
use candle_nn::ops::log_softmax;
use std::collections::BTreeMap;

/// The likeliest tokens, one forward pass after the other.
fn by_forward(model: &mut dyn Subject, prompt: &[u32], count: usize) -> Result<Vec<u32>> {
    model.clear()?;
    let mut tokens = prompt.to_vec();
    let mut position = 0;
    while tokens.len() < prompt.len() + count {
        let ids = Tensor::new(&tokens[position..], &device())?.unsqueeze(0)?;
        let logits = model.forward(&ids, position)?;
        position = tokens.len();
        tokens.push(logits.argmax(D::Minus1)?.squeeze(0)?.to_scalar()?);
    }
    Ok(tokens.split_off(prompt.len()))
}

/// Prompts of one page, of several chunks, and two with one beginning, in more requests than there are slots. The
/// longest goes past the windows that the models have.
#[test]
fn every_family_gives_the_tokens_of_forward_passes() -> Result<()> {
    on_every_device(|| {
        for name in ALL {
            let golden = Golden::open(name)?;
            let mut model = dense(&golden, DType::F32, Fusion::all())?;
            let mut engine = model.engine(&Options {
                sequences: 3,
                page: 8,
                prompt_budget: 16,
                ..Default::default()
            })?;
            // Of a model whose rotation changes behind its original context, the engine serves that.
            let long = engine.positions().min(96) as u32 * 5 / 12;
            let vocab = engine.vocab_size() as u32;
            let prompt =
                |seed: u32, tokens: u32| (0..tokens).map(move |i| (seed + i * 23) % (vocab - 1));
            let prompts: [Vec<u32>; 5] = [
                prompt(5, 3).collect(),
                prompt(11, long).collect(),
                prompt(2, 9).collect(),
                prompt(11, long).chain([7]).collect(),
                prompt(3, long / 2).collect(),
            ];
            let mut wanted = BTreeMap::new();
            for (i, prompt) in prompts.iter().enumerate() {
                let max_tokens = long as usize / 3 + 2 * i;
                let request = Request {
                    max_tokens,
                    ..Request::new(&prompt[..])
                };
                wanted.insert(engine.submit(request)?, (prompt, max_tokens));
            }
            let mut given = BTreeMap::new();
            finish(&mut engine, &mut given)?;
            let shared = u64::from(long) / 8 * 8;
            assert!(engine.stats().cached_tokens >= shared, "{name}");
            for (id, (prompt, max_tokens)) in wanted {
                let expected = by_forward(&mut *model, prompt, max_tokens)?;
                assert_eq!(given[&id].0, expected, "{name} request {id}");
            }
            assert_eq!(engine.graph_refusal(), None, "{name}");
        }
        Ok(())
    })
}

/// Mistral's window is shorter than the prompts: what lies before it does not count, also where its pages are shared.
#[test]
fn tokens_before_a_window_do_not_count() -> Result<()> {
    on_every_device(|| {
        let golden = Golden::open("mistral_window")?;
        let model = dense(&golden, DType::F32, Fusion::all())?;
        // Two layers of 7 tokens see 13 back.
        let end: Vec<u32> = (0..30).map(|i| (i * 19 + 4) % 120).collect();
        let mut given = BTreeMap::new();
        let mut engine = model.engine(&Options {
            positions: Some(96),
            page: 8,
            ..Default::default()
        })?;
        for beginning in [3u32, 50] {
            let text = (0..24).map(|i| (beginning + i) % 120);
            let prompt: Vec<u32> = text.chain(end.iter().copied()).collect();
            let request = Request {
                max_tokens: 20,
                ..Request::new(prompt)
            };
            engine.submit(request)?;
            while !engine.is_idle() {
                count(&mut given, engine.step()?);
            }
        }
        let tokens: Vec<_> = given.into_values().collect();
        assert_eq!(tokens[0], tokens[1]);
        Ok(())
    })
}

/// With room for more positions than LongRoPE's first frequencies are for, the engine has the second ones alone: a long
/// prompt gets Hugging Face's log-probabilities, and requests that begin as short ones the tokens of a model without
/// first frequencies.
#[test]
fn past_the_original_context_long_frequencies_are_for_all() -> Result<()> {
    on_every_device(|| {
        let golden = Golden::open("phi3_long")?;
        let config: phi3::Config = golden.config();
        let model = phi3::Model::new(&config, golden.weights(DType::F32)?)?;
        let default = Engine::new(&model, &Options::default())?;
        assert_eq!(
            Some(default.positions()),
            config.original_max_position_embeddings
        );
        let mut engine = Engine::new(
            &model,
            &Options {
                positions: Some(128),
                page: 8,
                prompt_budget: 16,
                ..Default::default()
            },
        )?;
        let ids = golden.outputs["longer_ids"].to_dtype(DType::U32)?;
        let logits = golden.outputs["longer_logits"].to_dtype(DType::F64)?;
        let expected = log_softmax(&logits.narrow(1, ids.dims()[1] - 1, 1)?, D::Minus1)?;
        for row in 0..ids.dims()[0] {
            let prompt = ids.get(row)?.to_vec1::<u32>()?;
            assert!(prompt.len() > default.positions());
            engine.submit(Request {
                logprobs: Some(5),
                ..request(prompt, 1)
            })?;
            let expected = expected.get(row)?.squeeze(0)?.to_vec1::<f64>()?;
            let mut outputs = Vec::new();
            while !engine.is_idle() {
                outputs.extend(engine.step()?);
            }
            let top = outputs[0].logprobs.as_ref().expect("log-probabilities");
            assert_eq!(top.top.len(), 5);
            for (id, logprob) in &top.top {
                let error = (f64::from(*logprob) - expected[*id as usize]).abs();
                assert!(error < 1e-4, "token {id}: {logprob}, {error:e}");
            }
        }
        let mut long_alone = config.clone();
        let scaling = long_alone.rope_scaling.as_mut().expect("factors");
        scaling.short_factor = scaling.long_factor.clone();
        let long_alone = phi3::Model::new(&long_alone, golden.weights(DType::F32)?)?;
        let requests = [(3, 20), (20, 60), (40, 30)].map(|(tokens, count)| {
            let prompt: Vec<u32> = (0..tokens).map(|i| (11 + i * 23) % 127).collect();
            request(prompt, count)
        });
        let mut wanted = BTreeMap::new();
        for request in requests {
            wanted.insert(engine.submit(request.clone())?, request);
        }
        let mut given = BTreeMap::new();
        finish(&mut engine, &mut given)?;
        // They are not those that the first frequencies give.
        let (id, first) = wanted.iter().next().expect("a request");
        assert_ne!(given[id].0, alone(&model, first)?);
        assert_alone(&long_alone, &given, wanted)
    })
}
