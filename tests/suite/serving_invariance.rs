//! With batch invariance, what a request is given does not depend on what runs beside it, to the last bit.

use crate::golden::Golden;
use crate::support::on_every_device;
use candle_core::{DType, Result};
use candle_fused::Fusion;
use candle_fused::generation::SamplingParams;
use candle_fused::models::llama::{Llama, LlamaConfig};
use candle_fused::quant::Recipe;
use candle_fused::serving::{Engine, Options, Output, Request, RequestId};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::collections::BTreeMap;

/// A token, its log-probability and those of the likeliest, as bits.
type Bits = (Option<u32>, Vec<u32>);

/// What each request was given.
type Given = BTreeMap<RequestId, Vec<Bits>>;

fn options() -> Options {
    Options {
        sequences: 12,
        positions: Some(96),
        page: 8,
        pages: Some(100),
        // Chunks of 16.
        prompt_budget: 20,
        batch_invariant: true,
        ..Default::default()
    }
}

/// In f32 or bf16, or with quantized weights.
fn model(format: &str) -> Result<Llama> {
    let golden = Golden::open("llama_gqa_tied")?;
    let config = golden.config::<LlamaConfig>().into_config(false);
    match format {
        "f32" => Llama::load_fused(golden.weights(DType::F32)?, &config, Fusion::all()),
        "bf16" => Llama::load_fused(golden.weights(DType::BF16)?, &config, Fusion::all()),
        _ => {
            // Its rows divide by no group.
            let recipe =
                Recipe::new(format.parse()?).with("*.down_proj.weight", Some("int8".parse()?));
            let weights = golden.weights(DType::F32)?;
            Llama::load_quantized(weights, &config, &recipe, Fusion::all())
        }
    }
}

fn bits(output: &Output) -> Bits {
    let of = |logprob: f32| logprob.to_bits();
    let logprobs = output.logprobs.iter();
    let bits = logprobs.flat_map(|told| {
        let top = told.top.iter().map(|(_, logprob)| of(*logprob));
        std::iter::once(of(told.logprob)).chain(top)
    });
    (output.token, bits.collect())
}

/// A step, whose outputs are noted.
fn step(engine: &mut Engine, given: &mut Given) -> Result<()> {
    for output in engine.step()? {
        given.entry(output.id).or_default().push(bits(&output));
    }
    Ok(())
}

fn random(rng: &mut StdRng, beginning: &[u32]) -> Request {
    let shared = rng.random_range(0..=beginning.len());
    let own = rng.random_range(1..30);
    let mut prompt = beginning[..shared].to_vec();
    prompt.extend((0..own).map(|_| rng.random_range(0..128u32)));
    Request {
        max_tokens: rng.random_range(1..30),
        logprobs: Some(4),
        sampling: SamplingParams {
            temperature: if rng.random_bool(0.5) { 0.8 } else { 0. },
            seed: rng.random(),
            ..Default::default()
        },
        ..Request::new(prompt)
    }
}

/// The number of `requests` at random whose outputs differ from those of the request alone, in one bit at least.
fn differing(format: &str, options: &Options, requests: usize) -> Result<usize> {
    let model = model(format)?;
    let rng = &mut StdRng::seed_from_u64(11);
    let mut engine = Engine::new(&model, options)?;
    let beginning: Vec<u32> = (0..40).map(|_| rng.random_range(0..128)).collect();
    let (mut wanted, mut given) = (BTreeMap::new(), Given::new());
    while wanted.len() < requests {
        if rng.random_bool(0.5) {
            let request = random(rng, &beginning);
            wanted.insert(engine.submit(request.clone())?, request);
        }
        step(&mut engine, &mut given)?;
    }
    while !engine.is_idle() {
        step(&mut engine, &mut given)?;
    }
    let stats = engine.stats();
    assert!(stats.cached_tokens > 0, "{stats:?}");
    assert_eq!(stats.pages_free, stats.pages, "{stats:?}");
    assert!(!options.batch_invariant || stats.preemptions == 0);
    let mut alone = Engine::new(
        &model,
        &Options {
            share_prefixes: false,
            ..options.clone()
        },
    )?;
    let mut differing = 0;
    for (id, request) in wanted {
        let (own, mut outputs) = (alone.submit(request)?, Given::new());
        while !alone.is_idle() {
            step(&mut alone, &mut outputs)?;
        }
        differing += usize::from(outputs[&own] != given[&id]);
    }
    Ok(differing)
}

#[test]
fn outputs_are_those_of_a_request_alone_to_the_bit() -> Result<()> {
    on_every_device(|| {
        for format in ["f32", "bf16", "int8", "q4_0", "int4-g32"] {
            assert_eq!(differing(format, &options(), 100)?, 0, "{format}");
        }
        Ok(())
    })
}

/// A token's codes and scale are its own, so that pages of them are shared as others are.
#[test]
fn so_they_are_over_quantized_pages() -> Result<()> {
    on_every_device(|| {
        for kv_cache in ["fp8", "int8"] {
            let options = Options {
                kv_cache: kv_cache.parse()?,
                ..options()
            };
            for format in ["bf16", "q4_0"] {
                assert_eq!(differing(format, &options, 60)?, 0, "{format} {kv_cache}");
            }
        }
        Ok(())
    })
}

/// What was read in part of a chunk is not taken over as a part of a whole one.
#[test]
fn parts_of_chunks_are_not_shared() -> Result<()> {
    on_every_device(|| {
        let model = model("q4_0")?;
        let text: Vec<u32> = (0..33).map(|i| (11 * i + 5) % 120).collect();
        let request = |tokens: usize| Request {
            max_tokens: 12,
            logprobs: Some(4),
            ..Request::new(&text[..tokens])
        };
        // Alone; behind one that ended in the middle of a chunk; and behind both.
        let mut outputs = Vec::new();
        for before in [&[][..], &[24], &[24, 33]] {
            let mut engine = Engine::new(&model, &options())?;
            let mut given = Given::new();
            for tokens in before.iter().copied().chain([33]) {
                let id = engine.submit(request(tokens))?;
                while !engine.is_idle() {
                    step(&mut engine, &mut given)?;
                }
                outputs.extend((tokens == 33).then(|| given[&id].clone()));
            }
        }
        assert!(outputs.iter().all(|given| *given == outputs[0]));
        Ok(())
    })
}

#[test]
fn a_budget_below_a_page_is_refused() -> Result<()> {
    let options = Options {
        prompt_budget: 7,
        ..options()
    };
    let error = Engine::new(&model("f32")?, &options)
        .err()
        .map(|e| e.to_string());
    assert!(error.is_some_and(|e| e.contains("prompt_budget is 7")));
    Ok(())
}
