//! Token loops and engines whose keys and values are quantized.

use crate::generation::{PROMPTS, load};
use crate::support::on_every_device;
use candle_core::Result;
use candle_fused::generation::{self, Generation};
use candle_fused::models::llama::Llama;
use candle_fused::quant::KvCacheType;
use candle_fused::serving::{self, Engine, Request};
use candle_fused::{Fusion, trace};

const TYPES: [&str; 3] = ["bf16", "fp8", "int8"];

fn options(sequences: usize, kv_cache: &str) -> Result<generation::Options> {
    Ok(generation::Options {
        kv_cache: kv_cache.parse()?,
        ..crate::generation::options(sequences)
    })
}

/// The tokens of a generation of one sequence.
fn alone(model: &Llama, kv_cache: &str, prompt: &[u32], n: usize) -> Result<Vec<u32>> {
    let mut generation = Generation::new(model, &options(1, kv_cache)?)?;
    let mut tokens = vec![generation.extend(0, prompt)?];
    while tokens.len() < n {
        tokens.extend(generation.step()?[0]);
    }
    Ok(tokens)
}

/// The tokens of an engine, and the logarithms of their probabilities.
fn served(model: &Llama, kv_cache: &str, prompt: &[u32], n: usize) -> Result<(Vec<u32>, Vec<f32>)> {
    let mut engine = Engine::new(
        model,
        &serving::Options {
            positions: Some(96),
            kv_cache: kv_cache.parse()?,
            ..Default::default()
        },
    )?;
    engine.submit(Request {
        max_tokens: n,
        logprobs: Some(0),
        ..Request::new(prompt)
    })?;
    let (mut tokens, mut logprobs) = (Vec::new(), Vec::new());
    while !engine.is_idle() {
        for output in engine.step()? {
            tokens.extend(output.token);
            logprobs.extend(output.logprobs.map(|told| told.logprob));
        }
    }
    Ok((tokens, logprobs))
}

/// A token loop and an engine quantize alike, and both come near what the model says without.
#[test]
fn tokens_are_those_of_an_engine() -> Result<()> {
    on_every_device(|| {
        let (model, _) = load("llama_gqa_tied", Fusion::all())?;
        for prompt in PROMPTS {
            let (_, exact) = served(&model, "auto", prompt, 1)?;
            for kv_cache in TYPES {
                let (tokens, logprobs) = served(&model, kv_cache, prompt, 24)?;
                assert_eq!(alone(&model, kv_cache, prompt, 24)?, tokens, "{kv_cache}");
                let far = (logprobs[0] - exact[0]).abs();
                assert!(far < 0.1, "{kv_cache}: {far}");
                // It is another cache.
                assert!(far > 0., "{kv_cache}");
            }
        }
        Ok(())
    })
}

/// Prompts in parts, steps side by side, parked sequences and slots that are used again.
#[test]
fn sequences_side_by_side_do_not_see_each_other() -> Result<()> {
    on_every_device(|| {
        let (model, _) = load("llama_gqa_tied", Fusion::all())?;
        for kv_cache in TYPES {
            let expected = PROMPTS.map(|prompt| alone(&model, kv_cache, prompt, 20));
            let mut generation = Generation::new(&model, &options(3, kv_cache)?)?;
            let mut tokens = [const { Vec::new() }; 3];
            generation.extend(0, &[3, 1, 4, 1, 5])?;
            generation.truncate(0, 0)?;
            for (i, prompt) in PROMPTS.iter().enumerate() {
                let (first, rest) = prompt.split_at(prompt.len() / 2);
                generation.extend(i, first)?;
                tokens[i].push(generation.extend(i, rest)?);
            }
            for _ in 1..20 {
                for (all, token) in tokens.iter_mut().zip(generation.step()?) {
                    all.extend(token);
                }
            }
            for (tokens, expected) in tokens.iter().zip(expected) {
                assert_eq!(*tokens, expected?, "{kv_cache}");
            }
        }
        Ok(())
    })
}

/// On the CPU the ops say what they work on.
#[test]
fn pages_hold_what_was_asked_for() -> Result<()> {
    let (model, _) = load("llama_gqa_tied", Fusion::all())?;
    for (kv_cache, name) in [("fp8", "kv fp8"), ("int8", "kv int8")] {
        let (tokens, calls) = trace::capture(|| alone(&model, kv_cache, PROMPTS[0], 3));
        tokens?;
        let of_pages = calls.iter().filter(|(call, _)| call.path.contains(name));
        assert!(of_pages.count() > 0, "{calls:?}");
    }
    Ok(())
}

#[test]
fn what_cannot_be_paged_is_refused() -> Result<()> {
    let (plain, _) = load("llama_gqa_tied", Fusion::none())?;
    let error = Generation::new(&plain, &options(1, "int8")?).err();
    let said = error.map(|e| e.to_string()).unwrap_or_default();
    assert!(said.contains("not fused, which int8 needs"), "{said}");
    let said = "fp4"
        .parse::<KvCacheType>()
        .expect_err("an error")
        .to_string();
    assert!(
        said.contains("`fp4` is not one of auto, bf16, fp8, int8"),
        "{said}"
    );
    Ok(())
}
