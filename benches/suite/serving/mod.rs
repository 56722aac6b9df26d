//! Many requests at once: all at the same time, which shows how fast steps are, and arriving at random, which shows how
//! long each waits. Then requests with a shared prefix.

mod bound;
mod drive;
mod prefix;
mod report;
mod workload;

use crate::args::Args;
use crate::budget::Budget;
use crate::child;
use crate::figures::{Arrivals, Limits, PrefixRun, ServingRun};
use crate::form::Form;
use crate::place::Place;
use crate::stats::Times;
use anyhow::{Context, Result, ensure};
use candle_fused::generation::PartTime;
use candle_fused::serving::{Engine, Options, Request};
use common::comparison::{median, percentile};
use common::generate::TextModel;
use common::gpu;
use drive::{Means, Record, Step, drive};
use rand::SeedableRng;
use rand::rngs::StdRng;
use workload::Workload;

/// Positions of a sequence that an engine has room for at least.
const POSITIONS: usize = 1024;

/// Rounds of requests that begin together. All but the last warm up: they record graphs and load kernels, and put a
/// shared prefix into the cache.
const ROUNDS: u64 = 3;

/// A model in a format, with the names of its runs.
struct Case {
    model: String,
    format: String,
    /// Whether requests as many as there are sequences are wanted, and requests behind a shared prefix.
    all: bool,
    prefix: bool,
}

impl Case {
    fn name(model: &str, format: &str) -> String {
        format!("serving {model} {format}")
    }
}

/// Those that are wanted.
fn cases(place: &Place, args: &Args) -> Vec<Case> {
    let or = |given: &[String], default: &str| match given.is_empty() {
        true => vec![default.to_owned()],
        false => given.to_vec(),
    };
    let formats = or(&args.formats, place.dtypes[0].as_str());
    let mut cases = Vec::new();
    for model in or(&args.models, "smollm2-135m") {
        for format in &formats {
            let name = Case::name(&model, format);
            let (all, prefix) = (args.wants(&name), args.wants(&format!("{name} prefix")));
            if all || prefix {
                let (model, format) = (model.clone(), format.clone());
                cases.push(Case {
                    model,
                    format,
                    all,
                    prefix,
                });
            }
        }
    }
    cases
}

/// The names that `--filter` looks at.
pub fn names(place: &Place, args: &Args) -> Vec<String> {
    let mut names = Vec::new();
    for case in cases(place, args) {
        let name = Case::name(&case.model, &case.format);
        let prefix = case.prefix.then(|| format!("{name} prefix"));
        names.extend(case.all.then_some(name));
        names.extend(prefix);
    }
    names
}

/// Measures every model that is wanted.
pub fn run(
    place: &Place,
    args: &Args,
    limits: &Limits,
    budget: &Budget,
) -> Result<(Vec<ServingRun>, Vec<PrefixRun>)> {
    let cuda = place.device.is_cuda();
    gpu::tune(&place.device, true)?;
    let sequences = match (args.sequences.is_empty(), cuda) {
        (false, _) => args.sequences.clone(),
        (true, true) => vec![8, 32, 64, 256],
        (true, false) => vec![1, 4, 8],
    };
    println!("\nserving: {}", Workload::describe(args));
    let (mut runs, mut prefixes) = (Vec::new(), Vec::new());
    for case in cases(place, args) {
        if budget.is_spent() {
            break;
        }
        let job = child::Job {
            model: case.model.clone(),
            format: case.format.clone(),
            form: Form::Graph,
            cpu: !cuda,
            threads: args.most_threads(),
            positions: 0,
        };
        let loaded = child::load(&job, &place.device)?;
        let what = || format!("{} in {}", case.model, case.format);
        for sequences in sequences.iter().filter(|_| case.all) {
            let served = Served::new(loaded.as_ref(), &case, (*sequences, args), limits);
            runs.extend(served.and_then(Served::run).with_context(what)?);
        }
        if case.prefix {
            let name = (case.model.as_str(), case.format.as_str());
            let run = prefix::run(loaded.as_ref(), name, (cuda, args.quick));
            prefixes.push(run.with_context(what)?);
        }
    }
    Ok((runs, prefixes))
}

/// A model under an engine, and its workloads.
struct Served<'a> {
    case: &'a Case,
    engine: Engine,
    cuda: bool,
    limits: &'a Limits,
    sequences: usize,
    offline: Workload,
    /// Where requests are to arrive at random too, and the shares of the offline throughput at which they do.
    arriving: Option<(Workload, &'a [f64])>,
}

impl<'a> Served<'a> {
    fn new(
        model: &dyn TextModel,
        case: &'a Case,
        (sequences, args): (usize, &'a Args),
        limits: &'a Limits,
    ) -> Result<Self> {
        let offline = Workload::offline(args, sequences);
        let arriving = Workload::arriving(args, sequences).map(|w| (w, &args.load[..]));
        let arriving_positions = arriving.as_ref().map_or(0, |(w, _)| w.positions());
        let (positions, context) = (
            offline.positions().max(arriving_positions),
            model.context_length(),
        );
        ensure!(
            positions <= context,
            "--prompt-lengths, --answer-lengths and --shared-prefix: requests of up to {positions} tokens, and a \
             context of {context}"
        );
        let options = Options {
            sequences,
            positions: Some(positions.max(POSITIONS.min(context))),
            ..Default::default()
        };
        Ok(Self {
            case,
            engine: model.engine(&options)?,
            cuda: model.device().is_cuda(),
            limits,
            sequences,
            offline,
            arriving,
        })
    }

    /// All at once, then arriving at random if that is wanted.
    fn run(mut self) -> Result<Vec<ServingRun>> {
        let all = self.offline()?;
        report::line(&all);
        let speed = all.tokens_per_second;
        let mut runs = vec![all];
        if let Some((workload, loads)) = self.arriving.take() {
            for load in loads {
                let run = self.arriving(&workload, *load, speed)?;
                report::line(&run);
                runs.push(run);
            }
        }
        Ok(runs)
    }

    fn offline(&mut self) -> Result<ServingRun> {
        let workload = self.offline.clone();
        let mut round = |seed| {
            let rng = &mut StdRng::seed_from_u64(seed);
            let requests = workload.draw(rng, self.engine.vocab_size());
            drive(&mut self.engine, workload::at_once(requests))
        };
        for seed in 1..ROUNDS {
            round(seed - 1)?;
        }
        let record = round(ROUNDS - 1)?;
        let alike = workload.is_uniform(self.sequences);
        let steps = alike.then(|| record.full_steps()).flatten();
        let mut run = self.figures(&workload, &record, steps.as_deref())?;
        if record.requests <= self.sequences {
            let read = (record.prompt_tokens - record.cached_tokens) as f64;
            run.prompts_per_second = (record.begun > 0.).then(|| read / record.begun);
        }
        if self.cuda {
            let means = Means::of(&record, steps.as_deref());
            run.parts = self.parts(&means)?;
        }
        Ok(run)
    }

    /// Requests at `load` of `speed`, in tokens of a second.
    fn arriving(&mut self, workload: &Workload, load: f64, speed: f64) -> Result<ServingRun> {
        // Prompts of another load would still be in the cache.
        let rng = &mut StdRng::seed_from_u64(load.to_bits());
        let requests = workload.draw(rng, self.engine.vocab_size());
        let answers: usize = requests.iter().map(|r| r.max_tokens).sum();
        let rate = load * speed * requests.len() as f64 / answers as f64;
        let record = drive(&mut self.engine, workload::at_rate(requests, rate, rng)?)?;
        Ok(ServingRun {
            arrivals: Arrivals::Poisson,
            load: Some(load),
            rate: Some(rate),
            ..self.figures(workload, &record, None)?
        })
    }

    /// The parts of a step like the mean one; the requests of it are then forgotten.
    fn parts(&mut self, means: &Means) -> Result<Vec<(String, usize, f64, u64)>> {
        let rng = &mut StdRng::seed_from_u64(9);
        let vocab = self.engine.vocab_size();
        let rows = (means.rows.round() as usize).clamp(1, self.sequences);
        let keys = (means.keys / rows as f64).round() as usize;
        // Requests generate while later ones are let in, and some steps behind that.
        let budget = Options::default().prompt_budget;
        let (positions, steps) = (self.engine.positions(), rows * keys / budget + 16);
        let keys = keys.clamp(1, positions.saturating_sub(steps).max(1));
        let mut ids = Vec::new();
        for _ in 0..rows {
            let prompt = workload::random(rng, vocab, keys);
            ids.push(self.engine.submit(Request {
                max_tokens: positions - keys,
                ..Request::new(prompt)
            })?);
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

    /// What a record says; `full` are steps with a token of every sequence, if it is those that count.
    fn figures(
        &self,
        workload: &Workload,
        record: &Record,
        full: Option<&[&Step]>,
    ) -> Result<ServingRun> {
        let all: Vec<_> = record.steps.iter().collect();
        let steps = full.unwrap_or(&all);
        let times = Times::of(&steps.iter().map(|s| s.seconds).collect::<Vec<_>>());
        let p99 = percentile(steps.iter().map(|s| s.seconds).collect(), 99.);
        let host = || median(steps.iter().map(|s| s.host).collect());
        let means = Means::of(record, full);
        let (model, format) = (self.case.model.as_str(), self.case.format.as_str());
        Ok(ServingRun {
            model: model.to_owned(),
            format: format.to_owned(),
            arrivals: Arrivals::Offline,
            sequences: self.sequences,
            requests: record.requests,
            prompt_lengths: workload.prompts.to_string(),
            answer_lengths: workload.answers.to_string(),
            shared_prefix: workload.prefix.map(|prefix| prefix.to_string()),
            prompt_tokens: record.prompt_tokens,
            cached_tokens: record.cached_tokens,
            tokens_per_second: match full {
                Some(_) => means.rows / means.step,
                None => record.generated as f64 / record.seconds,
            },
            prompts_per_second: None,
            step_p50: Some(times.median),
            step_p99: Some(p99),
            step: Some(times),
            host_p50: self.cuda.then(host),
            first_p50: record.first(50.),
            first_p99: record.first(99.),
            between_p50: record.between(50.),
            between_p99: record.between(99.),
            wasted: record.wasted(self.sequences),
            preemptions: record.preemptions,
            load: None,
            rate: None,
            parts: Vec::new(),
            bound: bound::of((model, format), !self.cuda, &means, self.limits)?,
            refusal: self.engine.graph_refusal().map(str::to_owned),
        })
    }
}
