//! The engine keeps nothing of requests that have ended.

use crate::generation::load;
use crate::serving::options;
use crate::soak::resident;
use candle_core::Result;
use candle_fused::Fusion;
use candle_fused::generation::SamplingParams;
use candle_fused::serving::{Engine, Options, Request};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::process::Command;

/// Set in a process that runs one test alone.
const ALONE: &str = "CANDLE_FUSED_MEMORY_ALONE";

/// Bytes that may come in the other nine tenths: the allocator's, whose free memory is in pieces.
const LIMIT: usize = 4 << 20;

/// Serves requests at random, of which some are cancelled, some stop and some share a beginning.
fn serve(engine: &mut Engine, rng: &mut StdRng, requests: usize) -> Result<()> {
    let beginning: Vec<u32> = (0..24).collect();
    for _ in 0..requests {
        let shared = rng.random_range(0..=beginning.len());
        let own = rng.random_range(1..20);
        let mut prompt = beginning[..shared].to_vec();
        prompt.extend((0..own).map(|_| rng.random_range(0..128u32)));
        let id = engine.submit(Request {
            max_tokens: rng.random_range(1..12),
            stop: vec![rng.random_range(0..128)],
            logprobs: rng.random_bool(0.2).then_some(3),
            sampling: SamplingParams {
                temperature: 0.8,
                seed: rng.random(),
                ..Default::default()
            },
            ..Request::new(prompt)
        })?;
        engine.step()?;
        if rng.random_bool(0.05) {
            engine.cancel(id);
        }
        while engine.stats().waiting > 8 {
            engine.step()?;
        }
    }
    while !engine.is_idle() {
        engine.step()?;
    }
    Ok(())
}

fn memory_after(requests: usize) -> Result<()> {
    let (model, _) = load("llama_gqa_tied", Fusion::all())?;
    let mut engine = Engine::new(
        &model,
        &Options {
            pages: Some(40),
            ..options()
        },
    )?;
    let rng = &mut StdRng::seed_from_u64(3);
    serve(&mut engine, rng, requests)?;
    let warm = resident();
    serve(&mut engine, rng, 9 * requests)?;
    let end = resident();
    println!(
        "{warm} bytes after {requests} requests, {end} after {}",
        10 * requests
    );
    assert!(end < warm + LIMIT, "{warm} bytes grew to {end}");
    Ok(())
}

/// The test runs itself again, in a process of its own, where no other test takes memory.
fn in_its_own_process(test: &str, requests: usize) -> Result<()> {
    if std::env::var_os(ALONE).is_some() {
        return memory_after(requests);
    }
    let test = format!("serving_memory::{test}");
    let out = Command::new(std::env::current_exe()?)
        .args([&test, "--exact", "--include-ignored", "--nocapture"])
        .env(ALONE, "1")
        .output()?;
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && said.contains("1 passed"), "{said}");
    Ok(())
}

#[test]
fn memory_stays_flat_over_a_thousand_requests() -> Result<()> {
    in_its_own_process("memory_stays_flat_over_a_thousand_requests", 100)
}

#[test]
#[ignore = "takes some seconds"]
fn memory_stays_flat_over_ten_thousand_requests() -> Result<()> {
    in_its_own_process("memory_stays_flat_over_ten_thousand_requests", 1000)
}
