//! Requests whose prompts begin with the same tokens: the time to the first token where an engine has that beginning
//! in its pages, against an engine that shares none.

use crate::figures::PrefixRun;
use crate::stats::Times;
use anyhow::{Context, Result, ensure};
use candle_fused::serving::{Engine, Options, Request};
use common::generate::TextModel;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::time::Instant;

/// Tokens that prompts share, on the CPU where it is to be quick, and those of their own.
const PREFIX: usize = 2048;
const QUICK_PREFIX: usize = 256;
const SUFFIX: usize = 32;

/// Tokens of a page.
const PAGE: usize = 16;

/// Requests of each engine that are timed, on a GPU and on the CPU.
const ROUNDS: usize = 15;
const CPU_ROUNDS: usize = 5;

/// Prompts of random ids behind one prefix.
struct Prompts {
    rng: StdRng,
    vocab: u32,
    prefix: Vec<u32>,
}

impl Prompts {
    fn new(vocab: usize, prefix: usize) -> Self {
        let (mut rng, vocab) = (StdRng::seed_from_u64(2048), vocab as u32);
        let prefix = (0..prefix).map(|_| rng.random_range(0..vocab)).collect();
        Self { rng, vocab, prefix }
    }

    /// The prefix with a suffix that none had before.
    fn next(&mut self) -> Vec<u32> {
        let suffix = (0..SUFFIX).map(|_| self.rng.random_range(0..self.vocab));
        let suffix: Vec<u32> = suffix.collect();
        [&self.prefix[..], &suffix].concat()
    }
}

/// Measures a model on a GPU or on the CPU, where it may have to be quick.
pub fn run(
    model: &dyn TextModel,
    name: (&str, &str),
    (cuda, quick): (bool, bool),
) -> Result<PrefixRun> {
    let wanted = if quick && !cuda { QUICK_PREFIX } else { PREFIX };
    // A token is drawn behind the prompt.
    let room = model.context_length().saturating_sub(SUFFIX + 1);
    let prefix = wanted.min(room) / PAGE * PAGE;
    ensure!(
        prefix > 0,
        "the context of {} has no room for a prefix",
        model.context_length()
    );
    let engine = |share_prefixes| {
        model.engine(&Options {
            sequences: 1,
            positions: Some(prefix + SUFFIX + 1),
            page: PAGE,
            share_prefixes,
            ..Default::default()
        })
    };
    let (mut with, mut without) = (engine(true)?, engine(false)?);
    let mut prompts = Prompts::new(model.vocab_size(), prefix);
    // Kernels are loaded and the prefix is read; then the suffix alone, which may take other kernels.
    for engine in [&mut with, &mut without] {
        first_token(engine, prompts.next())?;
        first_token(engine, prompts.next())?;
    }
    let before = with.stats();
    let (mut cached, mut uncached) = (Vec::new(), Vec::new());
    for _ in 0..if cuda { ROUNDS } else { CPU_ROUNDS } {
        cached.push(first_token(&mut with, prompts.next())?);
        uncached.push(first_token(&mut without, prompts.next())?);
    }
    let after = with.stats();
    let run = PrefixRun {
        model: name.0.to_owned(),
        format: name.1.to_owned(),
        prefix,
        suffix: SUFFIX,
        prompt_tokens: after.prompt_tokens - before.prompt_tokens,
        cached_tokens: after.cached_tokens - before.cached_tokens,
        cached: Times::of(&cached),
        uncached: Times::of(&uncached),
    };
    line(&run);
    Ok(run)
}

/// Seconds from a request to its first token; nothing else runs.
fn first_token(engine: &mut Engine, prompt: Vec<u32>) -> Result<f64> {
    let begun = Instant::now();
    engine.submit(Request {
        max_tokens: 1,
        ..Request::new(prompt)
    })?;
    let mut drawn = None;
    while !engine.is_idle() {
        let outputs = engine.step()?;
        drawn = outputs.iter().find_map(|output| output.token).or(drawn);
    }
    drawn.context("no token was drawn")?;
    Ok(begun.elapsed().as_secs_f64())
}

fn line(run: &PrefixRun) {
    println!(
        "{:<18}{:<12}shared prefix of {} tokens, {} behind it: first token {:.2} ms +-{:.2} cached, {:.2} +-{:.2} \
         uncached: {:.1} % of it; {} of {} prompt tokens from the cache",
        run.model,
        run.format,
        run.prefix,
        run.suffix,
        run.cached.median * 1e3,
        run.cached.spread * 1e3,
        run.uncached.median * 1e3,
        run.uncached.spread * 1e3,
        run.share() * 100.,
        run.cached_tokens,
        run.prompt_tokens,
    );
}
