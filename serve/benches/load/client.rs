//! Clients that stream answers from /v1/completions.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use reqwest::Client;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use crate::Args;
use crate::round::{Rates, Story};

/// Ids of prompts: every model that is served has them.
const IDS: std::ops::Range<u32> = 1000..40_000;

/// What an event is read for.
#[derive(Deserialize)]
struct Event {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    text: String,
}

#[derive(Deserialize)]
struct Usage {
    completion_tokens: usize,
}

/// The rates of all clients together.
pub async fn rounds(args: &Args, url: &str) -> Result<Rates> {
    let start = Arc::new(Barrier::new(args.clients));
    let mut clients = JoinSet::new();
    for n in 0..args.clients {
        clients.spawn(client(args.clone(), url.to_owned(), n, Arc::clone(&start)));
    }
    let mut rounds: Vec<Vec<Story>> = (0..args.rounds).map(|_| Vec::new()).collect();
    // The others end with the first that fails: they would wait for it.
    while let Some(ended) = clients.join_next().await {
        let stories = ended.context("a client has panicked")??;
        // The first round is not counted.
        for (round, story) in rounds.iter_mut().zip(stories.into_iter().skip(1)) {
            round.push(story);
        }
    }
    Ok(Rates::of(&rounds))
}

/// A client's answers, one of each round.
async fn client(args: Args, url: String, n: usize, start: Arc<Barrier>) -> Result<Vec<Story>> {
    let mut rng = StdRng::seed_from_u64(n as u64);
    let (client, url) = (Client::new(), format!("{url}/v1/completions"));
    let mut stories = Vec::new();
    for _ in 0..args.rounds + 1 {
        let prompt: Vec<u32> = (0..args.prompt).map(|_| rng.random_range(IDS)).collect();
        let body = json!({
            "prompt": prompt, "max_tokens": args.tokens, "temperature": 0, "ignore_eos": true,
            "stream": true, "stream_options": { "include_usage": true },
        });
        start.wait().await;
        stories.push(answer(&client, &url, &body).await?);
    }
    Ok(stories)
}

async fn answer(client: &Client, url: &str, body: &Value) -> Result<Story> {
    let asked = Instant::now();
    let response = client.post(url).json(body).send().await;
    let mut response = response.with_context(|| format!("{url} cannot be reached"))?;
    if !response.status().is_success() {
        let (status, body) = (response.status(), response.text().await?);
        bail!("the server answers with {status}: {body}");
    }
    let mut story = Story {
        asked,
        news: Vec::new(),
        tokens: 0,
    };
    let mut read = Vec::new();
    while let Some(more) = response
        .chunk()
        .await
        .context("the stream has broken off")?
    {
        let now = Instant::now();
        read.extend_from_slice(&more);
        let whole = read.iter().rposition(|byte| *byte == b'\n');
        let Some(whole) = whole else { continue };
        for line in read[..whole].split(|byte| *byte == b'\n') {
            take(line, now, &mut story)?;
        }
        read.drain(..=whole);
    }
    let wanted = body["max_tokens"].as_u64();
    ensure!(
        wanted == Some(story.tokens as u64) && !story.news.is_empty(),
        "an answer has {} tokens, expected {}",
        story.tokens,
        body["max_tokens"]
    );
    Ok(story)
}

/// A line of a stream.
fn take(line: &[u8], now: Instant, story: &mut Story) -> Result<()> {
    let Some(data) = line.strip_prefix(b"data: ") else {
        return Ok(());
    };
    if data.starts_with(b"[DONE]") {
        return Ok(());
    }
    let event: Event = serde_json::from_slice(data).context("an event is no JSON")?;
    if let Some(error) = event.error {
        bail!("the server says: {error}");
    }
    if event.choices.iter().any(|choice| !choice.text.is_empty()) {
        story.news.push(now);
    }
    if let Some(usage) = event.usage {
        story.tokens = usage.completion_tokens;
    }
    Ok(())
}
