//! Log-probabilities and constraints of requests that run together.

use crate::generation::{PROMPTS, load};
use crate::serving::options;
use crate::support::{device, on_every_device};
use candle_core::{D, DType, Result, Tensor, bail};
use candle_fused::Fusion;
use candle_fused::generation::SamplingParams;
use candle_fused::models::llama::{Cache, Config, Llama};
use candle_fused::serving::{
    Constraint, Engine, FinishReason, Options, Output, Request, RequestId, TokenLogprobs,
};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// What each request was given.
type Given = BTreeMap<RequestId, Vec<Output>>;

fn finish(engine: &mut Engine) -> Result<Given> {
    let mut given = Given::new();
    let mut steps = 0;
    while !engine.is_idle() {
        for output in engine.step()? {
            given.entry(output.id).or_default().push(output);
        }
        steps += 1;
        assert!(steps < 10_000, "it does not end: {:?}", engine.stats());
    }
    let stats = engine.stats();
    assert_eq!(stats.pages_free, stats.pages, "{stats:?}");
    Ok(given)
}

fn tokens(outputs: &[Output]) -> Vec<u32> {
    outputs.iter().filter_map(|output| output.token).collect()
}

/// `log_softmax` of the logits behind `ids`.
fn log_softmax((model, config): &(Llama, Config), ids: &[u32]) -> Result<Vec<f32>> {
    let mut cache = Cache::new(false, DType::F32, config, &device())?;
    let logits = model.forward(&Tensor::new(ids, &device())?.unsqueeze(0)?, 0, &mut cache)?;
    candle_nn::ops::log_softmax(&logits, D::Minus1)?
        .squeeze(0)?
        .to_vec1()
}

#[test]
fn log_probabilities_come_with_the_tokens() -> Result<()> {
    on_every_device(|| {
        let loaded = load("llama_gqa_tied", Fusion::all())?;
        let mut engine = Engine::new(&loaded.0, &options())?;
        let mut wanted = BTreeMap::new();
        let kinds = [None, Some(0), Some(3), Some(20), None, Some(1)];
        for (i, (prompt, logprobs)) in PROMPTS.iter().cycle().zip(kinds).enumerate() {
            let request = Request {
                max_tokens: 6 + i,
                logprobs,
                sampling: SamplingParams {
                    temperature: if i % 2 == 0 { 0.7 } else { 0. },
                    repeat_penalty: 1.3,
                    ..Default::default()
                },
                ..Request::new(*prompt)
            };
            wanted.insert(engine.submit(request.clone())?, request);
        }
        let given = finish(&mut engine)?;
        for (id, request) in wanted {
            let mut ids = request.prompt.clone();
            assert_eq!(given[&id].len(), request.max_tokens);
            for output in &given[&id] {
                let token = output.token.expect("a token");
                let Some(top) = request.logprobs else {
                    assert_eq!(output.logprobs, None);
                    continue;
                };
                let TokenLogprobs {
                    logprob,
                    top: likeliest,
                } = output.logprobs.as_ref().expect("asked for");
                let expected = log_softmax(&loaded, &ids)?;
                let near = |got: f32, token: u32| {
                    let expected = expected[token as usize];
                    assert!((got - expected).abs() < 1e-3, "{got} {expected}");
                };
                near(*logprob, token);
                assert_eq!(likeliest.len(), top);
                assert!(likeliest.windows(2).all(|pair| pair[0].1 >= pair[1].1));
                let highest = expected.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                if let Some((_, first)) = likeliest.first() {
                    assert!((first - highest).abs() < 1e-3);
                }
                likeliest
                    .iter()
                    .for_each(|(id, logprob)| near(*logprob, *id));
                ids.push(token);
            }
        }
        let error = engine.submit(Request {
            logprobs: Some(21),
            ..Request::new([1])
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains("logprobs is 21"), "{error}");
        Ok(())
    })
}

/// Allows token t as the n-th if `7 t + n` is a multiple of `every`; done behind `len`. Writes down what it takes.
struct Steps {
    every: u32,
    len: usize,
    taken: Arc<Mutex<Vec<u32>>>,
}

impl Steps {
    fn allows(&self, token: u32) -> bool {
        let n = self.taken.lock().expect("a list").len() as u32;
        (7 * token + n).is_multiple_of(self.every)
    }
}

impl Constraint for Steps {
    fn mask(&mut self, mask: &mut [u32]) -> Result<()> {
        let all = 0..32 * mask.len() as u32;
        for token in all.filter(|token| self.allows(*token)) {
            mask[token as usize / 32] |= 1 << (token % 32);
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<bool> {
        if !self.allows(token) {
            bail!("token {token} is not allowed");
        }
        let mut taken = self.taken.lock().expect("a list");
        taken.push(token);
        Ok(taken.len() == self.len)
    }
}

/// The likeliest tokens that a constraint allows, one forward pass after the other.
fn constrained(loaded: &(Llama, Config), prompt: &[u32], mut steps: Steps) -> Result<Vec<u32>> {
    let (mut ids, vocab) = (prompt.to_vec(), loaded.1.vocab_size);
    loop {
        let logprobs = log_softmax(loaded, &ids)?;
        let allowed = (0..vocab as u32).filter(|token| steps.allows(*token));
        // The first of equal ones.
        let best = allowed
            .rev()
            .max_by(|a, b| logprobs[*a as usize].total_cmp(&logprobs[*b as usize]));
        let token = best.expect("one is allowed");
        ids.push(token);
        if steps.accept(token)? {
            return Ok(ids[prompt.len()..].to_vec());
        }
    }
}

/// Requests with constraints and without, more than there are places and pages for.
#[test]
fn constraints_hold_beside_other_requests() -> Result<()> {
    on_every_device(|| {
        let loaded = load("llama_gqa_tied", Fusion::all())?;
        let alone = |prompt: &[u32]| -> Result<Vec<u32>> {
            let mut engine = Engine::new(&loaded.0, &options())?;
            let request = Request {
                max_tokens: 40,
                ..Request::new(prompt)
            };
            let id = engine.submit(request)?;
            Ok(tokens(&finish(&mut engine)?[&id]))
        };
        let mut engine = Engine::new(
            &loaded.0,
            &Options {
                pages: Some(14),
                ..options()
            },
        )?;
        let (mut free, mut bound) = (Vec::new(), Vec::new());
        for (i, prompt) in PROMPTS.iter().cycle().take(9).enumerate() {
            if i % 3 == 1 {
                let request = Request {
                    max_tokens: 40,
                    ..Request::new(*prompt)
                };
                free.push((engine.submit(request)?, *prompt));
                continue;
            }
            let steps = |taken| Steps {
                every: 3 + i as u32,
                len: 12 + 2 * i,
                taken,
            };
            let taken = Arc::new(Mutex::new(Vec::new()));
            let request = Request {
                max_tokens: 60,
                logprobs: Some(1),
                ..Request::new(*prompt)
            };
            let id = engine.submit_constrained(request, Box::new(steps(Arc::clone(&taken))))?;
            bound.push((
                id,
                constrained(&loaded, prompt, steps(Arc::default()))?,
                taken,
            ));
        }
        let given = finish(&mut engine)?;
        assert!(engine.stats().preemptions > 0, "{:?}", engine.stats());
        for (id, prompt) in free {
            assert_eq!(tokens(&given[&id]), alone(prompt)?, "request {id}");
        }
        for (id, expected, taken) in bound {
            assert_eq!(tokens(&given[&id]), expected, "request {id}");
            assert_eq!(*taken.lock().expect("a list"), expected);
            let last = given[&id].last().expect("an output");
            assert_eq!(last.finish, Some(FinishReason::Complete));
            assert!(given[&id].iter().all(|output| output.logprobs.is_some()));
        }
        Ok(())
    })
}

/// Fails in one way or another.
enum Broken {
    AllowsNothing,
    HasNoMask,
    TakesNothing,
}

impl Constraint for Broken {
    fn mask(&mut self, mask: &mut [u32]) -> Result<()> {
        match self {
            Self::AllowsNothing => {}
            Self::HasNoMask => {
                mask.fill(u32::MAX);
                bail!("no mask");
            }
            Self::TakesNothing => mask.fill(u32::MAX),
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<bool> {
        bail!("no {token}")
    }
}

#[test]
fn a_constraint_that_fails_ends_its_own_request_only() -> Result<()> {
    on_every_device(|| {
        let (model, _) = load("llama_gqa_tied", Fusion::all())?;
        let mut engine = Engine::new(&model, &options())?;
        let request = || Request {
            max_tokens: 10,
            ..Request::new(PROMPTS[0])
        };
        let mut broken = Vec::new();
        for (of, given) in [
            (Broken::AllowsNothing, 0),
            (Broken::HasNoMask, 0),
            (Broken::TakesNothing, 1),
        ] {
            broken.push((engine.submit_constrained(request(), Box::new(of))?, given));
        }
        // A stop id is not the constraint's matter.
        let stopping = Request {
            stop: (0..100).collect(),
            ..request()
        };
        let stopped = engine.submit_constrained(stopping, Box::new(Broken::TakesNothing))?;
        let other = engine.submit(request())?;
        let given = finish(&mut engine)?;
        for (id, count) in broken {
            assert_eq!(tokens(&given[&id]).len(), count);
            let last = given[&id].last().expect("an output");
            assert_eq!(last.finish, Some(FinishReason::Rejected));
        }
        assert_eq!(tokens(&given[&other]).len(), 10);
        assert_eq!(given[&stopped][0].finish, Some(FinishReason::Stop));
        Ok(())
    })
}
