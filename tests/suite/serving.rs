//! Requests that run together give the tokens that each gives alone.

use crate::generation::{PROMPTS, load};
use crate::support::on_every_device;
use candle_core::Result;
use candle_fused::Fusion;
use candle_fused::generation::{self, Generation, Model, SamplingParams};
use candle_fused::serving::{Engine, FinishReason, Options, Output, Request, RequestId};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::borrow::Borrow;
use std::collections::BTreeMap;

/// What each request was given, and why it ended.
type Given = BTreeMap<RequestId, (Vec<u32>, Option<FinishReason>)>;

pub fn options() -> Options {
    Options {
        sequences: 4,
        positions: Some(96),
        page: 8,
        prompt_budget: 16,
        ..Default::default()
    }
}

pub fn count(given: &mut Given, outputs: Vec<Output>) {
    for Output {
        id, token, finish, ..
    } in outputs
    {
        let of = given.entry(id).or_default();
        assert_eq!(of.1, None, "request {id} has ended");
        of.0.extend(token);
        of.1 = finish;
    }
}

/// Steps until nothing is left to do.
pub fn finish(engine: &mut Engine, given: &mut Given) -> Result<()> {
    finish_within(10_000, engine, given)
}

/// The same in fewer steps than `most`.
fn finish_within(most: usize, engine: &mut Engine, given: &mut Given) -> Result<()> {
    let mut steps = 0;
    while !engine.is_idle() {
        count(given, engine.step()?);
        steps += 1;
        assert!(steps < most, "it does not end: {:?}", engine.stats());
    }
    Ok(())
}

/// The tokens of a request that has a `Generation` to itself.
pub fn alone<M: Model>(model: &M, request: &Request) -> Result<Vec<u32>> {
    let mut generation = Generation::new(
        model,
        &generation::Options {
            positions: Some(128),
            stop: request.stop.clone(),
            sampling: request.sampling.clone(),
            ..Default::default()
        },
    )?;
    let mut tokens = vec![generation.extend(0, &request.prompt)?];
    while tokens.len() < request.max_tokens && !generation.is_finished(0) {
        tokens.extend(generation.step()?[0]);
    }
    Ok(tokens)
}

/// No request holds a page.
fn assert_empty(engine: &Engine) {
    let stats = engine.stats();
    assert_eq!(stats.pages_free, stats.pages, "{stats:?}");
    assert_eq!((stats.running, stats.waiting, stats.slots_held), (0, 0, 0));
}

/// The likeliest tokens behind a prompt.
pub fn request(prompt: impl Into<Vec<u32>>, max_tokens: usize) -> Request {
    Request {
        max_tokens,
        ..Request::new(prompt)
    }
}

/// What was given is what each request gets alone.
pub fn assert_alone<M: Model>(
    model: &M,
    given: &Given,
    wanted: impl IntoIterator<Item = (RequestId, impl Borrow<Request>)>,
) -> Result<()> {
    for (id, request) in wanted {
        assert_eq!(
            given[&id].0,
            alone(model, request.borrow())?,
            "request {id}"
        );
    }
    Ok(())
}

#[test]
fn tokens_are_those_of_a_request_alone() -> Result<()> {
    on_every_device(|| {
        for name in ["llama_gqa_tied", "llama3_rope"] {
            let (model, _) = load(name, Fusion::all())?;
            let mut engine = Engine::new(&model, &options())?;
            let mut wanted = BTreeMap::new();
            // Seven for four places, one of them longer than a step's budget.
            let long: Vec<u32> = (0..50).map(|i| (7 * i + 3) % 100).collect();
            let prompts = PROMPTS.iter().chain(&PROMPTS).copied();
            for (i, prompt) in prompts.chain([&long[..]]).enumerate() {
                let request = request(prompt, 20 + i);
                wanted.insert(engine.submit(request.clone())?, request);
            }
            let mut given = Given::new();
            finish(&mut engine, &mut given)?;
            for (id, request) in wanted {
                let (tokens, reason) = &given[&id];
                assert_eq!(*tokens, alone(&model, &request)?, "{name} request {id}");
                assert_eq!(*reason, Some(FinishReason::Length));
            }
            assert_empty(&engine);
        }
        Ok(())
    })
}

#[test]
fn hundreds_of_requests_at_random() -> Result<()> {
    requests_at_random(200)
}

/// As many as `CANDLE_FUSED_REQUESTS` says, or 10,000.
#[test]
#[ignore = "takes a minute on the CPU"]
fn thousands_of_requests_at_random() -> Result<()> {
    let wanted = std::env::var("CANDLE_FUSED_REQUESTS");
    requests_at_random(wanted.map_or(10_000, |n| n.parse().expect("a number of requests")))
}

/// Requests come and go at random, more than there is room for: some are cancelled, some stop, pages run out, and
/// beginnings are shared.
fn requests_at_random(requests: usize) -> Result<()> {
    on_every_device(|| {
        let (model, _) = load("llama_gqa_tied", Fusion::all())?;
        let rng = &mut StdRng::seed_from_u64(8);
        let mut engine = Engine::new(
            &model,
            &Options {
                sequences: 6,
                pages: Some(40),
                ..options()
            },
        )?;
        let beginning: Vec<u32> = (0..24).map(|_| rng.random_range(0..128)).collect();
        let (mut wanted, mut given, mut cancelled) = (BTreeMap::new(), Given::new(), Vec::new());
        while wanted.len() < requests {
            if rng.random_bool(0.4) {
                let shared = rng.random_range(0..=beginning.len());
                let own = rng.random_range(1..30);
                let mut prompt = beginning[..shared].to_vec();
                prompt.extend((0..own).map(|_| rng.random_range(0..128u32)));
                let request = Request {
                    max_tokens: rng.random_range(1..40),
                    stop: vec![rng.random_range(0..128)],
                    sampling: SamplingParams {
                        temperature: if rng.random_bool(0.5) { 0.8 } else { 0. },
                        seed: rng.random(),
                        ..Default::default()
                    },
                    ..Request::new(prompt)
                };
                wanted.insert(engine.submit(request.clone())?, request);
            }
            if rng.random_bool(0.03) {
                let ids: Vec<_> = wanted.keys().copied().collect();
                let id = ids[rng.random_range(0..ids.len().max(1)).min(ids.len() - 1)];
                if engine.cancel(id) {
                    cancelled.push(id);
                }
            }
            count(&mut given, engine.step()?);
        }
        // More come than are served meanwhile, so what is left grows with their number.
        finish_within(10_000.max(10 * requests), &mut engine, &mut given)?;
        let stats = engine.stats();
        assert!(
            stats.preemptions > 0 && stats.cached_tokens > 0,
            "{stats:?}"
        );
        assert!(!cancelled.is_empty());
        assert_empty(&engine);
        for (id, request) in wanted {
            let (tokens, reason) = given.remove(&id).unwrap_or_default();
            let expected = alone(&model, &request)?;
            if cancelled.contains(&id) {
                assert_eq!(tokens, expected[..tokens.len()], "request {id}");
                assert_eq!(reason, None);
                continue;
            }
            assert_eq!(tokens, expected, "request {id}: {request:?}");
            let stopped = request.stop.contains(&tokens[tokens.len() - 1]);
            let reasons = [FinishReason::Length, FinishReason::Stop];
            assert_eq!(reason, Some(reasons[usize::from(stopped)]), "request {id}");
        }
        Ok(())
    })
}

/// A prefix that was read is not read again.
#[test]
fn a_shared_beginning_is_read_once() -> Result<()> {
    on_every_device(|| {
        let (model, _) = load("llama_gqa_tied", Fusion::all())?;
        let beginning: Vec<u32> = (0..64).map(|i| (5 * i) % 120).collect();
        for share_prefixes in [true, false] {
            let mut engine = Engine::new(
                &model,
                &Options {
                    share_prefixes,
                    ..options()
                },
            )?;
            let mut given = Given::new();
            let prompts = [1u32, 2, 3].map(|last| [&beginning[..], &[last]].concat());
            for prompt in &prompts {
                engine.submit(request(&prompt[..], 5))?;
                finish(&mut engine, &mut given)?;
            }
            let expected = if share_prefixes { 2 * 64 } else { 0 };
            assert_eq!(engine.stats().cached_tokens, expected);
            for (prompt, (tokens, _)) in prompts.iter().zip(given.values()) {
                assert_eq!(*tokens, alone(&model, &request(&prompt[..], 5))?);
            }
        }
        Ok(())
    })
}

/// What has all pages to itself ends when they are full, as what has all positions does.
#[test]
fn a_request_ends_where_there_is_no_room() -> Result<()> {
    on_every_device(|| {
        let (model, _) = load("llama_gqa_tied", Fusion::all())?;
        for (pages, positions, room, restarts) in
            [(3, 96, 24, false), (20, 30, 30, false), (3, 96, 24, true)]
        {
            let mut engine = Engine::new(
                &model,
                &Options {
                    pages: Some(pages),
                    positions: Some(positions),
                    ..options()
                },
            )?;
            let mut given = Given::new();
            let id = engine.submit(request(PROMPTS[0], 90))?;
            let mut steps = 0;
            while engine.stats().running + engine.stats().waiting > 0 {
                count(&mut given, engine.step()?);
                steps += 1;
                assert!(steps < 500, "it does not end");
                // It begins anew then, in the end with more tokens than the pages have room for.
                if restarts && steps % 5 == 0 {
                    engine.profile(1)?;
                }
            }
            count(&mut given, engine.step()?);
            let (tokens, reason) = &given[&id];
            assert_eq!(*reason, Some(FinishReason::Length));
            // The last token has no keys yet.
            assert_eq!(PROMPTS[0].len() + tokens.len(), room + 1);
            assert_empty(&engine);
        }
        Ok(())
    })
}

#[test]
fn options_out_of_range_are_refused() -> Result<()> {
    let (model, _) = load("llama_gqa_tied", Fusion::all())?;
    let refused = |options: &Options| match Engine::new(&model, options) {
        Ok(_) => panic!("{options:?} is taken"),
        Err(error) => error.to_string(),
    };
    for (options, expected) in [
        (
            Options {
                sequences: 0,
                ..options()
            },
            "0 sequences, expected 1 to 256",
        ),
        (
            Options {
                page: 12,
                ..options()
            },
            "pages of 12 tokens, expected 8, 16",
        ),
        (
            Options {
                positions: Some(1 << 40),
                ..options()
            },
            "expected 1 to the model's context",
        ),
        (
            Options {
                prompt_budget: 0,
                ..options()
            },
            "prompt_budget is 0",
        ),
        (
            Options {
                pages: Some(0),
                ..options()
            },
            "pages is 0",
        ),
    ] {
        let text = refused(&options);
        assert!(text.contains(expected), "{text}");
    }
    let (plain, _) = load("llama_gqa_tied", Fusion::none())?;
    let text = match Engine::new(&plain, &options()) {
        Ok(_) => panic!("a model without fused attention is taken"),
        Err(error) => error.to_string(),
    };
    assert!(text.contains("attention of layer 0 is not fused"), "{text}");
    Ok(())
}

#[test]
fn requests_that_do_not_fit_are_refused() -> Result<()> {
    let (model, _) = load("llama_gqa_tied", Fusion::all())?;
    let mut engine = Engine::new(&model, &options())?;
    let mut refused = |request: Request| {
        engine
            .submit(request)
            .expect_err("it is refused")
            .to_string()
    };
    for (request, expected) in [
        (Request::new([]), "the prompt is empty"),
        (
            Request::new(vec![1; 97]),
            "the prompt has 97 tokens, expected at most 96",
        ),
        (
            Request::new([1, 60_000]),
            "token 60000 is out of the vocabulary",
        ),
        (
            Request {
                stop: vec![60_000],
                ..Request::new([1])
            },
            "token 60000 is out of",
        ),
        (request([1], 0), "max_tokens is 0"),
    ] {
        let text = refused(request);
        assert!(text.contains(expected), "{text}");
    }
    Ok(())
}
