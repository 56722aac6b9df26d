//! The size of a step follows the number of requests that run.

use crate::generation::{PROMPTS, load};
use crate::serving::{alone, assert_alone, count, finish, options};
use crate::support::on_every_device;
use candle_core::Result;
use candle_fused::Fusion;
use candle_fused::generation::SamplingParams;
use candle_fused::serving::{Engine, Options, Request};
use std::collections::BTreeMap;

/// A request whose draws depend on its seed, on its position and on its last tokens.
fn drawing(i: usize, max_tokens: usize) -> Request {
    Request {
        max_tokens,
        sampling: SamplingParams {
            temperature: if i.is_multiple_of(2) { 0.9 } else { 0. },
            repeat_penalty: if i.is_multiple_of(3) { 1.2 } else { 1. },
            seed: i as u64,
            ..Default::default()
        },
        ..Request::new(PROMPTS[i % PROMPTS.len()])
    }
}

/// Of 20 requests those in the lowest slots end first, so that the others move down, with their tokens and draws.
#[test]
fn steps_are_no_larger_than_their_requests_ask_for() -> Result<()> {
    on_every_device(|| {
        let (model, _) = load("llama_gqa_tied", Fusion::all())?;
        let mut engine = Engine::new(
            &model,
            &Options {
                sequences: 20,
                ..options()
            },
        )?;
        let (mut wanted, mut given) = (BTreeMap::new(), BTreeMap::new());
        for i in 0..20 {
            let request = drawing(i, 30 + 2 * i);
            wanted.insert(engine.submit(request.clone())?, request);
        }
        let mut sizes = Vec::new();
        while !engine.is_idle() {
            let waiting = engine.stats().waiting;
            count(&mut given, engine.step()?);
            let stats = engine.stats();
            // Those that end with a step were in it.
            if waiting == 0 && stats.bucket > 0 {
                sizes.push(stats.bucket);
            }
        }
        sizes.dedup();
        assert_eq!(sizes[sizes.len() - 10..], [20, 16, 8, 7, 6, 5, 4, 3, 2, 1]);
        assert_alone(&model, &given, wanted)
    })
}

/// Log-probabilities and the tokens of a step that is under way go with the request.
#[test]
fn the_last_of_many_goes_on_in_the_smallest_step() -> Result<()> {
    on_every_device(|| {
        let (model, _) = load("llama_gqa_tied", Fusion::all())?;
        let mut engine = Engine::new(
            &model,
            &Options {
                sequences: 12,
                ..options()
            },
        )?;
        let others: Vec<_> = (0..11)
            .map(|i| engine.submit(drawing(i, 80)))
            .collect::<Result<_>>()?;
        let request = Request {
            logprobs: Some(2),
            ..drawing(6, 60)
        };
        let last = engine.submit(request.clone())?;
        let (mut outputs, mut cancelled) = (Vec::new(), false);
        while !engine.is_idle() {
            let step = engine.step()?;
            outputs.extend(step.into_iter().filter(|output| output.id == last));
            if outputs.len() == 20 && !cancelled {
                assert_eq!(engine.stats().bucket, 12);
                assert!(others.iter().all(|other| engine.cancel(*other)));
                cancelled = true;
            } else if cancelled && engine.stats().bucket > 0 {
                assert_eq!(engine.stats().bucket, 1);
            }
        }
        let tokens: Vec<u32> = outputs.iter().filter_map(|output| output.token).collect();
        assert_eq!(tokens, alone(&model, &request)?);
        let mut engine = Engine::new(&model, &options())?;
        engine.submit(request)?;
        let mut expected = Vec::new();
        while !engine.is_idle() {
            expected.extend(engine.step()?);
        }
        for (output, alone) in outputs.iter().zip(&expected) {
            let (got, want) = (output.logprobs.as_ref(), alone.logprobs.as_ref());
            let [got, want] = [got, want].map(|of| of.expect("log-probabilities"));
            assert!((got.logprob - want.logprob).abs() < 1e-3);
            assert_eq!(got.top.len(), want.top.len());
        }
        Ok(())
    })
}

/// Requests come while others leave, so that slots are taken again by others.
#[test]
fn slots_are_taken_again() -> Result<()> {
    on_every_device(|| {
        let (model, _) = load("llama_gqa_tied", Fusion::all())?;
        let mut engine = Engine::new(
            &model,
            &Options {
                sequences: 16,
                pages: Some(60),
                ..options()
            },
        )?;
        let (mut wanted, mut given) = (BTreeMap::new(), BTreeMap::new());
        for i in 0..60 {
            let request = drawing(i, 1 + i * 37 % 50);
            wanted.insert(engine.submit(request.clone())?, request);
            count(&mut given, engine.step()?);
            // Now and then nearly all have left before more come.
            while i % 20 == 19 && engine.stats().running > 2 {
                count(&mut given, engine.step()?);
            }
        }
        finish(&mut engine, &mut given)?;
        assert_alone(&model, &given, wanted)
    })
}

/// With batch invariance all steps of a GPU have one size.
#[test]
fn with_batch_invariance_there_is_one_size() -> Result<()> {
    on_every_device(|| {
        let (model, _) = load("llama_gqa_tied", Fusion::all())?;
        let mut engine = Engine::new(
            &model,
            &Options {
                sequences: 6,
                batch_invariant: true,
                ..options()
            },
        )?;
        for i in 0..3 {
            engine.submit(drawing(i, 5 + 10 * i))?;
        }
        while !engine.is_idle() {
            engine.step()?;
            assert!([0, 6].contains(&engine.stats().bucket));
        }
        Ok(())
    })
}
