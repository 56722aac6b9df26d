//! Requests with one beginning read it once, also those that run at the same time.

use crate::generation::{PROMPTS, load};
use crate::serving::{alone, assert_alone, count, finish, options, request};
use crate::support::on_every_device;
use candle_core::Result;
use candle_fused::Fusion;
use candle_fused::models::llama::Llama;
use candle_fused::serving::{Engine, Options, Request};
use std::collections::BTreeMap;

fn text(tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|i| (13 * i + 7) % 120).collect()
}

/// Runs requests that come at the same time; how many tokens of prompts were read.
fn read(model: &Llama, options: &Options, requests: &[Request]) -> Result<u64> {
    let mut engine = Engine::new(model, options)?;
    let mut wanted = BTreeMap::new();
    for request in requests {
        wanted.insert(engine.submit(request.clone())?, request);
    }
    let mut given = BTreeMap::new();
    finish(&mut engine, &mut given)?;
    assert_alone(model, &given, wanted)?;
    let stats = engine.stats();
    assert_eq!(stats.preemptions, 0);
    Ok(stats.prompt_tokens - stats.cached_tokens)
}

/// Four times one prompt: all but the first read what follows the last full page, whether the prompt is read in one
/// step or in several.
#[test]
fn equal_prompts_at_the_same_time_are_read_once() -> Result<()> {
    on_every_device(|| {
        let (model, _) = load("llama_gqa_tied", Fusion::all())?;
        for batch_invariant in [false, true] {
            for (tokens, prompt_budget) in [(33, 64), (65, 16), (60, 24), (64, 64)] {
                let options = Options {
                    prompt_budget,
                    batch_invariant,
                    ..options()
                };
                let requests: Vec<_> = (0..4).map(|i| request(text(tokens), 5 + i)).collect();
                let whole = if batch_invariant { prompt_budget } else { 8 };
                let shared = (tokens - 1) / whole * whole;
                let expected = tokens + 3 * (tokens - shared);
                let got = read(&model, &options, &requests)?;
                assert_eq!(
                    got, expected as u64,
                    "{tokens} by {prompt_budget}, invariant: {batch_invariant}"
                );
            }
        }
        let options = Options {
            share_prefixes: false,
            ..options()
        };
        let requests = vec![request(text(33), 5); 4];
        assert_eq!(read(&model, &options, &requests)?, 4 * 33);
        Ok(())
    })
}

/// Who has more of its own than others read for it does not wait for them.
#[test]
fn a_short_common_beginning_is_not_waited_for() -> Result<()> {
    on_every_device(|| {
        let (model, _) = load("llama_gqa_tied", Fusion::all())?;
        let options = Options {
            prompt_budget: 256,
            ..options()
        };
        let mut engine = Engine::new(&model, &options)?;
        for i in 0..3u32 {
            let own = (0..30).map(|j| (i * 31 + j * 7) % 120);
            let prompt: Vec<_> = text(8).into_iter().chain(own).collect();
            engine.submit(request(prompt, 5))?;
        }
        engine.step()?;
        let stats = engine.stats();
        assert_eq!((stats.slots_used, stats.cached_tokens), (3 * 38, 0));
        Ok(())
    })
}

/// One that comes while another reads the same finds what has been read by then, and goes on behind it.
#[test]
fn what_is_being_read_is_taken_over() -> Result<()> {
    on_every_device(|| {
        let (model, _) = load("llama_gqa_tied", Fusion::all())?;
        let mut engine = Engine::new(&model, &options())?;
        let (long, longer) = (text(72), text(80));
        let first = engine.submit(request(long.clone(), 6))?;
        let mut given = BTreeMap::new();
        for _ in 0..2 {
            count(&mut given, engine.step()?);
        }
        let second = engine.submit(request(longer.clone(), 6))?;
        finish(&mut engine, &mut given)?;
        for (id, prompt) in [(first, long), (second, longer)] {
            assert_eq!(given[&id].0, alone(&model, &request(prompt, 6))?);
        }
        assert_eq!(engine.stats().cached_tokens, 72);
        Ok(())
    })
}

/// A request that is sent back while it reads its prompt finds what it has read.
#[test]
fn a_prompt_that_was_read_in_part_goes_on_there() -> Result<()> {
    on_every_device(|| {
        let (model, _) = load("llama_gqa_tied", Fusion::all())?;
        let options = Options {
            pages: Some(14),
            prompt_budget: 4,
            ..options()
        };
        let mut engine = Engine::new(&model, &options)?;
        let mut given = BTreeMap::new();
        let older = request(PROMPTS[2].to_vec(), 30);
        let first = engine.submit(older.clone())?;
        count(&mut given, engine.step()?);
        let younger = request(text(80), 5);
        let second = engine.submit(younger.clone())?;
        finish(&mut engine, &mut given)?;
        let stats = engine.stats();
        assert_eq!(stats.preemptions, 1, "{stats:?}");
        // It had read more than half when the older one needed its fourth page.
        assert!(stats.cached_tokens >= 40, "{stats:?}");
        assert_alone(&model, &given, [(first, older), (second, younger)])
    })
}
