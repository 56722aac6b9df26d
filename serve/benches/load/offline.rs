//! The engine alone, in this process.

use std::collections::HashMap;
use std::time::Instant;

use anyhow::Result;
use candle_fused::serving::{Engine, Request, RequestId};
use candle_fused_serve::load;
use common::args;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::Args;
use crate::round::{Rates, Story};

/// Prints the rates of as many requests as there would be clients.
pub fn run(args: &Args) -> Result<()> {
    let of_server = args.of_server()?;
    args::set_threads(of_server.model.threads);
    let (mut engine, vocab) = load::engine(&of_server)?;
    let mut rng = StdRng::seed_from_u64(1);
    let mut rounds = Vec::new();
    for _ in 0..args.rounds + 1 {
        rounds.push(round(&mut engine, args, vocab as u32, &mut rng)?);
    }
    // The first loads kernels and records graphs.
    println!("{}", serde_json::to_string(&Rates::of(&rounds[1..]))?);
    Ok(())
}

fn round(engine: &mut Engine, args: &Args, vocab: u32, rng: &mut StdRng) -> Result<Vec<Story>> {
    let asked = Instant::now();
    let mut stories = HashMap::<RequestId, Story>::new();
    for _ in 0..args.clients {
        let prompt = (0..args.prompt).map(|_| rng.random_range(0..vocab));
        let id = engine.submit(Request {
            max_tokens: args.tokens,
            ..Request::new(prompt.collect::<Vec<_>>())
        })?;
        let (news, tokens) = (Vec::new(), 0);
        stories.insert(
            id,
            Story {
                asked,
                news,
                tokens,
            },
        );
    }
    while !engine.is_idle() {
        let outputs = engine.step()?;
        let now = Instant::now();
        for output in outputs.iter().filter(|output| output.token.is_some()) {
            if let Some(story) = stories.get_mut(&output.id) {
                story.news.push(now);
                story.tokens += 1;
            }
        }
    }
    Ok(stories.into_values().collect())
}
