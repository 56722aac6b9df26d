//! Who is served when: no request starves, and a long prompt stalls nobody.

use crate::generation::{PROMPTS, load};
use crate::serving::{options, request};
use crate::support::on_every_device;
use candle_core::Result;
use candle_fused::Fusion;
use candle_fused::serving::{Engine, FinishReason, Options, Output, RequestId};
use std::collections::BTreeSet;

/// A prompt that shares no page with that of another seed.
fn own(seed: u32, tokens: u32) -> Vec<u32> {
    (0..tokens)
        .map(|i| (seed * 29 + 1 + i * 17) % 120)
        .collect()
}

fn whose(outputs: &[Output]) -> BTreeSet<RequestId> {
    let drawn = outputs.iter().filter(|output| output.token.is_some());
    drawn.map(|output| output.id).collect()
}

/// While a long prompt is read, each step brings a token to each of those that run, and reads as much of the prompt
/// as the budget allows and no more.
#[test]
fn a_long_prompt_stalls_nobody() -> Result<()> {
    on_every_device(|| {
        let (model, _) = load("llama_gqa_tied", Fusion::all())?;
        let mut engine = Engine::new(&model, &options())?;
        let mut running = BTreeSet::new();
        for i in 0..3 {
            running.insert(engine.submit(request(own(i, 5), 40))?);
        }
        while whose(&engine.step()?) != running {}
        let before = engine.stats().slots_used;
        let long = engine.submit(request(own(9, 70), 5))?;
        let (mut steps, mut used) = (0, before);
        loop {
            let drawn = whose(&engine.step()?);
            assert!(drawn.is_superset(&running));
            if drawn.contains(&long) {
                break;
            }
            steps += 1;
            let now = engine.stats().slots_used;
            if steps <= 4 {
                // A token of each of three, and a chunk of the budget's 16.
                assert_eq!(now - used, 3 + 16, "step {steps}");
            }
            used = now;
        }
        // 70 tokens are five chunks; on a GPU a step brings the tokens of the one before.
        assert!((4..=5).contains(&steps), "{steps}");
        Ok(())
    })
}

/// First tokens come in the order of the requests, whatever comes later and is shorter.
#[test]
fn later_requests_do_not_overtake() -> Result<()> {
    on_every_device(|| {
        let (model, _) = load("llama_gqa_tied", Fusion::all())?;
        let mut engine = Engine::new(
            &model,
            &Options {
                pages: Some(24),
                ..options()
            },
        )?;
        let mut ids = Vec::new();
        let mut first = Vec::new();
        let mut step = |engine: &mut Engine| -> Result<()> {
            for id in whose(&engine.step()?) {
                if !first.contains(&id) {
                    first.push(id);
                }
            }
            Ok(())
        };
        for i in 0..40 {
            // Now and then one that is long, among many that are short.
            let tokens = if i % 8 == 3 { 80 } else { 3 + i % 4 };
            ids.push(engine.submit(request(own(i, tokens), 4 + i as usize % 9))?);
            if i % 2 == 1 {
                step(&mut engine)?;
            }
        }
        while !engine.is_idle() {
            step(&mut engine)?;
        }
        assert_eq!(first, ids);
        Ok(())
    })
}

/// Where pages run out, the youngest gives its own back: the oldest gets a token in every step, and they end in their
/// order.
#[test]
fn the_youngest_gives_way() -> Result<()> {
    on_every_device(|| {
        let (model, _) = load("llama_gqa_tied", Fusion::all())?;
        let mut engine = Engine::new(
            &model,
            &Options {
                pages: Some(16),
                ..options()
            },
        )?;
        let mut ids = Vec::new();
        for i in 0..4 {
            ids.push(engine.submit(request(own(i, 4), 60))?);
        }
        let (mut steps, mut oldest, mut ended) = (0, Vec::new(), Vec::new());
        while !engine.is_idle() {
            for output in engine.step()? {
                if output.id == ids[0] {
                    oldest.push(steps);
                }
                if let Some(reason) = output.finish {
                    assert_eq!(reason, FinishReason::Length);
                    ended.push(output.id);
                }
            }
            steps += 1;
        }
        let stats = engine.stats();
        assert!(stats.preemptions > 0, "{stats:?}");
        assert_eq!(oldest.len(), 60);
        assert!(oldest.windows(2).all(|pair| pair[1] == pair[0] + 1));
        assert_eq!(ended, ids);
        Ok(())
    })
}

/// The oldest request gets its tokens also while new ones come in every step.
#[test]
fn a_stream_of_short_requests_starves_nobody() -> Result<()> {
    on_every_device(|| {
        let (model, _) = load("llama_gqa_tied", Fusion::all())?;
        let mut engine = Engine::new(&model, &options())?;
        let long = engine.submit(request(own(1, 90), 6))?;
        let mut tokens = 0;
        for i in 0..20u32 {
            engine.submit(request(PROMPTS[i as usize % PROMPTS.len()], 2))?;
            engine.submit(request(own(i, 16), 2))?;
            let outputs = engine.step()?;
            tokens += outputs.iter().filter(|output| output.id == long).count();
        }
        // Its prompt is read before those that came later, and each step behind it brings a token.
        assert_eq!(tokens, 6);
        Ok(())
    })
}
