//! Many requests at once: all at the same time, which shows how fast steps are, and arriving at random, which shows how
//! long each waits. Then requests with a shared prefix.

use crate::args::Args;
use crate::budget::Budget;
use crate::child;
use crate::figures::{Arrivals, PrefixRun, ServingRun};
use crate::form::Form;
use crate::place::Place;
use crate::prefix;
use anyhow::{Context, Result};
use candle_fused::generation::PartTime;
use candle_fused::serving::{Engine, Options, Output, Request, RequestId};
use common::comparison::{median, percentile};
use common::generate::TextModel;
use common::gpu;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Tokens of a prompt, and behind it, where all requests are alike.
const PROMPT: usize = 128;
const GENERATED: usize = 256;

/// Requests that arrive at random, for each sequence side by side.
const EACH: usize = 4;

/// The share of the offline rate at which they arrive.
const LOAD: f64 = 0.7;

/// Measures every model that is wanted.
pub fn run(
    place: &Place,
    args: &Args,
    budget: &Budget,
) -> Result<(Vec<ServingRun>, Vec<PrefixRun>)> {
    let cuda = place.device.is_cuda();
    gpu::tune(&place.device, true)?;
    let models = match args.models.is_empty() {
        true => vec!["smollm2-135m".to_owned()],
        false => args.models.clone(),
    };
    let formats = match args.formats.is_empty() {
        true => vec![place.dtypes[0].as_str().to_owned()],
        false => args.formats.clone(),
    };
    let sequences = match (args.sequences.is_empty(), cuda) {
        (false, _) => args.sequences.clone(),
        (true, true) => vec![8, 32, 64, 256],
        (true, false) => vec![1, 4, 8],
    };
    println!(
        "\nserving: prompts of {PROMPT}, {GENERATED} tokens behind each; then arrivals at random"
    );
    let (mut runs, mut prefixes) = (Vec::new(), Vec::new());
    for model in &models {
        for format in &formats {
            let name = format!("serving {model} {format}");
            let (all, prefix) = (args.wants(&name), args.wants(&format!("{name} prefix")));
            if budget.is_spent() || !(all || prefix) {
                continue;
            }
            let job = child::Job {
                model: model.clone(),
                format: format.clone(),
                form: Form::Graph,
                cpu: !cuda,
                threads: args.most_threads(),
                positions: 0,
            };
            let loaded = child::load(&job, &place.device)?;
            let what = || format!("{model} in {format}");
            for sequences in sequences.iter().filter(|_| all) {
                let served = Served::new(loaded.as_ref(), (model, format), *sequences)?;
                runs.extend(served.run(args.quick).with_context(what)?);
            }
            if prefix {
                let name = (model.as_str(), format.as_str());
                let run = prefix::run(loaded.as_ref(), name, (cuda, args.quick));
                prefixes.push(run.with_context(what)?);
            }
        }
    }
    Ok((runs, prefixes))
}

/// A model under an engine.
struct Served<'a> {
    name: (&'a str, &'a str),
    engine: Engine,
    vocab: usize,
    sequences: usize,
}

/// When a request came and when its tokens did.
struct Story {
    arrived: Instant,
    tokens: Vec<Instant>,
}

/// What becomes of requests.
#[derive(Default)]
struct Stories {
    sequences: usize,
    all: HashMap<RequestId, Story>,
    /// Of each step.
    wasted: Vec<f64>,
}

impl Stories {
    fn begin(&mut self, id: RequestId, arrived: Instant) {
        let tokens = Vec::new();
        self.all.insert(id, Story { arrived, tokens });
    }

    fn go_on(&mut self, engine: &Engine, outputs: &[Output]) {
        let now = Instant::now();
        for output in outputs {
            if let (Some(story), Some(_)) = (self.all.get_mut(&output.id), output.token) {
                story.tokens.push(now);
            }
        }
        let stats = engine.stats();
        if 2 * stats.running >= self.sequences {
            let used = stats.slots_used as f64 / stats.slots_held.max(1) as f64;
            self.wasted.push(1. - used);
        }
    }

    /// Seconds to the first token, and between tokens.
    fn waits(&self) -> (Vec<f64>, Vec<f64>) {
        let (mut first, mut between) = (Vec::new(), Vec::new());
        for story in self.all.values() {
            let to_first = story
                .tokens
                .first()
                .map(|t| t.duration_since(story.arrived));
            first.extend(to_first.map(|d| d.as_secs_f64()));
            let pairs = story.tokens.windows(2);
            between.extend(pairs.map(|w| w[1].duration_since(w[0]).as_secs_f64()));
        }
        (first, between)
    }
}

/// Requests that all began together.
struct Round {
    stories: Stories,
    /// Seconds of steps with a token of every sequence, and of the host's work in them.
    steps: Vec<f64>,
    host: Vec<f64>,
    /// Seconds until all had begun.
    reading: f64,
}

impl<'a> Served<'a> {
    fn new(model: &dyn TextModel, name: (&'a str, &'a str), sequences: usize) -> Result<Self> {
        let options = Options {
            sequences,
            positions: Some(1024),
            ..Default::default()
        };
        Ok(Self {
            name,
            engine: model.engine(&options)?,
            vocab: model.vocab_size(),
            sequences,
        })
    }

    /// All at once, then arriving at random, unless it is to be quick.
    fn run(mut self, quick: bool) -> Result<Vec<ServingRun>> {
        let all = self.offline()?;
        line(&all);
        // What a request takes of a step's time, all sequences being busy.
        let rate = LOAD * all.tokens_per_second / (GENERATED as f64);
        let mut runs = vec![all];
        if !quick {
            let arriving = self.arriving(rate)?;
            line(&arriving);
            runs.push(arriving);
        }
        Ok(runs)
    }

    fn stories(&self) -> Stories {
        Stories {
            sequences: self.sequences,
            ..Default::default()
        }
    }

    /// A prompt of random ids, so that no two begin alike.
    fn prompt(&self, rng: &mut StdRng, tokens: usize) -> Vec<u32> {
        (0..tokens)
            .map(|_| rng.random_range(0..self.vocab as u32))
            .collect()
    }

    /// All at once: steps are timed while all sequences are under way.
    fn offline(&mut self) -> Result<ServingRun> {
        // The first round warms up: it records graphs and loads kernels.
        let mut rounds = Vec::new();
        for round in 0..3 {
            rounds.push(self.round(round)?);
        }
        let Round {
            stories,
            steps,
            host,
            reading,
        } = rounds.swap_remove(2);
        let prompts = (self.sequences * PROMPT) as f64 / reading;
        let step = median(steps.clone());
        let mut run = self.figures(Arrivals::Offline, &stories, self.sequences as f64 / step);
        run.prompts_per_second = Some(prompts);
        run.step_p50 = Some(step);
        run.step_p99 = Some(percentile(steps, 99.));
        run.host_p50 = Some(median(host));
        run.parts = self.parts()?;
        Ok(run)
    }

    /// One request for each sequence.
    fn round(&mut self, seed: u64) -> Result<Round> {
        let rng = &mut StdRng::seed_from_u64(seed);
        let mut stories = self.stories();
        let started = Instant::now();
        for _ in 0..self.sequences {
            let prompt = self.prompt(rng, PROMPT);
            let request = Request {
                max_tokens: GENERATED,
                ..Request::new(prompt)
            };
            stories.begin(self.engine.submit(request)?, started);
        }
        let (mut steps, mut host, mut reading) = (Vec::new(), Vec::new(), 0.);
        let mut before = Instant::now();
        while !self.engine.is_idle() {
            let waited = self.engine.stats().waited;
            let begun = Instant::now();
            let outputs = self.engine.step()?;
            let worked = (begun.elapsed() + waited).saturating_sub(self.engine.stats().waited);
            stories.go_on(&self.engine, &outputs);
            let now = Instant::now();
            let begun = stories.all.values().all(|story| !story.tokens.is_empty());
            if begun && reading == 0. {
                reading = now.duration_since(started).as_secs_f64();
            } else if begun && outputs.len() == self.sequences {
                steps.push(now.duration_since(before).as_secs_f64());
                host.push(worked.as_secs_f64());
            }
            before = now;
        }
        Ok(Round {
            stories,
            steps,
            host,
            reading,
        })
    }

    /// The parts of a step half way through a round; the requests of it are then forgotten.
    fn parts(&mut self) -> Result<Vec<(String, usize, f64, u64)>> {
        let rng = &mut StdRng::seed_from_u64(9);
        let mut ids = Vec::new();
        for _ in 0..self.sequences {
            ids.push(
                self.engine
                    .submit(Request::new(self.prompt(rng, PROMPT + GENERATED / 2)))?,
            );
        }
        while self.engine.stats().waiting > 0 {
            self.engine.step()?;
        }
        for _ in 0..4 {
            self.engine.step()?;
        }
        let parts = self.engine.profile(20)?;
        for id in ids {
            self.engine.cancel(id);
        }
        let part = |p: &PartTime| (p.part.to_owned(), p.launches, p.seconds, p.bytes);
        Ok(parts.iter().map(part).collect())
    }

    /// Arrivals at `rate` of a second: exponential times between them, lengths between a quarter of the offline ones
    /// and twice less a quarter.
    fn arriving(&mut self, rate: f64) -> Result<ServingRun> {
        let rng = &mut StdRng::seed_from_u64(77);
        let count = EACH * self.sequences.max(4);
        let length =
            |rng: &mut StdRng, mean: usize| rng.random_range(mean / 4..=2 * mean - mean / 4);
        let mut due = 0.;
        let mut coming = Vec::new();
        for _ in 0..count {
            due += -(1. - rng.random::<f64>()).ln() / rate;
            let tokens = length(rng, PROMPT);
            let prompt = self.prompt(rng, tokens);
            let max_tokens = length(rng, GENERATED);
            let request = Request {
                max_tokens,
                ..Request::new(prompt)
            };
            coming.push((Duration::from_secs_f64(due), request));
        }
        let (mut stories, started) = (self.stories(), Instant::now());
        let mut coming = coming.into_iter().peekable();
        let mut generated = 0;
        while coming.peek().is_some() || !self.engine.is_idle() {
            while let Some((due, request)) = coming.next_if(|(due, _)| started.elapsed() >= *due) {
                stories.begin(self.engine.submit(request)?, started + due);
            }
            if let (true, Some((due, _))) = (self.engine.is_idle(), coming.peek()) {
                std::thread::sleep(due.saturating_sub(started.elapsed()));
                continue;
            }
            let outputs = self.engine.step()?;
            generated += outputs.iter().filter(|o| o.token.is_some()).count();
            stories.go_on(&self.engine, &outputs);
        }
        let seconds = started.elapsed().as_secs_f64();
        let mut run = self.figures(Arrivals::Poisson, &stories, generated as f64 / seconds);
        run.rate = Some(rate);
        Ok(run)
    }

    fn figures(&self, arrivals: Arrivals, stories: &Stories, speed: f64) -> ServingRun {
        let (first, between) = stories.waits();
        let stats = self.engine.stats();
        ServingRun {
            model: self.name.0.to_owned(),
            format: self.name.1.to_owned(),
            arrivals,
            sequences: self.sequences,
            requests: stories.all.len(),
            prompt_tokens: stats.prompt_tokens,
            cached_tokens: stats.cached_tokens,
            tokens_per_second: speed,
            prompts_per_second: None,
            step_p50: None,
            step_p99: None,
            host_p50: None,
            first_p50: median(first.clone()),
            first_p99: percentile(first, 99.),
            between_p50: median(between.clone()),
            between_p99: percentile(between, 99.),
            wasted: stories.wasted.iter().sum::<f64>() / stories.wasted.len().max(1) as f64,
            preemptions: stats.preemptions,
            rate: None,
            parts: Vec::new(),
            refusal: self.engine.graph_refusal().map(str::to_owned),
        }
    }
}

fn line(run: &ServingRun) {
    let ms = |seconds: f64| seconds * 1e3;
    let arrivals = match run.arrivals {
        Arrivals::Offline => "offline",
        Arrivals::Poisson => "poisson",
    };
    println!(
        "{:<18}{:<12}{arrivals:<9}{:>4} sequences: {:>9.0} tokens/s; step {:.3} ms p50 {:.3} p99, host {:.3}; prompts {:.0} \
         tokens/s; first token {:.1} ms p50 {:.1} p99; between {:.2} p50 {:.2} p99; wasted {:.1} %, {} preempted",
        run.model,
        run.format,
        run.sequences,
        run.tokens_per_second,
        ms(run.step_p50.unwrap_or(0.)),
        ms(run.step_p99.unwrap_or(0.)),
        ms(run.host_p50.unwrap_or(0.)),
        run.prompts_per_second.unwrap_or(0.),
        ms(run.first_p50),
        ms(run.first_p99),
        ms(run.between_p50),
        ms(run.between_p99),
        run.wasted * 100.,
        run.preemptions,
    );
    let parts = run.parts.iter();
    let parts: Vec<_> = parts
        .map(|(part, launches, seconds, _)| {
            format!(
                "{part} {launches} x {:.2}",
                seconds * 1e6 / *launches as f64
            )
        })
        .collect();
    if !parts.is_empty() {
        println!("{:<30}us: {}", "", parts.join(", "));
    }
    if let Some(why) = &run.refusal {
        println!("{:<30}no graph: {why}", "");
    }
}
