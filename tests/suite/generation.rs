//! The token loop: the same tokens as forward passes give, alone and side by side, on every device.

use crate::golden::Golden;
use crate::support::{device, on_every_device};
use candle_core::{D, DType, Result, Tensor};
use candle_fused::generation::{Generation, Options, SamplingParams};
use candle_fused::models::llama::{Cache, Config, Llama, LlamaConfig};
use candle_fused::quant::Recipe;
use candle_fused::{Fusion, trace};

pub const PROMPTS: [&[u32]; 3] = [
    &[1, 5, 9, 2, 77, 31, 4],
    &[8, 3],
    &[100, 7, 7, 7, 12, 60, 61, 62, 63],
];

pub fn load(name: &str, fusion: Fusion) -> Result<(Llama, Config)> {
    let golden = Golden::open(name)?;
    let config = golden.config::<LlamaConfig>().into_config(false);
    let llama = Llama::load_fused(golden.weights(DType::F32)?, &config, fusion)?;
    Ok((llama, config))
}

pub fn options(sequences: usize) -> Options {
    Options {
        sequences,
        positions: Some(96),
        ..Default::default()
    }
}

/// The likeliest tokens, one forward pass after the other.
pub fn by_forward((model, config): &(Llama, Config), prompt: &[u32], n: usize) -> Result<Vec<u32>> {
    let mut cache = Cache::new(true, DType::F32, config, &device())?;
    let mut tokens = prompt.to_vec();
    let mut position = 0;
    while tokens.len() < prompt.len() + n {
        let ids = Tensor::new(&tokens[position..], &device())?.unsqueeze(0)?;
        position = tokens.len();
        let logits = model.forward(&ids, tokens.len() - ids.dim(1)?, &mut cache)?;
        tokens.push(logits.argmax(D::Minus1)?.squeeze(0)?.to_scalar()?);
    }
    Ok(tokens.split_off(prompt.len()))
}

/// The tokens of a generation of one sequence.
fn alone(model: &Llama, options: &Options, prompt: &[u32], n: usize) -> Result<Vec<u32>> {
    let mut generation = Generation::new(model, options)?;
    let mut tokens = vec![generation.extend(0, prompt)?];
    while tokens.len() < n {
        tokens.extend(generation.step()?[0]);
    }
    assert_eq!(generation.ids(0), [prompt, &tokens[..n - 1]].concat());
    assert_eq!(generation.pending(0), tokens.last().copied());
    Ok(tokens)
}

#[test]
fn tokens_are_those_of_forward_passes() -> Result<()> {
    on_every_device(|| {
        for name in ["llama_gqa_tied", "llama3_rope"] {
            for fusion in [Fusion::all(), Fusion::none()] {
                let model = load(name, fusion)?;
                for prompt in PROMPTS {
                    let expected = by_forward(&model, prompt, 40)?;
                    assert_eq!(
                        alone(&model.0, &options(1), prompt, 40)?,
                        expected,
                        "{name} {fusion}"
                    );
                }
            }
        }
        Ok(())
    })
}

#[test]
fn sequences_side_by_side_do_not_see_each_other() -> Result<()> {
    on_every_device(|| {
        let model = load("llama_gqa_tied", Fusion::all())?;
        for count in [2, 3, 8] {
            let mut generation = Generation::new(&model.0, &options(count))?;
            let prompt = |i: usize| PROMPTS[i % PROMPTS.len()];
            let mut tokens = Vec::new();
            for i in 0..count {
                tokens.push(vec![generation.extend(i, prompt(i))?]);
            }
            for _ in 1..20 {
                for (all, token) in tokens.iter_mut().zip(generation.step()?) {
                    all.extend(token);
                }
            }
            for (i, tokens) in tokens.iter().enumerate() {
                assert_eq!(
                    *tokens,
                    by_forward(&model, prompt(i), 20)?,
                    "{i} of {count}"
                );
            }
        }
        Ok(())
    })
}

/// A step of several sequences makes the products of a step of one. On a GPU it is no op of candle's at all.
#[test]
fn a_step_of_several_sequences_reads_weights_once() -> Result<()> {
    let (model, _) = load("llama_gqa_tied", Fusion::all())?;
    let products = |count: usize| -> Result<u64> {
        let mut generation = Generation::new(&model, &options(count))?;
        for (i, prompt) in PROMPTS[..count].iter().enumerate() {
            generation.extend(i, prompt)?;
        }
        let (tokens, calls) = trace::capture(|| generation.step());
        assert!(tokens?.iter().all(Option::is_some));
        Ok(calls.count("linear") + calls.count("rms_norm_linear"))
    };
    let alone = products(1)?;
    assert!(alone > 0);
    assert_eq!(products(3)?, alone);
    Ok(())
}

/// A sequence may begin late, and end while others go on.
#[test]
fn sequences_begin_and_end_when_they_like() -> Result<()> {
    on_every_device(|| {
        let model = load("llama_gqa_tied", Fusion::all())?;
        let mut generation = Generation::new(&model.0, &options(2))?;
        let mut first = vec![generation.extend(0, PROMPTS[0])?];
        for _ in 0..3 {
            let tokens = generation.step()?;
            assert_eq!(tokens[1], None);
            first.extend(tokens[0]);
        }
        assert_eq!((generation.ids(1), generation.pending(1)), (&[][..], None));
        let mut second = vec![generation.extend(1, PROMPTS[1])?];
        for _ in 0..5 {
            let tokens = generation.step()?;
            first.extend(tokens[0]);
            second.extend(tokens[1]);
        }
        generation.truncate(0, 0)?;
        for _ in 0..5 {
            let tokens = generation.step()?;
            assert_eq!(tokens[0], None);
            second.extend(tokens[1]);
        }
        assert_eq!(generation.ids(0).len(), 0);
        assert_eq!(first, by_forward(&model, PROMPTS[0], 9)?);
        assert_eq!(second, by_forward(&model, PROMPTS[1], 11)?);
        Ok(())
    })
}

#[test]
fn a_sequence_goes_on_from_wherever_it_is_cut() -> Result<()> {
    on_every_device(|| {
        let model = load("llama3_rope", Fusion::all())?;
        let mut generation = Generation::new(&model.0, &options(1))?;
        generation.extend(0, PROMPTS[0])?;
        for _ in 0..10 {
            generation.step()?;
        }
        generation.truncate(0, 5)?;
        assert_eq!(generation.ids(0), &PROMPTS[0][..5]);
        let mut tokens = vec![generation.extend(0, &PROMPTS[2][..4])?];
        for _ in 1..12 {
            tokens.extend(generation.step()?[0]);
        }
        let text = [&PROMPTS[0][..5], &PROMPTS[2][..4]].concat();
        assert_eq!(tokens, by_forward(&model, &text, 12)?);
        // All that it holds stays, and the token that was drawn last is forgotten.
        let held = generation.ids(0).to_vec();
        generation.truncate(0, usize::MAX)?;
        assert_eq!(
            (generation.ids(0), generation.pending(0)),
            (&held[..], None)
        );
        Ok(())
    })
}

#[test]
fn draws_depend_on_the_seed_alone() -> Result<()> {
    on_every_device(|| {
        let model = load("llama_gqa_tied", Fusion::all())?.0;
        let drawn = |seed: u64, graph: bool| {
            let sampling = SamplingParams {
                temperature: 1.5,
                top_k: Some(40),
                top_p: Some(0.95),
                repeat_penalty: 1.1,
                seed,
                ..Default::default()
            };
            let options = Options {
                sampling,
                graph,
                ..options(1)
            };
            alone(&model, &options, PROMPTS[0], 30)
        };
        let first = drawn(7, true)?;
        assert_eq!(first, drawn(7, true)?);
        assert_eq!(first, drawn(7, false)?, "without a graph");
        assert_ne!(first, drawn(8, true)?);
        Ok(())
    })
}

#[test]
fn what_cannot_be_done_is_said() -> Result<()> {
    on_every_device(|| {
        let (model, config) = load("llama_gqa_tied", Fusion::all())?;
        let refused = |options: Options| match Generation::new(&model, &options) {
            Ok(_) => panic!("accepted"),
            Err(error) => error.to_string(),
        };
        assert!(refused(options(0)).contains("0 sequences"));
        assert!(refused(options(9)).contains("9 sequences"));
        let far = Options {
            positions: Some(config.max_position_embeddings + 1),
            ..options(1)
        };
        assert!(refused(far).contains("context length"));
        let sampling = SamplingParams {
            temperature: -1.,
            ..Default::default()
        };
        let hot = Options {
            sampling,
            ..options(1)
        };
        assert!(refused(hot).contains("temperature"));

        let short = Options {
            positions: Some(10),
            ..options(2)
        };
        let mut generation = Generation::new(&model, &short)?;
        let said = |result: Result<_>| result.map(drop).unwrap_err().to_string();
        assert!(said(generation.step().map(|_| 0)).contains("no sequence has begun"));
        assert!(said(generation.extend(2, &[1])).contains("sequence index 2, expected below 2"));
        assert!(said(generation.extend(0, &[])).contains("no ids"));
        assert!(said(generation.extend(0, &[1; 11])).contains("10 positions"));
        let vocab = config.vocab_size as u32;
        assert!(said(generation.extend(0, &[1, vocab])).contains("out of the vocabulary"));
        // None of that has harmed it.
        generation.extend(0, &[1, 2, 3])?;
        for _ in 3..10 {
            generation.step()?;
        }
        assert!(said(generation.step().map(|_| 0)).contains("positions"));
        generation.truncate(0, 3)?;
        generation.extend(0, &[4])?;
        generation.step()?;
        Ok(())
    })
}

/// Weights and buffers belong to the generation too.
#[test]
fn a_generation_outlives_its_model() -> Result<()> {
    on_every_device(|| {
        let model = load("llama_gqa_tied", Fusion::all())?;
        let expected = by_forward(&model, PROMPTS[0], 20)?;
        let mut generation = Generation::new(&model.0, &options(1))?;
        let mut tokens = vec![generation.extend(0, PROMPTS[0])?];
        tokens.extend(generation.step()?[0]);
        drop(model);
        let other = load("llama3_rope", Fusion::all())?;
        let mut beside = Generation::new(&other.0, &options(1))?;
        beside.extend(0, PROMPTS[1])?;
        while tokens.len() < 20 {
            tokens.extend(generation.step()?[0]);
            beside.step()?;
        }
        assert_eq!(tokens, expected);
        Ok(())
    })
}

#[test]
fn threads_have_models_of_their_own() -> Result<()> {
    let run = || -> Result<()> {
        on_every_device(|| {
            let model = load("llama_gqa_tied", Fusion::all())?;
            let expected = by_forward(&model, PROMPTS[0], 30)?;
            for _ in 0..5 {
                assert_eq!(alone(&model.0, &options(1), PROMPTS[0], 30)?, expected);
            }
            Ok(())
        })
    };
    let threads: Vec<_> = (0..2).map(|_| std::thread::spawn(run)).collect();
    threads
        .into_iter()
        .try_for_each(|t| t.join().expect("no panic"))
}

/// Ten thousand tokens take no more memory than the first few. The pool that is asked belongs to the
/// process, so the test has one to itself.
#[cfg(feature = "cuda")]
#[test]
fn ten_thousand_tokens_take_no_memory() -> Result<()> {
    const ALONE: &str = "CANDLE_FUSED_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let name = "generation::ten_thousand_tokens_take_no_memory";
        let status = std::process::Command::new(std::env::current_exe()?)
            .args(["--exact", name, "--test-threads=1"])
            .env(ALONE, "1")
            .status()?;
        assert!(status.success());
        return Ok(());
    }
    on_every_device(|| {
        let candle_core::Device::Cuda(cuda) = device() else {
            return Ok(());
        };
        let model = load("llama_gqa_tied", Fusion::all())?.0;
        let mut generation = Generation::new(&model, &options(1))?;
        let mut round = || -> Result<()> {
            generation.truncate(0, 0)?;
            generation.extend(0, PROMPTS[0])?;
            for _ in PROMPTS[0].len()..96 {
                generation.step()?;
            }
            Ok(())
        };
        round()?;
        candle_fused::cuda::reset_peak_memory(&cuda)?;
        round()?;
        let before = candle_fused::cuda::peak_memory(&cuda)?;
        for _ in 0..10_000 / 89 {
            round()?;
        }
        assert_eq!(candle_fused::cuda::peak_memory(&cuda)?, before);
        Ok(())
    })
}

/// A llama whose embedding of `token` is no number; its head has weights of its own.
fn spoilt(token: Option<u32>) -> Result<Llama> {
    let golden = Golden::open("llama_gqa_tied")?;
    let path = golden.folder.join("model.safetensors");
    let mut weights = candle_core::safetensors::load(path, &device())?;
    let name = "model.embed_tokens.weight";
    let table = weights[name].to_dtype(DType::F32)?;
    weights.insert("lm_head.weight".into(), table.clone());
    let mut rows = table.to_vec2::<f32>()?;
    if let Some(token) = token {
        rows[token as usize].fill(f32::NAN);
    }
    weights.insert(name.into(), Tensor::new(rows, &device())?);
    let vb = candle_nn::VarBuilder::from_tensors(weights, DType::F32, &device());
    let mut config = golden.config::<LlamaConfig>().into_config(false);
    config.tie_word_embeddings = false;
    Llama::load(vb, &config)
}

/// A call that fails for one sequence leaves all as they were.
#[test]
fn a_step_that_fails_changes_nothing() -> Result<()> {
    on_every_device(|| {
        let (first, second) = (PROMPTS[0], PROMPTS[1]);
        let sound = spoilt(None)?;
        let mut generation = Generation::new(&sound, &options(2))?;
        let drawn = [generation.extend(0, first)?, generation.extend(1, second)?];
        let next = generation.step()?;
        let (kept, next) = (next[0], next.into_iter().flatten().collect::<Vec<_>>());
        // What only the second sequence takes in.
        let bad = drawn[1];
        assert!(drawn[0] != bad && next[0] != bad);
        assert!(!first.contains(&bad) && !second.contains(&bad));

        let model = spoilt(Some(bad))?;
        let mut generation = Generation::new(&model, &options(2))?;
        assert_eq!(generation.extend(0, first)?, drawn[0]);
        assert_eq!(generation.extend(1, second)?, drawn[1]);
        let unchanged = |generation: &Generation| {
            assert_eq!((generation.ids(0), generation.ids(1)), (first, second));
            let pending = [0, 1].map(|i| generation.pending(i));
            assert_eq!(pending, drawn.map(Some));
        };
        for _ in 0..2 {
            let error = generation.step().unwrap_err().to_string();
            assert!(error.contains("number"), "{error}");
            unchanged(&generation);
        }
        generation.extend(0, &[drawn[0], bad]).unwrap_err();
        unchanged(&generation);
        // With another second sequence the first one goes on where it was.
        generation.truncate(1, 0)?;
        generation.extend(1, PROMPTS[2])?;
        assert_eq!(generation.step()?[0], kept);
        Ok(())
    })
}

/// On a GPU, where an allocation fails at once: this much the host would promise.
#[test]
fn memory_that_is_not_there_is_refused() -> Result<()> {
    on_every_device(|| {
        if device().is_cpu() {
            return Ok(());
        }
        let mut config = Config::config_7b_v2(false);
        (config.num_hidden_layers, config.vocab_size) = (1, 64);
        config.intermediate_size = 64;
        config.max_position_embeddings = 1 << 22;
        let vb = candle_nn::VarBuilder::zeros(DType::F16, &device());
        let model = Llama::load(vb, &config)?;
        let most = Options {
            sequences: 8,
            positions: Some(1 << 22),
            ..Default::default()
        };
        let error = Generation::new(&model, &most).err().map(|e| e.to_string());
        let error = error.unwrap_or_default();
        assert!(
            error.contains("4194304 positions of 8 sequences"),
            "{error}"
        );
        // And the process goes on.
        let tokens = alone(&model, &options(1), PROMPTS[1], 4)?;
        assert_eq!(tokens, [0; 4]);
        Ok(())
    })
}

/// Every weight format of one to eight sequences is a chain of kernels on a GPU, and what is none says why.
#[test]
fn steps_of_every_format_are_one_graph() -> Result<()> {
    on_every_device(|| {
        let golden = Golden::open("llama_gqa_tied")?;
        let config = golden.config::<LlamaConfig>().into_config(false);
        for format in [
            "int8",
            "int4-g32",
            "int4-g32-z",
            "ternary-row",
            "q4_0",
            "q8_0",
        ] {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                // Its rows divide by no group.
                let recipe = Recipe::new(format.parse()?)
                    .with("*.down_proj.weight", Some("int8".parse()?))
                    .with_head(format.parse()?);
                let weights = golden.weights(dtype)?;
                let model = Llama::load_quantized(weights, &config, &recipe, Fusion::all())?;
                for sequences in [1, 2, 5, 8] {
                    let mut generation = Generation::new(&model, &options(sequences))?;
                    for index in 0..sequences {
                        generation.extend(index, PROMPTS[index % PROMPTS.len()])?;
                    }
                    let what = format!("{format} {dtype:?} {sequences}");
                    for _ in 0..3 {
                        let tokens = generation.step()?;
                        let known = |token: &Option<u32>| {
                            token.is_some_and(|token| (token as usize) < config.vocab_size)
                        };
                        assert!(tokens.iter().all(known), "{what}: {tokens:?}");
                    }
                    assert_eq!(generation.graph_refusal(), None, "{what}");
                    if device().is_cuda() {
                        assert!(generation.kernels_per_step() > 0, "{what}");
                    }
                }
            }
        }
        let (plain, _) = load("llama_gqa_tied", Fusion::none())?;
        let generation = Generation::new(&plain, &options(2))?;
        let refusal = generation.graph_refusal();
        let told = refusal.is_some_and(|why| why.contains("layer 0: attention is switched off"));
        assert_eq!(told, device().is_cuda(), "{refusal:?}");
        Ok(())
    })
}
