//! Workloads: requests whose lengths are drawn from distributions, and when they arrive.

use crate::args::Args;
use crate::figures::Arrivals;
use crate::lengths::{Lengths, SharedPrefix};
use anyhow::Result;
use candle_fused::serving::Request;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, Exp};
use std::time::Duration;

/// Lengths where the command line names none: alike offline, so that each step is like the next, and between a quarter
/// and seven quarters of that where requests arrive at random.
const PROMPTS: (Lengths, Lengths) = (Lengths::Fixed(128), Lengths::Uniform(32, 224));
const ANSWERS: (Lengths, Lengths) = (Lengths::Fixed(256), Lengths::Uniform(64, 448));

/// Requests that arrive at random, for each sequence side by side, and the sequences that they are counted for at
/// least.
const EACH: usize = 4;
const LEAST: usize = 4;

/// How many requests of which lengths.
#[derive(Clone, Debug)]
pub struct Workload {
    pub prompts: Lengths,
    pub answers: Lengths,
    pub prefix: Option<SharedPrefix>,
    requests: usize,
}

/// A request, and when it comes.
pub struct Arrival {
    pub due: Duration,
    pub request: Request,
}

impl Workload {
    /// Of requests that come all at once.
    pub fn offline(args: &Args, sequences: usize) -> Self {
        Self {
            prompts: args.prompt_lengths.unwrap_or(PROMPTS.0),
            answers: args.answer_lengths.unwrap_or(ANSWERS.0),
            prefix: args.shared_prefix,
            requests: args.requests.unwrap_or(sequences),
        }
    }

    /// Of requests that arrive at random, if they are wanted.
    pub fn arriving(args: &Args, sequences: usize) -> Option<Self> {
        let wanted = match args.arrivals {
            Some(arrivals) => arrivals == Arrivals::Poisson,
            None => !args.quick,
        };
        wanted.then(|| Self {
            prompts: args.prompt_lengths.unwrap_or(PROMPTS.1),
            answers: args.answer_lengths.unwrap_or(ANSWERS.1),
            prefix: args.shared_prefix,
            requests: args.requests.unwrap_or(EACH * sequences.max(LEAST)),
        })
    }

    /// Both, in words.
    pub fn describe(args: &Args) -> String {
        let lengths = |w: Self| format!("prompts {}, answers {}", w.prompts, w.answers);
        let mut text = format!("all at once {}", lengths(Self::offline(args, 1)));
        if let Some(arriving) = Self::arriving(args, 1) {
            text += &format!("; arriving at random {}", lengths(arriving));
        }
        if let Some(SharedPrefix { tokens, share }) = args.shared_prefix {
            let percent = 100. * share;
            text += &format!("; {percent:.0} % of the prompts behind a prefix of {tokens}");
        }
        text
    }

    /// Tokens of a request at most.
    pub fn positions(&self) -> usize {
        let prefix = self.prefix.map_or(0, |prefix| prefix.tokens);
        prefix + self.prompts.most() + self.answers.most()
    }

    /// Whether all requests are alike and run side by side.
    pub fn is_uniform(&self, sequences: usize) -> bool {
        let prefix = self.prefix.is_none_or(|prefix| prefix.share == 1.);
        self.prompts.is_fixed() && self.answers.is_fixed() && prefix && self.requests <= sequences
    }

    /// Requests with prompts of random ids, so that no two begin alike but for the prefix, which is always the same.
    pub fn draw(&self, rng: &mut StdRng, vocab: usize) -> Vec<Request> {
        let prefix = self.prefix.map(|prefix| {
            let rng = &mut StdRng::seed_from_u64(2048);
            (random(rng, vocab, prefix.tokens), prefix.share)
        });
        let request = |_| {
            let own = self.prompts.draw(rng);
            let own = random(rng, vocab, own);
            let prompt = match &prefix {
                Some((prefix, share)) if rng.random::<f64>() < *share => {
                    [&prefix[..], &own].concat()
                }
                _ => own,
            };
            Request {
                max_tokens: self.answers.draw(rng),
                ..Request::new(prompt)
            }
        };
        (0..self.requests).map(request).collect()
    }
}

/// Random ids.
pub fn random(rng: &mut StdRng, vocab: usize, tokens: usize) -> Vec<u32> {
    let id = |_| rng.random_range(0..vocab as u32);
    (0..tokens).map(id).collect()
}

/// All at the same time.
pub fn at_once(requests: Vec<Request>) -> Vec<Arrival> {
    let due = Duration::ZERO;
    let arrival = |request| Arrival { due, request };
    requests.into_iter().map(arrival).collect()
}

/// A Poisson process: the times between arrivals are exponential, `rate` arrivals a second on average.
pub fn at_rate(requests: Vec<Request>, rate: f64, rng: &mut StdRng) -> Result<Vec<Arrival>> {
    let (between, mut due) = (Exp::new(rate)?, 0.);
    let arrival = |request| {
        due += between.sample(rng);
        let due = Duration::from_secs_f64(due);
        Arrival { due, request }
    };
    Ok(requests.into_iter().map(arrival).collect())
}
