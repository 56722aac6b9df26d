//! Memory is short at every allocation in turn: each gives an error, the call can be made again, and nothing is
//! lost or given back twice.

use super::shim::{Shim, Watchdog, Which};
use super::tiny::{self, Tiny};
use super::{PROMPTS, cuda, gpu, likeliest, options};
use candle_core::{Device, Result, Tensor};
use candle_fused::cuda::{peak_memory, reset_peak_memory};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// Allocations of a run at most: more than any model has here.
const MOST: usize = 5000;

/// What a run came to.
struct Run {
    /// None of one that was given up.
    tokens: Option<Vec<u32>>,
    errors: Vec<String>,
    /// Why steps were not replayed as a graph.
    refusal: Option<String>,
}

/// What follows an error.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Then {
    /// Everything is dropped.
    GiveUp,
    /// The call is made again, and nothing fails any more.
    Again,
}

/// Calls of which one may fail.
struct Calls<'a> {
    shim: &'a Shim,
    then: Then,
    errors: Vec<String>,
}

impl Calls<'_> {
    fn make<T>(&mut self, mut call: impl FnMut() -> Result<T>) -> Result<T> {
        match call() {
            Err(error) if self.shim.failed().is_some() => {
                self.errors.push(error.to_string());
                match self.then {
                    Then::GiveUp => Err(error),
                    Then::Again => {
                        self.shim.arm(Which::None);
                        call()
                    }
                }
            }
            outcome => outcome,
        }
    }

    /// Load, forward pass, generation, prompt, recording, steps, and other prompts: the tokens, and why
    /// steps were not replayed as a graph.
    fn all(&mut self, tiny: &Tiny, device: &Device) -> Result<(Vec<u32>, Option<String>)> {
        let mut model = self.make(|| tiny.load(device))?;
        let mut tokens = vec![self.make(|| {
            model.clear()?;
            let ids = Tensor::new(PROMPTS[0], device)?.unsqueeze(0)?;
            likeliest(&model.forward(&ids, 0)?)
        })?];
        let mut generation = self.make(|| model.generation(&options(64)))?;
        // Candle's operations allocate at every step, ours do not.
        let (prompts, steps) = match tiny.plain {
            true => (1, 1),
            false => (PROMPTS.len(), 4),
        };
        for prompt in &PROMPTS[..prompts] {
            generation.truncate(0, 0)?;
            tokens.push(self.make(|| generation.extend(0, prompt))?);
            for _ in 0..steps {
                tokens.extend(self.make(|| generation.step())?.into_iter().flatten());
            }
        }
        Ok((tokens, generation.graph_refusal().map(str::to_owned)))
    }
}

fn run(tiny: &Tiny, device: &Device, shim: &Shim, which: Which, then: Then) -> Result<Run> {
    let errors = Vec::new();
    let mut calls = Calls { shim, then, errors };
    shim.arm(which);
    let outcome = calls.all(tiny, device);
    let given_up = then == Then::GiveUp && !calls.errors.is_empty();
    let (tokens, refusal) = match outcome {
        Ok((tokens, refusal)) => (Some(tokens), refusal),
        Err(_) if given_up => (None, None),
        Err(error) => return Err(error),
    };
    Ok(Run {
        tokens,
        errors: calls.errors,
        refusal,
    })
}

/// What went wrong where, by the driver's function that failed.
#[derive(Default)]
struct Tally {
    runs: usize,
    errors: BTreeMap<String, usize>,
    without_graph: BTreeMap<String, usize>,
    /// Weights went to the GPU by way of memory that is not page-locked.
    pageable: BTreeMap<String, usize>,
}

impl Tally {
    fn count(counts: &mut BTreeMap<String, usize>, what: String) {
        *counts.entry(what).or_default() += 1;
    }
}

/// A model and what is needed to try it.
struct Trial<'a> {
    tiny: &'a Tiny,
    device: &'a Device,
    shim: &'a Shim,
    watchdog: &'a Watchdog,
    /// The tokens of every run so far.
    tokens: Option<Vec<u32>>,
}

impl Trial<'_> {
    /// Goes through all n until a run meets no fault. `warm`: all kernels are loaded, so that each run has
    /// to leave what there was.
    fn every(&mut self, warm: bool, then: Then, which: fn(usize) -> Which) -> Result<Tally> {
        let mut tally = Tally::default();
        for n in 1..MOST {
            let what = format!("{}, {:?}, {then:?}", self.tiny.name, which(n));
            self.watchdog.begin(what.clone());
            let before = self.shim.live();
            let attempt =
                AssertUnwindSafe(|| run(self.tiny, self.device, self.shim, which(n), then));
            let run = catch_unwind(attempt)
                .unwrap_or_else(|_| panic!("{what}: {:?} panicked", self.shim.failed()))
                .map_err(|e| e.context(format!("{what}: not of the fault, or not mended")))?;
            let failed = self.shim.failed();
            self.shim.arm(Which::None);
            self.device.synchronize()?;
            if let Some(tokens) = &run.tokens {
                let right = self.tokens.get_or_insert_with(|| tokens.clone());
                assert_eq!(tokens, right, "{what}: {:?}", run.errors);
            }
            if warm {
                assert_eq!(self.shim.live(), before, "{what}: {:?}", run.errors);
            }
            if !self.told(&what, failed, &run, &mut tally) {
                return Ok(tally);
            }
            tally.runs += 1;
        }
        panic!("{}: no run is without a fault", self.tiny.name)
    }

    /// Whether there was a fault. It was an error, or keeps steps from being recorded, which is said, or weights from going
    /// through page-locked memory, which is not.
    fn told(&self, what: &str, failed: Option<String>, run: &Run, tally: &mut Tally) -> bool {
        let about_memory = |text: &str| {
            assert!(text.to_lowercase().contains("memory"), "{what}: {text}");
        };
        match (failed, &run.errors[..]) {
            (None, []) => return false,
            // Where the call was made again, the arming has ended.
            (_, [error]) => {
                about_memory(error);
                Tally::count(&mut tally.errors, stage(error));
            }
            (Some(function), []) if function == "cuMemHostAlloc" && run.refusal.is_none() => {
                Tally::count(&mut tally.pageable, function);
            }
            (Some(function), []) => {
                let why = run.refusal.as_deref().filter(|_| !self.tiny.plain);
                about_memory(why.unwrap_or("nothing was said"));
                Tally::count(&mut tally.without_graph, function);
            }
            (_, errors) => panic!("{what}: {errors:?}"),
        }
        true
    }
}

/// The part of an error in front of its numbers and reasons.
fn stage(error: &str) -> String {
    let words = error.split(|c: char| c == ':' || c == '(' || c.is_ascii_digit());
    words.take(1).collect::<String>().trim().to_owned()
}

#[test]
#[ignore = "needs the GPU for itself, and a library in front of the driver"]
fn every_allocation_may_fail() -> Result<()> {
    let shim = Shim::find();
    let watchdog = Watchdog::new(Duration::from_secs(20));
    let device = gpu();
    for tiny in tiny::all()? {
        let name = tiny.name;
        let mut trial = Trial {
            tiny: &tiny,
            device: &device,
            shim: &shim,
            watchdog: &watchdog,
            tokens: None,
        };
        // Kernels are loaded once, so that only the first of these meets that.
        let cold = trial.every(false, Then::GiveUp, Which::Nth)?;
        let quiet = run(&tiny, &device, &shim, Which::None, Then::GiveUp)?;
        assert_eq!(quiet.tokens, trial.tokens, "{name}");
        let (live, used, free) = (shim.live(), in_use(&device)?, free(&device)?);
        let given_up = trial.every(true, Then::GiveUp, Which::Nth)?;
        let one = trial.every(true, Then::Again, Which::Nth)?;
        let all = trial.every(true, Then::Again, Which::From)?;
        for tally in [&given_up, &one, &all] {
            assert!(tally.runs > 20, "{name}: {} runs", tally.runs);
        }
        assert_eq!(shim.live(), live, "{name}");
        assert_eq!(in_use(&device)?, used, "{name}: bytes of tensors");
        let left = self::free(&device)?;
        // The driver takes memory in pieces of 2 MB.
        assert!(
            left + (8 << 20) >= free,
            "{name}: {free} bytes free, then {left}"
        );
        println!("faults: {name}: allocations that failed {}", cold.runs);
        println!(
            "faults: {name}: errors by their beginning {:?}",
            cold.errors
        );
        for (which, tally) in [
            ("cold, then given up", cold),
            ("then given up", given_up),
            ("then again", one),
            ("all from one on, then again", all),
        ] {
            let errors: usize = tally.errors.values().sum();
            let without = &tally.without_graph;
            println!("faults: {name}, {which}: {errors} errors, without a graph {without:?}");
        }
    }
    assert_eq!(shim.refused(), 0, "the driver did not take everything back");
    println!("faults: at the end there are {:?}", shim.live());
    Ok(())
}

/// Bytes that tensors hold.
fn in_use(device: &Device) -> Result<u64> {
    reset_peak_memory(cuda(device))?;
    peak_memory(cuda(device))
}

/// Bytes that nobody on the GPU holds.
fn free(device: &Device) -> Result<usize> {
    device.synchronize()?;
    let info = cuda(device).cuda_stream().context().mem_get_info();
    Ok(info.map_err(candle_core::Error::wrap)?.0)
}
