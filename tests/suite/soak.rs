//! Prompts of random lengths, stops and restarts for as long as one likes: the memory stays flat, and
//! the tokens are those of a fresh process.
//!
//! `SOAK_SECONDS=3600 cargo test --release --test suite -- --ignored --nocapture soak::`

use crate::smollm2;
use candle_core::quantized::gguf_file::Content;
use candle_core::{Device, Result};
use candle_fused::generation::{Generation, Options};
use candle_fused::models::llama::ModelWeights;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::io::Cursor;
use std::process::Command;
use std::time::{Duration, Instant};

/// Prompts, by number, that a fresh process each has answered.
const PROMPTS: u64 = 12;

/// Tokens of an answer.
const TOKENS: usize = 24;

/// Printed by the child, in front of its tokens.
const MARK: &str = "tokens of a fresh process: ";

fn prompt(number: u64) -> Vec<u32> {
    let rng = &mut StdRng::seed_from_u64(number);
    let length = rng.random_range(1..300);
    (0..length).map(|_| rng.random_range(3..49_000)).collect()
}

fn model() -> Result<ModelWeights> {
    let bytes = std::fs::read(smollm2::gguf())?;
    let mut reader = Cursor::new(&bytes);
    ModelWeights::from_gguf(Content::read(&mut reader)?, &mut reader, &Device::Cpu)
}

fn begin(model: &ModelWeights) -> Result<Generation> {
    let options = Options {
        positions: Some(400),
        ..Default::default()
    };
    Generation::new(model, &options)
}

/// The first `count` tokens of the answer, behind a sequence that is empty.
fn answer(generation: &mut Generation, number: u64, count: usize) -> Result<Vec<u32>> {
    let mut tokens = vec![generation.extend(0, &prompt(number))?];
    while tokens.len() < count {
        tokens.extend(generation.step()?[0]);
    }
    Ok(tokens)
}

/// What a child is asked for: the answer to the prompt that `SOAK_PROMPT` numbers.
#[test]
#[ignore = "part of the soak"]
fn a_fresh_process_answers() -> Result<()> {
    let number = std::env::var("SOAK_PROMPT").map_or(0, |n| n.parse().expect("a number"));
    let tokens = answer(&mut begin(&model()?)?, number, TOKENS)?;
    println!("{MARK}{tokens:?}");
    assert_eq!(tokens.len(), TOKENS);
    Ok(())
}

fn of_a_fresh_process(number: u64) -> Result<Vec<u32>> {
    let out = Command::new(std::env::current_exe()?)
        .args([
            "soak::a_fresh_process_answers",
            "--exact",
            "--ignored",
            "--nocapture",
        ])
        .env("SOAK_PROMPT", number.to_string())
        .output()?;
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    let tokens = said
        .split_once(MARK)
        .and_then(|(_, rest)| rest.lines().next());
    let tokens = tokens.and_then(|tokens| serde_json::from_str(tokens).ok());
    Ok(tokens.unwrap_or_else(|| panic!("{said}")))
}

/// Resident bytes.
#[cfg(target_os = "linux")]
fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("statm");
    let pages: usize = pages
        .split(' ')
        .nth(1)
        .and_then(|n| n.parse().ok())
        .expect("pages");
    4096 * pages
}

#[cfg(target_os = "linux")]
#[test]
#[ignore = "runs for SOAK_SECONDS"]
fn memory_stays_flat_and_tokens_the_same() -> Result<()> {
    let seconds = std::env::var("SOAK_SECONDS").map_or(60, |n| n.parse().expect("seconds"));
    let expected: Vec<Vec<u32>> = (0..PROMPTS)
        .map(of_a_fresh_process)
        .collect::<Result<_>>()?;
    let model = model()?;
    let mut generation = begin(&model)?;
    let rng = &mut StdRng::seed_from_u64(1);
    let (start, whole) = (Instant::now(), Duration::from_secs(seconds));
    let (mut rounds, mut tokens, mut warm) = (0usize, 0usize, None);
    while start.elapsed() < whole {
        let number = rng.random_range(0..PROMPTS);
        match rng.random_range(0..3) {
            // A new generation, or the old one from the start.
            0 => generation = begin(&model)?,
            _ => generation.truncate(0, 0)?,
        }
        let count = rng.random_range(1..=TOKENS);
        let said = answer(&mut generation, number, count)?;
        let known = &expected[number as usize];
        assert_eq!(said, known[..count], "prompt {number}");
        rounds += 1;
        tokens += count + prompt(number).len();
        if warm.is_none() && start.elapsed() > whole / 5 {
            warm = Some(resident());
        }
    }
    let (warm, end) = (warm.expect("a fifth of the time has passed"), resident());
    println!(
        "soak: {rounds} prompts, {tokens} tokens in {seconds} s; {warm} bytes after a fifth, {end} at the end"
    );
    assert!(end < warm + (16 << 20), "{warm} bytes grew to {end}");
    Ok(())
}
